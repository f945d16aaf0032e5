"""Calibrating quantized layers: maps of their errors, and the stages they are measured in."""

from __future__ import annotations

import pytest
import torch

from diffcache.offline.quantize_layers import LayerCalibration


def layers(official: bool = False) -> LayerCalibration:
    made = LayerCalibration("w8a8", (), ("*",), official)
    made.layer("l", torch.randn(3, 4), torch.tensor([1.0, 2, 3]))
    made.enter("ranges", 2)
    for step in range(2):
        made.given("l", step, torch.randn(8, 4) * (step + 1))
    made.enter("errors", 2)
    return made


def test_a_quantizer_without_error_needs_no_map() -> None:
    for official in (False, True):
        made = layers(official)
        for step in range(2):
            out = torch.randn(8, 3)
            made.compare("l", step, out, out)
        made.enter("done", 2)
        plan = made.plan()
        assert plan is not None
        layer = plan.layers["l"]
        gain, shift = layer.gain, layer.shift
        assert gain is not None and shift is not None
        if not official:
            torch.testing.assert_close(gain, torch.ones(2, 3), rtol=0, atol=1e-6)
            torch.testing.assert_close(shift, torch.zeros(2, 3), rtol=0, atol=1e-6)
            continue
        torch.testing.assert_close(gain, torch.full((2, 3), 7 / 8))


def test_official_layers_count_the_bias_twice() -> None:
    ours, theirs, bias = layers(), layers(official=True), torch.tensor([1.0, 2, 3])
    seen = []
    for step in range(2):
        x = torch.randn(8, 3)
        y = 0.7 * x + 0.2 + 0.01 * torch.randn(8, 3)
        seen.append((x, y))
        ours.compare("l", step, y, x)
        theirs.compare("l", step, y, x)
    for made in (ours, theirs):
        made.enter("done", 2)
    mine, found = ours.plan().layers["l"], theirs.plan().layers["l"]
    for step, (x, y) in enumerate(seen):
        a = ((x - x.mean(0)) * (y - y.mean(0))).mean(0) / x.var(0)
        torch.testing.assert_close(found.gain[step], a)
        torch.testing.assert_close(found.shift[step], (y + bias).mean(0) - a * (x + bias).mean(0))
        torch.testing.assert_close(mine.gain[step], a * 8 / 7)
        torch.testing.assert_close(mine.shift[step], y.mean(0) - mine.gain[step] * x.mean(0))


def test_stages_of_layers() -> None:
    made = layers()
    assert made.compares("l") and made.plan().layers["l"].gain is None
    assert made.plan() is made.plan()
    scales = made.plan().layers["l"].input_scale
    assert scales[1] > scales[0]
    made.enter("ranges", 2)
    assert made.plan() is None and not made.compares("l")
    patterns = LayerCalibration("w4a8", ("*.attn?.*",), ("up*",), False)
    assert patterns.excludes("a.attn1.to_q") and not patterns.excludes("a.attn.to_q")
    patterns.enter("errors", 2)
    assert patterns.compares("up.0.ff") and not patterns.compares("down.0.ff")
    patterns.enter("done", 2)
    with pytest.raises(ValueError, match="exempt fewer"):
        patterns.plan()


@pytest.mark.parametrize("official", [False, True])
def test_the_plan_is_the_same_from_the_sums_alone(official: bool) -> None:
    made = layers(official)
    made.layer("without", torch.randn(2, 4), None)
    for step in range(2):
        made.compare("l", step, torch.randn(8, 3), torch.randn(8, 3))
    again = LayerCalibration("w8a8", (), ("*",), official)  # shown no layer
    again.load(made.state())
    assert again.state().keys() == made.state().keys()
    tensors = []
    for one in (made, again):
        one.enter("done", 2)
        plan = one.plan()
        assert plan is not None
        tensors.append(plan.tensors())
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert torch.equal(tensor, tensors[1][name]), name
