"""A pipeline timed uncached and under methods, in turn.

There is one pipeline, whatever its size: a cache is put in for a turn and taken out again. A cache
learns how a model is wired in the first call after it is put in, which takes longer than the
others; so every turn, the uncached one too, starts with an untimed run of two steps.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import diffcache
from diffcache.command import device_of
from diffcache.eval.cost.clock import DenoiserClock
from diffcache.eval.cost.energy import Joules
from diffcache.eval.cost.flops import Counted, count, evaluations
from diffcache.eval.cost.interleave import Progress, Timings, Turn, measure, summary
from diffcache.eval.cost.memory import Peak, Place, peak, peak_bytes
from diffcache.eval.methods import parse_method
from diffcache.eval.record import Setting, envelope
from diffcache.pipelines.demo import saved
from diffcache.pipelines.demo.inputs import class_number, needed_inputs
from diffcache.pipelines.load import load
from diffcache.report import Report
from diffcache.timeline import steps_of

UNCACHED = "uncached"
_PROMPT = "a small red ring on the left, on a yellow background"
_SHORT = 2  # steps of the run that a turn starts with


@dataclass(frozen=True)
class Plan:
    """What to time.

    Attributes:
        model: Directory of a saved pipeline, or the name of a shipped one.
        methods: Such as `taylorseer:every=4`; each is a row, beside the uncached one.
        call: Arguments of the pipeline's call.
        prompt: What to draw; a class number for class-conditional pipelines.
        batch_size: Samples a call.
        rounds: Timed calls of each row.
        warmup: Untimed rounds before.
        place: Device, dtype and threads.
        memory: Whether to measure peak memory, in a process for each row.
    """

    model: str
    methods: tuple[str, ...] = ()
    call: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = ""
    batch_size: int = 1
    rounds: int = 7
    warmup: int = 1
    place: Place = field(default_factory=Place)
    memory: bool = False

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("rounds", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
        for name, value in self.call.items():
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if self.place.threads < 1:
            raise ValueError(f"threads={self.place.threads}: must be at least 1")
        doubles = [name for name in self.methods if self.methods.count(name) > 1]
        if doubles or UNCACHED in self.methods:
            raise ValueError(f"--method {(doubles or [UNCACHED])[0]}: is a row already")


class Bench:
    """A pipeline, and the turns that its rows take.

    Args:
        plan: What to time.

    Raises:
        FileNotFoundError: If there is no such pipeline.
        UnknownMethodError: If a method is unknown.
        ValueError: If a setting is wrong, or the pipeline does not take an argument of the call.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.methods = {text: parse_method(text) for text in plan.methods}
        device = device_of(plan.place.device)
        torch.set_num_threads(plan.place.threads)
        directory = saved.locate(plan.model)
        self.dtype = saved.dtype_of(plan.place.dtype, directory, device)
        self.pipe, defaults = load(plan.model, self.dtype, str(device), plan.place.loading)
        self.pipe.set_progress_bar_config(disable=True)
        self.setting = Setting(device, saved.DTYPES[self.dtype])
        self.taken = inspect.signature(type(self.pipe).__call__).parameters
        self.call = self._call(defaults)
        self.clock = DenoiserClock(self.pipe, self.setting)
        self.reports: dict[str, Report] = {}
        self._energy = Joules(device)

    def _call(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the call, plain data."""
        plan, taken = self.plan, self.taken
        unknown = sorted(set(plan.call) - set(taken))
        if unknown:
            raise ValueError(f"{type(self.pipe).__name__} takes no {unknown[0]}")
        name = type(self.pipe).__name__
        inputs = needed_inputs(name, taken)
        if inputs:
            raise ValueError(f"{name} works on {inputs[0]}: only pipelines without can be timed")
        call = {**{k: v for k, v in defaults.items() if k in taken}, **plan.call}
        if "prompt" in taken:
            call["prompt"] = [plan.prompt or _PROMPT] * plan.batch_size
        elif "class_labels" in taken:
            call["class_labels"] = [class_number(self.pipe, plan.prompt or "0")] * plan.batch_size
        elif "batch_size" in taken:
            call["batch_size"] = plan.batch_size
        return call

    def draw(self, short: bool = False) -> None:
        """Call the pipeline, in full or for two steps, always from the same noise."""
        call = dict(self.call)
        if short and "num_inference_steps" in self.taken:
            call["num_inference_steps"] = min(_SHORT, call.get("num_inference_steps", _SHORT))
        if "generator" in self.taken:
            call["generator"] = torch.Generator("cpu").manual_seed(0)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", diffcache.CacheWarning)  # the record tells it
            self.pipe(**call)

    def turn(self, name: str) -> Turn:
        """Return the turn of a row."""
        return Turn(self.draw, lambda: self._within(name), self._prepare,
                    lambda: self._readings(name))  # fmt: skip

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        method = self.methods.get(name)
        if method is not None:
            diffcache.wrap(self.pipe, method)
        try:
            with self.clock:
                yield
        finally:
            self._energy.stop()
            if method is not None:
                diffcache.unwrap(self.pipe)

    def _prepare(self) -> None:
        self.draw(short=True)
        self.clock.reset()
        self.setting.wait()
        self._energy.start()  # before the timed call: NVML takes milliseconds to start

    def _readings(self, name: str) -> dict[str, float | None]:
        self._energy.stop()
        if name in self.methods:
            self.reports[name] = diffcache.report(self.pipe)
        return {"denoiser_seconds": self.clock.seconds, "joules": self._energy.joules}

    def peak(self, name: str) -> Peak:
        """Return the peak memory of a row on an accelerator."""
        with self._within(name):
            self._prepare()
            return peak(self.draw, self.setting.device)

    def count(self) -> Counted:
        """Count the operations of a run of two steps, uncached."""
        call = {**self.call, "num_inference_steps": _SHORT}
        return count(self.pipe, {k: v for k, v in call.items() if k in self.taken})

    def notes(self, timings: Timings, counted: Counted) -> list[str]:
        """Return what a reader should know before believing the numbers."""
        found = [timings.warning, counted.reason]
        if self.setting.device.type == "cuda":
            found.append(self._energy.reason)
        found += [f"{n} skipped nothing" for n, r in self.reports.items() if not r.skipped]
        return [text for text in found if text]


def run(plan: Plan, command: str = "", progress: Progress | None = None) -> dict[str, Any]:
    """Time a pipeline uncached and under methods.

    Args:
        plan: What to time.
        command: That measures it again, for the record.
        progress: Told (calls done, calls in all, name of the next).

    Returns:
        The record: see `diffcache.eval.record`; `warnings` is a list of sentences.

    Raises:
        FileNotFoundError: If there is no such pipeline.
        AttachError: If it cannot be cached with a method.
        UnknownMethodError: If a method is unknown.
        ValueError: If an argument is wrong.
    """
    started = time.monotonic()
    bench = Bench(plan)
    counted = bench.count()
    names = [UNCACHED, *plan.methods]
    timings = measure({name: bench.turn(name) for name in names}, plan.rounds, plan.warmup,
                      bench.setting, progress)  # fmt: skip
    steps = bench.clock.calls * counted.steps / len(counted.calls)
    denoiser = timings.ratios("denoiser_seconds")
    rows = []
    for name, times in timings.rows(plan.batch_size).items():
        cost = _cost(bench.reports.get(name), counted, steps)
        row = {"name": name, **cost, **times, "denoiser_ratio": summary(denoiser[name])}
        rows.append({**row, **_peak(plan, bench, name)})
    body = {
        "shapes": {"device": bench.setting.device.type, "model": plan.model, **bench.call,
                   "batch_size": plan.batch_size},
        "rounds": plan.rounds, "warmup": plan.warmup, "load": timings.load,
        "seconds": round(time.monotonic() - started, 1), "rows": rows,
        "warnings": bench.notes(timings, counted),
    }  # fmt: skip
    return envelope("latency", bench.setting, command, body)


def _cost(report: Report | None, counted: Counted, steps: float) -> dict[str, Any]:
    """Return what is counted of a run: steps, evaluations, operations, bytes held."""
    full = counted.per_step
    if report is None:
        total, took = float(steps), float(steps)
        found: dict[str, Any] = {"computed_steps": steps, "held_bytes": 0}
    else:
        total = float(len(steps_of(report.calls)))
        cost = None if full is None else evaluations(report, full)
        took = float(report.steps_computed) if cost is None else cost
        found = {"computed_steps": report.steps_computed, "held_bytes": report.peak_bytes}
    known = full is not None and (report is None or report.flops_saved is not None)
    return {
        "steps": total, "evaluations": took, **found,
        "flops": full * took if full is not None and known else None,
        "flops_ratio": total / took if known else None,
    }  # fmt: skip


def _peak(plan: Plan, bench: Bench, name: str) -> dict[str, Any]:
    if not plan.memory:
        return {}
    place = plan.place
    if bench.setting.device.type == "cuda":  # here: a second copy may not fit
        found = bench.peak(name)
    else:
        place = Place(str(bench.setting.device), bench.dtype, place.threads)
        method = None if name == UNCACHED else name
        found = peak_bytes(plan.model, method, {**bench.call, "seed": 0}, place)
    return {"peak_bytes": found.peak_bytes, "loaded_bytes": found.loaded_bytes,
            "reserved_bytes": found.reserved_bytes}  # fmt: skip
