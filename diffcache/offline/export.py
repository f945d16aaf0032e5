"""Write tables and methods in the forms that other engines read.

| engine | form | reader |
|---|---|---|
| `diffusers` | JSON: `class` and its arguments | `getattr(diffusers, kind)(**arguments)` |
| `cache-dit` | YAML | `cache_dit.load_configs(file)` |
| `sglang` | cache-dit's; JSON of TeaCache | `--cache-dit-config`; `TeaCacheParams(**arguments)` |
| `vllm-omni` | JSON: `cache_backend`, `cache_config` | `Omni(**arguments)` |
| `tensorrt-llm` | YAML: `cache_config` | `VisualGenArgs.from_yaml(file)` |
| `comfyui` | JSON of the API: a node | `DiffcacheModel` of diffcache's own nodes |

Sources, read and not copied: cache-dit 1.5.3 `caching/load_configs.py`; SGLang 0.5.23
`multimodal_gen/configs/sample/teacache.py`; vLLM-Omni 0.30.0 `diffusion/data.py` and `cache`;
TensorRT-LLM `visual_gen/args.py` and aaedbf9 `_torch/visual_gen/cache/teacache.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffcache.catalog import make_method, method_class
from diffcache.features.base import Method
from diffcache.features.combine import Combine, reuse_of
from diffcache.features.dbcache import DBCache
from diffcache.features.first_block import FirstBlock
from diffcache.features.magcache import MagCache, ratio_at
from diffcache.features.parts.instead import Reuse, Taylor
from diffcache.features.parts.when import steps_of
from diffcache.features.tables import Tables
from diffcache.features.teacache import TeaCache
from diffcache.features.tuned import Tuned
from diffcache.presets.choose import word_of
from diffcache.step import Site

_CLAMPED = "changes outside of those at calibration count as the nearer end here, and as the polynomial has it there"
_APART = "each guidance branch decides for itself there, and the first decides for all here"
_OWN_LISTS = "lists of blocks may be caches of their own there, and the first blocks of the model decide for all here"
_LATE = "differences are taken from step 3 on there, and what is skipped before the next computed one is reused"
_MIXED = "guidance in two calls a step may count as two steps there"


@dataclass(frozen=True)
class Exported:
    """A method in the form that an engine reads.

    Attributes:
        data: Plain data of the file.
        form: `json` or `yaml`.
        notes: Differences that the form cannot express, a sentence each.
    """

    data: Mapping[str, Any]
    form: str
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the text of the file."""
        if self.form == "json":
            return json.dumps(self.data, indent=1) + "\n"
        import yaml

        return str(yaml.safe_dump(dict(self.data), sort_keys=False))


def export(method: str | Method, to: str, *, steps: int | None = None, **settings: Any) -> Exported:
    """Write a method in the form that another engine reads.

    Args:
        method: A method or its name, as `diffcache.wrap` takes it, or a file of tables, which
            brings the settings that it was measured with.
        to: Key of `ENGINES`.
        steps: Steps of the runs, for forms that list them; None for those of the tables.
        **settings: Settings of the method, over those of the file.

    Raises:
        ValueError: If there is no such engine, or its form cannot express the method.
    """
    if to not in ENGINES:
        raise ValueError(f"to={to!r}: must be one of {', '.join(ENGINES)}")
    is_tables = isinstance(method, (str, Path)) and str(method).endswith(".safetensors")
    made = _of_tables(method, settings) if is_tables else make_method(method, **settings)
    made.abilities()  # raises where tables are missing
    tables = getattr(made, "tables", None)
    known = tables.steps if isinstance(tables, Tables) else None
    chosen = made.method if isinstance(made, Tuned) else made
    return ENGINES[to](chosen, _Run(to, steps or known or chosen.total))


def _of_tables(path: Any, settings: Mapping[str, Any]) -> Method:
    """Return the method of a file of tables, with the settings that it was measured with."""
    tables = Tables.load(path)
    cls: Any = method_class(str(tables.header["method"]))
    names = {field.name for field in dataclasses.fields(cls)}
    known = {k: v for k, v in dict(tables.header.get("fields", {})).items() if v is not None}
    given = {key: value for key, value in known.items() if key in names}
    made: Method = cls(**{**given, **settings, "tables": tables})
    return made


@dataclass(frozen=True)
class _Run:
    """The engine that a method goes to, and the steps of its runs."""

    to: str
    steps: int | None

    def refuse(self, method: Method, why: str) -> ValueError:
        """Return the error for a method that the engine's form cannot express."""
        name = word_of(method.name, {})
        return ValueError(f"to={self.to!r}: cannot express {name}: {why}")

    def known_steps(self, method: Method) -> int:
        """Return the steps of the runs."""
        if self.steps is None:
            raise self.refuse(method, "its form lists every step; say steps=")
        return self.steps


# the methods, as arguments ---------------------------------------------------------------------


def _polynomial(method: TeaCache, run: _Run) -> tuple[list[float], tuple[str, ...]]:
    """Return coefficients, highest power first, and notes."""
    if method.by_branch:
        raise run.refuse(method, "by_branch=True; measure it without")
    if method.coefficients is not None:
        return list(method.coefficients), ()
    return [float(value) for value in method.measured()["coefficients"].tolist()], (_CLAMPED,)


def _of_five(values: list[float], method: Method, run: _Run) -> list[float]:
    """Return a polynomial of degree 4, of lower degrees with leading zeros."""
    if len(values) > 5:
        raise run.refuse(method, f"degree {len(values) - 1}; it takes 4: calibrate with degree=4")
    return [0.0] * (5 - len(values)) + values


def _magnitudes(method: MagCache, run: _Run) -> dict[str, Any]:
    """Return one ratio a step, with the settings of MagCache."""
    ratios: Any = method.ratios or tuple(method.measured()["ratios"].tolist())
    if method.always:
        raise run.refuse(method, f"always={method.always!r}; leave it out")
    if isinstance(ratios[0], tuple):
        raise run.refuse(method, "ratios of each guidance branch; it takes one list")
    steps = run.steps or len(ratios)
    return {
        "threshold": method.threshold,
        "max_skip_steps": method.longest,
        "retention_ratio": method.retention,
        "num_inference_steps": steps,
        "mag_ratios": [ratio_at(ratios, index, steps) for index in range(steps)],
    }


def _dual_block(method: DBCache | FirstBlock) -> dict[str, Any]:
    """Return the gate on the first blocks as cache-dit calls its settings."""
    if isinstance(method, FirstBlock):
        method = DBCache(method.threshold, warmup=method.warmup, by_branch=method.by_branch)
    return {
        "Fn_compute_blocks": method.lead,
        "Bn_compute_blocks": method.tail,
        "max_warmup_steps": method.warmup,
        "max_cached_steps": -1 if method.skips is None else method.skips,
        "max_continuous_cached_steps": -1 if method.longest is None else method.longest,
        "residual_diff_threshold": method.threshold,
        "cfg_diff_compute_separate": method.by_branch,
        **_forecast(method.order),
    }


def _forecast(order: int) -> dict[str, Any]:
    """Return the forecast of the skipped residuals, of images and texts, as cache-dit calls its settings."""
    return {"enable_taylorseer": True, "enable_encoder_taylorseer": True, "taylorseer_order": order} if order else {}


def _mask(parts: Combine, method: Method, run: _Run) -> tuple[dict[str, Any], list[str]]:
    """Return a fixed list of computed steps as cache-dit's mask, and notes."""
    when, order = parts.when, getattr(parts.instead, "order", 0)
    if when.probe is not None or when.sites or when.by_branch or when.reads_output:
        raise run.refuse(method, "its steps are no fixed list that all blocks share")
    if type(parts.instead) not in (Reuse, Taylor):
        raise run.refuse(method, f"{parts.instead!r}; it reuses a residual or forecasts by Taylor")
    if Site.of(parts.site) is not Site.STACK or parts.feature != "residual":
        raise run.refuse(method, f"site={Site.of(parts.site).value!r}; it keeps that of the stack")
    total = run.known_steps(method)
    if when.total not in (None, total):
        raise run.refuse(method, f"its steps are of runs of {when.total}, not of {total}")
    computed = set(steps_of(when, total))
    notes = [] if parts.lead else ["the first block always runs there"]
    notes += [_LATE] if order and computed & {1, 2} else []
    return {
        "Fn_compute_blocks": max(1, parts.lead),
        "Bn_compute_blocks": parts.tail,
        "max_warmup_steps": 0,
        "residual_diff_threshold": 1e9,
        "num_inference_steps": total,
        "steps_computation_mask": [int(index in computed) for index in range(total)],
        "steps_computation_policy": "static",
        **_forecast(order),
    }, [*notes, _OWN_LISTS]


# the engines -----------------------------------------------------------------------------------


def _diffusers(method: Method, run: _Run) -> Exported:
    if isinstance(method, MagCache):
        return Exported({"class": "MagCacheConfig", **_magnitudes(method, run)}, "json", (_APART,))
    if isinstance(method, FirstBlock):
        if method.warmup != 1:
            raise run.refuse(method, f"warmup={method.warmup}; it computes the first step alone")
        notes = () if method.by_branch else (_APART,)
        data = {"class": "FirstBlockCacheConfig", "threshold": method.threshold}
        return Exported(data, "json", notes)
    raise run.refuse(method, "it has MagCache, and a gate on the first block without warm-up")


def _cache_dit(method: Method, run: _Run) -> Exported:
    if isinstance(method, (DBCache, FirstBlock)):
        return Exported({"cache_config": _dual_block(method)}, "yaml", (*_late(method), _OWN_LISTS))
    parts = reuse_of(method)
    if parts is None or method.abilities() != (parts,):
        raise run.refuse(method, "it does more than reuse features")
    mask, notes = _mask(parts, method, run)
    return Exported({"cache_config": mask}, "yaml", tuple(notes))


def _sglang(method: Method, run: _Run) -> Exported:
    if not isinstance(method, TeaCache):
        return _cache_dit(method, run)
    values, notes = _polynomial(method, run)
    if method.compared() == "modulated":  # of its models Wan and LingBot-World have TeaCache
        raise run.refuse(method, "input='modulated'; it compares the time embedding: calibrate with input='time'")
    first = method.warmup
    if first < 1 and run.steps is not None:
        first = math.ceil(first * run.steps)
    elif first < 1:
        notes = (*notes, "a warm-up that is a share of the run is rounded down there and up here; say steps=")
    content = {
        "teacache_thresh": method.threshold,
        "coefficients": _of_five(values, method, run),
        "start_skipping": first,
        "end_skipping": -1 if method.last else 1.0,
        "use_ret_steps": method.compared() == "time-projection",
    }
    return Exported(content, "json", (*notes, _APART))


def _vllm_omni(method: Method, run: _Run) -> Exported:
    if isinstance(method, TeaCache):
        values, notes = _polynomial(method, run)
        if method.warmup != 1 or method.last:
            said = f"warmup={method.warmup}, last={method.last}; it computes the first step alone"
            raise run.refuse(method, f"{said}: give warmup=1, last=False")
        if method.compared() != "modulated":
            raise run.refuse(method, f"input={method.compared()!r}; it compares the input")
        config = {"rel_l1_thresh": method.threshold, "coefficients": _of_five(values, method, run)}
        data = {"cache_backend": "tea_cache", "cache_config": config}
        return Exported(data, "json", (*notes, _APART))
    if isinstance(method, MagCache):
        found = _magnitudes(method, run)
        if not 0 < found["retention_ratio"] < 1:
            raise run.refuse(method, f"retention={method.retention}; it takes more than 0, below 1")
        steps = found.pop("num_inference_steps")
        config = {f"mag_{key.removeprefix('mag_')}": value for key, value in found.items()}
        config["num_inference_steps"] = steps
        notes = (f"every request is taken as one of {steps} steps there", _MIXED)
        return Exported({"cache_backend": "mag_cache", "cache_config": config}, "json", notes)
    config, notes = _without_branches(method, run)
    notes = (*notes, _MIXED)
    return Exported({"cache_backend": "cache_dit", "cache_config": config}, "json", notes)


def _tensorrt_llm(method: Method, run: _Run) -> Exported:
    if not isinstance(method, TeaCache):
        config, notes = _without_branches(method, run)
        return Exported({"cache_config": {"cache_backend": "cache_dit", **config}}, "yaml", notes)
    values, more = _polynomial(method, run)
    modes: dict[tuple[float, bool], bool] = {(1, True): False, (5, False): True}
    mode = modes.get((method.warmup, method.last))
    if mode is None:
        given = f"warmup={method.warmup}, last={method.last}"
        raise run.refuse(method, f"{given}; it has 1 and True, or 5 and False")
    if method.compared() == "modulated":
        way_out = "it compares the time embedding: calibrate with input='time'"
        raise run.refuse(method, f"input='modulated'; {way_out}")
    config = {"cache_backend": "teacache", "teacache_thresh": method.threshold}
    config |= {"use_ret_steps": mode, "coefficients": values}
    return Exported({"cache_config": config}, "yaml", (*more, _APART))


def _without_branches(method: Method, run: _Run) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return cache-dit's settings of a gate for engines that take no mask of steps."""
    if not isinstance(method, (DBCache, FirstBlock)):
        has = "it has gates on the first blocks, TeaCache and no more"
        raise run.refuse(method, f"it takes no list of steps; {has}")
    config = _dual_block(method)
    config.pop("enable_encoder_taylorseer", None)  # which they set themselves
    apart = config.pop("cfg_diff_compute_separate")
    return config, (*_late(method), _OWN_LISTS, *(() if apart else (_APART,)))


def _late(method: DBCache | FirstBlock) -> tuple[str, ...]:
    """Return a note where cache-dit has not all differences by the end of the warm-up."""
    order = method.order if isinstance(method, DBCache) else 0
    return (_LATE,) if order and method.warmup < 3 + order else ()


def _comfyui(method: Method, run: _Run) -> Exported:
    names = ["taylorseer", "interval", "first-block", "dbcache", "confidence-gated-taylor"]
    names += ["seacache", "teacache", "magcache"]
    if method.name not in names:
        raise run.refuse(method, f"the node has {', '.join(names)}")
    fields: Any = dataclasses.fields(method)  # type: ignore[arg-type]
    own = {f.name: getattr(method, f.name) for f in fields if getattr(method, f.name) != f.default}
    notes: tuple[str, ...] = ()
    if own.pop("tables", None) is not None:  # the node reads no files
        if isinstance(method, TeaCache):
            values, notes = _polynomial(method, run)
            own |= {"coefficients": tuple(values), "input": method.compared()}
        elif isinstance(method, MagCache):
            own["ratios"] = tuple(method.measured()["ratios"].tolist())
    settings = word_of("", own).removeprefix(":")
    inputs = {"method": method.name, "settings": settings, "preset": "auto", "hold": "as computed"}
    return Exported({"1": {"class_type": "DiffcacheModel", "inputs": inputs}}, "json", notes)


ENGINES: dict[str, Callable[[Method, _Run], Exported]] = {
    "sglang": _sglang,
    "vllm-omni": _vllm_omni,
    "tensorrt-llm": _tensorrt_llm,
    "comfyui": _comfyui,
    "diffusers": _diffusers,
    "cache-dit": _cache_dit,
}
