"""Base class of extensions, which carry out the abilities of a method on one denoiser."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from diffcache.attach.call import Call
from diffcache.attach.run import Run, Timeline
from diffcache.errors import AttachError
from diffcache.method import Ability

# Class of ability -> "module:name" of what makes its extension of (denoiser, ability)
INSTALLERS: dict[str, str] = {
    "Combine": "diffcache.attach.reuse.reusing:FeatureReuse",
    "SigmaRule": "diffcache.attach.extensions.noise_level:Times",
    "SceneRule": "diffcache.attach.extensions.noise_level:NoiseLevels",
    "Quantize": "diffcache.attach.extensions.quantize:install",
    "RegionPlan": "diffcache.attach.extensions.region:install",
    "FedRows": "diffcache.attach.extensions.rows:install",
    "BranchRows": "diffcache.attach.extensions.branch_rows:install",
    "NotedRows": "diffcache.attach.extensions.rows:install",
    "UnsureRows": "diffcache.attach.extensions.rows:install",
    "SparseRows": "diffcache.attach.extensions.rows:install",
    "WideningRows": "diffcache.attach.extensions.drift:install",
    "FinishedBlocks": "diffcache.attach.extensions.blocks:install",
    "WatchLayers": "diffcache.attach.extensions.quantize:watch",
    "TemporalTable": "diffcache.attach.extensions.lookup:install",
}


class Extension:
    """Take part in the calls of one denoiser and the steps of its scheduler.

    A call that writes to a stream (`call.writes`) is no step: its output has to be the model's own.

    Storage has the lifetime of what it belongs to, with the extension as its key: `call.storage`,
    `call.run.storage` (one `set_timesteps`; also `timeline.storage` and `branch.storage`), and
    `call.run.stream.storage` (chunks of a video, turns of a conversation). An exception in a call
    drops the first two, and the stream as well if the call was writing to it.
    """

    def start(self, timeline: Timeline) -> None:
        """Prepare for a run, at its first step."""

    def open(self, call: Call) -> Call:
        """Return the call as it goes on, with other arguments or another step; raise AttachError if it cannot."""
        return call

    def given(self, call: Call) -> None:
        """See a call that is learned from, as all extensions left it, before the denoiser runs."""

    def ran(self, call: Call, out: Any) -> None:
        """See the output of a call that is learned from, before any extension changes it."""

    def close(self, call: Call, out: Any) -> Any:
        """Return the replacement of the output `out`, None if it stays.

        Outputs go through the extensions from the last to the first, so that the first
        keeps what is final; what was estimated goes from the first to the last.
        """
        return None

    def timesteps(self, run: Run, scheduler: Any) -> None:
        """Look at, or change, a scheduler's times after its `set_timesteps`."""

    def stepping(self, run: Run, scheduler: Any, output: Tensor, timestep: Any, sample: Tensor) -> None:
        """See the arguments of the scheduler's next step: the guided output and the sample."""

    def counts(self, call: Call) -> dict[str, tuple[int, int]]:
        """Return, per site of its own, evaluations that ran and that were skipped in a call."""
        return {}

    def tensors(self, run: Run) -> Iterable[Tensor]:
        """Return the tensors that it keeps of a run, for the account of memory."""
        return ()

    def held_bytes(self, runs: list[Run]) -> int:
        """Return the bytes it keeps besides `tensors`, of these runs and beyond them."""
        return 0

    def remove(self) -> None:
        """Leave the model as it was found."""


def make_extension(denoiser: Any, ability: Ability) -> Extension:
    """Return the extension that carries out an ability; raise AttachError if the model has none for it."""
    where = ability.extension or INSTALLERS.get(type(ability).__name__)
    if where is None:
        raise AttachError(
            f"{denoiser.method!r} asks for {type(ability).__name__}, which nothing "
            f"installs; known: {', '.join(INSTALLERS) or 'none'}"
        )
    module, function = where.split(":")
    made: Extension = getattr(importlib.import_module(module), function)(denoiser, ability)
    return made
