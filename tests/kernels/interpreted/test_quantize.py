"""Codecs of keys and values with kernels on: the codes and grids of plain PyTorch."""

import pytest
import torch

from diffcache.kernels import quantize
from diffcache.kv.codec.quant import GroupQuant
from tests.kernels.quantized import CODECS, DTYPES, by_twin, tensor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_codes_and_grids_are_those_of_plain_pytorch(
    codec: GroupQuant, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = tensor(dtype)
    codes, grid = by_twin(codec, x)
    made = codec.encode(x)
    assert torch.equal(codes, made.codes)
    assert torch.equal(grid, made.grid.values)
    index = torch.randint(64, (2, 2, 40), generator=torch.Generator().manual_seed(2))
    parts = (made, made.take(index))
    found = [(held.decode(), torch.full(held.decode().shape, 7.0)) for held in parts]
    for held, (_, room) in zip(parts, found, strict=True):
        held.decode_into(room)
    monkeypatch.setenv("DIFFCACHE_KERNELS", "torch")
    for held, (one, room) in zip(parts, found, strict=True):
        assert torch.equal(held.decode(), one)
        wide = torch.empty_like(room)
        held.decode_into(wide)
        assert torch.equal(wide, room)


def test_kernels_run_where_they_can_and_are_not_asked_elsewhere() -> None:
    x = tensor(torch.float32)
    assert quantize.can_quantize(x, 2, 32, 1)
    assert quantize.can_quantize(x, 4, 1, 40)
    assert not quantize.can_quantize(x, 3, 32, 1)  # numbers that share three bytes
    assert not quantize.can_quantize(x, 2, 1, 6)  # a byte of two groups
    assert not quantize.can_quantize(x.double(), 2, 32, 1)
    made = GroupQuant(2, "channels", 6).encode(x)
    assert made.decode().isfinite().all()


def test_slots_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        quantize.quant_groups(tensor(torch.float32)[:, :, :33], 2, 32, 1, 3, False)


def test_a_group_with_a_number_that_is_none_comes_back_as_none() -> None:
    x = tensor(torch.float32)
    x[0, 0, 3, 4] = float("nan")
    for codec in (CODECS[0], CODECS[3]):
        assert codec.encode(x).decode().isnan()[0, 0, 3, 4]
        assert codec.encode(x).decode().isfinite()[0, 1].all()
