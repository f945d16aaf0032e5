"""The keys and values of one attention layer: settled segments and a growing tail."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from diffcache.kv.attend import View
from diffcache.kv.codec.base import tensors
from diffcache.kv.positions import PositionMap, own, placed
from diffcache.kv.rotary import Rotation
from diffcache.kv.rotary_table import RotaryTable
from diffcache.kv.segment import Dense, Flat, Segment, read_all
from diffcache.kv.slots import EMPTY, Slots, join_meta, span
from diffcache.kv.summary import LayerSummary
from diffcache.kv.tail import Tail


class Form(NamedTuple):
    """What all keys and values of a layer have in common."""

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


class KVLayer:
    """Keys and values of one layer.

    Two lengths are apart: `seen`, the tokens that were written, and `held`, the slots that are
    still there. Positions are data, so nothing depends on where in memory a slot is.

    Attributes:
        index: of the layer in its model.
        rotary: rotates keys when they are read. Keys are then stored before rotation; without it
            they are stored and read as given.
        positions: the numbers that keys are rotated under when they are read; None: their own.
        seen: logical length in tokens.
        form: of what was written last; None while nothing was.
        segments: settled slots, oldest first.
        tail: exact slots that grow.
        stats: of scorers, by name, float32 [B, H, S], in the order of `read`.
        summary: of a retriever; None where it has to be built anew.
        latent: what is held are latents and, as values, rotary parts of keys. Queries meet both
            together as keys, and the latents as values (multi-head latent attention).
    """

    def __init__(
        self,
        index: int = 0,
        *,
        rotary: Rotation | None = None,
        positions: PositionMap | None = None,
    ) -> None:
        if positions is not None and rotary is None:
            raise ValueError(
                f"positions={positions!r}: keys are rotated when they are read, which takes a "
                "rotary"
            )
        self.index = index
        self.rotary = rotary
        self.positions = positions
        self.seen = 0
        self.form: Form | None = None
        self.padding: Tensor | None = None  # tokens of each row that are none, int64 [B]
        self.segments: list[Segment] = []
        self.tail = Tail()
        self.stats: dict[str, Tensor] = {}
        self.summary: LayerSummary | None = None
        self.latent = False

    # the four verbs ------------------------------------------------------------------------

    def write(
        self,
        k: Tensor,
        v: Tensor,
        *,
        valid: Tensor | None = None,
        meta: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add tokens at the end, at positions from `seen` on.

        Args:
            k: [B, H, n, D], before rotation if the layer has a `rotary`.
            v: [B, H, n, Dv].
            valid: bool [B, n]; False is padding, which takes a position and is never seen.
            meta: more of each token, [B, 1, n]: `rpos`, `tag`, `logn`, `ver`.

        Raises:
            ValueError: If shapes do not fit each other or what is there.
        """
        self._check(k, v)
        if valid is None:
            self.tail.extend(k, v, self.seen, meta)
        else:
            pos = span(self.seen, self.seen + k.shape[2], len(k), k.device)
            pos = pos.where(valid[:, None], EMPTY)
            empty = (~valid).sum(-1)
            self.padding = empty if self.padding is None else self.padding + empty
            self.tail.append(Slots(k, v, {"pos": pos, **(meta or {})}))
        self.seen += k.shape[2]

    def overwrite(
        self, index: Tensor | range, k: Tensor, v: Tensor, ver: int | None = None
    ) -> None:
        """Write anew into slots that are there, which keep their positions.

        Args:
            index: int64 [n] or [B, n], slots of the tail, as `read` shows them. A `range` of step 1
                is a run of slots, which is checked without reading a tensor and written as a copy.
            k: [B, H, n, D], before rotation if the layer has a `rotary`.
            v: [B, H, n, Dv].
            ver: of what is written, where versions are kept.

        Raises:
            ValueError: If a slot is settled or not there; on CUDA, its own error, later. If a range
                has another step, or another length than `k`.
        """
        index = self._in_tail(index, k.shape[2])
        columns = {"k": k, "v": v}
        if ver is not None:
            columns["ver"] = torch.full((1, 1, 1), ver, dtype=torch.int32, device=k.device)
        self.tail.overwrite(index, columns)
        self.summary = None

    def _in_tail(self, index: Tensor | range, count: int) -> Tensor | range:
        """Return slots of the layer as slots of the tail."""
        first = self.held - self.tail.length
        if isinstance(index, range):
            if index.step != 1 or len(index) != count:
                raise ValueError(
                    f"index={index!r} of {count} tokens: a range must have step 1 and as many slots"
                )
            if count:
                self._check_slots(index.start, index.stop - 1, first)
            return range(index.start - first, index.stop - first)
        if index.numel():
            if index.device.type == "cuda":  # reading the index would make the host wait
                torch._assert_async(((index >= first) & (index < self.held)).all())
            else:
                least, most = (int(end) for end in torch.aminmax(index))
                self._check_slots(least, most, first)
        return index - first if first else index

    def _check_slots(self, least: int, most: int, first: int) -> None:
        if not first <= least <= most < self.held:
            raise ValueError(
                f"index={least}..{most}: slots {first} to {self.held - 1} can be overwritten; "
                "what is before them is settled"
            )

    def read(self) -> Slots:
        """Return all slots, segments first; keys as they are stored.

        Raises:
            ValueError: If nothing was written.
        """
        tail = self.tail.read()
        if tail is None and not self.segments:
            raise ValueError(f"layer {self.index} is empty: write keys and values first")
        if tail is not None and not tail.width and self.segments:
            tail = None
        return read_all(self.segments, tail)

    def meta(self) -> dict[str, Tensor]:
        """Return the metadata of all slots, as `read` orders them; nothing is decoded.

        Raises:
            ValueError: If nothing was written.
        """
        parts = [segment.metadata() for segment in self.segments]
        tail = self.tail.read()
        if tail is not None and (tail.width or not parts):
            parts.append(tail.meta)
        if not parts:
            raise ValueError(f"layer {self.index} is empty: write keys and values first")
        return parts[0] if len(parts) == 1 else join_meta(parts)

    def reset(self) -> None:
        """Forget everything."""
        self.seen, self.padding, self.segments, self.tail = 0, None, [], Tail()
        self.stats, self.summary, self.form = {}, None, None

    # reading for attention -----------------------------------------------------------------

    def views(self) -> list[View]:
        """Return what queries attend to: keys rotated, segments of their own kind apart."""
        if not self.segments:  # the common case, cheap
            slots = self.tail.read()
            if slots is None:
                raise ValueError(f"layer {self.index} is empty: write keys and values first")
            return [self._tail_view(slots)]
        tail = self.tail.read()
        found = []
        for segment in self.segments:
            below = self.seen if segment.whole else None
            slots = self.rotated(segment.read())
            found.append(View(slots, segment.first, segment.traits, below=below))
        if tail is not None and tail.width:
            found.append(self._tail_view(tail))
        return found

    def _tail_view(self, slots: Slots) -> View:
        tail = self.tail
        start = tail.start if tail.is_plain else None
        return View(self.rotated(slots), start, below=self.seen if tail.whole else None)

    def rotated(self, slots: Slots) -> Slots:
        """Return slots with their keys as queries meet them."""
        if self.latent:
            return Slots(torch.cat([slots.k, slots.v], -1), slots.k, slots.meta)
        if self.rotary is None:
            return slots
        return Slots(self.rotary.rotate(slots.k, self.placed(slots.meta)), slots.v, slots.meta)

    def rotate(self, q: Tensor, pos: Tensor) -> Tensor:
        """Return queries as keys at the same positions are rotated, given what is held now.

        Args:
            q: [B, Hq, n, D], before rotation.
            pos: int [n] or [B, n], positions as they are counted by `seen`.

        Raises:
            ValueError: If the layer has no rotary, or nothing was written.
        """
        if self.rotary is None:
            raise ValueError("rotate: this layer has no rotary; its keys come rotated")
        at = (pos if pos.dim() == 2 else pos[None])[:, None]
        if self.positions is not None:
            at = placed(self.positions, at, own(self.meta()), self.rotary.unit)
            if at.shape[1] > 1:  # of key-value heads
                at = at.repeat_interleave(q.shape[1] // at.shape[1], 1)
        return self.rotary.rotate(q, at)

    def placed(self, meta: Mapping[str, Tensor]) -> Tensor:
        """Return the positions that keys of these slots are rotated under."""
        assert self.rotary is not None
        held = own(meta)
        if self.positions is None:
            return held.clamp_min(0)
        return placed(self.positions, held, held, self.rotary.unit)

    # changing what is held -----------------------------------------------------------------

    def replace(self, slots: Slots, *, flat: bool = False) -> None:
        """Hold these slots instead of all there are."""
        self.segments, self.summary = [], None
        if flat and not bool(slots.valid.all()):
            self.segments.append(Flat.of(slots))
            self.tail = Tail(self.seen)
        else:
            self.tail = Tail.of(slots)

    def settle_tail(self, segment: Segment | None = None) -> None:
        """Turn the tail into a segment, by default an exact one."""
        slots = self.tail.read()
        if slots is not None and slots.width:
            self.segments.append(segment or Dense(slots.clone()))
            self.tail = Tail(self.seen)

    def rollback(self, count: int) -> None:
        """Forget the last tokens.

        Raises:
            ValueError: If so many were not written since the layer was last settled.
        """
        self.check_rollback(count)
        self.tail.drop_last(count)
        self.seen -= count
        if self.summary is not None:
            self.summary = self.summary.shortened(self.held)
        self.stats = {name: value[..., : self.held] for name, value in self.stats.items()}

    def check_rollback(self, count: int) -> None:
        """Raise unless so many tokens can be taken back.

        Raises:
            ValueError: If so many were not written since the layer was last settled.
        """
        if not 0 <= count <= self.tail.loose:
            raise ValueError(
                f"count={count}: {self.tail.loose} tokens can be taken back, "
                "those before are settled"
            )

    def rows(self, index: Tensor) -> None:
        """Keep batch rows, int64 [m], as beam search reorders them."""
        self.segments = [segment.rows(index) for segment in self.segments]
        if self.summary is not None:
            self.summary = self.summary.rows(index)
        self.tail.map(index)
        if self.form is not None:
            self.form = self.form._replace(batch=len(index))
        if self.padding is not None:
            self.padding = self.padding.index_select(0, index)
        self.stats = {name: value.index_select(0, index) for name, value in self.stats.items()}

    def fork(self) -> KVLayer:
        """Return a layer with the same content; writing to either leaves the other as it is."""
        other = copy(self)
        other.segments = list(self.segments)
        other.tail = self.tail.fork()
        other.stats = {name: value.clone() for name, value in self.stats.items()}
        return other

    # account -------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Slots of the longest row, empty ones included."""
        return sum(segment.width for segment in self.segments) + self.tail.length

    def tensors(self) -> list[Tensor]:
        """Return every tensor that is held."""
        own = [*self.segments, *self.stats.values(), self.summary, self.padding]
        return [*tensors([part for part in own if part is not None]), *self.tail.tensors()]

    def _check(self, k: Tensor, v: Tensor) -> None:
        if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
            raise ValueError(
                f"k={list(k.shape)}, v={list(v.shape)}: must be [B, H, n, D] and [B, H, n, Dv]"
            )
        form = Form.of(k, v)
        before = self.form
        if before is not None and form != before and (form[1:] != before[1:] or before.batch != 1
                                                      or self.tail.length):  # fmt: skip
            raise ValueError(
                f"layer {self.index}: keys and values of [B, H, D, Dv]={list(form[:4])} in "
                f"{form.dtype} on {form.device} do not fit the {list(before[:4])} in "
                f"{before.dtype} on {before.device} that are held; reset the cache, or make a new "
                "one"
            )
        self.form = form
