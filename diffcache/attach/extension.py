"""What an ability of a method adds to an engine, beside features."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch import Tensor

from diffcache.errors import AttachError
from diffcache.features.base import Ability

if TYPE_CHECKING:
    from diffcache.attach.clock import Run
    from diffcache.attach.engine import Engine
    from diffcache.attach.reuse.frame import Frame

# Class of ability -> "module:function" that installs it: install(engine, ability) -> Extension
INSTALLERS: dict[str, str] = {
    "SigmaRule": "diffcache.attach.times:install",
    "SceneRule": "diffcache.attach.scene:install",
    "Quantize": "diffcache.attach.quantize:install",
    "RegionPlan": "diffcache.attach.region:install",
    "WatchLayers": "diffcache.attach.quantize:watch",
    "TimeTables": "diffcache.attach.time_table:install",
}


class Extension:
    """Takes part in the calls of one denoiser and the steps of its scheduler.

    What belongs to a run is kept in `frame.timeline.run.extras[self]`, which is dropped where
    features are: at the start and end of a run and after exceptions.
    """

    def open(
        self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return what the denoiser is given instead of `args` and `kwargs`, None if that stays.

        Called when it is decided what runs; `frame.computes` is None where a probe decides.
        """
        return None

    def close(self, frame: Frame, out: Any) -> Any:
        """Return what the denoiser returns instead of `out`, None if that stays.

        Called before the output is kept as a feature.
        """
        return None

    def timesteps(self, scheduler: Any) -> None:
        """Look at, or change, a scheduler's times behind its `set_timesteps`."""

    def stepping(
        self, run: Run, scheduler: Any, output: Tensor, timestep: Any, sample: Tensor
    ) -> None:
        """See what the scheduler is about to step with: the guided output and the sample."""

    def counts(self, frame: Frame) -> dict[str, tuple[int, int]]:
        """Return, per site of its own, evaluations that ran and that were skipped in a call."""
        return {}

    def held_bytes(self, runs: list[Run]) -> int:
        """Return the bytes it keeps of these runs and beyond them, for the account of memory."""
        return 0

    def remove(self) -> None:
        """Leave the model as it was found."""


def install(engine: Engine, ability: Ability) -> Extension:
    """Return the extension that gives an engine an ability.

    Raises:
        AttachError: If there is no installer for it, or the model cannot have it.
    """
    where = INSTALLERS.get(type(ability).__name__)
    if where is None:
        raise AttachError(
            f"{engine.method!r} asks for {type(ability).__name__}, which nothing installs; known: "
            f"{', '.join(INSTALLERS) or 'none'}"
        )
    module, function = where.split(":")
    made: Extension = getattr(importlib.import_module(module), function)(engine, ability)
    return made
