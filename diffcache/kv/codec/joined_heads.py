"""Code several heads of a slot as one long vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffcache.kernels.move import gather_slots
from diffcache.kv.codec.base import Payload, TensorCodec, all_of, checked, tensors
from diffcache.kv.codec.table import compact, narrow
from diffcache.kv.settings import Count


@dataclass(frozen=True, eq=False)
class JoinedHeads(Payload):
    """Heads coded together.

    Args:
        inner: Codes `[B, H / heads, N, heads * D]`. A joint vector is whole or gone: where the
            heads of a group keep different slots, it holds every slot that one of them keeps.
        heads: Heads of a group.
        shape: (B, H / heads, N).
        at: `[B, H, S]` place of each slot of a head in `inner`, a narrow integer; None while all
            heads of a group have the same slots.
    """

    inner: Payload
    heads: int
    shape: tuple[int, int, int]
    at: Tensor | None = None

    @property
    def direct(self) -> bool:  # type: ignore[override]
        """That of the joint vectors."""
        return self.inner.direct

    def decode(self) -> Tensor:
        """Return `[B, H, S, D]`."""
        every = self._apart(self.inner.decode())
        return every if self.at is None else gather_slots(every, self.at.long())

    def _apart(self, joined: Tensor) -> Tensor:
        """Return the heads of joint vectors."""
        every: Tensor = joined.unflatten(3, (self.heads, -1))
        return every.transpose(2, 3).flatten(1, 2)

    def decode_at(self, index: Tensor) -> Tensor:
        """Return some slots, of each head its own channels alone where the codes allow it."""
        found = None
        if self.at is None and index.shape[1] == self.heads:
            found = self.inner.heads_at(index)
        return super().decode_at(index) if found is None else found

    def near(self) -> Tensor:
        """Return `decode` but for rounding."""
        if self.at is not None:
            return self.decode()
        return self._apart(self.inner.near())

    def mix(self, weights: Tensor) -> Tensor:
        """Sum whole vectors by the weights of every head, and leave each head its own channels."""
        if self.at is not None:
            return super().mix(weights)
        every: Tensor = self.inner.mix(weights.unflatten(1, (-1, self.heads)).flatten(2, 3))
        every = every.unflatten(3, (self.heads, -1)).unflatten(2, (self.heads, -1))
        return every.diagonal(dim1=2, dim2=4).movedim(-1, 2).flatten(1, 2)

    def take(self, index: Tensor) -> JoinedHeads:
        """Gather slots, and drop those that no head of the group keeps."""
        at = index if self.at is None else self.at.long().gather(2, index)
        heads: Tensor = at.unflatten(1, (-1, self.heads))
        if bool((heads == heads[:, :, :1]).all()):
            return self.slots(heads[:, :, 0], None)
        order, places = compact(heads.flatten(2), self.shape[2])
        return self.slots(order, narrow(places.reshape(at.shape), order.shape[2]))

    def slots(self, index: Tensor, at: Tensor | None) -> JoinedHeads:
        """Return joint slots at `index`, `[B, H / heads, n]` int64; heads find theirs at `at`."""
        shape = (*self.shape[:2], index.shape[2])
        return replace(self, inner=self.inner.take(index), shape=shape, at=at)

    def rows(self, index: Tensor) -> JoinedHeads:
        """Gather batch rows."""
        at = None if self.at is None else self.at[index]
        shape = (index.shape[0], *self.shape[1:])
        return replace(self, inner=self.inner.rows(index), shape=shape, at=at)

    def places(self, device: torch.device) -> Tensor:
        """Return the place of each slot of a head, `[B, H, S]` int64."""
        if self.at is not None:
            return self.at.long()
        batch, groups, slots = self.shape
        return torch.arange(slots, device=device).expand(batch, groups * self.heads, -1)


@dataclass(frozen=True)
class JoinHeads(TensorCodec):
    """Give a codec `heads` consecutive heads of a slot as one vector of `heads * D` channels.

    Structure across heads (a basis shared by all, a rotation over a group of heads) is a codec of
    one vector inside this one.

    Args:
        inner: Codec of the long vectors.
        heads: Heads of a group, which must divide H; None for all heads.
    """

    inner: TensorCodec
    heads: Count | None = None

    def encode(self, x: Tensor) -> JoinedHeads:
        """Code a tensor `[B, H, S, D]`; raise ValueError if `heads` does not divide H."""
        count = checked(x, self.multiple).shape[1]
        heads = self.heads or count
        if count % heads:
            raise ValueError(f"heads={heads}: must divide the {count} heads of x")
        joined = x.unflatten(1, (-1, heads)).transpose(2, 3).flatten(3)
        shape = (joined.shape[0], joined.shape[1], joined.shape[2])
        return JoinedHeads(self.inner.encode(joined), heads, shape)

    def join(self, parts: Sequence[Payload]) -> JoinedHeads:
        """Append slots; if heads have their own slots in one part, they do in the whole."""
        found = all_of(JoinedHeads, parts)
        device = next(tensors(found[0])).device
        places, total = [], 0
        for part in found:
            places.append(part.places(device) + total)
            total += part.shape[2]
        alike = all(part.at is None for part in found)
        return replace(
            found[0],
            inner=self.inner.join([part.inner for part in found]),
            shape=(*found[0].shape[:2], total),
            at=None if alike else narrow(torch.cat(places, 2), total),
        )
