"""Attend from a few queries to many keys, shares of which are read at the same time."""

from __future__ import annotations

import torch
from torch import Tensor

from diffcache.kernels.dispatch import define

MOST = 16  # queries
LARGEST = 256  # channels of a head that the kernel takes


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernel should run on these queries, keys and values."""
    few = q.shape[2] <= MOST and max(q.shape[3], v.shape[3]) <= LARGEST
    alike = q.dtype == k.dtype == v.dtype and k.numel() > 0 and v.numel() > 0
    return few and alike and DECODE.takes(q, k, v)


def attn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    slots: Tensor | None = None,
    offset: int | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return attention of 1 to 16 queries and its log-sum-exp.

    Keys have places 0 to N - 1, or those in the list `slots`, which is read on the device. Keys
    that no query sees may hold anything, NaN too.

    Args:
        q: Queries [B, Hq, n, D]. Heads h * G to h * G + G - 1 read key-value head h.
        k: Keys [B or 1, H, N, D], of the same dtype.
        v: Values [B or 1, H, N, Dv], of the same dtype.
        scale: Factor of the logits.
        slots: Integers [B or 1, H or 1, P], the slot that is read for each place; none for one
            below 0 or from N on.
        offset: Query i sees places 0 to `offset + i`; None: all of them.
        window: Last places up to its own that a query sees; 0 for all of those.

    Returns:
        The attention [B, Hq, n, Dv] in the dtype of `q`, 0 where nothing is seen, and float32
        [B, Hq, n], natural logarithms, -inf there.

    Raises:
        ValueError: If there are more than 16 queries, their heads are no multiple of those of the
            keys, or there is a window and no offset.
    """
    if not 1 <= q.shape[2] <= MOST:
        raise ValueError(f"q: has {q.shape[2]} queries a head, must have 1 to {MOST}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q: has {q.shape[1]} heads, must have a multiple of the {k.shape[1]} heads of k"
        )
    if window and offset is None:
        raise ValueError(f"window={window}: takes an offset, which says where the queries are")
    run = DECODE if takes(q, k, v) else decode_twin
    found: tuple[Tensor, Tensor] = run(q, k, v, scale, slots, offset, window)
    return found


def decode_twin(
    q: Tensor, k: Tensor, v: Tensor, scale: float, slots: Tensor | None, offset: int | None,
    window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `attn_decode` in plain PyTorch and float32."""
    batch, _, count, size = q.shape
    width = k.shape[2] if slots is None else slots.shape[2]
    seen = _seen(count, width, offset, window, q.device)[None, None]
    if slots is not None:
        seen = seen & ((slots >= 0) & (slots < k.shape[2]))[:, :, None]
        k, v = (_listed(x, slots, batch) for x in (k, v))
    rows = q.float().reshape(batch, k.shape[1], -1, size)
    logits = (rows @ k.float().mT).unflatten(2, (-1, count)) * scale
    logits = logits.masked_fill(~seen[:, :, None], -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.where(lse.isfinite(), 0)[..., None]).exp()
    values = v.float().masked_fill(~seen.any(2)[..., None], 0)
    out = (weights.flatten(2, 3) @ values).to(q.dtype)
    return out.view(batch, -1, count, v.shape[3]), lse.flatten(1, 2)


def _listed(x: Tensor, slots: Tensor, batch: int) -> Tensor:
    """Return the slots of a list, [B, H, P, D]."""
    index = slots.long().clamp(0, x.shape[2] - 1).expand(batch, x.shape[1], -1)
    wide = index[..., None].expand(-1, -1, -1, x.shape[3])
    return x.expand(batch, -1, -1, -1).gather(2, wide)


def _seen(count: int, width: int, offset: int | None, window: int, device: torch.device) -> Tensor:
    """Return which places each query sees, bool [n, P]."""
    if offset is None:
        return torch.ones(count, width, dtype=torch.bool, device=device)
    place = torch.arange(width, device=device)
    own = torch.arange(offset, offset + count, device=device)[:, None]
    seen = place <= own
    return seen & (place > own - window) if window else seen


def _empty(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    shape = q.shape[:3]
    return q.new_empty((*shape, v.shape[3])), q.new_empty(shape, dtype=torch.float32)


def _flops(
    q: list[int], k: list[int], v: list[int], scale: float, slots: list[int] | None,
    *_: object, **__: object,
) -> int:  # fmt: skip
    width = k[2] if slots is None else slots[2]
    return 2 * q[0] * q[1] * q[2] * width * (q[3] + v[3])


DECODE = define(
    "attn_decode(Tensor q, Tensor k, Tensor v, float scale, Tensor? slots, SymInt? offset, "
    "SymInt window) -> (Tensor, Tensor)",
    decode_twin, _empty, "decode:attn_decode", _flops,
)  # fmt: skip
