"""Run a denoiser once more on the call at hand, which leaves random numbers as they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from diffcache.attach.call import in_call
from diffcache.attach.reuse.frame import FRAME, Frame
from diffcache.attach.tap import ITEMS
from diffcache.attach.tree import unshared


def again(
    frame: Frame,
    items: dict[str, list[Any]],
    given: tuple[Any, Any],
    look: Callable[..., Any] | None = None,
) -> Any:
    """Run the denoiser once more under a frame, with other items.

    Args:
        frame: The frame of the call.
        items: Items to hand out for the lists of blocks.
        given: Positional and keyword arguments.
        look: Runs the forward that it is given with these arguments, in a way of its own.
    """
    args, kwargs = unshared(given)
    forward = frame.setup.model.forward
    repeat = replace(frame.call, repeats=True, storage={FRAME: frame, ITEMS: items})
    assert frame.random is not None
    with in_call(repeat), frame.random.replayed():
        return forward(*args, **kwargs) if look is None else look(forward, args, kwargs)
