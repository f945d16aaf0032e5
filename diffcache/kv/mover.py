"""Move keys that are stored rotated to the positions they are read at, by the difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from diffcache.kv.positions import own_places
from diffcache.kv.rotary import Rotation
from diffcache.kv.tail import Tail


class Mover:
    """Moves stored keys, all of them in a copy, or the first ones where they are.

    Under `diffcache.kv.positions.Slot` tokens that follow one another up to the newest are read
    where they are, in whatever order they are held. The few before the gap move closer by it, and
    they alone are turned at a token that is generated. Keys are turned from how they were written
    each time, so that no rounding adds up.

    Args:
        rotation: Rotation that turned the keys; its frequencies never change.
    """

    def __init__(self, rotation: Rotation) -> None:
        self.rotation = rotation
        self._tail: Tail | None = None
        self._count: int | None = None

    def turned(self, k: Tensor, at: Tensor, meta: Mapping[str, Tensor]) -> Tensor:
        """Return keys as they are read.

        Args:
            k: [B, H, S, D], rotated by the positions of their own.
            at: int64 [B, 1 or H, S], positions they are read at.
            meta: Their metadata.
        """
        return self.rotation.shift(k, at - own_places(meta).clamp_min(0))

    def forget(self) -> None:
        """Look at positions again next time."""
        self._tail = None

    def lead(self, tail: Tail, seen: int) -> int | None:
        """Return how many slots of a layer's tail stand before the only gap, or None where there is no such lead.

        The device is read when the tail is another than before, and not at every token.
        """
        slots = tail.read()
        if slots is None or not tail.whole or "rpos" in slots.meta:
            return None
        if tail.start is not None:
            return 0 if tail.start + tail.length == seen else None
        if self._tail is not tail:
            pos = slots.pos
            place = torch.arange(slots.width, device=pos.device)
            lead = (pos[0, 0] == place).long().cumprod(0).sum()
            after = pos[0, 0].where(place >= lead, seen).amin().long()
            alike = (pos == pos[:1, :1]).all().long()
            count, first, same = torch.stack([lead, after, alike]).tolist()
            is_lead = bool(same) and first == seen - (slots.width - count)
            self._tail, self._count = tail, count if is_lead else None
        return self._count

    @contextmanager
    def moved(self, tail: Tail, count: int, gap: int) -> Iterator[None]:
        """Have the first `count` keys, those before the gap, moved closer by it where they are, for one attention."""
        if not count or not gap:
            yield
            return
        keys = tail.keys(count)
        own = keys.clone()
        try:
            keys.copy_(self.rotation.shift(own, gap))
            yield
        finally:
            keys.copy_(own)
