"""The least that counts as a pipeline and a scheduler, whose steps are taken one by one."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import diffcache
from diffcache.features.base import Method


class Ticker:
    """The least that counts as a scheduler: it says how many steps there are, and when one ends."""

    def __init__(self) -> None:
        self.timesteps: range = range(0)

    def set_timesteps(self, steps: int) -> None:
        """Start a run."""
        self.timesteps = range(steps)

    def step(self) -> None:
        """End a step."""


class Loop:
    """A denoiser under a method, one step at a time, with the clock of a real pipeline.

    Args:
        model: A denoiser.
        method: What to wrap it with.
        call: Arguments of every call.
        steps: Length of a run.
    """

    def __init__(
        self, model: Any, method: Method, call: dict[str, Any], steps: int = 10**6
    ) -> None:
        self.model, self.method, self.steps, self.arguments = model, method, steps, call
        self.scheduler = Ticker()
        self.components = {"transformer": model, "scheduler": self.scheduler}

    def __call__(self) -> None:
        """Do nothing; a pipeline can be called."""

    def __enter__(self) -> Loop:
        diffcache.wrap(self, self.method)
        self.restart()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        diffcache.unwrap(self)

    def restart(self) -> None:
        """Start a run."""
        self.scheduler.set_timesteps(self.steps)

    def call(self, branch: str = "cond") -> Any:
        """Make one denoiser call, as diffusers' pipelines do."""
        with self.model.cache_context(branch):
            return self.model(**self.arguments)

    def tick(self) -> None:
        """End the step."""
        self.scheduler.step()

    def take(self, steps: int, branches: tuple[str, ...] = ("cond",)) -> None:
        """Take some steps."""
        for _ in range(steps):
            for branch in branches:
                self.call(branch)
            self.tick()


class Plain:
    """A denoiser without a cache, driven as a `Loop` is."""

    def __init__(self, model: Any, call: dict[str, Any]) -> None:
        self.model, self.arguments = model, call

    def call(self) -> Any:
        """Make one denoiser call."""
        with self.model.cache_context("cond"):
            return self.model(**self.arguments)

    def tick(self) -> None:
        """End the step, which nobody follows."""
