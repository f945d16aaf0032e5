"""MagCache: its schedule against a loop of its own and diffusers', its ratios in closed form."""

import numpy as np
import pytest
import torch

import diffcache
from diffcache.features.collect import RunInfo
from diffcache.features.magcache import MagCache, ratio_at
from diffcache.features.tables import Tables
from diffcache.features.temporal_table import TemporalTable
from diffcache.offline.magcache_collect import Ratios
from diffcache.step import Step
from tests.internals import computed_steps
from tests.test_presets import official_magcache
from tests.zoo.pipes import pipes

RATIOS = tuple(1 - 0.002 * i - (0.03 * (i - 20) if i > 20 else 0) for i in range(28))


def test_ratios_of_other_lengths_are_those_of_the_nearest_step():
    from diffusers.hooks.mag_cache import nearest_interp

    for total in (1, 2, 9, 28, 50):
        theirs = nearest_interp(torch.tensor(RATIOS), total).tolist()
        mine = [ratio_at(RATIOS, index, total) for index in range(total)]
        assert mine == pytest.approx(theirs, abs=1e-6)
    assert ratio_at(RATIOS, 30, 28) == 1


@pytest.mark.parametrize("total", [28, 50, 17])
def test_a_step_may_be_fixed_as_for_flux(total):
    """The rule of MagCache4FLUX with its published settings, by a loop of its own."""
    from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS

    ratios = FLUX_MAG_RATIOS.tolist()
    places = np.round(np.arange(total) * (27 / (total - 1))).astype(int)
    steps, product, error, skipped = [], 1.0, 0.0, 0
    for index, place in enumerate(places):
        if index >= int(0.1 * total + 0.5):
            product, skipped = product * ratios[place], skipped + 1
            error += abs(1 - product)
            if error <= 0.24 and skipped <= 5 and place != 11:
                continue
        product, error, skipped = 1.0, 0.0, 0
        steps.append(index)
    found = computed_steps(MagCache(0.24, 5, 0.1, tuple(ratios), always=(11,)), total)
    assert found == steps
    free = computed_steps(MagCache(0.24, 5, 0.1, tuple(ratios)), total)
    assert (found == free) == (total == 17)  # where no step is at that position
    if total == 28:
        assert found == [0, 1, 2, 5, 9, 11, 17, 23, 26]


@pytest.mark.parametrize("threshold", [0.03, 0.06, 0.12])
def test_ratios_of_two_branches_decide_apart_on_a_pipeline(threshold, agrees):
    """Guidance in two calls; an official list holds the ratios of both in turn."""
    case = pipes()["WanPipeline"]
    pipe = case.build(0)
    total = 20
    both = [1.0, 1.0]
    for step in range(1, total):
        both += [1 - 0.002 * step, 1 - 0.004 * step]
    method = MagCache(threshold, 4, 0.2, (both[0::2], both[1::2]))
    expected = official_magcache(method, total)
    with diffcache.wrapped(pipe, method) as handle, torch.no_grad():
        case.run(pipe, steps=total)
        calls = handle.last.calls
    found = [[c.index for c in calls if c.computed and c.branch == name] for name in ("cond", "uncond")]
    agrees("magcache", "official code (Wan2.1), as a loop", steps=(found, expected))
    assert expected[0] != expected[1]


def collect(residuals, streams=1, branches=1):
    """Feed residuals [T] of tensors [B, N, D], split over two lists."""
    collector = Ratios(MagCache())
    for prompt, run in enumerate(residuals):
        collector.begin(RunInfo(0, prompt, torch.zeros(len(run)), None, len(run)))
        for index, value in enumerate(run):
            for branch in range(branches):
                step = Step(index, total=len(run), branch=branch)
                for stream in range(streams):
                    collector.feature(step, "blocks.3", stream, 0.25 * value)
                    if index == 0:  # a first call is recorded again where its wiring is relearned
                        collector.feature(step, "blocks.3", stream, 0.25 * value)
                    collector.feature(step, "single_blocks.7", stream, 0.75 * value)
        collector.end()
    return collector


@pytest.mark.parametrize(("streams", "branches"), [(1, 1), (2, 1), (2, 2)])
def test_ratios_in_closed_form(streams, branches):
    base = torch.randn(2, 5, 4)
    scales = [2.0, 1.8, 1.5, 0.3]
    found = collect([[s * base for s in scales]], streams, branches).tables()["ratios"]
    assert found.tolist() == pytest.approx([1.0, 0.9, 1.5 / 1.8, 0.2], rel=1e-5)


def test_a_branch_that_misses_steps_is_compared_with_the_step_before_alone():
    collector = Ratios(MagCache())
    collector.begin(RunInfo(0, 0, torch.zeros(4), None, 4))
    for index, branches in enumerate(((0, 1), (0,), (0, 1), (0, 1))):
        for branch in branches:
            collector.feature(Step(index, branch=branch), "blocks.3", 0, torch.ones(1, 2, 4) * 0.9**index)
    collector.end()
    assert collector.tables()["ratios"].tolist() == pytest.approx([1.0, 0.9, 0.9, 0.9])


def test_a_wrapped_pipeline_runs_at_other_lengths_than_the_calibration():
    from diffcache.attach.fingerprint import facts_of

    case = pipes()["FluxPipeline"]
    pipe = case.build(0)
    header = {"method": "magcache", "steps": 28, **facts_of(pipe.transformer, pipe.scheduler)}
    tables = Tables(header, {"ratios": torch.tensor(RATIOS, dtype=torch.float64)})
    method = MagCache(threshold=0.06, tables=tables)
    assert method.total is None
    for carried in (method, TemporalTable(method)):
        for total in (7, 12):
            with diffcache.wrapped(pipe, carried), torch.no_grad():
                case.run(pipe, 0, total)
                calls = diffcache.report(pipe).calls
            wanted = computed_steps(MagCache(0.06, ratios=RATIOS), total)
            assert [call.index for call in calls if call.computed] == wanted
            assert 1 < len(wanted) < total


def test_two_experts_share_the_ratios_of_one_run():
    """The second expert of Wan 2.2 goes on where the first stopped: its step 0 is step 5 of 8."""
    ratios = (1.0, 0.99, 0.98, 0.9, 0.99, 0.7, 0.95, 0.99)
    pipe = pipes()["WanPipeline-two"].build(0)
    with diffcache.wrapped(pipe, MagCache(0.06, 3, 0.0, ratios)) as handle:
        pipes()["WanPipeline-two"].run(pipe, steps=8)
        calls = [call for call in handle.last.calls if call.branch == "cond"]
    # From the last computed step on: 0.01, then 0.01 + 0.03; 0.9 is beyond 0.06; of the second
    # expert, which computes step 5, step 6 is off by 0.05 and step 7 by 0.05 + 0.0595.
    assert [call.computed for call in calls] == [True, False, False, True, False, True, False, True]
