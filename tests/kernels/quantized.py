"""Codecs that the kernels of quantization stand for, and tensors to code."""

import math

import torch
from torch import Tensor

from diffcache.kernels.quantize import quant_twin
from diffcache.kv.codec.quant import GroupQuant

CODECS = [
    GroupQuant(2, "tokens", 32),
    GroupQuant(4, "tokens", None),
    GroupQuant(8, "tokens", 16),
    GroupQuant(2, "channels", 16),
    GroupQuant(4, "channels", None, symmetric=True),
    GroupQuant(8, "channels", 24),
    GroupQuant(4, "channels", 16, levels=9),
    GroupQuant(4, "tokens", 32, symmetric=True, scale_dtype=torch.float32),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def tensor(dtype: torch.dtype) -> Tensor:
    """Return what is hard to code: constant groups, outliers, very small numbers; NaN lies around."""
    room = torch.full((2, 2, 80, 48), math.nan)
    room[:, :, 8:72, :40] = torch.randn(2, 2, 64, 40, generator=torch.Generator().manual_seed(1))
    x = room.to(dtype)[:, :, 8:72, :40]
    x[0, 0, :32] = 0.25
    x[0, 1] *= 1e-6
    x[1, 0, 5, 7], x[1, 0, 40, 3] = 6e4, -6e4
    return x


def by_twin(codec: GroupQuant, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and grid by the twin of the operator."""
    tokens = codec.along == "tokens"
    each, width = (codec.group or x.shape[2], 1) if tokens else (1, codec.width(x.shape[3]))
    return quant_twin(x, int(codec.bits), each, width, float(codec.intervals), codec.symmetric, codec.scale_dtype)
