"""Write into a store what models of transformers give to their caches, from begin to end."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicSlidingWindowLayer

from diffcache.errors import AttachError
from diffcache.foreign import CALL_CODE, PREFILL, reads_whole_prompt, take_hooks
from diffcache.kv.hf.model import NAME, CacheSetup, Mode, decoder_of
from diffcache.kv.hf.refresh import Refreshing
from diffcache.kv.hf.rotary import NotedPositions, RotaryReader
from diffcache.kv.hf.versions import FUSED
from diffcache.kv.layer import KVLayer
from diffcache.kv.rotary import Rotation
from diffcache.kv.rotary_nd import RotaryND, RotaryTable
from diffcache.kv.slots import span
from diffcache.kv.store import CUT_OFF, KVStore

_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Writer:
    """Writes keys and values of a model into a store.

    Attributes:
        store: Store that keys and values go into.
        readers: Rotary embedding of each layer, where keys are stored before rotation; else None.
        tags: int [B, T], tags of the first T tokens.
        given_tags: The same, of the rows that there were at first.
        refreshing: State of the forward that writes over tokens that are there; None elsewhere.
        exchange: Function from a layer's number, unrotated keys and values to the pair that is
            written in their place; None to write these.
        noted: Positions of several axes, where keys are stored before such rotation.
        table: Positions of all tokens, int [B or 1, T, A], where there are several axes.
        past: False for padding among tokens that were taken over, bool [B or 1, T], until a mask is
            seen.
        checked: Numbers of the layers of latents whose attention module was tried out.
        setup: Mode, layers and decoder of the model that the cache was made for.
        handed: The keys that `update` returned in this forward.
    """

    def __init__(
        self, store: KVStore, setup: CacheSetup, readers: Sequence[RotaryReader] | None, tags: Tensor | None
    ) -> None:
        self.store = store
        self.setup = setup
        self.handed: list[weakref.ref[Tensor]] = []
        self.readers = readers
        if tags is not None and tags.dim() != 2:
            raise ValueError(f"tags={list(tags.shape)}: must be [B, T], a number for each token")
        self.tags = self.given_tags = tags
        self._mask: tuple[weakref.ref[Tensor], Tensor | None] | None = None
        self._in_order: dict[int | None, tuple[weakref.ref[Tensor], int, bool]] = {}
        self._given: tuple[weakref.ref[Tensor], int, Tensor | None] | None = None
        self.refreshing: Refreshing | None = None
        self.exchange: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        self.noted: NotedPositions | None = None
        self.table: Tensor | None = None
        self.past: Tensor | None = None
        self.checked: set[int] = set()

    def reset(self) -> None:
        """Forget what was said of tokens that are gone; tags are those of the first rows again."""
        self.tags, self.table, self.past = self.given_tags, None, None

    def begin(self) -> None:
        """Begin a forward: a mask or positions may be those of the last one with other content."""
        self.handed.clear()
        self._mask = self._given = None
        self._in_order.clear()

    def rows(self, index: Tensor) -> None:
        """Keep batch rows, int64 [m]."""
        if self.table is not None and len(self.table) > 1:
            self.table = self.table.index_select(0, index.to(self.table.device))
        if self.past is not None and len(self.past) > 1:
            self.past = self.past.index_select(0, index.to(self.past.device))
        if self.tags is not None and len(self.tags) > 1:
            self.tags = self.tags.index_select(0, index.to(self.tags.device))

    def check_past(self, mask: Tensor | None) -> None:
        """Raise ValueError if a mask hides tokens that were taken over as no padding."""
        if mask is None or self.past is None:
            return
        known, self.past = self.past, None
        hidden = ~mask[:, 0, -1, : known.shape[1]].to(known.device)
        if bool((known & hidden).any()):
            raise ValueError(
                "attention_mask hides tokens of `past` that were taken over as no padding: give "
                "cache_for(..., past=..., past_mask=...), 0 for padding"
            )

    def valid(self, mask: Tensor | None, start: int, count: int, batch: int) -> Tensor | None:
        """Return which new tokens are no padding: those that see themselves, bool [B, n].

        None stands for all of them. Layers share a mask, which is looked at once.
        """
        if mask is None:
            return None
        if self._mask is None or self._mask[0]() is not mask:
            own = mask[:, 0].diagonal(start, -2, -1)
            found = None if bool(own.all()) else own.expand(batch, -1)
            self._mask = weakref.ref(mask), found
        return self._mask[1]

    def is_in_order(self, mask: Tensor | None, start: int, window: int | None) -> bool:
        """Return whether a mask hides later tokens and those before the window, and no others.

        Layers of the same window share a mask, which is looked at once.

        Args:
            mask: bool [B or 1, 1, n, T].
            start: Position of the first token.
            window: Last tokens that are seen; None for all.
        """
        if mask is None:
            return False
        known = self._in_order.get(window)
        if known is None or known[0]() is not mask or known[1] != start:
            count, width = mask.shape[2:]
            own = torch.arange(start, start + count, device=mask.device)[:, None]
            place = torch.arange(width, device=mask.device)
            seen = place <= own
            if window is not None:
                seen &= place > own - window
            known = self._in_order[window] = weakref.ref(mask), start, bool((mask == seen).all())
        return known[2]

    def _placed(self, given: Tensor | None, start: int, count: int) -> Tensor | None:
        """Return the rotary positions that a model gives its tokens, int32 [B, 1, n].

        None stands for those from `start` on. Layers share what they are given, which is looked at
        once.
        """
        if given is None or given.dim() != 2:
            return None
        known = self._given
        if known is None or known[0]() is not given or known[1] != start:
            own = torch.arange(start, start + count, device=given.device)
            found = None if bool((given == own).all()) else given[:, None].to(torch.int32)
            self._given = known = weakref.ref(given), start, found
        return known[2]

    def write(self, number: int, k: Tensor, v: Tensor, **about: Tensor | None) -> KVLayer:
        """Write new tokens of a layer, keys rotated as the model gives them.

        Args:
            number: Number of the layer in the store, from 0.
            k: [B, H, n, D].
            v: [B, H, n, Dv].
            about: `valid` bool [B, n]; `position_ids` int [B, n].
        """
        layer = self.store.layers[number]
        start, count = layer.seen, k.shape[2]
        meta: dict[str, Tensor] = {}
        if self.tags is not None and start < self.tags.shape[1]:
            if len(self.tags) not in (1, len(k)):
                raise ValueError(
                    f"tags={list(self.tags.shape)}: the batch has {len(k)} rows, beams and "
                    "returned sequences included; give tags of one row, or of each of them"
                )
            tags = self.tags[:, None, start : start + count].to(k.device, torch.int32)
            meta["tag"] = nn.functional.pad(tags, (0, count - tags.shape[2])).expand(len(k), -1, -1)
        if self.readers is not None:
            given = None
            if self.noted is None:
                given = self._placed(about.get("position_ids"), start, count)
            if given is not None:
                meta["rpos"] = given.expand(len(k), -1, -1)
            if layer.mover is None:
                layer.rotary = self.readers[number].read()
                if self.noted is not None:
                    layer.rotary = self._tabled(layer.rotary, number, start, count)
                pos = meta.get("rpos", span(start, start + count, len(k), k.device))
                k = layer.rotary.unrotate(k, pos)
        if self.exchange is not None:
            k, v = self.exchange(number, k, v)
        layer.write(k, v, valid=about.get("valid"), meta=meta)
        return layer

    def _tabled(self, rotary: Rotation, number: int, start: int, count: int) -> Rotation:
        """Return a rotary of several axes with the positions of all tokens."""
        if not isinstance(rotary, RotaryND):  # a layer without positions
            return rotary
        assert self.noted is not None
        if not number or self.table is None:
            self.table = self.noted.after(self.table, start, count)
        return RotaryTable.of(rotary, self.table)


class Host:
    """A cache of `cache_for`, as its layers and what reads, fills or refreshes it know it.

    Attributes:
        store: Keys and values of the layers that follow a recipe, and what is done to them.
        setup: Mode, layers and decoder of the model that the cache was made for.
        writer: Writer of the model's keys and values into the store.
        layers: All layers, as transformers sees them.
    """

    store: KVStore
    setup: CacheSetup
    writer: Writer
    layers: list[Any]
    _ends_prompt = False
    _runs: weakref.ReferenceType[nn.Module] | None = None

    @property
    def mode(self) -> Mode:
        """`"native"` or `"stock"`."""
        return self.setup.mode

    @property
    def beside(self) -> list[Any]:
        """The layers that hold something outside the store."""
        owned = self.setup.owned
        return [x for at, x in enumerate(self.layers) if at not in owned or isinstance(x, FUSED)]

    def begin(self, count: int) -> None:
        """Settle what is due, at the first layer of a forward of `count` tokens; see `check`."""
        self._check_used()
        self.store.begin(count)
        self.await_end()

    def check(self) -> None:
        """Check, before a forward, that the model and this cache are as they were left.

        Raises:
            AttachError: If the model uses another attention function by now.
            ValueError: If an earlier forward did not come to its end, or only the store was filled.
        """
        self._check_used()
        beside = self.beside
        if self.store.seen and beside and all(map(_is_empty, beside)):
            raise ValueError(
                f"layers beside the store hold nothing of its {self.store.seen} tokens, as where the store alone was "
                "loaded, or a first forward was cut off: reset the cache and read the prompt again"
            )
        for layer in self.layers:
            known = type(layer) is DynamicSlidingWindowLayer and layer.is_initialized
            if known and layer.get_seq_length() != self.store.seen:
                raise ValueError(CUT_OFF)

    def _check_used(self) -> None:
        used = self.setup.config._attn_implementation
        if self.setup.mode == "native" and used != NAME:
            raise AttachError(
                f"the model was released and uses {used!r}, which sees nothing of this cache; "
                "call cache_for(model, ...) again, which sets it up for all its caches"
            )

    def await_end(self) -> None:
        """Expect the end of the outermost module that runs with this cache and tells of its end.

        Layers after the last one that writes, and the head, can still fail: what was written would
        then be written again when the forward is repeated.
        """
        place: FrameType | None = sys._getframe(1)
        runs, whole = None, None
        while place is not None:
            if place.f_code.co_name == PREFILL and whole is None:
                whole = reads_whole_prompt(place)
            if place.f_code is CALL_CODE:
                given = place.f_locals
                if given["self"] in _WATCHED:
                    for each in (*given["args"], *given["kwargs"].values()):
                        runs = given["self"] if each is self else runs
            place = place.f_back
        self._runs, self._ends_prompt = None if runs is None else weakref.ref(runs), bool(whole)
        self.store.opened = None if runs is None else self.store.seen


def _tell(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
    for each in (*args, *kwargs.values()):
        if isinstance(each, Host) and each._runs is not None and each._runs() is module:
            each.store.end(each._ends_prompt)


def watch(model: nn.Module) -> None:
    """Have the decoder of a model, and what it is a part of, tell caches when a forward ends."""
    decoder = decoder_of(model)
    for part in model.modules():
        if part not in _WATCHED and any(each is decoder for each in part.modules()):
            part.register_forward_hook(_tell, with_kwargs=True)
            _WATCHED.add(part)


def unwatch(model: nn.Module) -> None:
    """Undo `watch`."""
    for part in model.modules():
        take_hooks(part, lambda hook: hook is _tell)
        _WATCHED.discard(part)


def _is_empty(layer: Any) -> bool:
    """Return whether a layer of transformers holds nothing yet, as far as it says."""
    names = ("is_initialized", "has_previous_state", "is_conv_states_initialized", "is_recurrent_states_initialized")
    said = [getattr(layer, name) for name in names if hasattr(layer, name)]
    return bool(said) and not any(any(flag.values()) if isinstance(flag, dict) else flag for flag in said)
