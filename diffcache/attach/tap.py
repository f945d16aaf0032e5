"""Taps: a `ModuleList` and a module's children that hand out stand-ins while a frame is open.

Nothing is wrapped: the list keeps its modules, names and state dict and only its *iteration* is
observed, so that a model's own loop runs with every statement it has between blocks. Outside a
denoiser call of the wrapped model both behave as before.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from diffcache.attach.anchor import ATTRIBUTE, subclass
from diffcache.errors import CacheWarning

if TYPE_CHECKING:
    from diffcache.attach.reuse.frame import Frame

FRAME: ContextVar[Frame | None] = ContextVar("diffcache_frame", default=None)


class Tap:
    """Stands for one module inside a frame; everything but the call is the module's own."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance() in a model's loop sees the module's class
        return type(self.module)


def notice(engine: Any) -> None:
    """Warn once if a wrapped model's forward was called directly, which its hooks do not see.

    Its blocks are then asked for with no frame open, and the forward is on the stack, but not the
    call of the module that would have opened one.
    """
    frame = FRAME.get()
    if engine.is_noticed or torch.compiler.is_compiling():
        return
    if frame is not None and frame.engine is engine:
        return
    model = engine.model
    forward = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    hooked = nn.Module._call_impl.__code__
    place: FrameType | None = sys._getframe(2)
    runs = False
    while place is not None:
        if place.f_code in (forward, hooked) and place.f_locals.get("self") is model:
            if place.f_code is hooked:
                return
            runs = True
        place = place.f_back
    if runs:
        engine.is_noticed = True
        warnings.warn(
            f"{type(model).__name__}.forward was called directly (forward_with_cfg does), so it "
            "runs uncached; call the model itself: model(...)",
            CacheWarning,
            stacklevel=4,
        )


def _iterate(self: nn.ModuleList) -> Iterator[Any]:
    frame = FRAME.get()
    if frame is not None:
        items = frame.items_of(self)
        if items is not None:
            return iter(items)
    notice(self.__dict__[ATTRIBUTE][0])
    return nn.ModuleList.__iter__(self)


def _get(self: nn.ModuleList, index: Any) -> Any:
    frame = FRAME.get()
    if frame is not None:
        items = frame.items_of(self)
        if items is not None:
            return items[index]
    notice(self.__dict__[ATTRIBUTE][0])
    if isinstance(index, slice):
        return nn.ModuleList(list(self._modules.values())[index])
    return nn.ModuleList.__getitem__(self, index)


TapList = subclass(nn.ModuleList, __iter__=_iterate, __getitem__=_get)


def tap_list(blocks: nn.ModuleList, owner: Any, key: str) -> None:
    """Observe the iteration of `blocks`, which the engine `owner` knows as `key`."""
    blocks.__class__ = TapList
    blocks.__dict__[ATTRIBUTE] = (owner, key)


def untap_list(blocks: nn.ModuleList) -> None:
    """Give a list back as it was."""
    blocks.__class__ = nn.ModuleList
    blocks.__dict__.pop(ATTRIBUTE, None)


class TapDict(dict[str, nn.Module]):
    """A module's `_modules` that hands out taps for some children while a frame is open."""

    def __init__(self, children: dict[str, nn.Module], owner: Any, taps: dict[str, Tap]) -> None:
        super().__init__(children)
        self.owner = owner
        self.taps = taps

    def __getitem__(self, name: str) -> Any:
        tap = self.taps.get(name)
        if tap is not None:
            frame = FRAME.get()
            if frame is not None and frame.engine is self.owner:
                module = dict.__getitem__(self, name)
                if module is not tap.module:  # replaced since, by an adapter for instance
                    tap.module = module
                return tap
            notice(self.owner)
        return dict.__getitem__(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Module]:
        from copy import deepcopy

        return deepcopy(dict(self), memo)


def tap_children(parent: nn.Module, owner: Any, taps: dict[str, Tap]) -> None:
    """Hand out `taps` for the children of `parent` that they name."""
    children = parent.__dict__["_modules"]
    if isinstance(children, TapDict):
        children.taps.update(taps)
    else:
        parent.__dict__["_modules"] = TapDict(children, owner, taps)


def untap_children(parent: nn.Module) -> None:
    """Give the children back as they were."""
    parent.__dict__["_modules"] = dict(parent.__dict__["_modules"])
