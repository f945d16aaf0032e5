"""DBCache: its gate and limits against a loop, and the blocks that run."""

import math

import pytest
import torch

import diffcache
from diffcache.features.dbcache import DBCache
from tests.internals import computed_steps
from tests.zoo.catalog import cases
from tests.zoo_runs import sample

STEPS = 12


def probes(total):
    return [torch.tensor([2 + math.sin(0.5 * s), 1 + 0.1 * s]) for s in range(total)]


@pytest.mark.parametrize("threshold", [0.05, 0.15, math.inf])
@pytest.mark.parametrize("longest", [None, 1, 3])
@pytest.mark.parametrize("skips", [None, 4])
@pytest.mark.parametrize("warmup", [1, 5])
def test_the_schedule_follows_an_independent_trace(threshold, longest, skips, warmup):
    steps, kept, row, left = [], None, 0, skips
    for index, probe in enumerate(probes(30)):
        alike = kept is not None and (probe - kept).abs().sum() / kept.abs().sum() < threshold
        if alike and index >= warmup and row != longest and left != 0:
            row, left = row + 1, None if left is None else left - 1
            continue
        steps.append(index)
        kept, row = probe, 0
    method = DBCache(threshold, warmup=warmup, longest=longest, skips=skips)
    assert computed_steps(method, 30, probes(30)) == steps
    assert skips is None or 30 - len(steps) <= skips


@pytest.fixture(scope="module")
def made():
    case = cases()["FluxTransformer2DModel"]
    return case, case.build()


def test_lead_and_tail_always_run_and_the_rest_as_the_limits_say(made):
    case, model = made
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    ran = [0] * len(blocks)
    hooks = [
        block.register_forward_hook(lambda *_, n=n: ran.__setitem__(n, ran[n] + 1)) for n, block in enumerate(blocks)
    ]
    method = DBCache(math.inf, lead=2, tail=1, warmup=3, longest=2)
    with diffcache.wrapped(model, method) as handle:
        sample(case, model, STEPS)
        computed = [call.index for call in handle.last.calls if call.computed]
    for hook in hooks:
        hook.remove()
    assert computed == [0, 1, 2, 5, 8, 11]
    # the first call's wiring is checked by one more with the middle skipped
    assert ran == [STEPS + 1] * 2 + [len(computed)] * (len(blocks) - 3) + [STEPS + 1]


def test_a_forecast_differs_from_reuse(made):
    case, model = made
    outs = []
    for order in (0, 1):
        with diffcache.wrapped(model, DBCache(math.inf, warmup=2, longest=3, order=order)):
            outs.append(sample(case, model, STEPS))
    assert torch.equal(outs[0][1], outs[1][1])
    assert not torch.equal(outs[0][2], outs[1][2])
