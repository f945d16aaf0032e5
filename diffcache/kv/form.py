"""Shapes, dtype and device that all keys and values of a layer have in common."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Form(NamedTuple):
    """Shapes, dtype and device that all keys and values of a layer have in common."""

    batch: int
    heads: int
    size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> Form:
        """Return the form of keys [B, H, n, D] and values [B, H, n, Dv]."""
        return cls(len(k), k.shape[1], k.shape[3], v.shape[3], k.dtype, k.device)
