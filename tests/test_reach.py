"""Gates look at what changes with the sample, and lists of the text alone always run."""

from collections import Counter

import pytest
import torch
from torch import nn

import diffcache
from diffcache.attach.anatomy import anatomy_of
from diffcache.attach.handle import Handle
from diffcache.features.collect import Observer
from tests.internals import reuse_in
from tests.zoo.catalog import cases


def run(case, model, steps=8):
    with torch.no_grad():
        return [model(**case.kwargs(model, 0, step, steps), return_dict=False) for step in range(steps)]


def test_lead_and_tail_are_counted_over_the_blocks_of_the_image():
    case = cases()["Lumina2Transformer2DModel"]
    model = case.build(0)
    counts, hooks = Counter(), []
    for key in ("context_refiner", "noise_refiner", "layers"):
        for block in getattr(model, key):
            hook = block.register_forward_hook(lambda *_, key=key: counts.update([key]))
            hooks.append(hook)
    depth = {key: len(getattr(model, key)) for key in ("context_refiner", "noise_refiner", "layers")}
    method = diffcache.DBCache(float("inf"), lead=2, tail=1, warmup=1)
    with diffcache.wrapped(model, method) as handle:
        run(case, model)
        counts.clear()
        run(case, model)
        assert [call.computed for call in handle.last.calls] == [True] + [False] * 7
    assert counts == {
        "context_refiner": 8 * depth["context_refiner"],
        "noise_refiner": 8 * depth["noise_refiner"],
        "layers": depth["layers"] + 7 * 3,
    }


def test_teacache_on_lumina2_looks_at_the_joint_sequence_before_the_main_layers():
    """The official script compares `layers[0].norm1(joint, temb)[0]`; refiners always run."""
    case = cases()["Lumina2Transformer2DModel"]
    model, expected, probes = case.build(0), [], []
    norm = model.layers[0].norm1.register_forward_hook(lambda *call: expected.append(call[2][0]))
    run(case, model, 3)
    norm.remove()
    observer = Observer()
    observer.probe = lambda step, value: probes.append(value)
    method = diffcache.TeaCache(float("inf"), (1.0, 0.0), last=False)
    with Handle(model, {"model": model}, method, observer=observer) as handle:
        run(case, model, 3)
        assert [call.counts for call in handle.last.calls] == [
            {"layers": (len(model.layers), 0)},
            *[{"layers": (0, len(model.layers))}] * 2,
        ]
    joint = case.kwargs(model, 0)["encoder_hidden_states"].shape[1] + 16  # of the image
    assert [len(value[0]) for value in probes] == [joint] * 3
    for mine, official in zip(probes, expected, strict=True):
        torch.testing.assert_close(mine, official)


def test_the_stream_of_the_sample_is_looked_at_where_the_text_comes_first():
    """The first argument of its blocks is the text, which no step changes."""
    case = cases()["Cosmos3OmniTransformer"]
    model = case.build(0)
    assert anatomy_of(model).sample == "vision_tokens"
    for method in (diffcache.FirstBlock(1e-9), diffcache.TeaCache(1e-9, (1.0, 0.0))):
        with diffcache.wrapped(model, method) as handle:
            run(case, model)
            assert all(call.computed for call in handle.last.calls)
            (layout,) = reuse_in(handle).setup.layouts.values()
        assert layout.streams == {"layers": [1]}


class Apart(nn.Module):
    """A denoiser whose blocks see the text alone."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Plus(), Plus(), Plus()])

    def forward(self, hidden_states, timestep, text):
        for block in self.blocks:
            text = block(text)
        return hidden_states * timestep.view(-1, 1) + text


class Plus(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, hidden_states):
        return hidden_states + self.weight


def test_a_gate_with_nothing_to_look_at_is_refused():
    model, text = Apart(), torch.ones(1, 3)
    with torch.no_grad():
        with (
            diffcache.wrapped(model, diffcache.FirstBlock(0.1)),
            pytest.raises(diffcache.AttachError, match="'hidden_states', so a gate has nothing to"),
        ):
            model(torch.zeros(1, 3), torch.ones(1), text)
        with diffcache.wrapped(model, diffcache.Interval(every=2)) as handle:
            with diffcache.run(model):
                for step in range(4):
                    sample, time = torch.full((1, 3), float(step)), torch.tensor([4.0 - step])
                    assert torch.equal(model(sample, time, text), sample * time + text + 3)
            assert [call.computed for call in handle.last.calls] == [True, False] * 2
