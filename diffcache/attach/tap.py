"""Taps: a `ModuleList` and a module's children that hand out stand-ins while a frame is open.

Nothing is wrapped: the list keeps its modules, names and state dict and only its *iteration* is
observed, so that a model's own loop runs with every statement it has between blocks. Outside a
denoiser call of the wrapped model both behave as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import nn

from diffcache.attach.anchor import ATTRIBUTE, subclass

if TYPE_CHECKING:
    from diffcache.attach.frame import Frame

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


def _iterate(self: nn.ModuleList) -> Iterator[Any]:
    frame = FRAME.get()
    if frame is not None:
        items = frame.items_of(self)
        if items is not None:
            return iter(items)
    return nn.ModuleList.__iter__(self)


def _get(self: nn.ModuleList, index: Any) -> Any:
    frame = FRAME.get()
    if frame is not None:
        items = frame.items_of(self)
        if items is not None:
            return items[index]
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
