"""Time within the denoisers of a pipeline's call."""

from __future__ import annotations

import time
from typing import Any

import torch

from diffcache.eval.cost.flops import denoisers
from diffcache.eval.record import Setting


class DenoiserClock:
    """Adds up the time of all denoiser calls: `with DenoiserClock(pipe, setting) as clock: ...`.

    Enter it behind `diffcache.wrap`: its hooks are then the outermost, and what a cache itself
    costs is within. CUDA's own events are used, so that nothing waits between the steps.

    Args:
        target: A diffusers pipeline, or a denoiser.
        setting: Its device.
    """

    def __init__(self, target: Any, setting: Setting) -> None:
        self._models = denoisers(target)
        self._is_cuda = setting.device.type == "cuda"
        self._setting = setting
        self._marks: list[tuple[Any, Any]] = []
        self._hooks: list[Any] = []
        self._begun: list[Any] = []

    def __enter__(self) -> DenoiserClock:
        for model in self._models.values():
            self._hooks.append(model.register_forward_pre_hook(self._start, prepend=True))
            self._hooks.append(model.register_forward_hook(self._stop))
        return self

    def __exit__(self, *exception: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def reset(self) -> None:
        """Forget the time so far."""
        self._marks.clear()
        self._begun.clear()

    @property
    def calls(self) -> int:
        """Denoiser calls since the last reset."""
        return len(self._marks)

    @property
    def seconds(self) -> float:
        """Seconds since the last reset."""
        self._setting.wait()
        if self._is_cuda:
            return float(sum(start.elapsed_time(end) for start, end in self._marks)) / 1000
        return float(sum(end - start for start, end in self._marks))

    def _start(self, *given: Any) -> None:
        self._begun.append(self._mark())

    def _stop(self, *given: Any) -> None:
        self._marks.append((self._begun.pop(), self._mark()))

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
