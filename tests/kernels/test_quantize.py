"""The twins of quantization are the codecs, bit for bit."""

import pytest
import torch

from diffcache.kernels.quantize import dequant_twin
from diffcache.kv.codec.quant import GroupQuant
from tests.kernels.quantized import CODECS, DTYPES, by_twin, tensor


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_twins_are_the_codec(codec: GroupQuant, dtype: torch.dtype) -> None:
    x = tensor(dtype)
    made = codec.encode(x)
    codes, grid = by_twin(codec, x)
    assert torch.equal(codes, made.codes)
    assert torch.equal(grid, made.grid.values)
    index = torch.randint(64, (2, 2, 40), generator=torch.Generator().manual_seed(2))
    for held in (made, made.take(index), made.take(index[..., :1].expand(-1, -1, 3))):
        out = torch.empty_like(held.decode())
        width = 1 if codec.along == "tokens" else codec.width(x.shape[3])
        dequant_twin(
            held.codes,
            held.grid.values,
            out,
            int(codec.bits),
            max(held.grid.each, 1),
            width,
            -codec.intervals / 2,
            held.grid.of,
        )
        assert torch.equal(out, held.decode())
