"""Hold the queries, keys and values of one attention call, and rotate them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.foreign import backend_of, split_of

Kind = Literal["self", "cross", "joint"]
Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]


@dataclass(frozen=True)
class AttentionSite:
    """One attention of a model."""

    path: str  # path of the attention module
    layer: int  # number of its block, in the order of `attention_sites`
    heads: int  # number of query heads
    kind: Kind  # `self`, `cross`, or `joint` for text and picture tokens together
    part: Literal["", "image"] = ""  # `image` for the second attention of a cross-attention, to a picture's tokens


@dataclass(frozen=True, eq=False)
class CallRotary:
    """Rotary embedding of the rows of one call."""

    rotate: Callable[..., Tensor]  # function of `[B, T, H, D]` and the tables, which rotates rows
    # cosines, sines or complex numbers, `[1 or B, T, 1 or H, P]` each, of the rows that are rotated
    tables: tuple[Tensor, ...]
    first: int = 0  # the first row that is rotated
    some: bool = False  # whether the call has rows that are not rotated, before or after those
    is_rotated: Tensor | None = None  # rows that are rotated, bool `[1 or B, T]`; None where `first` and `some` tell

    def apply(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Rotate queries or keys, `[B, T, H, D]`, of all rows in order, or of rows int64 `[T]` or `[B, T]`."""
        if rows is not None:
            return self.at(rows).apply(x)
        if self.is_rotated is not None:
            return torch.where(self.is_rotated[..., None, None], self.rotate(x, *self.tables), x)
        if not self.some:
            return self.rotate(x, *self.tables)
        last = self.first + self.tables[0].shape[1]
        inside = self.rotate(x[:, self.first : last], *self.tables)
        parts = [x[:, : self.first], inside, x[:, last:]]
        return torch.cat([part for part in parts if part.shape[1]], dim=1)

    def at(self, rows: Tensor) -> CallRotary:
        """Return the rotation of some rows of the call, int64 `[T]` or `[B, T]`."""
        rows = rows if rows.dim() == 2 else rows[None]
        count = self.tables[0].shape[1]
        inside = (rows - self.first).clamp(0, count - 1) if self.some else rows
        batch = torch.arange(len(rows), device=rows.device)[:, None]
        tables = []
        for table in self.tables:
            wide = table.to(rows.device)
            wide = wide.expand(max(len(wide), len(rows)), *wide.shape[1:])
            tables.append(wide[:, inside[0]] if len(rows) == 1 else wide[batch, inside])
        is_rotated = (rows - self.first == inside) if self.some else None
        return CallRotary(self.rotate, tuple(tables), is_rotated=is_rotated)


def rotate_pairs(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate neighboring channels, in float32."""
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-imaginary, real], dim=-1).flatten(3)
    return (x.float() * cosine + turned.float() * sine).to(x.dtype)


def rotate_complex(x: Tensor, numbers: Tensor) -> Tensor:
    """Rotate neighboring channels by unit complex numbers."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * numbers.to(x.device)).flatten(3).to(x.dtype)


def rotate_by_pair(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate neighboring channels by one cosine and one sine a pair, in the wider dtype."""
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    pairs = [real * cosine - imaginary * sine, real * sine + imaginary * cosine]
    return torch.stack(pairs, dim=-1).flatten(3).to(x.dtype)


@cache
def _dispatcher() -> Callable[..., Tensor]:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    found: Callable[..., Tensor] = dispatch_attention_fn
    return found


def dispatched(processor: Any, *, split: bool = True) -> Attend:
    """Return attention through diffusers' dispatcher, with the backend of a processor."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        config = split_of(processor) if split else None
        out: Tensor = _dispatcher()(q, k, v, attn_mask=mask, backend=backend_of(processor), parallel_config=config)
        return out

    return attend


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend through torch's fused attention."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


@dataclass(eq=False, slots=True)
class AttentionCall:
    """The queries, keys and values of one call, after the model's norms."""

    q: Tensor  # queries before rotation, `[B, T, H, D]`
    k: Tensor  # keys before rotation, `[B, N, H or fewer, D]`
    v: Tensor  # values, `[B, N, H or fewer, D]`
    # attention as the model computes it, of rotated queries and keys, values and a mask; returns `[B, T, H, D]`
    attend: Attend
    # rotation of queries and keys; None where there is none, or where the model gives them rotated (models of
    # transformers)
    rotary: CallRotary | None = None
    mask: Tensor | None = None  # mask of the model, as its attention takes it
    text: int | None = 0  # number of text rows of a joint attention; None where the call does not tell
    text_first: bool = True  # whether the text rows come first
    causal: bool = False  # whether rows see only those up to their own
    scaling: float | None = None  # factor of the logits; None for one over the root of D
    _rotated: tuple[Tensor, Tensor] | None = None

    @property
    def scale(self) -> float:
        """The factor of the logits."""
        return self.q.shape[-1] ** -0.5 if self.scaling is None else self.scaling

    def rotated(self) -> tuple[Tensor, Tensor]:
        """Return queries and keys after rotation, computed once."""
        if self._rotated is None:
            turn = self.rotary
            both = (self.q, self.k)
            self._rotated = both if turn is None else (turn.apply(self.q), turn.apply(self.k))
        return self._rotated

    def plain(self) -> Tensor:
        """Return the model's own attention, `[B, T, H, D]`."""
        q, k = self.rotated()
        return self.attend(q, k, self.v, self.mask)


class Strategy(Protocol):
    """Protocol of an object that attends in a model's place.

    In which denoiser call, run and branch it is, a strategy finds out by itself.
    """

    def attend(self, site: AttentionSite, call: AttentionCall) -> Tensor | None:
        """Return the attention of one call, `[B, T, H, D]`; None for the model's own."""
