"""Tell a cache that a forward of its model came to its end, as one that is cut off never does."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import Any

from torch import nn

from diffcache.foreign import CALL_CODE, take_hooks
from diffcache.kv.hf.model import decoder_of
from diffcache.kv.store import KVStore

_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Ending:
    """A cache that is told when the forward that writes to it has ended.

    Layers after the last one that writes, and the head, can still fail: what was written would then
    be written again when the forward is repeated.

    Attributes:
        store: Keys and values.
    """

    store: KVStore
    _runs: weakref.ReferenceType[nn.Module] | None = None

    def await_end(self) -> None:
        """Expect the end of the outermost module that runs with this cache and tells of its end."""
        place: FrameType | None = sys._getframe(1)
        runs = None
        while place is not None:
            if place.f_code is CALL_CODE:
                given = place.f_locals
                if given["self"] in _WATCHED and self._is_in(given["args"], given["kwargs"]):
                    runs = given["self"]
            place = place.f_back
        self._runs = None if runs is None else weakref.ref(runs)
        self.store.opened = None if runs is None else self.store.seen

    def _is_in(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return any(each is self for each in (*args, *kwargs.values()))


def _tell(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
    for each in (*args, *kwargs.values()):
        if isinstance(each, Ending) and each._runs is not None and each._runs() is module:
            each.store.opened = None


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
