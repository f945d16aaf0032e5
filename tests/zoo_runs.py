"""Runs of the zoo's pipelines with a cache that computes every third step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from diffcache import Interval
from diffcache.api import handle_of
from tests.zoo.pipes import pipes

PIPES = pipes()
EVERY = Interval(every=3)
STEPS = 6


def run(pipe: Any, name: str = "FluxPipeline", seed: int = 0, **more: Any) -> Tensor:
    """Return what six steps of a pipeline give."""
    return pipe(**{**PIPES[name].call(pipe, seed, STEPS), **more})[0]


def marks(target: Any) -> str:
    """Return a letter for every call of the last run: C computed, s skipped."""
    return "".join("sC"[call.computed] for call in handle_of(target).last.calls)


def flux(seed: int = 0) -> Any:
    """Return the zoo's FluxPipeline."""
    return PIPES["FluxPipeline"].build(seed)
