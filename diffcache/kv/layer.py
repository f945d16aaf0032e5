"""Keys and values of one attention layer, which are written, dropped and taken back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kv.codec.base import tensors
from diffcache.kv.mover import Mover
from diffcache.kv.positions import PositionMap, Slot, key_places, own_places, placed
from diffcache.kv.rotary import Rotation
from diffcache.kv.segment import PLAIN, Dense, Flat, Segment, leveled, read_all
from diffcache.kv.slots import EMPTY, SlotIndex, Slots, chosen, join_meta, named, one_row, span, writable
from diffcache.kv.tail import Refill, Tail
from diffcache.kv.view import Unread, View

_SHARE = 8  # room for one in so many slots, when more are read than before
FIXED = (
    "count={}: {} tokens can be taken back, those before are settled: compressed or coded; go on "
    "from a fork of before, or announce it (cache.activate_past_recording()) before they are read"
)


class Form(NamedTuple):
    """Shapes, dtype and device that all keys and values of a layer have in common."""

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

    def check_fits(self, before: Form | None, layer: int, empty: bool) -> None:
        """Raise ValueError unless a layer with tokens of a form, and an empty tail or not, takes these too."""
        if before is None or self == before:
            return
        if self[1:] != before[1:] or before.batch != 1 or not empty:
            raise ValueError(
                f"layer {layer}: keys and values of [B, H, D, Dv]={list(self[:4])} in "
                f"{self.dtype} on {self.device} do not fit the {list(before[:4])} in "
                f"{before.dtype} on {before.device} that are held; reset the cache, or make a new "
                "one"
            )


class LayerSummary(ABC):
    """Summary of the slots of a layer; never written to, so that forks share it."""

    @abstractmethod
    def rows(self, index: Tensor) -> LayerSummary:
        """Keep batch rows, int64 [m]."""

    @abstractmethod
    def shortened(self, width: int) -> LayerSummary | None:
        """Forget all slots but the first `width`; None if it cannot, as queries said more."""


@final
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
            raise ValueError(f"positions={positions!r}: keys are rotated when they are read, which takes a rotary")
        if mover is not None and (rotary is not None or positions != Slot()):
            raise ValueError("mover: goes with positions=Slot() and keys that come rotated")
        self.index, self.rotary, self.positions, self.mover = index, rotary, positions, mover
        self.seen, self.latent, self.read_once = 0, False, read_once
        self.segments: list[Segment] = []
        self.tail, self._reads = Tail(), Reads()
        self.form: Form | None = None
        self.padding: Tensor | None = None  # tokens of each row that are none, int64 [B]
        self.stats: dict[str, Tensor] = {}
        self.summary: LayerSummary | None = None
        self.marked: tuple[int, LayerSummary | None] | None = None

    # writing -------------------------------------------------------------------------------

    def write(
        self, k: Tensor, v: Tensor, *, valid: Tensor | None = None, meta: Mapping[str, Tensor] | None = None
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
        if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
            raise ValueError(f"k={list(k.shape)}, v={list(v.shape)}: must be [B, H, n, D] and [B, H, n, Dv]")
        form = Form.of(k, v)
        if form != self.form:
            form.check_fits(self.form, self.index, not self.tail.length)
            self.form = form
        if valid is None:
            self.tail.extend(k, v, self.seen, meta)
        else:
            pos = span(self.seen, self.seen + k.shape[2], len(k), k.device)
            pos = pos.where(valid[:, None], EMPTY)
            empty = (~valid).sum(-1)
            self.padding = empty if self.padding is None else self.padding + empty
            self.tail.append(Slots(k, v, {"pos": pos, **(meta or {})}))
        self.seen += k.shape[2]

    def overwrite(self, index: Tensor | range | SlotIndex, k: Tensor, v: Tensor, ver: int | None = None) -> None:
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

    def reset(self) -> None:
        """Forget everything."""
        self.seen, self.padding, self.segments, self.tail = 0, None, [], Tail()
        self.stats, self.summary, self.marked, self.form = {}, None, None, None
        self._reads = Reads()

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
        held: list[Segment] = []
        origins, first = [], 0  # where each slot was, -1 for none
        for segment in self.segments:
            index, there = chosen(mask[..., first : first + segment.width])
            if index.shape[2]:
                held.append(leveled(segment.take(index, there)))
                origins.append((index + first).where(there, EMPTY))
            first += segment.width
        slots, exact, newest = self.tail.read(), None, None
        if slots is not None:
            stop = slots.width - last
            index, there = chosen(mask[..., first : first + stop])
            own = torch.arange(first + stop, first + slots.width, device=mask.device)
            origins += [(index + first).where(there, EMPTY), own.expand(*mask.shape[:2], -1)]
            exact, newest = slots.gather(index, there), slots.narrow(stop, slots.width).clone()
        self.segments, self.summary, self._reads = [], None, Reads()
        if exact is not None:
            self.replace(exact, flat=flat)
        if last and newest is not None:
            self.tail.append(newest)
        self.segments[:0] = held
        origin = torch.cat(origins, -1)
        for name, value in self.stats.items():
            value = functional.pad(value, (0, mask.shape[2] - value.shape[2]))  # newer have none yet
            self.stats[name] = value.gather(2, origin.clamp_min(0)) * (origin >= 0)

    def replace(self, slots: Slots, *, flat: bool = False) -> None:
        """Hold these slots instead of all there are."""
        slots = replace(slots, meta=one_row(slots.meta))
        self.segments, self.summary = [], None
        self._reads = Reads()
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
        refill, left = Refill.of(index, self.tail.length), self.tail.length - index.shape[2]
        for name, value in self.stats.items():
            self.stats[name] = refill.apply(writable(value))[..., :left]
        self.tail.refill(refill)
        self.summary = None

    def settle_tail(self, segment: Segment | None = None) -> None:
        """Turn the tail into a segment, by default an exact one."""
        slots = self.tail.read()
        if slots is not None and slots.width:
            self.segments.append(segment or Dense(slots.clone()))
            self.tail = Tail(self.seen)

    def rollback(self, count: int) -> None:
        """Forget the last tokens; raise ValueError if fewer were written since the layer was last settled."""
        self.check_rollback(count)
        self.padding = None if self.padding is None else self.padding - self.tail.empty(count)
        self.summary = self._known_before(count)
        self.tail.drop_last(count)
        self.seen -= count
        self.stats = {name: value[..., : self.held] for name, value in self.stats.items()}

    def check_rollback(self, count: int) -> None:
        """Raise ValueError if fewer tokens are loose, or a retriever knows more than it can forget."""
        if not 0 <= count <= self.tail.loose:
            raise ValueError(FIXED.format(count, self.tail.loose))
        self._known_before(count)

    def _known_before(self, count: int) -> LayerSummary | None:
        """Return what a retriever knew before the last tokens; ValueError if it cannot forget what it knows."""
        if self.summary is None or not count:
            return self.summary
        if self.marked is not None and self.seen - count >= self.marked[0]:
            return self.marked[1]
        found = self.summary.shortened(self.held - count)
        if found is None:
            raise ValueError(
                f"count={count}: queries choose by what is known of these tokens, which cannot be "
                "forgotten; announce it (cache.activate_past_recording()) before they are read and "
                "take back no more than the last forward wrote, or go on from a fork of before"
            )
        return found

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
        self._reads = Reads()
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
        other._reads = Reads()
        other.mover = None if self.mover is None else Mover(self.mover.rotation)
        other.stats = {name: value.clone() for name, value in self.stats.items()}
        return other

    # reading as stored ---------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Slots of the longest row, empty ones included."""
        count = self.tail.length
        for segment in self.segments:
            count += segment.width
        return count

    def read(self) -> Slots:
        """Return all slots, segments first, keys as they are stored, or raise ValueError if nothing was written."""
        slots = self.tail.read()
        if self.segments:
            return read_all(self.segments, slots if slots is not None and slots.width else None)
        if slots is None:
            raise ValueError(f"layer {self.index} is empty: write keys and values first")
        return slots

    def meta(self) -> dict[str, Tensor]:
        """Return the metadata of all slots, as `read` orders them and raises; nothing is decoded."""
        if not self.segments:
            return self.read().meta
        parts = [segment.metadata() for segment in self.segments]
        last = self.tail.read()
        if last is not None and last.width:
            parts.append(last.meta)
        return parts[0] if len(parts) == 1 else join_meta(parts)

    @property
    def first(self) -> int | None:
        """The first position, where all follow one another and slots are one token each."""
        runs = [(segment.first, segment.width) for segment in self.segments]
        if self.tail.length or not runs:
            runs.append((self.tail.start if self.tail.is_plain else None, self.tail.length))
        reached = runs[0][0]
        for first, width in runs:
            if first is None or first != reached:
                return None
            reached = first + width
        return runs[0][0]

    @property
    def below(self) -> int | None:
        """Bound above all positions, where no slot is known to be empty."""
        whole = self.tail.whole
        for segment in self.segments:
            whole = whole and segment.whole
        return self.seen if whole else None

    # reading as queries meet them ----------------------------------------------------------

    def views(self) -> list[View]:
        """Return what queries attend to: keys rotated, segments of their own kind apart."""
        turned = self.rotary or self.mover or self.latent
        if not self.segments and not turned:  # exact slots as they are, the common case
            slots = self.read()
            start = None if "logn" in slots.meta else self.tail.start
            return [View(slots, start, below=self.seen if self.tail.whole else None)]
        if not self._is_plain():
            return self._parts()
        source: Slots | Unread | None = None
        coded = any(segment.coded for segment in self.segments)
        if self.held and not (self.mover or self.latent or self.read_once) and (coded or turned):
            last = self.tail.read() if self.tail.length else None
            source = Unread(tuple(self.segments), last, self.rotary, self.positions)
        return [View(source or self.met(), self.first, below=self.below)]

    @contextmanager
    def meeting(self) -> Iterator[list[View]]:
        """Give `views` for one attention; the few keys that a mover moves take no copy of all."""
        count = None
        if self.mover is not None and not self.segments:
            count = self.mover.lead(self.tail, self.seen)
        if self.mover is None or count is None:
            yield self.views()
            return
        gap = self.seen - self.tail.length
        with self.mover.moved(self.tail, count, gap):
            yield self._stored_parts()

    def met(self) -> Slots:
        """Return all slots as queries meet them, as `read` raises; what was kept of them is not read again."""
        fresh = self.rotary is not None or bool(self.segments)  # else it is the tail's own memory
        if self.read_once and fresh and self.held and self._is_plain() and not self.latent:
            return self._reads.read(self)
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
        """Return the positions that queries at [B or 1, 1, n] are rotated under, given what is held now."""
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

    def _is_plain(self) -> bool:
        """Return whether all slots are attended to alike."""
        return all(segment.traits == PLAIN for segment in self.segments)

    def _turned(self, k: Tensor, at: Tensor, meta: Mapping[str, Tensor]) -> Tensor:
        """Return keys as they are met at positions, int [B, 1 or H, S]."""
        if self.mover is not None:
            return self.mover.turned(k, at, meta)
        return k if self.rotary is None else self.rotary.rotate(k, at)

    def _stored_parts(self) -> list[View]:
        """Return a view of each segment and of the tail, keys as they are stored."""
        found = []
        for segment in self.segments:
            bound = segment.below if isinstance(segment, Dense) else None
            below = (self.seen if bound is None else bound) if segment.whole else None
            found.append(View(segment.read(), segment.first, segment.traits, below))
        slots, tail = self.tail.read(), self.tail
        if slots is not None and (slots.width or not found):
            start = tail.start if tail.is_plain else None
            found.append(View(slots, start, below=self.seen if tail.whole else None))
        return found

    def _parts(self) -> list[View]:
        """Return a view of each segment and of the tail, as queries meet them."""
        parts = self._stored_parts()
        if self.positions is None:
            return [replace(view, source=self.rotated(view.slots)) for view in parts]
        places = self.placed(self.meta())  # numbers that depend on all parts
        first, found = 0, []
        for view in parts:
            slots = view.slots
            at = places[:, :, first : first + slots.width]
            first += slots.width
            k, v = slots.k, slots.v
            if len(k) < len(at):  # shared by rows that need not hold the same
                k, v = (x.expand(len(at), -1, -1, -1) for x in (k, v))
            turned = Slots(self._turned(k, at, slots.meta), v, slots.meta)
            found.append(replace(view, source=turned))
        return found

    # account -------------------------------------------------------------------------------

    def tensors(self) -> list[Tensor]:
        """Return every tensor that is held."""
        own = [*self.segments, *self.stats.values(), self.summary, self.padding, self.marked]
        found = [*tensors([part for part in own if part is not None]), *self.tail.tensors()]
        return [*found, *self._reads.tensors()]


class Reads:
    """Rotated keys and decoded values of a layer, kept from one read to the next.

    Slots that were overwritten are read again, and new ones. A segment never changes; where
    segments or the tail are others than before, or keys are rotated otherwise, all are read. What
    is returned is valid until the next read.
    """

    def __init__(self) -> None:
        self._slots: Slots | None = None
        self._places: Tensor | None = None  # positions that keys are rotated under
        self._buffers: dict[str, Tensor] = {}
        self._source: list[object] = []  # what was read, compared by identity
        self._moves = -1  # of the tail, when it was read

    def read(self, layer: KVLayer) -> Slots:
        """Return all slots of a layer, which holds at least one, as queries meet them."""
        tail, rotary, positions = layer.tail, layer.rotary, layer.positions
        settled, held = layer.held - tail.length, layer.held
        source: list[object] = [*layer.segments, tail, rotary, positions]
        known = self._slots is not None and len(source) == len(self._source)
        known = known and all(a is b for a, b in zip(source, self._source, strict=False))
        still = known and self._moves == tail.moves  # only overwritten, if at all
        if not still or self._slots is None or "ver" in self._slots.meta:
            meta = layer.meta()
            self._places = None if rotary is None else key_places(positions, meta, rotary)
        else:
            meta = self._slots.meta
        steady = positions is None or positions.steady
        first = settled + min(tail.clean, tail.length) if known and (still or steady) else 0
        if first < held:
            self._refill(layer, first)
        self._source, self._moves, tail.clean = source, tail.moves, tail.length
        values = self._buffers.get("v")
        if values is None:
            last = tail.read()
            assert last is not None
            values = last.v
        self._slots = Slots(self._buffers["k"][:, :, :held], values[:, :, :held], meta)
        return self._slots

    def tensors(self) -> list[Tensor]:
        """Return every tensor that is kept."""
        found = list(self._buffers.values())
        if self._places is not None:
            found.append(self._places)
        return found if self._slots is None else [*found, *self._slots.meta.values()]

    def _refill(self, layer: KVLayer, first: int) -> None:
        """Read the slots from one on, which is the first of all or one of the tail."""
        slots = layer.tail.read() if first else layer.read()
        assert slots is not None
        if first and len(slots.k) != len(self._buffers["k"]):  # of a segment shared by all rows
            self._refill(layer, 0)
            return
        if first:
            settled = layer.held - layer.tail.length
            slots = slots.narrow(first - settled, slots.width)
        k = slots.k
        if layer.rotary is not None:
            assert self._places is not None
            k = layer.rotary.rotate(k, self._places[:, :, first:])
        if not first:  # none of it may be memory of the tail, which is written to elsewhere
            self._buffers = {"k": k.clone() if k is slots.k else k}
            if layer.segments:
                self._buffers["v"] = slots.v
            return
        self._buffers["k"] = _put(self._buffers["k"], k, first)
        if layer.segments:
            self._buffers["v"] = _put(self._buffers["v"], slots.v, first)


def _put(buffer: Tensor, fresh: Tensor, first: int) -> Tensor:
    """Return a buffer with slots from `first` on, the others being as they were."""
    stop = first + fresh.shape[2]
    if buffer.shape[2] < stop or (buffer.is_inference() and not torch.is_inference_mode_enabled()):
        larger = buffer.new_empty(*buffer.shape[:2], stop + stop // _SHARE, buffer.shape[3])
        larger[:, :, :first] = buffer[:, :, :first]
        buffer = larger
    buffer[:, :, first:stop] = fresh
    return buffer
