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

    def check_fits(self, before: Form | None, layer: int, empty: bool) -> None:
        """Raise unless a layer that holds tokens of a form, nothing in its tail, takes these too.

        Raises:
            ValueError: If it cannot.
        """
        if before is None or self == before:
            return
        if self[1:] != before[1:] or before.batch != 1 or not empty:
            raise ValueError(
                f"layer {layer}: keys and values of [B, H, D, Dv]={list(self[:4])} in "
                f"{self.dtype} on {self.device} do not fit the {list(before[:4])} in "
                f"{before.dtype} on {before.device} that are held; reset the cache, or make a new "
                "one"
            )
