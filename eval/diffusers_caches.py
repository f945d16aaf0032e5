"""The caches of diffusers, as rows beside ours: `diffusers/taylorseer:cache_interval=5`.

They are put in with the denoiser's own `enable_cache`, configured by the names of their classes'
arguments. What a run of theirs computes is counted, operation by operation, as they do not tell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import diffusers

from diffcache.errors import AttachError, UnknownMethodError
from diffcache.eval.cost.flops import Tally, counting, denoisers
from diffcache.eval.peers import held_bytes

PREFIX = "diffusers/"
CONFIGS = {
    "faster-cache": "FasterCacheConfig",
    "first-block": "FirstBlockCacheConfig",
    "mag-cache": "MagCacheConfig",
    "pyramid-attention-broadcast": "PyramidAttentionBroadcastConfig",
    "sea-cache": "SeaCacheConfig",
    "taylorseer": "TaylorSeerCacheConfig",
}


@dataclasses.dataclass(frozen=True)
class DiffusersCache:
    """A cache of diffusers.

    Args:
        name: One of `CONFIGS`, after its prefix.
        settings: Arguments of its configuration; `current_timestep_callback` is filled in.

    Raises:
        UnknownMethodError: If there is no such cache, here or in the installed diffusers.
        ValueError: If a setting is unknown, or the configuration refuses its value.
    """

    name: str
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        short = self.name.removeprefix(PREFIX)
        if short not in CONFIGS or not hasattr(diffusers, CONFIGS[short]):
            known = ", ".join(PREFIX + name for name in CONFIGS)
            raise UnknownMethodError(f"no cache {self.name!r}; there are {known}")
        unknown = [key for key in self.settings if key not in self._fields]
        if unknown:
            raise ValueError(
                f"{self.name}: no setting {unknown[0]!r}; there are {', '.join(self._fields)}"
            )
        self._made(None)

    def __repr__(self) -> str:
        said = ", ".join(f"{key}={value!r}" for key, value in self.settings.items())
        return f"{self._class.__name__}({said})"

    @property
    def _class(self) -> Any:
        return getattr(diffusers, CONFIGS[self.name.removeprefix(PREFIX)])

    @property
    def _fields(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self._class)]

    def _made(self, pipe: Any) -> Any:
        """Return a configuration; those that ask for the timestep read it from the pipeline."""
        given = dict(self.settings)
        if "current_timestep_callback" in self._fields:
            given.setdefault("current_timestep_callback", lambda: pipe.current_timestep)
        try:
            return self._class(**given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.name}: {error}") from error

    @contextmanager
    def applied(self, pipe: Any) -> Iterator[None]:
        """Put the cache into every denoiser of a pipeline, and take it out again.

        Raises:
            AttachError: If a denoiser takes no cache of diffusers.
        """
        models = denoisers(pipe)
        without = [name for name, model in models.items() if not hasattr(model, "enable_cache")]
        if without or not models:
            kind = type(models[without[0]]).__name__ if without else "nothing"
            raise AttachError(f"{self.name}: {kind} has no enable_cache; leave this row out")
        entered: list[Any] = []
        try:
            for model in models.values():
                try:
                    enable: Any = model.enable_cache
                    enable(self._made(pipe))
                except (ValueError, AttributeError, LookupError, TypeError) as error:
                    raise AttachError(
                        f"{self.name}: diffusers cannot cache {type(model).__name__}: {error}"
                    ) from error
                entered.append(model)
            yield
        finally:
            for model in entered:
                disable: Any = model.disable_cache
                disable()


@dataclasses.dataclass
class Count:
    """What a run under a cache of diffusers did.

    Attributes:
        tally: Operations of every denoiser call.
        timesteps: The timestep of every call.
        held_bytes: Most bytes kept at the end of a call.
    """

    tally: Tally
    timesteps: list[float] = dataclasses.field(default_factory=list)
    held_bytes: int = 0

    def summary(self) -> dict[str, Any]:
        """Return what a manifest keeps of a run, as `draw.summary` does of one of ours.

        A step counts as computed if no call of it left anything out. The first call computes
        everything in each of these caches, so that it is what the others are compared with.
        """
        flops = [count for _, count in self.tally.calls]
        known = [count for count in flops if count is not None]
        full = known[0] if len(known) == len(flops) and known else None
        steps: list[list[Any]] = []
        for timestep, count in zip(self.timesteps, flops, strict=True):
            whole = int(full is None or count is None or count > 0.999 * full)
            if steps and steps[-1][0] == timestep:
                steps[-1][1] = max(steps[-1][1], whole)
            else:
                steps.append([timestep, whole])
        saved = None if full is None else sum(full - count for count in known)
        return {
            "steps": steps,
            "computed": sum(whole for _, whole in steps),
            "skipped": sum(1 - whole for _, whole in steps),
            "flops_computed": None if full is None else sum(known),
            "flops_saved": saved,
            "held_bytes": self.held_bytes,
        }


@contextmanager
def observed(pipe: Any) -> Iterator[Count]:
    """Count what the denoisers of a pipeline do; inside of `applied`."""
    models = denoisers(pipe)
    with counting(models) as tally:
        count = Count(tally)
        hooks = []

        def note(model: Any, args: Any, kwargs: Any, out: Any) -> None:
            given = kwargs.get("timestep", args[1] if len(args) > 1 else 0)
            first = given.flatten()[0] if hasattr(given, "flatten") else given
            count.timesteps.append(float(first))
            count.held_bytes = max(count.held_bytes, sum(map(held_bytes, models.values())))

        for model in models.values():
            hooks.append(model.register_forward_hook(note, with_kwargs=True))
        try:
            yield count
        finally:
            for hook in hooks:
                hook.remove()
