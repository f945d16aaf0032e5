"""Attend through torch's own fused attention, by cuDNN where that was measured to be faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffcache.kernels.dispatch import is_faster

NAME = "sdpa_cudnn"  # of its ratio
FEWEST = 1024  # queries: cuDNN plans anew for every shape, and sizes like these were measured
# What one does not take, the next does.
ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **settings: Any
) -> Tensor:
    """Compute torch's function of this name.

    Of 1024 and more queries without a mask cuDNN is asked first on a CUDA device where it was
    measured to be faster than torch's choice; results agree within rounding. Elsewhere, and in
    compiled code, this is torch's function.

    Args:
        q: Queries [B, Hq, n, D].
        k: Keys [B, H, N, D].
        v: Values [B, H, N, Dv].
        mask: Mask or bias, as torch takes it.
        settings: `is_causal`, `scale`, `enable_gqa`, `dropout_p`.
    """
    if mask is None and takes(q):
        with sdpa_kernel(ORDER, set_priority=True):
            return functional.scaled_dot_product_attention(q, k, v, **settings)
    return functional.scaled_dot_product_attention(q, k, v, mask, **settings)


def takes(q: Tensor) -> bool:
    """Return whether cuDNN should be asked first."""
    if not q.is_cuda or q.shape[2] < FEWEST or torch.compiler.is_compiling():
        return False
    return is_faster(NAME, q.device)
