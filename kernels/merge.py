"""Merge attention over disjoint sets of keys by the log-sum-exps of their logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffcache.kernels.dispatch import DTYPES, define, no_products

MOST = 8  # parts


def lse_merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of keys into attention over all of them.

    The kernel takes two to eight parts whose log-sum-exps are float32, and passes over memory once.

    Args:
        outs: Attention over each set, [..., D], of one shape and dtype; or stacked, [P, ..., D].
        lses: Log-sum-exp of the logits of each set, [...], natural logarithms; -inf where nothing
            is seen. Or stacked, [P, ...].

    Returns:
        The attention [..., D], 0 where no part sees anything, and its log-sum-exp [...]. A single
        part is returned as it is.

    Raises:
        ValueError: If there are no parts, or another number of log-sum-exps.

    Reference: FlashAttention, arXiv 2205.14135, section 3.1; LeanAttention, arXiv 2405.10480.
    """
    if not 1 <= len(outs) == len(lses):
        raise ValueError(
            f"outs: must be one or more parts with a log-sum-exp each, got {len(outs)} and {len(lses)} log-sum-exps"
        )
    if len(outs) == 1:
        return outs[0], lses[0]
    parts, logs = list(outs), list(lses)
    run = MERGE if _fits(parts, logs) and MERGE.takes(*parts, *logs) else merge_twin
    found: tuple[Tensor, Tensor] = run(parts, logs)
    return found


def merge_twin(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Compute `lse_merge` for two or more parts in plain PyTorch."""
    each = torch.stack(lses)
    total = each.logsumexp(0)
    weights = (each - total.where(total.isfinite(), 0)).exp()
    return (torch.stack(outs) * weights[..., None]).sum(0), total


def _fits(outs: list[Tensor], lses: list[Tensor]) -> bool:
    """Return whether the kernel knows these shapes and dtypes."""
    first = outs[0]
    alike = all(out.shape == first.shape and out.dtype == first.dtype for out in outs)
    narrow = all(lse.shape == first.shape[:-1] and lse.dtype == torch.float32 for lse in lses)
    return len(outs) <= MOST and alike and narrow and first.dtype in DTYPES


def _empty(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    first, log = outs[0], lses[0]
    dtype = torch.promote_types(first.dtype, log.dtype)
    return first.new_empty(first.shape, dtype=dtype), log.new_empty(log.shape)


MERGE = define(
    "lse_merge(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)", merge_twin, _empty, "merge:lse_merge", no_products
)
