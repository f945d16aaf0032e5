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
