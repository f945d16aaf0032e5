"""Running a denoiser once more on the call at hand, which leaves random numbers as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diffcache.attach.tap import FRAME
from diffcache.attach.tree import leaves, unshared

if TYPE_CHECKING:
    from diffcache.attach.engine import Engine
    from diffcache.attach.reuse.frame import Frame


class Random:
    """The states of the host's and the devices' random generators at the start of a call.

    Args:
        call: Positional and keyword arguments of the call, which say the devices.
    """

    def __init__(self, call: Any) -> None:
        devices = {tensor.device for tensor in leaves(call) if tensor.device.type == "cuda"}
        self._devices = sorted(devices, key=str)
        self._start = self._now()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw what the call drew; what is drawn afterwards is what would have been."""
        now = self._now()
        self._set(self._start)
        try:
            yield
        finally:
            self._set(now)

    def _now(self) -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for state, device in zip(states[1:], self._devices, strict=True):
            torch.cuda.set_rng_state(state, device)


def again(
    engine: Engine,
    frame: Frame,
    items: dict[str, list[Any]],
    call: tuple[Any, Any],
    look: Callable[..., Any] | None = None,
) -> Any:
    """Run the denoiser once more under a frame, with other items.

    Args:
        engine: The engine of the denoiser.
        frame: The frame of the call.
        items: What to hand out for the lists of blocks.
        call: Positional and keyword arguments.
        look: Runs the forward that it is given with these arguments, in a way of its own.
    """
    frame.items, frame.repeats = items, True
    token = FRAME.set(frame)
    args, kwargs = unshared(call)
    forward = engine.model.forward
    try:
        assert frame.random is not None
        with frame.random.replayed():
            return forward(*args, **kwargs) if look is None else look(forward, args, kwargs)
    finally:
        frame.repeats = False
        FRAME.reset(token)
