"""Taps: a `ModuleList` and a module's children that hand out stand-ins while a call is open.

Nothing is wrapped: the list keeps its modules, names and state dict and only its *iteration* is
observed, so that a model's own loop runs with every statement it has between blocks. Outside a
denoiser call of the wrapped model both behave as before.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from diffcache.anchor import ATTRIBUTE, subclass
from diffcache.attach.call import Call
from diffcache.errors import AttachError, CacheWarning
from diffcache.foreign import CALL_CODE, children_of, set_children
from diffcache.step import CURRENT

ITEMS = "items"  # in a call's storage: list of blocks -> what is handed out for its blocks


class Tap:
    """Stands for one module inside a call; everything but its call is the module's own."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __iter__(self) -> Iterator[Any]:
        name = type(self.module).__name__
        raise AttachError(
            f"the model goes through the layers of a {name} itself: a cache skips calls, and it calls none"
        )

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance() in a model's loop sees the module's class
        return type(self.module)


class ServedTap(Tap):
    """A module whose calls a function answers.

    Args:
        module: The module.
        serve: Function of the module and the arguments of its call.
    """

    __slots__ = ("serve",)

    def __init__(self, module: nn.Module, serve: Callable[..., Any]) -> None:
        super().__init__(module)
        self.serve = serve

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the model's call of the module."""
        return self.serve(self.module, *args, **kwargs)


def notice(denoiser: Any) -> None:
    """Warn once if a wrapped model's forward was called directly, which its hooks do not see.

    Its blocks are then asked for with no call open, and the forward is on the stack, but not the
    call of the module that would have opened one.
    """
    if denoiser.is_noticed or torch.compiler.is_compiling():
        return
    model = denoiser.model
    forward = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    place: FrameType | None = sys._getframe(2)
    runs = False
    while place is not None:
        if place.f_code in (forward, CALL_CODE) and place.f_locals.get("self") is model:
            if place.f_code is CALL_CODE:
                return
            runs = True
        place = place.f_back
    if runs:
        denoiser.is_noticed = True
        warnings.warn(
            f"{type(model).__name__}.forward was called directly (forward_with_cfg does), so it "
            "runs uncached; call the model itself: model(...)",
            CacheWarning,
            stacklevel=5,
        )


def _items(blocks: nn.ModuleList) -> list[Any] | None:
    """Return the items of a block list in this call, None for the blocks themselves."""
    owner, key, compiled = blocks.__dict__[ATTRIBUTE]
    if compiled is not None and torch.compiler.is_dynamo_compiling():
        return compiled  # type: ignore[no-any-return]
    call: Call | None = CURRENT.get()
    if call is None or call.owner is not owner:
        notice(owner)
        return None
    items: dict[str, list[Any]] | None = call.storage.get(ITEMS)
    return None if items is None else items.get(key)


def _iterate(self: nn.ModuleList) -> Iterator[Any]:
    items = _items(self)
    return nn.ModuleList.__iter__(self) if items is None else iter(items)


def _get(self: nn.ModuleList, index: Any) -> Any:
    items = _items(self)
    if items is not None:
        return items[index]
    if isinstance(index, slice):
        return nn.ModuleList(list(children_of(self).values())[index])
    return nn.ModuleList.__getitem__(self, index)


TapList = subclass(nn.ModuleList, __iter__=_iterate, __getitem__=_get)


def tap_list(blocks: nn.ModuleList, owner: Any, key: str, compiled: list[Any] | None = None) -> None:
    """Observe the iteration of `blocks` in calls of a denoiser, which knows the list by `key`.

    Code that is compiled is given `compiled`, None for the blocks themselves.
    """
    blocks.__class__ = TapList
    blocks.__dict__[ATTRIBUTE] = (owner, key, compiled)


def untap_list(blocks: nn.ModuleList) -> None:
    """Give a list back as it was."""
    blocks.__class__ = nn.ModuleList
    blocks.__dict__.pop(ATTRIBUTE, None)


class TapDict(dict[str, nn.Module]):
    """A module's `_modules` that hands out taps for some children while a call is open."""

    def __init__(self, children: dict[str, nn.Module], owner: Any, taps: dict[str, Tap]) -> None:
        super().__init__(children)
        self.owner = owner
        self.taps = taps

    def __getitem__(self, name: str) -> Any:
        tap = self.taps.get(name)
        if tap is not None:
            call: Call | None = CURRENT.get()
            if call is not None and call.owner is self.owner:
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
    children = children_of(parent)
    if isinstance(children, TapDict):
        children.taps.update(taps)
    else:
        set_children(parent, TapDict(children, owner, taps))


def untap_children(parent: nn.Module) -> None:
    """Give the children back as they were."""
    set_children(parent, dict(children_of(parent)))
