"""The states of random generators, to draw the same numbers once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from diffcache.attach.tree import leaves


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
