"""Gates and their errors with the kernel of distances."""

import math

import pytest
import torch

from diffcache import Step
from diffcache.features.parts.when import Gate, relative_l1
from diffcache.kernels import distance
from tests.kernels.cases import DTYPES, guarded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relative_to", ["probe", "forecast"])
def test_the_error_of_a_gate_is_exact_but_for_rounding(dtype, relative_to):
    guess, probe = guarded((2, 300, 7), dtype, 1), guarded((2, 300, 7), dtype, 2)
    reference = guess if relative_to == "forecast" else probe
    exact = (guess.double() - probe.double()).abs().sum() / reference.double().abs().sum()
    assert relative_l1(guess, probe, relative_to) == pytest.approx(float(exact), rel=3e-7)


def test_zeros_infinities_and_nan_come_through():
    zero, one = torch.zeros(5000), torch.ones(5000)
    assert relative_l1(zero, zero) == 0
    assert relative_l1(one, zero) == math.inf
    assert relative_l1(one, one * 2, "probe") == 0.5
    for bad in (math.nan, math.inf):
        broken = one.clone()
        broken[4999] = bad
        assert math.isnan(relative_l1(broken, broken))
        state = (when := Gate(0.5)).init()
        when.computed(state, Step(0), one)
        assert when.should_compute(state, Step(1), broken)


def test_sums_of_parts_add_up_and_a_power_of_two_is_a_factor():
    values, reference = guarded((6000,), torch.float32, 1), guarded((6000,), torch.float32, 2)
    whole = distance.l1_sums(values, reference)
    pieces = [distance.l1_sums(values[p], reference[p]) for p in (slice(0, 17), slice(17, None))]
    torch.testing.assert_close(sum(pieces), whole, rtol=1e-6, atol=0)
    assert torch.equal(distance.l1_sums(values * 4, reference * 4), whole * 4)


def test_more_blocks_than_parts(monkeypatch):
    from diffcache.kernels.gpu import distance as launches

    values, reference = guarded((33, 777), torch.bfloat16, 1), guarded((33, 777), torch.bfloat16, 2)
    expected = distance.sums_twin(values, reference)
    monkeypatch.setattr(launches, "MOST", 4)  # 13 blocks: three parts of 4 and one of 1
    torch.testing.assert_close(distance.l1_sums(values, reference), expected, rtol=5e-6, atol=0)


def test_other_shapes_and_dtypes_are_left_to_plain_pytorch(monkeypatch):
    monkeypatch.setattr(distance.SUMS, "op", None)
    one, two = guarded((3, 1), torch.float32, 1), guarded((3, 4), torch.float32, 2)
    assert torch.equal(distance.l1_sums(one, two), distance.sums_twin(one, two))
    assert torch.equal(distance.l1_sums(two.double(), two), distance.sums_twin(two, two))
