"""ProfilingDiT in runs: an independent loop over blocks, formulas, published lists."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import diffcache
from diffcache.errors import AttachError
from diffcache.features.parts.when import Table
from diffcache.features.profilingdit import Decreasing, ProfilingDiT, merged
from diffcache.step import Step
from tests.internals import reuse_in
from tests.zoo.case import randomize
from tests.zoo.catalog import cases

STEPS = 50
WAN = [0, *range(2, 8), *range(10, 21), *range(25, 33), 37, 38]
SINGLE = [0, 2, 4, 5, 6, 7, *range(10, 22), 23, 25, 26, 27, 31, 33]


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Linear(size, size)

    def forward(self, hidden_states, temb):
        return hidden_states + torch.tanh(self.weight(hidden_states) + temb)


class Toy(nn.Module):
    def __init__(self, depth, size=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(size) for _ in range(depth))

    def forward(self, hidden_states, timestep):
        for block in self.blocks:
            hidden_states = block(hidden_states, timestep)
        return hidden_states


def toy(depth):
    return Toy(depth).double().eval().requires_grad_(False)


def samples(steps):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 16, 4, generator=generator, dtype=torch.float64)
    drift = torch.randn(1, 16, 4, generator=generator, dtype=torch.float64)
    return [(x + 0.05 * s * drift, torch.tensor(1.0 - s / steps)) for s in range(steps)]


def by_blocks(model, background, computes, steps):
    """Return outputs and block evaluations of a scheduler that knows one block at a time."""
    runs, outs, evaluated = {}, [], []
    for index, (x, t) in enumerate(samples(steps)):
        count = 0
        if index in computes:
            for number, block in enumerate(model.blocks):
                if number in background and number - 1 not in background:
                    start, given = number, x
                x, count = block(x, t), count + 1
                if number in background and number + 1 not in background:
                    runs[start] = x - given
        else:
            for number, block in enumerate(model.blocks):
                if number not in background:
                    x, count = block(x, t), count + 1
                elif number - 1 not in background:
                    x = x + runs[number]
        outs.append(x)
        evaluated.append(count)
    return torch.stack(outs), evaluated


def wrapped_run(model, method, steps):
    with diffcache.wrapped(model, method) as handle:
        outs = torch.stack([model(x, timestep=t) for x, t in samples(steps)])
        evaluated = [sum(ran for ran, _ in call.counts.values()) for call in handle.last.calls]
    return outs, evaluated


def computed(when, total):
    state, steps = when.init(), []
    for index in range(total):
        step = Step(index, total=total)
        if when.should_compute(state, step, None):
            when.computed(state, step, None)
            steps.append(index)
    return steps


@pytest.mark.parametrize(
    "background",
    [[0], [0, 1, 2], [1, 3], [2, 3, 4, 6, 7], [7], list(range(8)), [0, 1, 3, 4, 5, 7]],
)
def test_runs_of_blocks_equal_a_loop_that_knows_one_block_at_a_time(background):
    model = toy(8)
    method = ProfilingDiT(background=tuple(f"blocks.{i}" for i in background), every=3, warmup=4)
    computes = [s for s in range(20) if s < 4 or (s - 4) % 3 == 0]
    outs, evaluated = wrapped_run(model, method, 20)
    expected, counts = by_blocks(model, background, computes, 20)
    assert torch.equal(outs, expected)
    assert evaluated == counts
    plain = torch.stack([model(x, t) for x, t in samples(20)])
    assert torch.equal(outs[computes], plain[computes]) and not torch.equal(outs, plain)


def test_all_background_adds_one_change_to_what_comes_in():
    model = toy(5)
    outs, evaluated = wrapped_run(model, ProfilingDiT(background="blocks.0-4", warmup=2), 12)
    given = torch.stack([x for x, _ in samples(12)])
    for index in (3, 7):  # steps 0, 1, 2 and 8 are computed
        assert torch.equal(outs[index], given[index] + (outs[2] - given[2]))
    assert evaluated == [5, 5, 5, 0, 0, 0, 0, 0, 5, 0, 0, 0]


@pytest.mark.filterwarnings("ignore::diffcache.CacheWarning")
@pytest.mark.parametrize("off", [{"every": 1}, {"background": ()}, {"warmup": 99}])
def test_off_is_the_baseline(off):
    model = toy(6)
    method = ProfilingDiT(**{"background": "blocks.1-4", **off})
    outs, _ = wrapped_run(model, method, 15)
    assert torch.equal(outs, torch.stack([model(x, t) for x, t in samples(15)]))


def test_the_decreasing_interval_follows_its_formula():
    when = Decreasing(8, 3, warmup=6)
    expected = []
    for s in range(STEPS):
        exact = 8 - (8 - 3) * (s - 6) / (STEPS - 6)
        if s < 6 or s % math.floor(exact + 0.5) == 0:
            expected.append(s)
    assert computed(when, STEPS) == expected
    gaps = [b - a for a, b in pairwise(expected)]
    assert max(gaps) == 10 and gaps[-2:] == [4, 4]  # `mod` may pass over a shorter interval
    assert computed(Decreasing(5, 5, warmup=0), 23) == [0, 5, 10, 15, 20]
    assert computed(Decreasing(1, 1), 7) == list(range(7))
    assert computed(Decreasing(8, 3, 6, total=STEPS), 30) == [s for s in expected if s < 30]


def test_the_decreasing_interval_in_a_run():
    model = toy(6)
    method = ProfilingDiT(
        background="blocks.1-4", interval="decreasing", longest=6, shortest=2, warmup=3, total=20
    )
    computes = computed(Decreasing(6, 2, 3), 20)
    outs, evaluated = wrapped_run(model, method, 20)
    expected, counts = by_blocks(model, [1, 2, 3, 4], computes, 20)
    assert torch.equal(outs, expected) and evaluated == counts
    blind = dataclasses.replace(method, total=None)
    with pytest.raises(ValueError, match="number of steps is not known"):
        wrapped_run(model, blind, 3)


def tiny(name, **depths):
    case = cases()[name]
    import diffusers

    torch.manual_seed(0)
    model = getattr(diffusers, case.cls)(**{**case.config, **depths})
    return case, randomize(model, 0, gain=0.3).eval().requires_grad_(False)


def test_the_published_wan_list_runs_28_of_40_blocks_less():
    case, model = tiny("WanTransformer3DModel", num_layers=40)
    method = ProfilingDiT.published("wan2.1-14b", model="")
    runs = method.parts().blocks
    assert len(runs) == 5
    with diffcache.wrapped(model, method) as handle, torch.no_grad():
        for step in range(STEPS):
            model(**case.kwargs(model, 0, step=step, steps=STEPS), return_dict=False)
        evaluated = [call.counts["blocks"][0] for call in handle.last.calls]
        layout = reuse_in(handle).setup.layouts
    assert evaluated == ([40] * 6 + ([40] + [12] * 5) * 8)[:STEPS]
    (found,) = layout.values()
    skipped = [i for i, tap in enumerate(found.skip["blocks"]) if tap is not model.blocks[i]]
    assert skipped == WAN


def test_the_published_hunyuan_lists_have_two_schedules():
    case, model = tiny("HunyuanVideoTransformer3DModel", num_layers=20, num_single_layers=40)
    method = ProfilingDiT.published("hunyuanvideo", model="")
    when = method.parts().when
    assert isinstance(when, Table) and when.total == 50
    double = {*range(6), *range(6, STEPS, 6)}
    single = {*range(6), 6, 18, 26, 32, 38, 42, 46, 48}
    with diffcache.wrapped(model, method) as handle, torch.no_grad():
        for step in range(STEPS):
            out = model(**case.kwargs(model, 0, step=step, steps=STEPS), return_dict=False)[0]
        calls = handle.last.calls
    assert out.isfinite().all()
    assert len(SINGLE) == 24
    for index, call in enumerate(calls):
        assert call.counts["transformer_blocks"][0] == (20 if index in double else 6)
        assert call.counts["single_transformer_blocks"][0] == (40 if index in single else 16)


def test_blocks_the_model_lacks_are_refused():
    model = toy(4)
    with (
        pytest.raises(AttachError, match="no such block"),
        diffcache.wrapped(model, ProfilingDiT(background="blocks.9")),
    ):
        model(*samples(2)[0])


def test_repr_is_python_and_names_become_ranges():
    method = ProfilingDiT(background=("b.1", "b.2-3", "c.d.0", "b.5"), listed=[("b", [3])], total=9)
    assert eval(repr(method)) == method
    assert merged(method.background) == ("b.1-3", "b.5", "c.d.0")
