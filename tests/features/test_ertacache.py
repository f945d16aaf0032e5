"""ERTACache: the time ledger in closed form, and its settings."""

from dataclasses import replace

import pytest
import torch

from diffcache.errors import TablesError
from diffcache.features.ertacache import ERTACache, SigmaRule, adjust
from diffcache.offline.ertacache_collect import Profile
from diffcache.step import Step
from tests.features.ertacache_runs import STEPS, curved, loop, made, profile, sigmas

# the time ledger -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_time_is_conserved_for_any_factors(dtype):
    for seed in range(40):
        torch.manual_seed(seed)
        given = sigmas(24, dtype)
        if seed % 2:
            given = 1 - given  # schedules that count up
        factors = torch.rand(24).tolist()
        after = adjust(given, tuple(factors))
        assert after.dtype == dtype
        assert after[0] == given[0] and after[-1] == given[-1]
        steps = after.diff() * (given[-1] - given[0]).sign()
        assert (steps >= 0).all()
        assert float(after.double().diff().sum()) == pytest.approx(
            float((given[-1] - given[0]).double()), abs=1e-12
        )


def test_factors_of_one_leave_the_times_as_they_are_to_the_bit():
    for dtype in (torch.float32, torch.float64):
        given = sigmas(28, dtype)
        assert torch.equal(adjust(given, (1.0,) * 28), given)
        late = (1.0,) * 20 + (0.5,) + (1.0,) * 7
        assert torch.equal(adjust(given, late)[:21], given[:21])
        assert not torch.equal(adjust(given, late), given)


def test_times_of_a_uniform_schedule_by_hand():
    """Four steps of 1; the second takes half of its share, two steps share what is left."""
    given = torch.tensor([4.0, 3, 2, 1, 0], dtype=torch.float64)
    after = adjust(given, (1.0, 0.5, 1.0, 1.0))
    assert torch.allclose(after, torch.tensor([4.0, 3, 2.5, 1.25, 0], dtype=torch.float64))
    after = adjust(given, (1.0, 0.0, 0.0, 1.0))
    assert torch.allclose(after, torch.tensor([4.0, 3, 3, 3, 0], dtype=torch.float64))


def test_any_split_of_time_ends_a_constant_field_at_the_same_point():
    start = torch.randn(5, dtype=torch.float64)
    slope = torch.randn(5, dtype=torch.float64)
    plain, _ = loop(lambda x, t: slope, start, sigmas())
    for seed in range(5):
        torch.manual_seed(seed)
        times = adjust(sigmas(), tuple(torch.rand(STEPS).tolist()))
        split, _ = loop(lambda x, t: slope, start, times)
        assert torch.allclose(split, plain, atol=1e-12)


def test_bad_factors_are_refused():
    with pytest.raises(ValueError, match="numbers from 0 to 1"):
        adjust(sigmas(3), (1.0, 1.5, 1.0))
    with pytest.raises(ValueError, match=r"must be \[5\]"):
        adjust(sigmas(3), (1.0,) * 4)
    assert torch.equal(SigmaRule((1.0,) * 3).apply(sigmas(3)), sigmas(3))


# settings -------------------------------------------------------------------------------------


def test_threshold_zero_needs_no_tables_and_computes_everything():
    method = ERTACache(0)
    parts = method.parts()
    state = parts.when.init()
    for index in range(20):
        assert parts.when.should_compute(state, Step(index, total=20), None)
        parts.when.computed(state, Step(index, total=20), None)
    assert method.abilities() == (method.parts(),)
    assert Profile(0.0).settings() == {"threshold": 0.0}
    collector = profile(curved, [torch.randn(1, 2, 3, 3).double()], 0.0)
    assert collector.reused() == []
    empty = made(collector)
    assert empty.abilities() == (empty.parts(),) and len(empty.parts().when.steps) == STEPS


def test_uniform_computes_as_many_steps_at_even_distances():
    listed = made(profile(curved, [torch.randn(1, 2, 3, 3).double()], 0.5))
    even = replace(listed, schedule="uniform", time=False, rectify=False)
    count = len(listed.parts().when.steps)
    steps = sorted(even.parts().when.steps)
    assert 1 < count < STEPS and len(steps) == count and steps[0] == 0
    gaps = {b - a for a, b in zip(steps, [*steps[1:], STEPS], strict=True)}
    assert max(gaps) - min(gaps) <= 1
    assert even.abilities() == (even.parts(),)


def test_foreign_tables_are_refused():
    collector = profile(curved, [torch.randn(1, 2, 3, 3).double()], 0.5)
    method = made(collector)
    with pytest.raises(TablesError, match="made with threshold=0.5, not 0.2; leave threshold out"):
        replace(method, threshold=0.2)
    assert replace(method, threshold=0.5).parts() == method.parts()
    instead = method.parts().instead
    with pytest.raises(TablesError, match="made for 2 channels, the output .* has 5"):
        instead.correct(instead.init(), Step(3), torch.zeros(1, 5, 3, 3))
