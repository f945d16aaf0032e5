"""CacheQuant: its schedule, its two corrections, its quantized layers, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.errors import TablesError, UncalibratedError
from diffcache.features.cachequant import CacheQuant, Corrected
from diffcache.features.collect import RunInfo
from diffcache.features.tables import Tables
from diffcache.offline.cachequant_collect import CacheQuantCollector, segment_bounds
from diffcache.step import Step

SITE = "up_blocks.0"

pytestmark = pytest.mark.usefixtures("no_gradients")


def info(total: int, number: int = 0) -> RunInfo:
    return RunInfo(number, 0, torch.arange(total), None, total)


def collected(runs: list[list[Tensor]], **settings: Any) -> CacheQuantCollector:
    """A collector that saw one feature in some runs."""
    collector = CacheQuant(**settings).collector()
    for run in runs:
        collector.begin(info(len(run)))
        for index, value in enumerate(run):
            collector.feature(Step(index), SITE, 0, value)
        collector.end()
    return collector


def tables_of(collector: CacheQuantCollector, total: int, **more: Any) -> Tables:
    header = {"method": "cachequant", "steps": total, **collector.settings(), **more}
    return Tables(header, collector.tables())


def walk(total: int, shape: tuple[int, ...] = (2, 5, 3)) -> list[Tensor]:
    jumps = torch.rand(total, *[1] * len(shape), dtype=torch.float64) ** 3
    return list((torch.randn(total, *shape, dtype=torch.float64) * jumps).cumsum(0))


# the schedule


def brute_force(values: list[Tensor], count: int, shortest: int, longest: int) -> tuple[float, Any]:
    total, best = len(values), (math.inf, None)
    for inner in itertools.combinations(range(1, total), count - 1):
        edges = [0, *inner, total]
        lengths = [b - a for a, b in itertools.pairwise(edges)]
        if all(shortest <= length <= longest for length in lengths):
            cost = sum(
                float((values[t] - values[a]).abs().sum())
                for a, b in itertools.pairwise(edges)
                for t in range(a, b)
            )
            best = min(best, (cost, edges[:-1]))
    return best


@pytest.mark.parametrize(
    ("total", "every"), [(12, 3), (10, 2), (14, 4), (13, 3), (7, 4), (5, 4), (9, 5), (3, 5), (6, 1)]
)
def test_schedule_equals_brute_force(total: int, every: int) -> None:
    values = walk(total)
    count, shortest, longest = math.ceil(total / every), math.ceil(every / 2), 2 * every
    if count * shortest > total:
        shortest, longest = 1, total
    _, expected = brute_force(values, count, shortest, longest)
    if every == 1:
        expected = list(range(total))
    assert collected([values], every=every).starts() == expected


def test_schedule_adds_runs_features_and_branches() -> None:
    total, first, second = 9, walk(9), walk(9)
    joined = [torch.cat(pair) for pair in zip(first, second, strict=True)]
    whole = collected([joined], every=3).starts()
    assert collected([first, second], every=3).starts() == whole
    apart = CacheQuant(every=3).collector()
    apart.begin(info(total))
    for index, (a, b) in enumerate(zip(first, second, strict=True)):
        apart.feature(Step(index), SITE, 0, a)
        apart.feature(Step(index, branch=1), SITE, 0, b)
    apart.end()
    assert apart.starts() == whole


def test_bounds_of_segments() -> None:
    assert segment_bounds(50, 5) == (10, 3, 10)
    assert segment_bounds(2, 5) == (1, 1, 2)  # ceil(5 / 2) steps do not fit: any length
    for total in range(1, 40):
        for every in range(1, 12):
            count, shortest, longest = segment_bounds(total, every)
            assert count * shortest <= total <= count * longest


def test_uniform_schedule() -> None:
    assert collected([walk(10)], every=4, schedule="uniform").starts() == [0, 4, 8]


# the correction of reused features


def test_affine_features_are_met_exactly() -> None:
    total, base = 10, torch.randn(2, 6, 4, dtype=torch.float64)
    a, b = torch.rand(total, 4, dtype=torch.float64) + 0.5, torch.randn(total, 4).double()
    features = [a[t] * base + b[t] for t in range(total)]
    collector = collected([features], every=4)
    method = Corrected(tables_of(collector, total))
    state, starts = method.init(), collector.starts()
    for t in range(total):
        if t in starts:
            method.record(state, Step(t), features[t])
        error = float((method.estimate(state, Step(t)) - features[t]).abs().max())
        assert error < 1e-12 and (t not in starts or error == 0)
        if t in starts:
            assert method.estimate(state, Step(t)) is features[t]


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 3, 4, 4)], ids=["tokens", "pictures"])
def test_correction_never_raises_the_error(shape: tuple[int, ...]) -> None:
    runs = [walk(9, shape) for _ in range(3)]
    collector = collected(runs, every=3)
    tables, starts = tables_of(collector, 9), collector.starts()
    axis = 1 if len(shape) == 4 else len(shape) - 1
    others = [i for i in range(len(shape)) if i != axis]
    assert tables[f"cache/{SITE}/0/a"].shape == (9, 3)
    corrected, reused = torch.zeros(9, 3).double(), torch.zeros(9, 3).double()
    for run in runs:
        method = Corrected(tables)
        state = method.init_at(SITE, 0)
        for t, value in enumerate(run):
            if t in starts:
                method.record(state, Step(t), value)
            assert state.feature is not None
            corrected[t] += (method.estimate(state, Step(t)) - value).square().sum(others)
            reused[t] += (state.feature - value).square().sum(others)
    assert (corrected <= reused * (1 + 1e-12)).all()
    assert (corrected < reused).any()


def test_a_feature_of_another_step_is_reused_as_it_is() -> None:
    run = walk(9)
    collector = collected([run], every=3, schedule="uniform")
    method = Corrected(tables_of(collector, 9))
    state = method.init()
    method.record(state, Step(4), run[4])  # forced: the schedule says 3
    assert method.estimate(state, Step(5)) is run[4]
    method.record(state, Step(6), run[6])
    assert method.estimate(state, Step(7)) is not run[6]
    assert method.held(state) == [run[6]]


def test_maps_are_for_their_feature() -> None:
    tables = tables_of(collected([walk(4)], every=2), 4)
    method = Corrected(tables)
    with pytest.raises(TablesError, match=r"no maps for feature mid/0; they have up_blocks\.0/0"):
        method.init_at("mid", 0)
    with pytest.raises(TablesError, match=r"for 3 channels, the\s+feature has 7"):
        method.record(method.init(), Step(0), torch.ones(1, 2, 7))
    both = {f"cache/{n}/0/{k}": tables[f"cache/{SITE}/0/{k}"] for n in "xy" for k in "ab"}
    with pytest.raises(TablesError, match=r"hold 2 features \(x/0, y/0\)"):
        Corrected(Tables(tables.header, both)).init()


def test_official_moments_shrink_the_slope() -> None:
    run = walk(4)
    ours = collected([run], every=2, schedule="uniform").tables()
    theirs = collected([run], every=2, schedule="uniform", official=True).tables()
    n = run[0][..., 0].numel()
    name = f"cache/{SITE}/0/a"
    torch.testing.assert_close(theirs[name][1], ours[name][1] * (n - 1) / n)
    assert torch.equal(theirs[name][::2], torch.ones(2, 3).double())


def test_calibration_goes_on_from_its_state() -> None:
    first, second = walk(6), walk(6)
    whole = collected([first, second], every=3)
    again = CacheQuant(every=3).collector()
    again.load(collected([first], every=3).state())
    again.begin(info(6))
    for index, value in enumerate(second):
        again.feature(Step(index), SITE, 0, value)
    again.end()
    assert again.state().keys() == whole.state().keys()
    for name, tensor in whole.tables().items():
        assert torch.equal(again.tables()[name], tensor)
    empty = CacheQuant(every=3).collector()
    empty.load(empty.state())
    with pytest.raises(ValueError, match="no run was seen"):
        empty.tables()


def test_runs_must_be_alike_and_complete() -> None:
    collector = collected([walk(6)], every=3)
    with pytest.raises(ValueError, match="steps=7: the runs before had 6"):
        collector.begin(info(7))
    collector.begin(info(6))
    collector.feature(Step(0), SITE, 0, torch.ones(1, 2, 3))
    with pytest.raises(ValueError, match="seen at 1 of 6 steps in branch 0"):
        collector.end()


def test_joint_maps_lead_to_what_dense_layers_would_make() -> None:
    collector = CacheQuant(every=2, bits="w8a8", schedule="uniform", corrected=()).collector()
    assert collector.passes == 2 and len(collector.abilities()) == 1
    watched = collector.layers
    watched.layer("l", torch.randn(3, 4), None)
    collector.begin(info(4, 0))
    for t in range(4):
        watched.given("l", t, torch.randn(2, 4))
        collector.feature(Step(t), SITE, 0, torch.full((2, 5, 3), torch.nan))  # not looked at
    collector.end()
    collector.begin(info(4, 1))
    assert watched.plan() is not None and watched.wants_dense
    quantized, dense = walk(4), []
    for t in range(4):
        dense.append((t + 0.5) * quantized[t - t % 2] - t)
        collector.feature(Step(t), SITE, 0, quantized[t])
        watched.dense_again(True)
        collector.feature(Step(t), SITE, 0, dense[t])
        watched.dense_again(False)
    collector.end()
    expected = sum((dense[t] - quantized[0]).abs().sum() for t in range(2))
    torch.testing.assert_close(collector.pairs.distances[0, :2].sum(), expected)
    method = Corrected(tables_of(collector, 4))
    state = method.init()
    for t in (0, 2):
        method.record(state, Step(t), quantized[t])
        error = (method.estimate(state, Step(t + 1)) - dense[t + 1]).abs().max()
        assert float(error) < 1e-12


def test_tables_are_needed() -> None:
    for method in (CacheQuant(), CacheQuant(every=1, bits="w8a8")):
        with pytest.raises(UncalibratedError, match=r"diffcache\.calibrate\(pipe, CacheQuant"):
            method.parts()
    off = CacheQuant(every=1)
    assert off.abilities() == (off.parts(),)


def test_foreign_tables_are_refused(tmp_path) -> None:
    collector = CacheQuant(every=3).collector()
    collector.begin(RunInfo(0, 0, torch.arange(6), None, 6))
    for step in range(6):
        collector.feature(Step(step), "up_blocks.0", 0, torch.randn(1, 3, 4))
    collector.end()
    header = {"method": "cachequant", "steps": 6, **collector.settings(), "model": "Other"}
    tables = Tables(header, collector.tables())
    with pytest.raises(TablesError, match="made for every=3, not every=2"):
        CacheQuant(every=2, tables=tables)
    with pytest.raises(TablesError, match="made for bits=None, not bits='w8a8'"):
        CacheQuant(every=3, bits="w8a8", tables=tables)
    with pytest.raises(TablesError, match="it lacks 'starts'"):
        CacheQuant(every=3, tables=Tables(tables.header, {}))
    method = CacheQuant(every=3, tables=tables)
    with pytest.raises(TablesError, match="measured on Other, this is UNet2DModel"):
        method.check_model({"model": "UNet2DModel", "scheduler": None})
    path = str(tmp_path / "t.safetensors")
    saved = dataclasses.replace(method, tables=tables.save(path))
    assert eval(repr(saved)) == saved == method and hash(saved) == hash(method)
