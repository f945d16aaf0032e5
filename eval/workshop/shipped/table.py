"""Tables of methods on shipped models whose call takes more than a prompt.

A record is one like those of `diffcache eval`, so that `docs/figures.md`, `docs/methods.md` and
the plots are made of it in the same way. It grows row by row: an interrupted measurement goes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm

import diffcache
from diffcache.catalog import make_method
from diffcache.eval.cost.flops import count
from diffcache.eval.cost.interleave import measure
from diffcache.eval.metrics.intervals import share_change, share_interval
from diffcache.eval.record import FOLDER, Setting, envelope, values
from diffcache.eval.report.records import SCHEMA, checked
from diffcache.eval.runs.task import code_sha256, directory_sha256, versions
from diffcache.eval.workshop.figures import write_plot
from diffcache.features.base import Method
from diffcache.features.collect import Calibrated
from diffcache.files import read_json, write_json
from diffcache.run_report import Report

UNCACHED = "uncached"
ALL: list[str] = []
Rounds = Annotated[int, typer.Option(min=1, help="Timed calls of each method.")]
Only = Annotated[list[str], typer.Option(metavar="ROW", help="A row; may be repeated.")]
Row = dict[str, Any]
SETTING = Setting(torch.device("cpu"))


@dataclass(frozen=True)
class Drawn:
    """Results of the runs of one row.

    Attributes:
        outcomes: Metric -> outcome of every sample, bool [N].
        values: Values to compare with those of uncached samples, [N, ...].
        reports: Report of every run with its number of samples; none uncached.
    """

    outcomes: Mapping[str, Tensor]
    values: Tensor
    reports: Sequence[tuple[Report, int]] = ()


class Subject(ABC):
    """A shipped model with the methods that are measured on it.

    Attributes:
        name: Name of the model.
        directory: Directory of the saved model.
        methods: Catalogue names with settings, in the order of the rows.
        metrics: Metric -> title, unit and direction.
        about: Facts that the samples depend on, `samples`, `seed` and `steps` among them.
        pipe: The pipeline that methods are put on.
        plain: The pipeline that stays uncached, for seconds in turn.
    """

    name: str
    directory: Path
    methods: Sequence[tuple[str, Mapping[str, Any]]]
    metrics: Mapping[str, Mapping[str, Any]]
    about: Mapping[str, Any]
    pipe: Any
    plain: Any

    @abstractmethod
    def calibrated(self, method: Calibrated) -> Calibrated:
        """Return a method with its tables, measured on samples that are not drawn."""

    @abstractmethod
    def uncached(self) -> Drawn:
        """Return what the uncached pipeline makes."""

    @abstractmethod
    def draw(self, method: Method) -> Drawn:
        """Draw all samples with the pipeline, which is wrapped in the method."""

    @abstractmethod
    def fidelity(self, mine: Tensor, uncached: Tensor) -> dict[str, Any]:
        """Return intervals of how close a row's values are to the uncached ones."""

    @abstractmethod
    def one_step(self) -> dict[str, Any]:
        """Return the arguments of a call that takes one step for one sample."""

    @abstractmethod
    def timed(self, pipe: Any, method: Method) -> Callable[[], object]:
        """Return the call that is timed, of either pipeline."""

    @cached_property
    def step_flops(self) -> float:
        """Operations of one uncached step for one sample."""
        once = count(self.plain, self.one_step()).per_step
        assert once is not None  # nothing here is compiled
        return once

    def task(self) -> dict[str, Any]:
        """Return what must be equal for rows to be of the same measurement."""
        return {
            "model": self.name,
            "model_sha256": directory_sha256(self.directory),
            **self.about,
            "dtype": "float32",
            "device": "cpu",
            "threads": torch.get_num_threads(),
            "code_sha256": code_sha256(),
            "versions": versions(),
        }


def named(name: str, settings: Mapping[str, Any]) -> str:
    """Return a catalogue name with settings as on the command line: `taylorseer:every=5`."""
    text = ",".join(f"{key}={value}" for key, value in settings.items())
    return f"{name}:{text}" if text else name


def run(subject: Subject, file: Path, command: str, rounds: int, only: Sequence[str] = ()) -> dict[str, Any]:
    """Measure every row that the record does not have yet, write it after each, and plot it.

    Args:
        subject: The model.
        file: JSON file of the record.
        command: Command that measures it again.
        rounds: Timed calls of the uncached pipeline and of each method, at least 1.
        only: Rows to measure besides the uncached one; all by default.

    Returns:
        The record.

    Raises:
        ValueError: If a row is unknown, or `rounds` is out of range.
    """
    known = {named(name, settings): (name, settings) for name, settings in subject.methods}
    for name in only:
        if name not in known:
            raise ValueError(f"--only {name}: must be one of {', '.join(known)}")
    if rounds < 1:
        raise ValueError(f"--rounds {rounds}: must be at least 1")
    task = subject.task()
    before = read_json(file)
    kept = before if isinstance(before, dict) and before.get("task") == task else {}
    rows: dict[str, Row] = {row["name"]: row for row in kept.get("rows", [])}
    times: dict[str, Any] = kept.get("timing", {}).get("rows", {})
    wanted = [UNCACHED, *(only or known)]
    missing = [name for name in wanted if name not in rows]
    base = subject.uncached() if missing else None
    for name in tqdm(missing, desc=subject.name):
        assert base is not None
        if name == UNCACHED:
            rows[name] = _row(subject, name, None, base, base)
        else:
            called, settings = known[name]
            method = make_method(called, **settings)
            if isinstance(method, Calibrated):
                method = subject.calibrated(method)
            with diffcache.wrapped(subject.pipe, method):
                rows[name] = _row(subject, name, method, subject.draw(method), base)
                times |= _times(subject, name, method, rounds)
        warning = next((one["warning"] for one in times.values() if one["warning"]), None)
        body = {
            "schema": SCHEMA,
            "seed": subject.about["seed"],
            "task": task,
            "finished": all(name in rows for name in wanted),
            "metrics": dict(subject.metrics),
            "rows": list(rows.values()),
            "warnings": [],
            "timing": {"rows": times, "warning": warning},
        }
        kept = checked(envelope("eval", SETTING, command, body))
        write_json(file, kept)
    write_plot(kept, file.with_suffix(".png"))
    return kept


def draw_record(subject: Subject, module: str, options: Mapping[str, int], rounds: int, only: Sequence[str]) -> None:
    """Measure a subject, as the module of that name in this package does on a command line.

    Records of other seeds stand beside the first.
    """
    seed = subject.about["seed"]
    file = FOLDER / f"eval-{subject.name}-methods{f'-seed{seed}' if seed else ''}.json"
    said = [("rounds", rounds), *(("only", name) for name in only)]
    words = "".join(f" --{option} {value}" for option, value in (*options.items(), *said))
    run(subject, file, f"python -m diffcache.eval.workshop.shipped.{module}{words}", rounds, only)


def _row(subject: Subject, name: str, method: Method | None, mine: Drawn, base: Drawn) -> Row:
    """Return a row: cost by count, closeness to the uncached samples, outcomes."""
    quality: dict[str, Any] = {}
    for key, outcome in mine.outcomes.items():
        quality[key] = share_interval(outcome).to_dict()
        if method is not None:
            change = share_change(base.outcomes[key], outcome)
            quality[f"{key}_change"] = {**change.to_dict(), "paired": True}
    steps = int(subject.about["steps"])
    return {
        "name": name,
        "kind": UNCACHED if method is None else "method",
        "method": None if method is None else _described(method),
        "steps": steps,
        **_cost(mine.reports, steps, subject.step_flops),
        "fidelity": {} if method is None else subject.fidelity(mine.values, base.values),
        "quality": quality,
        "outcomes": {key: values(outcome) for key, outcome in mine.outcomes.items()},
    }


def _described(method: Method) -> str:
    """Return a method as text, without its tables."""
    if isinstance(method, Calibrated):
        return repr(replace(method, tables=None))  # type: ignore[type-var]
    return repr(method)


def _cost(reports: Sequence[tuple[Report, int]], steps: int, step_flops: float) -> Row:
    """Return operations, evaluations and bytes of one sample; uncached where nothing reports."""
    samples = sum(count for _, count in reports) or 1
    saved = 0.0
    for report, _ in reports:
        if report.flops_saved is None:
            raise ValueError(f"{report.method!r}: operations of compiled blocks are not counted")
        saved += report.flops_saved
    took = steps - saved / samples / step_flops
    ran = sum(report.computed * count for report, count in reports)
    skipped = sum(report.skipped * count for report, count in reports)
    return {
        "evaluations": took,
        "computed_steps": steps * (ran / (ran + skipped) if reports else 1.0),
        "flops": step_flops * took,
        "flops_ratio": steps / took,
        "held_bytes": max((report.peak_bytes // count for report, count in reports), default=0),
    }


def _times(subject: Subject, name: str, method: Method, rounds: int) -> dict[str, Any]:
    """Return the times of a method and of the uncached pipeline, in turn with each other."""
    turns = {UNCACHED: subject.timed(subject.plain, method), name: subject.timed(subject.pipe, method)}
    timings = measure(turns, rounds, 1, SETTING)
    return {name: {**timings.rows()[name], "warning": timings.warning}}
