"""Attend with queries and keys of 8 bits, as SageAttention does, to models that allow it.

SageAttention, arXiv 2410.02367. It changes results, so nobody gets it unasked: `Int8Attention` is
entered around a call of a model, and takes the kernel where `diffcache kernels measure` found it
faster than torch's own attention. `diffcache eval --method kernels/int8` measures what it does to
pictures.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from diffcache.kernels.dense import FEWEST
from diffcache.kernels.dispatch import define

ROWS, KEYS = 128, 64  # queries, and keys or values, that share a scale
LARGEST = 128  # channels of a head that the kernel takes


def attn_int8(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return attention whose logits are products of int8 codes.

    Their mean over tokens is taken from the keys, which leaves softmax as it is: it adds the same
    to all logits of a query. Then 128 queries share a scale, and 64 keys. Weights and values are
    multiplied in float16. A block of values has a scale, too, so that none overflows; the official
    code casts them as they are. A number that is not finite makes its block NaN.

    Args:
        q: Queries [B, Hq, n, D]. Heads h * G to h * G + G - 1 read key-value head h.
        k: Keys [B, H, N, D], of the same dtype.
        v: Values [B, H, N, Dv], of the same dtype.
        scale: Factor of the logits.

    Returns:
        [B, Hq, n, Dv] in the dtype of `q`.

    Raises:
        ValueError: If shapes or dtypes do not go together, or there is no key.
    """
    if not _fit(q, k, v):
        told = ", ".join(f"{x.dtype} {list(x.shape)}" for x in (q, k, v))
        raise ValueError(
            f"q, k, v: are {told}; must be [B, H * G, n, D], [B, H, N, D] and [B, H, N, Dv] of "
            "one float dtype, with a key at least"
        )
    run: Any = INT8 if takes(q, k, v) else int8_twin
    found: Tensor = run(q, k, v, scale)
    return found


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernel should run on these tensors."""
    return INT8.takes(q, k, v) and max(q.shape[3], v.shape[3]) <= LARGEST


def _fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if not q.dim() == k.dim() == v.dim() == 4 or not q.dtype == k.dtype == v.dtype:
        return False
    alike = k.shape[:3] == v.shape[:3] and len(q) == len(k) and q.shape[3] == k.shape[3]
    return alike and k.numel() > 0 and not q.shape[1] % k.shape[1] and q.is_floating_point()


def int8_twin(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute `attn_int8` in plain PyTorch; float64 is computed in float64."""
    groups = q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.to(wide), v.to(wide)
    k, v = _rounded(k - k.mean(2, keepdim=True), KEYS), v.repeat_interleave(groups, 1)
    keys, outs = k.repeat_interleave(groups, 1).mT, []
    for part in q.to(wide).split(ROWS, 2):
        outs.append((_rounded(part * scale, ROWS) @ keys).softmax(-1) @ v)
    return (torch.cat(outs, 2) if outs else q.new_empty(*q.shape[:3], v.shape[3])).to(q.dtype)


def _rounded(x: Tensor, block: int) -> Tensor:
    """Round the tokens of a block to 255 multiples of one number."""
    parts = functional.pad(x, (0, 0, 0, -x.shape[2] % block)).unflatten(2, (-1, block))
    most = parts.abs().amax((3, 4), keepdim=True)
    codes = (parts * (127 / most).where(most > 0, 0)).round()
    step = most / 127 + 0 * parts.sum((3, 4), keepdim=True)  # infinity makes NaN
    rounded: Tensor = (codes * step).flatten(2, 3)
    return rounded[:, :, : x.shape[2]]


def _like(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def _flops(q: list[int], k: list[int], v: list[int], scale: float, **_: object) -> int:
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])


INT8 = define(
    "attn_int8(Tensor q, Tensor k, Tensor v, float scale) -> Tensor", int8_twin, _like, "int8:attn_int8", _flops
)


class Int8Attention(TorchFunctionMode):
    """Let torch's fused attention run on 8 bits inside, in this thread; a context manager.

    Attention of 1024 and more queries without mask, dropout and gradients is taken, where the
    kernel was measured to be faster than torch's own; all else is torch's.

    Args:
        always: Whether to take it without a kernel and of any number of queries, too: to see what
            it does to a model, by plain PyTorch.

    Attributes:
        taken: Calls of attention on 8 bits.
        left: Other calls.
    """

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.always = always
        self.taken = self.left = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute attention on 8 bits where that is asked for, and leave all else as it is."""
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        found = self._attend(*args, **(kwargs or {}))
        if found is None:
            self.left += 1
            return func(*args, **(kwargs or {}))
        self.taken += 1
        return found

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        """Return the attention; None where it is torch's."""
        given = query, key, value
        if attn_mask is not None or dropout_p or is_causal or not _fit(*given):
            return None
        if query.shape[1] != key.shape[1] and not enable_gqa:
            return None
        if torch.is_grad_enabled() and any(x.requires_grad for x in given):
            return None
        if not self.always and not (query.shape[2] >= FEWEST and takes(*given)):
            return None
        return attn_int8(*given, query.shape[3] ** -0.5 if scale is None else scale)
