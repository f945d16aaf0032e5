"""Pipelines and methods of the tests of what a cache remembers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import diffcache
from diffcache import Combine, Every, Interval, Taylor
from diffcache.api import handle_of
from tests.zoo.catalog import cases
from tests.zoo.pipes import pipes

CASES, PIPES = cases(), pipes()
EVERY = Interval(every=3)
SEER = Combine(Every(3), Taylor(2), site="block")
STEPS = 6


def wrapped_pipe(name: str, method: Any = EVERY, seed: int = 0) -> Any:
    return diffcache.wrap(PIPES[name].build(seed), method)


def run(pipe: Any, name: str, seed: int = 0, steps: int = STEPS, **more: Any) -> Tensor:
    return pipe(**{**PIPES[name].call(pipe, seed, steps), **more})[0]


def marks(target: Any, branch: int | str | None = None) -> str:
    calls = handle_of(target).last.calls
    return "".join("sC"[c.computed] for c in calls if branch is None or c.branch == branch)
