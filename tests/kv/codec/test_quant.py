"""Group quantization: against a loop, its error bound, its bytes, and what eviction does to groups."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from diffcache.kv.codec.base import nbytes
from diffcache.kv.codec.quant import GroupQuant, Quantized


def groups_of(x: Tensor, along: str, group: int) -> Iterator[tuple[int, ...]]:
    """Yield (b, h, slots, channels) slices of every group, by definition."""
    b, h, s, d = x.shape
    for i in range(b):
        for j in range(h):
            if along == "tokens":
                for start in range(0, s, group):
                    for c in range(d):
                        yield i, j, slice(start, start + group), slice(c, c + 1)
            else:
                for t in range(s):
                    for start in range(0, d, group):
                        yield i, j, slice(t, t + 1), slice(start, min(start + group, d))


def reference(x: Tensor, bits: float, along: str, group: int) -> tuple[Tensor, Tensor]:
    """Min-max rounding in Python floats; returns what is decoded and half a scale of each element."""
    top = {1.58: 2}.get(bits, 2 ** int(bits) - 1)
    out, half = torch.empty_like(x), torch.empty_like(x)
    for place in groups_of(x, along, group):
        values = x[place].flatten().tolist()
        low = float(torch.tensor(min(values)).half())
        scale = float(torch.tensor((max(values) - min(values)) / top).half())
        codes = [min(max(round((v - low) / scale), 0), top) if scale else 0 for v in values]
        out[place] = torch.tensor([low + code * scale for code in codes]).reshape(x[place].shape)
        half[place] = scale / 2
    return out, half


@pytest.mark.parametrize("bits", [1, 1.58, 2, 3, 4, 8])
@pytest.mark.parametrize(("along", "group"), [("tokens", 4), ("channels", 4), ("channels", 7)])
def test_equals_a_loop_and_keeps_the_bound(bits: float, along: str, group: int) -> None:
    x = torch.randn(2, 2, 8, 12)
    wanted, half = reference(x, bits, along, group)
    found = GroupQuant(bits, along, group).encode(x).decode()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    error = (found - x).abs()
    slack = x.abs().max() * 2**-11 * 2  # of the stored minimum and scale
    assert (error <= half + slack).all()


def test_kivi_bytes() -> None:
    x = torch.randn(2, 4, 128, 64).half()
    for along in ("tokens", "channels"):
        assert nbytes(GroupQuant(2, along, 32).encode(x)) == 0.1875 * x.nbytes
    assert nbytes(GroupQuant(2, "channels", 32, symmetric=True).encode(x)) == 0.15625 * x.nbytes
    joined = GroupQuant(2, "tokens", 32)
    assert nbytes(joined.join([joined.encode(x)] * 3)) == 3 * 0.1875 * x.nbytes


@pytest.mark.parametrize("bits", [1, 1.58, 2, 3, 4, 8])
def test_symmetric_grid_by_hand(bits: float) -> None:
    x = torch.randn(1, 2, 3, 16)
    payload = GroupQuant(bits, "channels", None, symmetric=True).encode(x)
    found, largest = payload.decode(), x.abs().amax(-1, keepdim=True)
    values = {1: 2, 1.58: 3}.get(bits, 2 ** int(bits) - 1)
    steps = torch.linspace(-1, 1, values)
    ideal = (largest * steps).unsqueeze(3)  # [1, 2, 3, 1, values]
    nearest = (x.unsqueeze(-1) - ideal).abs().min(-1).values
    torch.testing.assert_close((found - x).abs(), nearest, rtol=0, atol=2e-3 * float(largest.max()))
    assert payload.grid.values.shape[3] == 1
    if values % 2:
        assert (GroupQuant(bits, symmetric=True).encode(torch.zeros(1, 1, 2, 8)).decode() == 0).all()


def test_relaxed_grid_draws_both_ends_in() -> None:
    x = torch.tensor([0.0, 1, 2, 4])[None, None, None]
    found = GroupQuant(1, "channels", None, relax=0.25).encode(x).decode()
    assert found.flatten().tolist() == [1, 1, 1, 3]


def test_more_levels_than_bits_leave_the_top_short() -> None:
    x = torch.arange(9.0)[None, None, None]  # 8 widths of 1 and codes 0 to 7
    found = GroupQuant(3, "channels", None, levels=9).encode(x).decode()
    assert found.flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7]
    fewer = GroupQuant(2, "channels", None, levels=3).encode(x).decode()
    assert fewer.unique().tolist() == [0, 4, 8]


def test_a_constant_group_has_code_zero() -> None:
    """Even where its value is not a half-precision number: codes may be shared by layers."""
    payload = GroupQuant(8, "channels", None).encode(torch.full((1, 1, 2, 8), 40010.7))
    assert (payload.codes == 0).all()
    assert (payload.decode() == float(torch.tensor(40010.7).half())).all()


def test_ranges_beyond_half_precision_saturate() -> None:
    x = torch.tensor([-1e6, 0, 1e6, 5])[None, None, None]
    assert GroupQuant(2, "channels", None).encode(x).decode().isfinite().all()
    wide = GroupQuant(8, "channels", None, scale_dtype=torch.float32).encode(x).decode()
    assert ((wide - x).abs() <= 1e6 / 255 + 1).all()


def test_taking_whole_groups_needs_no_group_numbers() -> None:
    codec = GroupQuant(2, "tokens", 4)
    payload = codec.encode(torch.randn(1, 2, 16, 8))
    slid = payload.take(torch.arange(4, 16).expand(1, 2, -1))
    assert slid.grid.of is None and nbytes(slid) == nbytes(payload) * 12 // 16
    apart = torch.stack([torch.arange(8), torch.arange(8, 16)])[None]  # other groups in each head
    assert payload.take(apart).grid.of is None


def test_taking_scattered_slots_keeps_only_their_groups() -> None:
    payload: Quantized = GroupQuant(2, "tokens", 4).encode(torch.randn(1, 2, 64, 8))
    some = payload.take(torch.tensor([[[0, 5, 6], [60, 61, 2]]]))
    assert some.grid.values.shape[2] == 2 and some.codes.shape == (1, 2, 3, 2)
