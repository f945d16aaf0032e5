"""Host time of a skipped step above its floor, on a deep and narrow FLUX with random weights.

The floor of a method that skips every block is the same model without blocks (embedders and head);
of one that runs the first block, the model with that one block; of a method at module sites, the
model whose modules are replaced by ones that return a ready tensor. CPU time of the thread, the
10th percentile over interleaved rounds: what the machine's other work adds is left out.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig
from torch import nn

import diffcache
from diffcache.eval.record import Setting, stats
from diffcache.eval.tiny import Loop, Shape, build, hollow_out, inputs
from diffcache.features.base import FeatureMethod
from diffcache.features.confidence_gated import ConfidenceGatedTaylor
from diffcache.features.first_block import FirstBlock
from diffcache.features.interval import Interval
from diffcache.features.taylorseer import TaylorSeer
from diffcache.step import Site

NEVER = 10**9  # an interval that no run reaches the end of
TARGETS = {"stack": 130.0, "block": 300.0, "module": 15.0}  # microseconds; the last is per site
_WARMUP = 8  # calls until every variant skips


@dataclass
class Variant:
    """One model to time.

    Attributes:
        name: Name in the table.
        floor: Name of the variant that it is compared with, empty for floors themselves.
        step: Makes one denoiser call.
        tick: What happens between calls; not timed.
        model: The model.
        handle_of: The wrapped pipeline, for variants of diffcache.
        sites: Module sites that a skipped step estimates, 0 where the floor is a model's.
        samples: Seconds of the timed calls.
    """

    name: str
    floor: str
    step: Callable[[], Any]
    model: nn.Module
    tick: Callable[[], None] = lambda: None
    loop: Loop | None = None
    sites: int = 0
    calls: int = 5
    samples: list[float] = field(default_factory=list)


def methods() -> dict[str, tuple[FeatureMethod, str]]:
    """Return the methods of diffcache to time, with their floors."""
    taylor = {
        f"TaylorSeer {site}": (
            TaylorSeer(NEVER, 1, site=site),
            f"{site} rest" if Site.of(site).is_module else "0 blocks",
        )
        for site in ("stack", "block", "attention", "feed-forward", "module")
    }
    return {
        **taylor,
        "Interval stack": (Interval(NEVER), "0 blocks"),
        "FirstBlock": (FirstBlock(float("inf")), "1 block"),
        "ConfidenceGatedTaylor": (ConfidenceGatedTaylor(float("inf")), "1 block"),
    }


def peers(steps: int) -> dict[str, tuple[Any, str]]:
    """Return the configurations of diffusers to time, with their floors."""
    lite = TaylorSeerCacheConfig(
        cache_interval=NEVER, use_lite_mode=True, taylor_factors_dtype=torch.float32
    )
    mag = MagCacheConfig(
        threshold=1e9, max_skip_steps=NEVER, retention_ratio=0.0, num_inference_steps=steps,
        mag_ratios=[1.0] * steps,
    )  # fmt: skip
    attention = TaylorSeerCacheConfig(cache_interval=NEVER, taylor_factors_dtype=torch.float32)
    return {
        "diffusers MagCache": (mag, "0 blocks"),
        "diffusers TaylorSeer lite": (lite, "0 blocks"),
        "diffusers FirstBlockCache": (FirstBlockCacheConfig(threshold=1e9), "1 block"),
        "diffusers TaylorSeer": (attention, "attention rest"),
    }


def module_paths(model: nn.Module, site: str) -> list[str]:
    """Return the modules that a module site replaces, with those a fused block leaves out."""
    entries = diffcache.inspect(model).modules_at(Site.of(site))
    return [f"{entry.parent}.{entry.child}" for entry in entries]


class Overhead:
    """Variants side by side, on models of the same weights.

    Args:
        setting: Device, dtype and thread count.
        shape: Sizes of the model.
        steps: Steps that will be taken at most.
    """

    def __init__(self, setting: Setting, shape: Shape, steps: int) -> None:
        self.setting, self.shape, self.steps = setting, shape, steps
        self.call = inputs(shape, setting.device, setting.dtype)
        self.variants: dict[str, Variant] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Overhead:
        self._stack.enter_context(torch.no_grad())
        self._stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        self._floors()
        for name, (method, floor) in methods().items():
            self._ours(name, method, floor)
        for name, (config, floor) in peers(self.steps).items():
            self._peer(name, config, floor)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _model(self, **changes: int) -> nn.Module:
        sizes = {**vars(self.shape), **changes}
        return build(Shape(**sizes), self.setting.device, self.setting.dtype)

    def _add(self, name: str, floor: str, model: nn.Module, **more: Any) -> Variant:
        variant = Variant(name, floor, lambda: model(**self.call), model, **more)
        self.variants[name] = variant
        return variant

    def _floors(self) -> None:
        self._add("full step", "", self._model())
        self._add("0 blocks", "", self._model(double=0, single=0))
        self._add("1 block", "", self._model(double=1, single=0))
        for site in ("attention", "feed-forward", "module"):
            model = self._model()
            hollow_out(model, module_paths(model, site), self.call)
            self._add(f"{site} rest", "", model)

    def _ours(self, name: str, method: FeatureMethod, floor: str) -> None:
        model = self._model()
        loop = diffcache.wrap(Loop(model), method)
        self._stack.callback(diffcache.unwrap, loop)
        variant = self._add(name, floor, model, tick=lambda: loop.scheduler.step(), loop=loop)
        self._stack.enter_context(model.cache_context("cond"))
        loop.scheduler.set_timesteps(self.steps)
        for _ in range(_WARMUP):
            variant.step()
            variant.tick()
        counts = diffcache.report(loop).steps[-1].counts
        if not sum(skipped for _, skipped in counts.values()):
            raise RuntimeError(f"{method!r} skips nothing; the benchmark would time full steps")
        if Site.of(method.parts().site).is_module:
            variant.sites = sum(skipped for _, skipped in counts.values())

    def _peer(self, name: str, config: Any, floor: str) -> None:
        model = self._model()
        model.enable_cache(config)
        sites = self.shape.double + self.shape.single if floor.endswith("rest") else 0
        variant = self._add(name, floor, model, sites=sites)
        self._stack.enter_context(model.cache_context("cond"))
        for _ in range(_WARMUP):
            variant.step()

    def rounds(self, count: int) -> Iterator[int]:
        """Time every variant in turn, `count` times over.

        In its turn a variant makes one call that is not timed and finds the processor's caches
        cold, and then a few that are: skipped steps come in rows.
        """
        for number in range(count):
            for variant in self.variants.values():
                for call in range(1 + variant.calls):
                    started = time.thread_time()
                    variant.step()
                    seconds = time.thread_time() - started
                    self.setting.wait()
                    variant.tick()
                    if call:
                        variant.samples.append(seconds)
            yield number

    def rows(self) -> list[dict[str, Any]]:
        """Return what was measured, in microseconds."""
        cheap = {name: stats(v.samples, 1e6)["p10"] for name, v in self.variants.items()}
        rows = []
        for name, variant in self.variants.items():
            above = cheap[name] - cheap[variant.floor] if variant.floor else None
            rows.append({
                "name": name, "floor": variant.floor or None, "microseconds": stats(variant.samples, 1e6),
                "above_floor_us": above, "sites": variant.sites or None,
                "per_site_us": above / variant.sites if above is not None and variant.sites else None,
            })  # fmt: skip
        return rows
