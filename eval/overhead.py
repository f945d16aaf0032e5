"""Host time of a skipped step above its floor, on a deep and narrow FLUX with random weights.

The floor of a method that skips every block is the same model without blocks (embedders and head);
of one that runs the first block, the model with that one block; of a method at module sites, the
model whose modules are replaced by ones that return a ready tensor. The 10th percentile over
interleaved rounds is compared: what the machine's other work adds is left out. Calls are made
inside a `cache_context` that is open already, whose own cost stands in a column of its own.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig
from rich.progress import track
from rich.table import Table

import diffcache
from diffcache.eval.loop import Loop
from diffcache.eval.record import Setting, stats
from diffcache.eval.stamps import Stamps, arithmetic
from diffcache.eval.tiny import Shape, build, hollow_out, inputs
from diffcache.features.base import Method
from diffcache.features.confidence_gated import ConfidenceGatedTaylor
from diffcache.features.first_block import FirstBlock
from diffcache.features.interval import Interval
from diffcache.features.taylorseer import TaylorSeer
from diffcache.step import Site

NEVER = 10**9  # an interval that no run reaches the end of
TARGETS = {"TaylorSeer stack": 130.0, "TaylorSeer block": 300.0}  # microseconds above the floor
SITE_TARGET = 15.0  # microseconds a module site
_SITES = ("attention", "feed-forward", "module")
_WARMUP = 8  # calls until every variant skips


@dataclass
class Variant:
    """One model to time.

    Attributes:
        name: Name in the table.
        floor: Name of the variant that it is compared with, empty for floors themselves.
        model: The model.
        tick: What happens between calls; not timed.
        sites: Module sites that a skipped step estimates, 0 where the floor is a model's.
        calls: Timed calls a round.
        samples: Seconds of the timed calls.
        contexts: Seconds of opening and closing a `cache_context`.
    """

    name: str
    floor: str
    model: Any
    tick: Callable[[], None] = lambda: None
    sites: int = 0
    calls: int = 5
    samples: list[float] = field(default_factory=list)
    contexts: list[float] = field(default_factory=list)


def methods() -> dict[str, tuple[Method, str]]:
    """Return the methods of diffcache to time, with their floors."""
    taylor: dict[str, tuple[Method, str]] = {
        f"TaylorSeer {site}": (
            TaylorSeer(NEVER, 1, site=site), f"{site} rest" if site in _SITES else "0 blocks"
        )
        for site in ("stack", "model", "block", *_SITES)
    }  # fmt: skip
    return {
        **taylor,
        "Interval stack": (Interval(NEVER), "0 blocks"),
        "FirstBlock": (FirstBlock(float("inf")), "1 block"),
        "ConfidenceGatedTaylor": (ConfidenceGatedTaylor(float("inf")), "1 block"),
    }


def peers(steps: int) -> dict[str, tuple[Any, str]]:
    """Return the configurations of diffusers to time, with their floors."""
    lite, attention = (
        TaylorSeerCacheConfig(
            cache_interval=NEVER, use_lite_mode=lite, taylor_factors_dtype=torch.float32
        )
        for lite in (True, False)
    )
    mag = MagCacheConfig(
        threshold=1e9, max_skip_steps=NEVER, retention_ratio=0.0, num_inference_steps=steps,
        mag_ratios=[1.0] * steps,
    )  # fmt: skip
    return {
        "diffusers MagCache": (mag, "0 blocks"),
        "diffusers TaylorSeer lite": (lite, "0 blocks"),
        "diffusers FirstBlockCache": (FirstBlockCacheConfig(threshold=1e9), "1 block"),
        "diffusers TaylorSeer": (attention, "attention rest"),
    }


class Bench:
    """Variants side by side, on models of the same weights; a context manager.

    Args:
        setting: Device and dtype.
        shape: Sizes of the model.
        rounds: Rounds that will be timed.
    """

    def __init__(self, setting: Setting, shape: Shape, rounds: int) -> None:
        self.setting, self.shape, self.rounds = setting, shape, rounds
        self.call = inputs(shape, setting.device, setting.dtype)
        self.variants: dict[str, Variant] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Bench:
        self._stack.enter_context(torch.no_grad())
        self._stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        self._floors()
        for name, (method, floor) in methods().items():
            self._ours(name, method, floor)
        for name, (config, floor) in peers(_WARMUP + 6 * self.rounds).items():
            model = self._model()
            model.enable_cache(config)
            sites = self.shape.double + self.shape.single if floor.endswith("rest") else 0
            self._add(name, floor, model, sites=sites)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _model(self, **changes: int) -> Any:
        return build(replace(self.shape, **changes), self.setting.device, self.setting.dtype)

    def _add(self, name: str, floor: str, model: Any, **more: Any) -> Variant:
        variant = self.variants[name] = Variant(name, floor, model, **more)
        if name == "full step" or "rest" in name + floor:
            variant.calls = 2
        with model.cache_context("cond"):
            for _ in range(_WARMUP):
                model(**self.call)
                variant.tick()
        return variant

    def _floors(self) -> None:
        self._add("full step", "", self._model())
        self._add("0 blocks", "", self._model(double=0, single=0))
        self._add("1 block", "", self._model(double=1, single=0))
        for site in _SITES:
            model = self._model()
            entries = diffcache.inspect(model).modules_at(Site.of(site))
            hollow_out(model, [f"{entry.parent}.{entry.child}" for entry in entries], self.call)
            self._add(f"{site} rest", "", model)

    def _ours(self, name: str, method: Method, floor: str) -> None:
        model = self._model()
        loop = self._stack.enter_context(Loop(model, method, self.call))
        variant = self._add(name, floor, model, tick=loop.tick)
        counts = diffcache.report(loop).calls[-1].counts
        skipped = sum(left_out for _, left_out in counts.values())
        if not skipped:
            raise RuntimeError(f"{method!r} skips nothing; the benchmark would time full steps")
        variant.sites = skipped if floor.endswith("rest") else 0

    def run(self) -> Iterator[int]:
        """Time every variant in turn, round after round.

        In its turn a variant makes one call that is not timed and finds the processor's caches
        cold, and then a few that are: skipped steps come in rows.
        """
        for number in range(self.rounds):
            for variant in self.variants.values():
                self._turn(variant)
            yield number

    def _turn(self, variant: Variant) -> None:
        model, call = variant.model, self.call
        started = time.thread_time()
        with model.cache_context("cond"):
            pass
        variant.contexts.append(time.thread_time() - started)
        with model.cache_context("cond"):
            for number in range(1 + variant.calls):
                started = time.thread_time()
                model(**call)
                seconds = time.thread_time() - started
                self.setting.wait()
                variant.tick()
                if number:
                    variant.samples.append(seconds)

    def rows(self) -> list[dict[str, Any]]:
        """Return what was measured, in microseconds."""
        cheap = {name: stats(v.samples, 1e6)["p10"] for name, v in self.variants.items()}
        rows = []
        for name, variant in self.variants.items():
            above = cheap[name] - cheap[variant.floor] if variant.floor else None
            sites = variant.sites or None
            is_ours = not name.startswith("diffusers")
            rows.append({
                "name": name,
                "step_us": stats(variant.samples, 1e6),
                "floor": variant.floor or None,
                "above_floor_us": above,
                "sites": sites,
                "above_floor_us_a_site": above / sites if above is not None and sites else None,
                "cache_context_us": stats(variant.contexts, 1e6)["p10"],
                "target_us": TARGETS.get(name),
                "target_us_a_site": SITE_TARGET if sites and is_ours else None,
            })  # fmt: skip
        return rows

    def anatomy(self, calls: int) -> list[dict[str, Any]]:
        """Return where the time of a skipped step goes, in microseconds (10th percentiles)."""
        names = ["0 blocks", "1 block", *(f"{site} rest" for site in _SITES), *methods()]
        stamps = {name: Stamps(self.variants[name].model) for name in names}
        for _ in range(max(calls // 2, 1)):
            for name, stamp in stamps.items():
                variant = self.variants[name]
                with variant.model.cache_context("cond"):
                    for number in range(3):
                        stamp.call(self.call, keep=number > 0)
                        self.setting.wait()
                        variant.tick()
        rows = []
        depth = self.shape.double + self.shape.single
        for name, stamp in stamps.items():
            floor = self.variants[name].floor
            reference = stamps[floor].parts()["body"] if floor else None
            stamp.remove()
            spans = {"TaylorSeer stack": 2, "TaylorSeer block": depth}.get(name)
            sums = spans and arithmetic(
                self.shape, spans, self.setting.device, self.setting.dtype, 20 * calls
            )
            rows.append({
                "name": name, **stamp.parts(), "floor_body": reference, "arithmetic": sums,
            })  # fmt: skip
        return rows


def measure(
    setting: Setting, *, rounds: int = 50, shape: Shape | None = None, bar: bool = False
) -> dict[str, Any]:
    """Measure the host time of skipped steps.

    Args:
        setting: Device and dtype.
        rounds: Rounds of a few calls of every variant.
        shape: Sizes of the model; those of FLUX.1 in depth by default.
        bar: Whether to show a progress bar.
    """
    shape = shape or Shape()
    started = time.monotonic()
    with Bench(setting, shape, rounds) as bench:
        for _ in track(bench.run(), "overhead", rounds, disable=not bar, transient=True):
            pass
        rows, anatomy = bench.rows(), bench.anatomy(rounds)
    return {
        "shapes": {
            "device": setting.device.type,
            "model": "tiny FLUX, random weights",
            **asdict(shape),
        },
        "rounds": rounds,
        "clock": "CPU time of the calling thread, 10th percentile",
        "seconds": round(time.monotonic() - started, 1),
        "rows": rows,
        "anatomy": anatomy,
    }


def tables(record: dict[str, Any]) -> list[Table]:
    """Return the record as tables."""
    shape = record["shapes"]
    title = f"host time of a skipped step, {shape['double']} + {shape['single']} blocks, µs"
    first = Table("", "step", "above floor", "floor", "a site", "target", "context", title=title)
    for row in record["rows"]:
        target = row["target_us"] or row["target_us_a_site"]
        per_site = row["above_floor_us_a_site"]
        first.add_row(
            row["name"], f"{row['step_us']['p10']:,.0f}",
            "" if row["floor"] is None else f"{row['above_floor_us']:+,.0f}", row["floor"] or "",
            "" if per_site is None else f"{per_site:.1f} x {row['sites']}",
            "" if target is None else f"{target:.0f}", f"{row['cache_context_us']:.0f}",
        )  # fmt: skip
    second = Table("", "before hooks", "open", "body", "of floor", "forecasts alone", "close",
                   "after hooks",
                   title="where it goes, µs")  # fmt: skip
    for row in record["anatomy"]:
        keys = ("enter", "open", "body", "floor_body", "arithmetic", "close", "leave")
        numbers = [row[key] for key in keys]
        second.add_row(row["name"], *["" if n is None else f"{n:,.1f}" for n in numbers])
    return [first, second]
