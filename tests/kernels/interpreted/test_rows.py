"""Features held as int8 codes with the kernels of rows."""

import math

import pytest
import torch

from diffcache import Newton, Reuse, Step, Taylor
from diffcache.features.parts.hold import Hold, pack
from diffcache.kernels import rows
from tests.kernels.cases import DTYPES, guarded


@pytest.fixture
def launched(monkeypatch):
    """Return the names of the operators that are called, in order."""
    names = []
    for operator in (rows.PACK, rows.SUM):
        monkeypatch.setattr(
            operator, "op",
            lambda *args, op=operator.op, name=operator.name: (names.append(name), op(*args))[1],
        )  # fmt: skip
    return names


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_scales_and_what_is_unpacked_are_those_of_the_twin(dtype, launched):
    for seed, shape in enumerate([(5,), (3, 50), (2, 9, 64), (3, 1100), (4, 1, 2, 7)]):
        tensor = guarded(shape, dtype, seed) * 3
        codes, scale = rows.pack_rows(tensor)
        expected, widths = rows.pack_twin(tensor)
        assert torch.equal(codes, expected) and torch.equal(scale, widths)
        unpacked = rows.unpack_rows(codes, scale, dtype)
        assert torch.equal(unpacked, rows.unpack_twin(codes, scale, dtype))
        assert torch.equal(rows.pack_rows(unpacked * 0)[0], codes * 0)
    assert len(launched) == 15


def test_numbers_in_the_middle_of_two_codes_go_to_the_even_one():
    for width in (1.0, 0.75, 1.0078125, 1.9921875):  # significands of bfloat16
        middle = (torch.arange(-127, 127) + 0.5) * width
        row = torch.cat([middle, torch.tensor([127 * width / 1.00390625])])
        assert torch.equal(rows.pack_rows(row)[0], rows.pack_twin(row)[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_held_as_nan_and_alone(bad):
    tensor = guarded((3, 40), torch.float32, 1).clone()
    tensor[1, 7] = bad
    found = rows.unpack_rows(*rows.pack_rows(tensor), torch.float32)
    expected = rows.unpack_twin(*rows.pack_twin(tensor), torch.float32)
    assert found[1].isnan().all()
    assert torch.equal(found[::2], expected[::2]) and found[::2].isfinite().all()


@pytest.mark.parametrize("inner", [Reuse(), Taylor(2), Newton(2), Taylor(4)])
@pytest.mark.parametrize("shape", [(2, 6, 32), (1, 6, 4, 4)])
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
