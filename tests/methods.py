"""Methods of the registry as contract tests run them: with `skips` or `off` of their rows."""

import dataclasses
from typing import Any

from diffcache.catalog import make_method, method_class
from diffcache.features.base import Method
from diffcache.registry import MODELS, rows_of

STEPS = 8
ALONE = [
    "FluxTransformer2DModel",
    "WanTransformer3DModel",
    "SD3Transformer2DModel",
    "DiTTransformer2DModel",
    "UNet2DConditionModel",
]
# Tables of a model alone, which pipelines are calibrated for.
TABLES: dict[str, dict[str, Any]] = {"teacache": {"coefficients": (1.0, 0.0)}, "magcache": {"ratios": (1.0,) * STEPS}}
# Method and pipeline -> settings that differ there.
OWN: dict[tuple[str, str], dict[str, Any]] = {("ertacache", "WanPipeline"): {"time": False}}

_ALONE = {name: row for name, row in rows_of("method").items() if row.cells["computed"]}
COMPUTED = {name: list(row.numbers("computed")) for name, row in _ALONE.items()}
OFF = {name: row.off for name, row in _ALONE.items()}
ON = {name: row.skips | TABLES.get(name, {}) for name, row in _ALONE.items()}
TENSORS = {name: row.numbers("holds") for name, row in _ALONE.items()}
ON_PIPELINES = {name: row for name, row in rows_of("method").items() if row.skips is not None}


def pipelines_of(name: str) -> list[str]:
    """Return the pipelines of the zoo that a method is tried on."""
    return [each for each in rows_of("method")[name].tried if each in MODELS]


def method(name: str, pipeline: str, *, off: bool = False) -> Method:
    """Return a method for a pipeline, not calibrated."""
    row = rows_of("method")[name]
    settings = row.off if off else row.skips | OWN.get((name, pipeline), {})
    return make_method(name, **settings)


def fields(name: str) -> set[str]:
    """Return the settings of a method."""
    return {field.name for field in dataclasses.fields(method_class(name))}
