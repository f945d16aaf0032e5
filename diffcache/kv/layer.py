"""The keys and values of one attention layer: settled segments and a growing tail."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from diffcache.kv.attend import View
from diffcache.kv.codec.base import tensors
from diffcache.kv.contents import first_of, kept, metadata, parts_of, placed_parts, stored, unread
from diffcache.kv.form import Form
from diffcache.kv.mover import Mover
from diffcache.kv.positions import PositionMap, Slot, key_places, own_places, placed
from diffcache.kv.reading import Reading
from diffcache.kv.refill import Refill
from diffcache.kv.rotary import Rotation
from diffcache.kv.segment import PLAIN, Dense, Flat, Segment
from diffcache.kv.slots import EMPTY, SlotIndex, Slots, named, one_row, span, writable
from diffcache.kv.summary import LayerSummary, known_before
from diffcache.kv.tail import Tail

FIXED = "count={}: {} tokens can be taken back, those before are settled"


class KVLayer:
    """Keys and values of one layer.

    Two lengths are apart: `seen`, the tokens that were written, and `held`, the slots that are
    still there. Positions are data, so nothing depends on where in memory a slot is.

    Attributes:
        index: Number of the layer in its model.
        rotary: Rotation of keys when they are read. Keys are then stored unrotated; without it
            they are stored and read as given.
        positions: Numbers that keys are rotated under when they are read; None: their own.
        mover: Mover of keys that are stored rotated to the numbers of `positions`; None elsewhere.
        seen: Logical length in tokens.
        form: Shape, dtype and device of the last write; None while nothing was written.
        segments: Settled slots, oldest first.
        tail: Exact slots that grow.
        stats: Statistics of scorers, by name, float32 [B, H, S], in the order of `read`.
        summary: State of a retriever; None where it has to be built anew.
        marked: Tokens seen, and `summary`, when `mark` was called; None where it was not.
        latent: True for slots of latents and, as values, rotary parts of keys. Queries meet both
            together as keys, and the latents as values (multi-head latent attention).
        read_once: True keeps rotated keys, and decoded values of segments, until their source
            changes. For slots that are read often as they are, such as the chunks before one that
            is denoised: it takes the memory of exact keys, and where there are segments of exact
            values too, however few bytes these are coded in. `tensors` has them.
    """

    def __init__(
        self,
        index: int = 0,
        *,
        rotary: Rotation | None = None,
        positions: PositionMap | None = None,
        mover: Mover | None = None,
        read_once: bool = False,
    ) -> None:
        if positions is not None and rotary is None and mover is None:
            raise ValueError(
                f"positions={positions!r}: keys are rotated when they are read, which takes a "
                "rotary"
            )
        if mover is not None and (rotary is not None or positions != Slot()):
            raise ValueError("mover: goes with positions=Slot() and keys that come rotated")
        self.index = index
        self.rotary = rotary
        self.positions = positions
        self.mover = mover
        self.seen = 0
        self.form: Form | None = None
        self.padding: Tensor | None = None  # tokens of each row that are none, int64 [B]
        self.segments: list[Segment] = []
        self.tail = Tail()
        self.stats: dict[str, Tensor] = {}
        self.summary: LayerSummary | None = None
        self.marked: tuple[int, LayerSummary | None] | None = None
        self.latent = False
        self.read_once = read_once
        self._reading = Reading()

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
            meta: More numbers of each token, [B, 1, n]: `rpos`, `tag`, `logn`, `ver`.

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
        self, index: Tensor | range | SlotIndex, k: Tensor, v: Tensor, ver: int | None = None
    ) -> None:
        """Write anew into slots that are there, which keep their positions.

        Args:
            index: int64 [n] or [B, n], slots of the tail, as `read` shows them. A `range` of step 1
                is a run of slots, which is checked without reading a tensor and written as a copy;
                a `SlotIndex` was checked before, for all layers at once.
            k: [B, H, n, D], before rotation if the layer has a `rotary`.
            v: [B, H, n, Dv].
            ver: Version of the keys and values, where versions are kept.

        Raises:
            ValueError: If a slot is settled or not there; on CUDA, its own error, later. If a range
                has another step, or another length than `k`.
        """
        columns = {"k": k, "v": v}
        if ver is not None:
            columns["ver"] = torch.full((1, 1, 1), ver, dtype=torch.int32, device=k.device)
        self.tail.overwrite(index, columns, self.held - self.tail.length)
        self.summary = None

    def read(self) -> Slots:
        """Return all slots, segments first; keys as they are stored.

        Raises:
            ValueError: If nothing was written.
        """
        slots = stored(self.segments, self.tail)
        if slots is None:
            raise ValueError(f"layer {self.index} is empty: write keys and values first")
        return slots

    def meta(self) -> dict[str, Tensor]:
        """Return the metadata of all slots, as `read` orders them; nothing is decoded.

        Raises:
            ValueError: If nothing was written.
        """
        meta = metadata(self.segments, self.tail)
        if meta is None:
            raise ValueError(f"layer {self.index} is empty: write keys and values first")
        return meta

    def reset(self) -> None:
        """Forget everything."""
        self.seen, self.padding, self.segments, self.tail = 0, None, [], Tail()
        self.stats, self.summary, self.marked, self.form = {}, None, None, None
        self._reading.clear()

    # reading for attention -----------------------------------------------------------------

    def views(self) -> list[View]:
        """Return what queries attend to: keys rotated, segments of their own kind apart."""
        if self._plain():
            turned = self.rotary or self.mover or self.latent or self.read_once
            source = (None if turned else unread(self.segments, self.tail)) or self.met()
            return [View(source, first_of(self.segments, self.tail), below=self._below())]
        found = parts_of(self.segments, self.tail, self.seen)
        if self.positions is None:
            return [replace(view, source=self.rotated(view.slots)) for view in found]
        return placed_parts(found, self.placed(self.meta()), self._turned)

    def _plain(self) -> bool:
        """Whether all slots are attended to alike."""
        return all(segment.traits == PLAIN for segment in self.segments)

    def _below(self) -> int | None:
        """Return what all positions are below, where no slot is known to be empty."""
        whole = self.tail.whole and all(segment.whole for segment in self.segments)
        return self.seen if whole else None

    def meeting(self) -> AbstractContextManager[list[View]]:
        """Return a context that gives `views` for one attention; few moved keys take no copy."""
        if self.mover is None or self.segments:
            return nullcontext(self.views())
        return self.mover.meeting(self.tail, self.seen, self.views)

    def _turned(self, k: Tensor, at: Tensor, meta: Mapping[str, Tensor]) -> Tensor:
        """Return keys as they are met at positions, int [B, 1 or H, S]."""
        if self.mover is not None:
            return self.mover.turned(k, at, meta)
        return k if self.rotary is None else self.rotary.rotate(k, at)

    def met(self) -> Slots:
        """Return all slots as queries meet them; as far as they were kept, they are not read again.

        Raises:
            ValueError: If nothing was written.
        """
        fresh = self.rotary is not None or bool(self.segments)  # else it is the tail's own memory
        if self.read_once and fresh and self.held and self._plain() and not self.latent:
            return self._reading.read(self.segments, self.tail, self.rotary, self.positions)
        return self.rotated(self.read())

    def rotated(self, slots: Slots) -> Slots:
        """Return slots with their keys as queries meet them."""
        if self.latent:
            return Slots(torch.cat([slots.k, slots.v], -1), slots.k, slots.meta)
        if self.rotary is None and self.mover is None:
            return slots
        k = self._turned(slots.k, self.placed(slots.meta), slots.meta)
        return Slots(k, slots.v, slots.meta)

    def rotate(self, q: Tensor, pos: Tensor) -> Tensor:
        """Return queries as keys at the same positions are rotated, given what is held now.

        Args:
            q: [B, Hq, n, D], before rotation.
            pos: int [n] or [B, n], positions as they are counted by `seen`, or as `rpos` has them.

        Raises:
            ValueError: If the layer has no rotary, or nothing was written.
        """
        if self.rotary is None:
            raise ValueError("rotate: this layer has no rotary; its keys come rotated")
        at = (pos if pos.dim() == 2 else pos[None])[:, None]
        return self.rotary.rotate(q, self.query_places(at, q.shape[1]))

    def query_places(self, at: Tensor, heads: int) -> Tensor:
        """Return the positions that queries are rotated under, given what is held now.

        Args:
            at: int [B or 1, 1, n], their own positions.
            heads: Query heads.
        """
        if self.positions is None:
            return at
        assert self.rotary is not None
        at = placed(self.positions, at, own_places(self.meta()), self.rotary.unit)
        return at if at.shape[1] == 1 else at.repeat_interleave(heads // at.shape[1], 1)

    def placed(self, meta: Mapping[str, Tensor]) -> Tensor:
        """Return the positions that keys of these slots are rotated under."""
        rotation = self.rotary if self.mover is None else self.mover.rotation
        assert rotation is not None
        return key_places(self.positions, meta, rotation)

    # changing what is held -----------------------------------------------------------------

    def keep(self, which: Tensor, *, last: int = 0, flat: bool = False) -> None:
        """Hold the slots that are named and no others, in the order they are in.

        Coded slots stay in their codes. The slots are then settled, but for the `last`.

        Args:
            which: Slots as `read` shows them, by mask or number: bool [S] or [B, 1 or H, S], or
                int64 [n] or [B, 1 or H, n].
            last: Newest slots that stay in any case, at the end, where they can be overwritten and
                taken back.
            flat: Hold rows of different lengths without padding.

        Raises:
            ValueError: If `which` is of other slots, or some of the last are settled already.
        """
        if not 0 <= last <= self.tail.loose:
            raise ValueError(f"last={last}: only {self.tail.loose} slots are not settled yet")
        assert self.form is not None
        mask = named(which, self.meta()["pos"])
        mask = mask.expand(self.form.batch, self.form.heads, -1)
        found = kept(self.segments, self.tail, mask, last)
        self.segments, self.summary = [], None
        self._reading.clear()
        if found.exact is not None:
            self.replace(found.exact, flat=flat)
        if last and found.last is not None:
            self.tail.append(found.last)
        self.segments[:0] = found.segments
        for name, value in self.stats.items():
            there = (found.origin >= 0) & (found.origin < value.shape[2])  # newer have none yet
            self.stats[name] = value.gather(2, found.origin.where(there, 0)) * there

    def replace(self, slots: Slots, *, flat: bool = False) -> None:
        """Hold these slots instead of all there are."""
        slots = replace(slots, meta=one_row(slots.meta))
        self.segments, self.summary = [], None
        self._reading.clear()
        if flat and not bool(slots.valid.all()):
            self.segments.append(Flat.of(slots))
            self.tail = Tail(self.seen)
        else:
            self.tail = Tail.of(slots)

    def refill(self, index: Tensor, *, oldest: bool = False) -> None:
        """Drop slots of the tail by putting the last ones in their places; no other slot moves.

        Args:
            index: int64 [B, 1 or H, n], different slots of each row, where there are no segments.
            oldest: These are the oldest but for first ones that all rows hold.
        """
        if self.mover is not None and not oldest:
            self.mover.forget()
        refill = Refill.of(index, self.tail.length)
        for name, value in self.stats.items():
            self.stats[name] = refill.apply(writable(value))[..., : -refill.count]
        self.tail.refill(refill)
        self.summary = None

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
        self.padding = None if self.padding is None else self.padding - self.tail.empty(count)
        self.summary = known_before(self, count)
        self.tail.drop_last(count)
        self.seen -= count
        self.stats = {name: value[..., : self.held] for name, value in self.stats.items()}

    def check_rollback(self, count: int) -> None:
        """Raise unless so many tokens can be taken back.

        Raises:
            ValueError: If so many were not written since the layer was last settled, or a retriever
                knows more of them than it can forget.
        """
        if not 0 <= count <= self.tail.loose:
            raise ValueError(FIXED.format(count, self.tail.loose))
        known_before(self, count)

    def mark(self) -> None:
        """Remember what a retriever knows, so that `rollback` can go back to it."""
        self.marked = (self.seen, self.summary)

    def rows(self, index: Tensor) -> None:
        """Keep batch rows, int64 [m], as beam search reorders them."""
        self.segments = [segment.rows(index) for segment in self.segments]
        if self.summary is not None:
            self.summary = self.summary.rows(index)
        self.marked = None
        self.tail.map(index)
        self._reading.clear()
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
        other._reading = Reading()
        other.mover = None if self.mover is None else Mover(self.mover.rotation)
        other.stats = {name: value.clone() for name, value in self.stats.items()}
        return other

    # account -------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Slots of the longest row, empty ones included."""
        return sum(segment.width for segment in self.segments) + self.tail.length

    def tensors(self) -> list[Tensor]:
        """Return every tensor that is held."""
        own = [*self.segments, *self.stats.values(), self.summary, self.padding, self.marked]
        found = [*tensors([part for part in own if part is not None]), *self.tail.tensors()]
        return [*found, *self._reading.tensors()]

    def _check(self, k: Tensor, v: Tensor) -> None:
        if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
            raise ValueError(
                f"k={list(k.shape)}, v={list(v.shape)}: must be [B, H, n, D] and [B, H, n, Dv]"
            )
        form = Form.of(k, v)
        form.check_fits(self.form, self.index, not self.tail.length)
        self.form = form
