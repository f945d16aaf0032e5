"""Time stamps between the hooks of a model: what is spent before, in and behind its forward."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from diffcache.eval.record import stats
from diffcache.eval.tiny import Shape

PARTS = ("enter", "open", "body", "close", "leave")


class Stamps:
    """Four stamping hooks around the hooks that a model has already.

    Args:
        model: A denoiser, wrapped or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.taken: list[float] = []
        self.samples: list[list[float]] = []
        pre, post = model.register_forward_pre_hook, model.register_forward_hook
        self._hooks = [pre(self._stamp, prepend=True), pre(self._stamp),
                       post(self._stamp, prepend=True), post(self._stamp)]  # fmt: skip

    def _stamp(self, *given: Any) -> None:
        self.taken.append(time.thread_time())

    def call(self, arguments: dict[str, Any], keep: bool = True) -> None:
        """Make one call, and keep its times if wanted."""
        self.taken = []
        started = time.thread_time()
        self.model(**arguments)
        ended = time.thread_time()
        if keep:
            marks = [started, *self.taken, ended]
            self.samples.append([b - a for a, b in pairwise(marks)])

    def parts(self) -> dict[str, float]:
        """Return the 10th percentile of every part, in microseconds.

        `enter` and `leave` are torch's own dispatch, `open` and `close` the hooks of a cache (and
        one stamp), `body` the forward.
        """
        columns = zip(*self.samples, strict=True)
        return {
            name: stats(column, 1e6)["p10"] for name, column in zip(PARTS, columns, strict=True)
        }

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()


def arithmetic(
    shape: Shape, spans: int, device: torch.device, dtype: torch.dtype, calls: int
) -> float:
    """Return the microseconds of a first-order forecast of residuals and nothing else.

    Args:
        shape: Sizes of the model.
        spans: Runs of skipped blocks, each with a text and a picture stream.
        device: Where.
        dtype: Of the streams.
        calls: Timed calls.
    """
    tokens = (shape.text_tokens, shape.image_tokens) * spans
    streams = [torch.ones(shape.batch, n, shape.width, device=device, dtype=dtype) for n in tokens]
    samples = []
    for _ in range(calls):
        started = time.thread_time()
        guesses = torch._foreach_add(streams, streams, alpha=3.0)
        for stream, guess in zip(streams, guesses, strict=True):
            torch.add(stream, guess)
        samples.append(time.thread_time() - started)
    return stats(samples, 1e6)["p10"]
