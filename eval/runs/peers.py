"""Put caches of other libraries into a pipeline, as rows: `diffusers/taylorseer:cache_interval=5`.

`diffusers/NAME` is put in with the denoiser's own `enable_cache`, `cache-dit/dbcache` with that of cache-dit, both
configured by the names of their classes' arguments. `kernels/int8` is attention on 8 bits. They do not report the
computed steps, so operations are counted here.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import importlib.util
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from diffcache.errors import AttachError, MissingError, UnknownMethodError
from diffcache.eval.cost.flops import Tally, counting, denoisers
from diffcache.foreign import children_of
from diffcache.kernels.int8 import Int8Attention

DIFFUSERS = "diffusers/"
CONFIGS = {
    "faster-cache": "FasterCacheConfig",
    "first-block": "FirstBlockCacheConfig",
    "mag-cache": "MagCacheConfig",
    "pyramid-attention-broadcast": "PyramidAttentionBroadcastConfig",
    "sea-cache": "SeaCacheConfig",
    "taylorseer": "TaylorSeerCacheConfig",
}
MAG_CACHE = f"{DIFFUSERS}mag-cache"
CACHE_DIT = "cache-dit/dbcache"
INT8 = "kernels/int8"
_REFUSALS = (ValueError, AttributeError, LookupError, TypeError, AssertionError)


@dataclasses.dataclass(frozen=True)
class Peer(ABC):
    """A cache of another library, by its name in a row, with its prefix, and the settings of its configuration.

    Raises:
        UnknownMethodError: If there is no such cache, here or in the installed library.
        MissingError: If its library is not installed.
        ValueError: If a setting is unknown, or the configuration refuses its value.
    """

    name: str  # name in a row, with its prefix
    settings: Mapping[str, Any]  # arguments of its configuration

    def __post_init__(self) -> None:
        unknown = [key for key in self.settings if key not in self.fields]
        if unknown:
            raise ValueError(f"{self.name}: no setting {unknown[0]!r}; there are {', '.join(self.fields)}")
        try:
            self.config()
        except (TypeError, ValueError, OSError, LookupError) as error:
            raise ValueError(f"{self.name}: {error}") from error

    @property
    @abstractmethod
    def fields(self) -> list[str]:
        """Names of the settings."""

    @property
    def total(self) -> int | None:
        """Steps of the runs that its configuration is made for, None for any."""
        return getattr(self.config(), "num_inference_steps", None)

    @abstractmethod
    def config(self, pipe: Any = None) -> Any:
        """Return the library's own configuration."""

    @abstractmethod
    def attached(self, pipe: Any, models: Mapping[str, nn.Module]) -> AbstractContextManager[None]:
        """Return a context in which the denoisers of a pipeline run under the cache."""

    @contextmanager
    def applied(self, pipe: Any, steps: int | None = None) -> Iterator[None]:
        """Put the cache into every denoiser of a pipeline, and take it out again.

        `steps` are the sampling steps of its runs; None does not check them. Raises AttachError if a denoiser takes no
        such cache, and ValueError if the cache is made for runs of another number of steps.
        """
        if steps is not None and self.total not in (None, steps):
            raise ValueError(f"{self.name}: made for {self.total} steps, and the run has {steps}")
        models = denoisers(pipe)
        # Remove everything that a library leaves behind: it would disturb the next row.
        modules = [module for model in models.values() for module in model.modules()]
        before = [(m, dict(vars(m)), dict(children_of(m))) for m in modules]
        try:
            with self.attached(pipe, models):
                yield
        finally:
            for module, attributes, children in before:
                vars(module).clear()
                vars(module).update(attributes)
                children_of(module).clear()  # cache-dit changes their order
                children_of(module).update(children)


class DiffusersCache(Peer):
    """A cache of diffusers; `current_timestep_callback` is filled in.

    `diffusers/mag-cache` takes `tables`, a file of `mag_ratios` (`mag_ratios_of`), and the number of steps from it.
    """

    def __post_init__(self) -> None:
        short = self.name.removeprefix(DIFFUSERS)
        if short not in CONFIGS or not hasattr(diffusers, CONFIGS[short]):
            known = ", ".join(DIFFUSERS + name for name in CONFIGS)
            raise UnknownMethodError(f"no cache {self.name!r}; there are {known}")
        super().__post_init__()

    def __repr__(self) -> str:
        said = ", ".join(f"{key}={value!r}" for key, value in self._arguments().items())
        return f"{self._class.__name__}({said})"

    @property
    def _class(self) -> Any:
        return getattr(diffusers, CONFIGS[self.name.removeprefix(DIFFUSERS)])

    @property
    def fields(self) -> list[str]:
        """Names of the configuration's arguments."""
        names = [field.name for field in dataclasses.fields(self._class)]
        return [*names, "tables"] if self.name == MAG_CACHE else names

    def _arguments(self) -> dict[str, Any]:
        given = dict(self.settings)
        file = given.pop("tables", None)
        if file is not None:
            ratios = json.loads(Path(file).read_text(encoding="utf-8"))["mag_ratios"]
            given = {"mag_ratios": ratios, "num_inference_steps": len(ratios)} | given
        return given

    def config(self, pipe: Any = None) -> Any:
        """Return a configuration; those that ask for the timestep read it from the pipeline."""
        given = self._arguments()
        if "current_timestep_callback" in self.fields:
            given.setdefault("current_timestep_callback", lambda: pipe.current_timestep)
        return self._class(**given)

    @contextmanager
    def attached(self, pipe: Any, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """Enable the cache of every denoiser."""
        without = [name for name, model in models.items() if not hasattr(model, "enable_cache")]
        if without or not models:
            kind = type(models[without[0]]).__name__ if without else "nothing"
            raise AttachError(f"{self.name}: {kind} has no enable_cache; leave this row out")
        entered: list[Any] = []
        try:
            for model in models.values():
                enable: Any = model.enable_cache
                try:
                    enable(self.config(pipe))
                except _REFUSALS as error:
                    raise AttachError(
                        f"{self.name}: diffusers cannot cache {type(model).__name__}: {error}"
                    ) from error
                entered.append(model)
            yield
        finally:
            for model in entered:
                model.disable_cache()


class CacheDit(Peer):
    """DBCache of cache-dit, which refuses to leave out the first block.

    `steps_computation_mask` is a list of 0 and 1, or such digits in a row; the number of steps is taken from it.
    `taylorseer_order` adds its TaylorSeer calibrator; without it, residuals are reused.
    """

    def __post_init__(self) -> None:
        if self.name != CACHE_DIT:
            raise UnknownMethodError(f"no cache {self.name!r}; there is {CACHE_DIT}")
        if importlib.util.find_spec("cache_dit") is None:
            raise MissingError("cache-dit is not installed: pip install cache-dit")
        super().__post_init__()

    def __repr__(self) -> str:
        said = ", ".join(f"{key}={value!r}" for key, value in self.settings.items())
        return f"DBCacheConfig({said}), cache-dit {importlib.metadata.version('cache-dit')}"

    @property
    def fields(self) -> list[str]:
        """Names of the configuration's arguments, and `taylorseer_order`."""
        names = [field.name for field in dataclasses.fields(_cache_dit().DBCacheConfig)]
        return [*names, "taylorseer_order"]

    def config(self, pipe: Any = None) -> Any:
        """Return a new configuration: cache-dit writes into it."""
        given = {key: value for key, value in self.settings.items() if key != "taylorseer_order"}
        mask = given.get("steps_computation_mask")
        if mask is not None:
            digits = [str(step) for step in (mask if isinstance(mask, list) else str(mask))]
            if set(digits) - {"0", "1"}:
                raise ValueError(f"steps_computation_mask={mask!r}: must be of 0 and 1")
            given["steps_computation_mask"] = [int(digit) for digit in digits]
            given.setdefault("num_inference_steps", len(digits))
        first = given.get("Fn_compute_blocks", 1)
        if not isinstance(first, int) or first < 1:
            raise ValueError(f"Fn_compute_blocks={first!r}: must be 1 or more")
        return _cache_dit().DBCacheConfig(**given)

    @contextmanager
    def attached(self, pipe: Any, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """Enable the cache of a pipeline, whose class it changes meanwhile."""
        library, order = _cache_dit(), self.settings.get("taylorseer_order")
        calibrator = None
        if order is not None:
            calibrator = library.TaylorSeerCalibratorConfig(taylorseer_order=order)
        try:
            try:
                library.enable_cache(pipe, cache_config=self.config(), calibrator_config=calibrator)
            except _REFUSALS as error:
                raise AttachError(f"{self.name}: cache-dit cannot cache {type(pipe).__name__}: {error}") from error
            yield
        finally:
            library.disable_cache(pipe)


def _cache_dit() -> Any:
    """Return the library, with its messages turned off."""
    os.environ.setdefault("CACHE_DIT_LOG_LEVEL", "error")  # it is read once, at import
    import cache_dit

    return cache_dit


class RoundedAttention(Peer):
    """Attention on 8 bits, to measure its effect on pictures; plain PyTorch where there is no kernel."""

    @property
    def fields(self) -> list[str]:
        """Return no names, as there are no settings."""
        return []

    def config(self, pipe: Any = None) -> None:
        """Return nothing, as there are no settings."""

    @contextmanager
    def attached(self, pipe: Any, models: Mapping[str, nn.Module]) -> Iterator[None]:
        """Replace all attention that can be replaced; raise an error for a call in which none can."""
        with Int8Attention(always=True) as mode, ExitStack() as hooks:

            def check(*_: Any) -> None:
                if not mode.taken:
                    told = "the model has no attention without a mask; leave this row out"
                    raise AttachError(f"{self.name}: {told}")

            for model in models.values():  # fail before a sample is kept
                hooks.callback(model.register_forward_hook(check).remove)
            yield


def make_peer(name: str, settings: Mapping[str, Any]) -> Peer:
    """Return a cache of another library, or attention on 8 bits, by name.

    Raises:
        UnknownMethodError: If there is no such cache.
        MissingError: If its library is not installed.
        ValueError: If a setting is wrong.
    """
    if name == INT8:
        return RoundedAttention(name, settings)
    return (DiffusersCache if name.startswith(DIFFUSERS) else CacheDit)(name, settings)


def mag_ratios_of(pipe: Any, call: Mapping[str, Any]) -> list[float]:
    """Measure the ratios that MagCache of diffusers needs, in its own calibration mode.

    `call` are the arguments of one call, with `num_inference_steps`. There is one ratio for every step, measured on
    the first guidance branch where there are several.
    """
    settings = {"calibrate": True, "num_inference_steps": call["num_inference_steps"]}
    cache = DiffusersCache(MAG_CACHE, settings)
    with cache.applied(pipe), torch.no_grad(), redirect_stdout(io.StringIO()) as printed:
        pipe(**call)  # diffusers prints the ratios, and returns them nowhere
    lists = [line for line in printed.getvalue().splitlines() if line.startswith("[")]
    return [float(ratio) for ratio in ast.literal_eval(lists[-1])]


@dataclasses.dataclass
class Count:
    """Count of a run under a cache of another library."""

    tally: Tally  # operations of every denoiser call
    timesteps: list[float] = dataclasses.field(default_factory=list)  # the timestep of every call
    held_bytes: int = 0  # most bytes kept at the end of a call

    def summary(self) -> dict[str, Any]:
        """Return a run's entry in the manifest, as `draw.summary` does for one of ours.

        A step counts as computed if one of its calls left nothing out. The first call computes
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
    """Count the work of a pipeline's denoisers; inside of `applied`."""
    models = denoisers(pipe)
    with counting(models) as tally:
        count = Count(tally)
        hooks = []

        def note(model: Any, args: Any, kwargs: Any, out: Any) -> None:
            given = kwargs.get("timestep", args[1] if len(args) > 1 else 0)
            first = given.flatten()[0] if hasattr(given, "flatten") else given
            count.timesteps.append(float(first))
            count.held_bytes = max(count.held_bytes, held_bytes(models.values()))

        for model in models.values():
            hooks.append(model.register_forward_hook(note, with_kwargs=True))
        try:
            yield count
        finally:
            for hook in hooks:
                hook.remove()


def held_bytes(models: Iterable[nn.Module]) -> int:
    """Return the bytes of all tensors that the caches of some denoisers keep."""
    kept: list[Any] = []
    for model in models:
        kept.append(getattr(model, "_context_manager", None))  # of cache-dit
        for module in model.modules():
            registry = getattr(module, "_diffusers_hook", None)
            for hook in registry.hooks.values() if registry is not None else ():
                states = getattr(getattr(hook, "state_manager", None), "_state_cache", {})
                kept += [*states.values(), getattr(hook, "state", None)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(kept, set())}.values())


def _tensors(value: Any, known: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in containers and in attributes of objects, each object once."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) or hasattr(value, "__dict__"):
        if id(value) in known or isinstance(value, (type, nn.Module)) or callable(value):
            return
        known.add(id(value))
        inner = vars(value) if hasattr(value, "__dict__") else value
        for item in inner.values() if isinstance(inner, dict) else inner:
            yield from _tensors(item, known)
