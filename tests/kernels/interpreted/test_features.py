"""Kernels of features: codes of layers and rows, distances and forecasts."""

import math

import pytest
import torch
from torch import Tensor, nn

from diffcache import Newton, Reuse, Step, Taylor
from diffcache.features.parts.hold import Hold, pack
from diffcache.features.parts.when import Gate, relative_l1
from diffcache.kernels import codes, distance, linear, rows
from diffcache.kernels.forecast import differences_twin, finite_differences
from diffcache.quant.linear import QuantizedLinear
from diffcache.quant.plan import LayerPlan
from diffcache.quant.scales import grid_of
from tests.kernels.cases import DTYPES, guarded


def test_far_numbers_get_the_last_code_and_zero_gets_its_own():
    values = torch.tensor([torch.inf, 3e38, 255.0, 0.0, -0.0, -1.0, -3e38, -torch.inf])
    for scale, zero in ((1.0, 0), (1e-30, 7), (1e-6, 255)):
        found = codes.int8_codes(values, scale, zero)
        assert torch.equal(found, codes.codes_twin(values, scale, zero, 8))
        assert found.tolist()[3:5] == [zero - 128] * 2
    nan, rows = torch.full((2, 16), torch.nan), torch.ones(2, 1)
    for scale, zero in ((0.1, 9), (0.1 * rows, 9 * rows.int())):
        found = codes.int8_codes(nan, scale, zero)
        assert found.eq(-128).all() and codes.codes_twin(nan, scale, zero, 8).eq(-128).all()


def test_scales_that_are_not_one_a_row_are_left_to_plain_pytorch(monkeypatch):
    monkeypatch.setattr(codes.CODES, "op", None)
    values, scale = guarded((4, 6), torch.float32, 1), torch.full((6,), 0.02)
    for pair in ((scale, scale.int()), (0.02, scale.int()), (scale, 3)):
        expected = codes.codes_twin(values, *pair, 8)
        assert torch.equal(codes.int8_codes(values, *pair), expected)
    assert codes.int8_codes(values.double(), 0.02, 3).dtype == torch.int8


@pytest.mark.parametrize(("bits", "dtype"), list(zip((8, 4, 8), DTYPES, strict=True)))
def test_a_quantized_layer_is_the_same_with_kernels(monkeypatch, bits, dtype):
    dense = nn.Linear(41, 24).requires_grad_(False)
    low, high = dense.weight.amin(1), dense.weight.amax(1)
    inputs = grid_of(torch.tensor([-3.1]), torch.tensor([3.3]), 8)
    plan = LayerPlan(*grid_of(low, high, bits), *inputs)
    x, calls, outputs = guarded((2, 5, 41), dtype, 1), [], []
    for operator in (codes.CODES, linear.LINEAR):
        monkeypatch.setattr(operator, "op", lambda *a, op=operator.op, n=operator.name: calls.append(n) or op(*a))
    for how in ("triton", "torch"):
        monkeypatch.setenv("DIFFCACHE_KERNELS", how)
        layer = QuantizedLinear(dense, plan, bits, "l", now=lambda: Step(0))
        outputs.append((layer.codes, layer(x)))
        assert layer(x[:0]).shape == (0, 5, 24)
    # of the weight, with a scale a row, and of the input, with one
    assert calls == ["int8_codes", "int8_codes", "linear_of_codes"]
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert outputs[0][1].dtype == dtype
    torch.testing.assert_close(outputs[0][1], outputs[1][1])


@pytest.fixture
def launched(monkeypatch):
    """Return the names of the operators that are called, in order."""
    names = []
    for operator in (rows.PACK, rows.SUM):
        monkeypatch.setattr(operator, "op", lambda *a, op=operator.op, n=operator.name: names.append(n) or op(*a))
    return names


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_scales_and_what_is_unpacked_are_those_of_the_twin(dtype, launched):
    for seed, shape in enumerate([(5,), (2, 9, 64), (3, 1100)]):
        tensor = guarded(shape, dtype, seed) * 3
        codes, scale = rows.pack_rows(tensor)
        expected, widths = rows.pack_twin(tensor)
        assert torch.equal(codes, expected) and torch.equal(scale, widths)
        unpacked = rows.unpack_rows(codes, scale, dtype)
        assert torch.equal(unpacked, rows.unpack_twin(codes, scale, dtype))
        assert torch.equal(rows.pack_rows(unpacked * 0)[0], codes * 0)
    assert len(launched) == 9


def test_the_largest_numbers_of_float16_come_back_finite():
    tensor = torch.tensor([[65504.0, 7], [-65504, 7], [65056, -65024], [65504, torch.inf]], dtype=torch.float16)
    for pair in (rows.pack_rows(tensor), rows.pack_twin(tensor)):
        found = rows.unpack_twin(*pair, torch.float16)
        assert found.tolist()[:3] == [[65024, 0], [-65024, 0], [65024, -65024]] and found[3].isnan().all()


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_row_that_is_not_finite_is_held_as_nan_and_alone(bad):
    tensor = guarded((3, 40), torch.float32, 1).clone()
    tensor[1, 7] = bad
    found = rows.unpack_rows(*rows.pack_rows(tensor), torch.float32)
    expected = rows.unpack_twin(*rows.pack_twin(tensor), torch.float32)
    assert found[1].isnan().all()
    assert torch.equal(found[::2], expected[::2]) and found[::2].isfinite().all()


@pytest.mark.parametrize(
    ("inner", "shape"), [(Reuse(), (2, 6, 32)), (Newton(2), (1, 6, 4, 4)), (Taylor(4), (2, 6, 32))]
)
def test_a_held_forecast_is_the_twins(monkeypatch, launched, inner, shape):
    features = [guarded(shape, torch.bfloat16, seed) for seed in range(4)]
    base = guarded(shape, torch.bfloat16, 9)
    results = {}
    for how in ("triton", "torch"):
        monkeypatch.setenv("DIFFCACHE_KERNELS", how)
        hold = Hold(inner, "int8")
        state = hold.init()
        for index, feature in enumerate(features):
            hold.record(state, Step(index * 2), feature.clone())
        results[how] = [hold.estimate(state, Step(8)), *hold.estimate_all([state], Step(8), [base])]
        assert torch.equal(hold.estimate_all([state], Step(8))[0], results[how][0])
    for one, other in zip(*results.values(), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (one - other).double().norm() <= 8e-3 * other.double().norm()
    # codes of channels on the second axis are the twin's; rows are summed as they are
    assert bool(launched) == (len(shape) == 3)


def test_a_forecast_reads_codes_once_and_unpacks_nothing(launched):
    hold = Hold(Taylor(2), "int8")
    state = hold.init()
    for index in range(3):
        hold.record(state, Step(index), guarded((4, 32), torch.float32, index))
    launched.clear()
    hold.estimate_all([state, state], Step(4), [guarded((4, 32), torch.float32, 5)] * 2)
    assert launched == ["weighted_sum_int8"] * 2


def test_bases_of_other_dtypes_and_shapes_are_added_as_before(monkeypatch):
    packed = pack(guarded((2, 4, 32), torch.bfloat16, 1), "int8")
    given = [packed.values], [packed.scale], [1.0]
    for base in (guarded((2, 4, 32), torch.float32, 2), guarded((32,), torch.bfloat16, 2)):
        found = rows.weighted_sum_int8(*given, base, torch.bfloat16)
        expected = base + packed.unpack()
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    with pytest.raises(ValueError, match="codes: must be 1 to 5 tensors with a scale and a weight"):
        rows.weighted_sum_int8(*given[:2], [1.0, 2.0], None, torch.bfloat16)


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


def drawn(seed: int, whole: bool) -> tuple[Tensor, Tensor]:
    """Return numbers in another order of axes, and the memory that they are in."""
    room = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    return (room if whole else room[:, :3]).t(), room


@pytest.mark.parametrize("whole", [True, False])
def test_old_differences_are_written_over_where_they_have_no_gaps(whole: bool) -> None:
    (feature, _), (first, _), (second, room) = (drawn(seed, whole) for seed in range(3))
    before, steps = room.clone(), [2.0, -4.0]
    exact = differences_twin(feature, [first, second.clone()], steps)
    _, *found = finite_differences([first, second], feature, steps)
    torch.testing.assert_close(found, exact)
    assert (found[0] is second) is whole
    assert torch.equal(room, before) is not whole
