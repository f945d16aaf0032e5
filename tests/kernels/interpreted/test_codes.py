"""Codes of quantized layers with the kernel that rounds."""

import pytest
import torch
from torch import nn

from diffcache.kernels import codes, linear
from diffcache.quant.calibrate import grid_of
from diffcache.quant.linear import QuantizedLinear
from diffcache.quant.plan import LayerPlan
from diffcache.step import Step
from tests.kernels.cases import DTYPES, guarded


def test_codes_are_the_twins_but_for_ties():
    for seed, dtype in enumerate(DTYPES):
        values = guarded((40, 1000), dtype, seed)
        found = codes.int8_codes(values, 6 / 255, 128)
        other = found.int() - codes.codes_twin(values, 6 / 255, 128, 8).int()
        assert other.abs().max() <= 1 and (other != 0).float().mean() <= 1e-4


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


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantized_layer_is_the_same_with_kernels(monkeypatch, bits, dtype):
    dense = nn.Linear(41, 24).requires_grad_(False)
    low, high = dense.weight.amin(1), dense.weight.amax(1)
    inputs = grid_of(torch.tensor([-3.1]), torch.tensor([3.3]), 8)
    plan = LayerPlan(*grid_of(low, high, bits), *inputs)
    x, calls, outputs = guarded((2, 5, 41), dtype, 1), [], []
    for operator in (codes.CODES, linear.LINEAR):
        monkeypatch.setattr(
            operator, "op",
            lambda *args, op=operator.op, name=operator.name: (calls.append(name), op(*args))[1],
        )  # fmt: skip
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
