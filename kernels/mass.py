"""Add up the attention that every key gets, without holding the matrix of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from diffcache.kernels.dispatch import define

BLOCK = 256  # queries of a head whose logits plain PyTorch holds at once
LARGEST = 256  # channels of a head that the kernels take


def takes(q: Tensor, k: Tensor) -> bool:
    """Return whether both kernels should run on these queries and keys."""
    return _fits(q, k) and LSE.takes(q, k) and MASS.takes(q, k)


def attn_lse(q: Tensor, k: Tensor, scale: float, offset: int | None = None) -> Tensor:
    """Return the log-sum-exp of the logits of every query, computed in float32.

    Args:
        q: Queries [B, Hq, n, D]. Heads h * G to h * G + G - 1 read key head h.
        k: Keys [B or 1, H, N, D], of the same dtype.
        scale: Factor of the logits.
        offset: Query i sees keys 0 to `offset + i`; None: all of them.

    Returns:
        float32 [B, Hq, n], natural logarithms; -inf where a query sees no key.

    Raises:
        ValueError: If the heads of the queries are no multiple of those of the keys.
    """
    _check(q, k)
    run = LSE if _fits(q, k) and LSE.takes(q, k) else lse_twin
    found: Tensor = run(q, k, scale, offset)
    return found


def attn_mass(q: Tensor, k: Tensor, lse: Tensor, scale: float, offset: int | None = None) -> Tensor:
    """Return the attention that every key gets, summed over queries and the heads that share it.

    The kernel goes over keys and adds up all queries of one in a fixed order.

    Args:
        q: Queries [B, Hq, n, D]. Heads h * G to h * G + G - 1 read key head h.
        k: Keys [B or 1, H, N, D], of the same dtype.
        lse: Result of `attn_lse`, float32 [B, Hq, n]; inf where a query does not count.
        scale: Factor of the logits.
        offset: Query i sees keys 0 to `offset + i`; None: all of them.

    Returns:
        float32 [B, H, N]. The sum over N is G times the number of queries, without those that do
        not count or see no key.

    Raises:
        ValueError: If the heads of the queries are no multiple of those of the keys.
    """
    _check(q, k)
    run = MASS if _fits(q, k) and MASS.takes(q, k, lse) else mass_twin
    found: Tensor = run(q, k, lse, scale, offset)
    return found


def lse_twin(q: Tensor, k: Tensor, scale: float, offset: int | None) -> Tensor:
    """Compute `attn_lse` in plain PyTorch."""
    found = [
        _logits(q, k, scale, offset, start).logsumexp(-1) for start in range(0, q.shape[2], BLOCK)
    ]
    return torch.cat(found, 3).flatten(1, 2)


def mass_twin(q: Tensor, k: Tensor, lse: Tensor, scale: float, offset: int | None) -> Tensor:
    """Compute `attn_mass` in plain PyTorch."""
    total = torch.zeros(len(q), *k.shape[1:3], dtype=torch.float32, device=q.device)
    seeing = lse.masked_fill(lse == -torch.inf, torch.inf).unflatten(1, (k.shape[1], -1))
    for start in range(0, q.shape[2], BLOCK):
        logits = _logits(q, k, scale, offset, start)
        total += (logits - seeing[:, :, :, start : start + BLOCK, None]).exp().sum((2, 3))
    return total


def _logits(q: Tensor, k: Tensor, scale: float, offset: int | None, start: int) -> Tensor:
    """Return the logits of a block of queries in float32, [B, H, G, n, N]."""
    part = q[:, :, start : start + BLOCK].float()
    batch, _, count, size = part.shape
    heads, width = k.shape[1:3]
    rows = part.reshape(batch, heads, -1, size)
    logits: Tensor = (rows @ k.float().mT).unflatten(2, (-1, count)) * scale
    if offset is None:
        return logits
    last = torch.arange(count, device=q.device) + (start + offset)
    later = torch.arange(width, device=q.device) > last[:, None]
    return logits.masked_fill(later, -torch.inf)


def _fits(q: Tensor, k: Tensor) -> bool:
    """Return whether the kernels know these shapes and dtypes."""
    return q.dtype == k.dtype and q.shape[3] <= LARGEST and k.numel() > 0


def _check(q: Tensor, k: Tensor) -> None:
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q: has {q.shape[1]} heads, must have a multiple of the {k.shape[1]} heads of k"
        )


def _no_lse(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def _no_mass(q: Tensor, k: Tensor, *_: object) -> Tensor:
    return q.new_empty((q.shape[0], *k.shape[1:3]), dtype=torch.float32)


def _flops(q: list[int], k: list[int], *_: object, **__: object) -> int:
    return 2 * q[0] * q[1] * q[2] * q[3] * k[2]


LSE = define(
    "attn_lse(Tensor q, Tensor k, float scale, SymInt? offset) -> Tensor",
    lse_twin, _no_lse, "mass:attn_lse", _flops,
)  # fmt: skip
MASS = define(
    "attn_mass(Tensor q, Tensor k, Tensor lse, float scale, SymInt? offset) -> Tensor",
    mass_twin, _no_mass, "mass:attn_mass", _flops,
)  # fmt: skip
