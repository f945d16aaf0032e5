"""Graphs and graph breaks of regional compilation, with and without a cache."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig
from torch import Tensor, nn

from diffcache.eval.record import Setting
from diffcache.eval.workshop.bench.models import Loop, Plain, Shape, build, inputs
from diffcache.features.base import Method
from diffcache.features.confidence_gated import ConfidenceGatedTaylor
from diffcache.features.first_block import FirstBlock
from diffcache.features.taylorseer import TaylorSeer

_STEPS = 8


class Counter:
    """A backend that counts graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        """Count a graph."""
        self.graphs += 1
        return graph.forward


Start = Callable[[nn.Module, dict[str, Any]], AbstractContextManager[Any]]


def subjects() -> dict[str, Start]:
    """Return what to compile: a plain model, ours, and diffusers' own caches."""
    taylor = TaylorSeerCacheConfig(cache_interval=3, taylor_factors_dtype=torch.float32)
    lite = TaylorSeerCacheConfig(
        cache_interval=3, taylor_factors_dtype=torch.float32, use_lite_mode=True
    )
    return {
        "uncached": lambda model, call: nullcontext(Plain(model, call)),
        "TaylorSeer stack": _ours(TaylorSeer(3, 1, site="stack")),
        "TaylorSeer block": _ours(TaylorSeer(3, 1, site="block")),
        "FirstBlock": _ours(FirstBlock(0.5)),
        "ConfidenceGatedTaylor": _ours(ConfidenceGatedTaylor(0.5, warmup=3)),
        "diffusers TaylorSeer": _theirs(taylor),
        "diffusers TaylorSeer lite": _theirs(lite),
        "diffusers FirstBlockCache": _theirs(FirstBlockCacheConfig(threshold=0.5)),
    }


def _ours(method: Method) -> Start:
    return lambda model, call: Loop(model, method, call)


def _theirs(config: Any) -> Start:
    @contextmanager
    def start(model: nn.Module, call: dict[str, Any]) -> Iterator[Plain]:
        model.enable_cache(config)  # type: ignore[operator]
        try:
            yield Plain(model, call)
        finally:
            model.disable_cache()  # type: ignore[operator]

    return start


def measure(setting: Setting, *, shape: Shape | None = None) -> dict[str, Any]:
    """Count graphs and breaks of `compile_repeated_blocks(fullgraph=True)`.

    The cached model is run in eager mode as well: outputs must agree.

    Args:
        setting: Device and dtype.
        shape: Sizes of the model.
    """
    shape = shape or Shape(double=2, single=2)
    call = inputs(shape, setting.device, setting.dtype)
    rows = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = subjects()
        for number, (name, start) in enumerate(chosen.items()):
            if setting.progress is not None:
                setting.progress(number, len(chosen), name)
            with start(build(shape, setting.device, setting.dtype), call) as subject:
                expected = _outputs(subject)
            rows.append({"name": name, **_compiled(setting, shape, call, start, expected)})
    return {
        "shapes": {
            "device": setting.device.type,
            "model": "tiny FLUX, random weights",
            **asdict(shape),
        },
        "rounds": 1,
        "steps": _STEPS,
        "rows": rows,
    }


def _outputs(subject: Any) -> list[Tensor]:
    """Run a few steps on inputs that change from step to step."""
    found = []
    for number in range(_STEPS):
        subject.arguments = {
            **subject.arguments,
            "timestep": torch.full_like(subject.arguments["timestep"], 1 - number / _STEPS),
        }
        found.append(subject.call()[0])
        subject.tick()
    return found


def _compiled(
    setting: Setting, shape: Shape, call: dict[str, Any], start: Start, expected: list[Tensor]
) -> dict[str, Any]:
    """Compile the blocks of a subject and run it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    backend, model = Counter(), build(shape, setting.device, setting.dtype)
    error, difference = None, None
    try:
        with start(model, call) as subject:
            model.compile_repeated_blocks(fullgraph=True, backend=backend)
            outputs = _outputs(subject)
        pairs = zip(outputs, expected, strict=True)
        difference = max(float((a - b).abs().max()) for a, b in pairs)
    except Exception as failure:  # whatever a peer raises is the result
        error = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:120]}"
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return {"graphs": backend.graphs, "breaks": breaks, "difference": difference, "error": error}
