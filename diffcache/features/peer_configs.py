"""Turn configurations of diffusers and cache-dit into methods, without importing either."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from diffcache.features.base import Method, Warmup, When
from diffcache.features.combine import Combine
from diffcache.features.dbcache import DBCache
from diffcache.features.first_block import FirstBlock
from diffcache.features.magcache import MagCache
from diffcache.features.parts.hold import Held
from diffcache.features.parts.instead import Taylor
from diffcache.features.parts.when import LastComputed
from diffcache.ranges import Count, Whole
from diffcache.step import Site, Step

_DTYPES = ("None", "torch.float32", "torch.float64", "torch.bfloat16")


@dataclass(frozen=True)
class DiffusersInterval(When):
    """Compute the steps that diffusers' TaylorSeer computes.

    These are the steps below `before`, one in `every` from step `before + 1` on, and those from
    `after` on. Reference: `TaylorSeerCacheHook._measure_should_compute` of diffusers.

    Args:
        every: Interval in steps (`cache_interval`).
        before: First steps that are always computed (`disable_cache_before_step`).
        after: Step from which all are computed (`disable_cache_after_step`); None for none.
    """

    state: ClassVar[type] = LastComputed

    every: Count
    before: Warmup
    after: Whole | None = None

    def should_compute(self, state: LastComputed, step: Step, probe: Any) -> bool:
        """Return whether the step is warm-up, one in `every` or among the last."""
        return (
            state.index is None
            or step.index < self.before
            or (step.index - self.before - 1) % self.every == 0
            or (self.after is not None and step.index >= self.after)
        )

    def computed(self, state: LastComputed, step: Step, probe: Any) -> None:
        """Note that there is something to stand in for later steps."""
        state.index = step.index


def method_of_config(config: Any) -> Method | None:
    """Return the method that a configuration of diffusers or cache-dit asks for; None if it is no such configuration.

    Raises ValueError if there is no equal here of the configuration, or of a field of it.
    """
    for cls in type(config).__mro__:
        makers = _MAKERS.get(cls.__module__.partition(".")[0])
        if makers is None:
            continue
        if cls.__name__ in makers:
            return makers[cls.__name__](config)
        if cls.__name__ in _REFUSED:
            raise ValueError(f"method={cls.__name__}(...): {_REFUSED[cls.__name__]}")
    return None


def _refuse(config: str, field: str, value: Any, reason: str) -> ValueError:
    """Return the error for a field that has no equal here."""
    return ValueError(f"method={config}({field}={value!r}): {reason}")


def _fields(config: Any, known: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a configuration, a dataclass, by name.

    Raises ValueError if one that is not known here, such as of a newer version, is not at its default.
    """
    found = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for field in dataclasses.fields(config):
        value = found[field.name]
        if field.name not in known and value != field.default:
            way_out = f"leave it at {field.default!r}, or give a method of diffcache"
            reason = f"diffcache does not know this field; {way_out}"
            raise _refuse(type(config).__name__, field.name, value, reason)
    return found


def _first_block(config: Any) -> Method:
    """Return first-block cache as `FirstBlockCacheConfig` has it."""
    fields = _fields(config, ["threshold"])
    return FirstBlock(threshold=float(fields["threshold"]), by_branch=True)


def _mag_cache(config: Any) -> Method:
    """Return MagCache as `MagCacheConfig` has it, with its ratios of `num_inference_steps`.

    Departure: a run of another length takes the ratios of the nearest steps, where diffusers begins
    anew in its midst or leaves some out.
    """
    known = ("threshold", "max_skip_steps", "retention_ratio", "num_inference_steps")
    fields = _fields(config, (*known, "mag_ratios", "calibrate"))
    if fields["calibrate"]:
        way_out = "measure them by diffcache.calibrate(pipe, 'magcache', prompts=[...]) instead"
        raise _refuse("MagCacheConfig", "calibrate", True, way_out)
    ratios = [float(ratio) for ratio in fields["mag_ratios"]]
    steps = fields["num_inference_steps"]
    if len(ratios) != steps:  # the configuration was changed after it was made
        reason = f"has {len(ratios)} mag_ratios; make the configuration anew"
        raise _refuse("MagCacheConfig", "num_inference_steps", steps, reason)
    return MagCache(
        threshold=float(fields["threshold"]),
        longest=fields["max_skip_steps"],
        retention=float(fields["retention_ratio"]),
        ratios=(1.0, *ratios[1:]),  # that of the first step, which is always computed, is not read
    )


def _taylorseer(config: Any) -> Method:
    """Return TaylorSeer as `TaylorSeerCacheConfig` has it.

    Departure: diffusers looks for attention by names that end in `attn`, and so computes every step
    of models that call it otherwise, such as Wan; here all attention is found.
    """
    name = "TaylorSeerCacheConfig"
    where = ("skip_predict_identifiers", "cache_identifiers")
    steps = ("cache_interval", "disable_cache_before_step", "disable_cache_after_step")
    forecast = ("max_order", "taylor_factors_dtype", "use_lite_mode")
    fields = _fields(config, (*steps, *forecast, *where))
    for field in where:
        if fields[field] is not None:
            sites = "TaylorSeer(site='attention'), 'module', 'block' or 'stack'"
            reason = f"modules are chosen by a site here, such as {sites}"
            raise _refuse(name, field, fields[field], reason)
    before = fields["disable_cache_before_step"]
    if before < 1:
        reason = "the first step has nothing to stand in for it; use 1 or more"
        raise _refuse(name, "disable_cache_before_step", before, reason)
    dtype = fields["taylor_factors_dtype"]
    if str(dtype) not in _DTYPES:
        held = "factors are held as the model makes them (torch.float32), or in torch.bfloat16"
        raise _refuse(name, "taylor_factors_dtype", dtype, f"{held}; use one of these")
    when = DiffusersInterval(fields["cache_interval"], before, fields["disable_cache_after_step"])
    site = Site.MODEL if fields["use_lite_mode"] else Site.ATTENTION
    method = Combine(when, Taylor(fields["max_order"]), site)
    return Held(method, "bf16") if str(dtype) == "torch.bfloat16" else method


# Fields of cache-dit that have no equal, and why; all but one ask for nothing where they are None.
_OF_CACHE_DIT = {
    "max_accumulated_residual_diff_threshold": "there is no bound on summed changes here; bound "
    "the skips with max_cached_steps or max_continuous_cached_steps",
    "warmup_interval": "all steps of a warm-up are computed here; use a smaller max_warmup_steps",
    "steps_computation_mask": "give the steps as a schedule: "
    "diffcache.Combine(diffcache.Listed([...], total=STEPS), diffcache.Taylor(1))",
    "force_refresh_step_hint": "runs start anew here by themselves; for a run in two parts open "
    "diffcache.run(pipe) around each",
}
_MAPPED_OF_CACHE_DIT = (
    "cache_type",
    "Fn_compute_blocks",
    "Bn_compute_blocks",
    "residual_diff_threshold",
    "max_warmup_steps",
    "max_cached_steps",
    "max_continuous_cached_steps",
    "cfg_diff_compute_separate",
    "cfg_compute_first",
    # what a pipeline, its branches and a mask are, which is found out here by itself
    "enable_separate_cfg",
    "num_inference_steps",
    "steps_computation_policy",
    "force_refresh_step_policy",
)


def _dbcache(config: Any) -> Method:
    """Return DBCache as cache-dit's `DBCacheConfig` has it."""
    name = "DBCacheConfig"
    fields = _fields(config, [*_OF_CACHE_DIT, *_MAPPED_OF_CACHE_DIT])
    kind = getattr(fields["cache_type"], "value", fields["cache_type"])
    if kind != "DBCache":
        raise _refuse(name, "cache_type", kind, "is no DBCache, and has no equal here")
    for field, reason in _OF_CACHE_DIT.items():
        nothing = 1 if field == "warmup_interval" else None
        if fields.get(field, nothing) != nothing:
            raise _refuse(name, field, fields[field], reason)
    apart = bool(fields["cfg_diff_compute_separate"])
    if fields["cfg_compute_first"] and not apart:
        reason = "the first call of a step decides for the others here"
        way_out = "use cfg_diff_compute_separate=True"
        raise _refuse(name, "cfg_compute_first", True, f"{reason}; {way_out}")
    limits = {}
    for field in ("max_cached_steps", "max_continuous_cached_steps"):
        if fields[field] == 0:
            raise _refuse(name, field, 0, "skips nothing; do not wrap, or use -1 for no limit")
        limits[field] = None if fields[field] < 0 else fields[field]
    return DBCache(
        threshold=float(fields["residual_diff_threshold"]),
        lead=fields["Fn_compute_blocks"],
        tail=fields["Bn_compute_blocks"],
        warmup=max(1, fields["max_warmup_steps"]),  # the first step is computed in either
        longest=limits["max_continuous_cached_steps"],
        skips=limits["max_cached_steps"],
        by_branch=apart,
    )


_MAKERS: dict[str, dict[str, Callable[[Any], Method]]] = {
    "diffusers": {
        "FirstBlockCacheConfig": _first_block,
        "MagCacheConfig": _mag_cache,
        "TaylorSeerCacheConfig": _taylorseer,
    },
    "cache_dit": {"DBCacheConfig": _dbcache},
}
_REFUSED = {
    "SeaCacheConfig": "it filters the latents of videos, where SeaCache of diffcache filters the "
    "input of the first block as its paper does; use diffcache.SeaCache(threshold=...)",
    "PyramidAttentionBroadcastConfig": "its ranges are of timesteps, and shares of the steps here; "
    "use diffcache.PAB(self_every=..., cross_every=..., start=..., end=...)",
    "FasterCacheConfig": "its ranges are of timesteps, and it reuses attention too; use "
    "diffcache.FasterCache(every=..., start=...) for its guidance",
    "TextKVCacheConfig": "it holds the keys and values of a prompt exactly, and skips no steps; leave it to diffusers",
    "DBPruneConfig": "use diffcache.DBPrune(threshold=..., lead=..., tail=..., warmup=...)",
    "BasicCacheConfig": "is the base of cache-dit's configurations; give a DBCacheConfig",
    **{
        f"{name}CalibratorConfig": "forecasts the skipped residuals of a cache; use diffcache.DBCache(..., order=1)"
        for name in ("", "TaylorSeer", "FoCa", "DMD")
    },
}
