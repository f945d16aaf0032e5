"""Evaluate and time a pipeline that is loaded, as it stands: adapters, offload, compiled blocks."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from diffcache.errors import MissingError
from diffcache.eval.methods import rows_of
from diffcache.offline.calibrate import with_steps
from diffcache.step import Site
from diffcache.targets import check_free, denoisers_of

NEEDED = ("torchmetrics", "matplotlib", "jinja2", "av")
SHOWN = (
    "evaluations", "flops_ratio", "ratio", "cpu_ratio", "held_bytes", "psnr_db", "lpips",
    "lpips_lite", "temporal_error", "fid", "fid_lite", "fid_lite_change", "fvd_lite",
    "fvd_lite_change", "clip_score", "pick_score",
)  # fmt: skip
# Settings of `evaluate` that are fields of `Task` and of `Plan`; all others go to the call.
_TASK = ("samples", "seed", "batch_size", "steps", "fps", "threads")
_PLAN = ("reference", "resize", "convention", "rounds", "memory", "reward")
_SAMPLES = 256  # samples where a list of prompts is named
_BATCH = 8


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Outcome of an evaluation or of timings.

    Attributes:
        record: Everything that was measured, as plain data; see `diffcache.eval.record`.
        folder: Folder of samples, record and report; None where nothing is kept.
        page: The report as one HTML page; None where there is none.
    """

    record: dict[str, Any]
    folder: Path | None = None
    page: Path | None = None

    @classmethod
    def of(cls, record: dict[str, Any]) -> Evaluation:
        """Return the outcome of a run; its folder and files leave the record."""
        files, folder = record.pop("files"), Path(record.pop("folder"))
        return cls(record, folder, next((Path(f) for f in files if f.endswith(".html")), None))

    def table(self) -> Any:
        """Return the table for `rich` to print."""
        from diffcache.eval.cost.latency import timed_table
        from diffcache.eval.report.table import terminal_table

        if "metrics" not in self.record:
            return timed_table(self.record)
        own = [key for key in self.record["metrics"] if key.startswith("reward_")]
        return terminal_table(self.record, (*SHOWN, *own))

    def print(self) -> None:
        """Print the table and its notes."""
        from diffcache.pipelines.demo.console import console

        screen = console()
        screen.print(self.table())
        for text in self.record["warnings"]:
            screen.print(f"note: {text}", highlight=False, markup=False)
        if self.folder is not None:
            page = self.page or self.folder
            text = f"wrote {self.folder}/record.json and {page}"
            screen.print(text, highlight=False, soft_wrap=True)

    def __str__(self) -> str:
        from diffcache.run_report import text_of

        return "\n".join([text_of(self.table()), *self.record["warnings"]])

    def _repr_html_(self) -> str:
        """Return the table and its notes as HTML, for notebooks."""
        from diffcache.run_report import html_of

        return html_of(self.table(), self.record["warnings"])


def evaluate(
    pipe: Any,
    methods: Sequence[Any] | Mapping[str, Any],
    prompts: Sequence[Any] | str | os.PathLike[str] = "",
    *,
    out: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Evaluation:
    """Measure cost and savings of methods on a loaded pipeline, as `diffcache eval` does.

    The pipeline runs as it stands: with its adapters, offloaded, quantized, or with compiled blocks; of a
    `diffcache.json` in the folder that it was loaded from it takes the defaults of its call. Samples are kept in a
    folder and never drawn twice; the same call goes on after an interrupt.

    Args:
        pipe: A pipeline of diffusers, not wrapped.
        methods: Methods, their names with or without settings, or a mapping from the names of rows. Caches of other
            libraries have names too, `diffusers/taylorseer:cache_interval=4`.
        prompts: Texts or class numbers, one a sample; or the name or file of a list that `diffcache eval --prompts`
            takes; empty for the one that suits the model.
        out: Folder of the run; None is `runs/NAME-HASH`.
        quiet: Show no progress.
        **settings: `samples`, `seed`, `batch_size`, `steps` or `num_inference_steps`, `fps`, `threads`; `rounds` of
            timed calls (10), `reference`, `resize`, `convention`, `memory`, `reward`, as in `diffcache eval`. Anything
            else goes to the pipeline's call, such as `height=512`, or `image=picture` of an editing pipeline, which
            all samples share.

    Returns:
        The outcome; `.print()` shows it, `.page` is the report.

    Raises:
        AttachError: If the pipeline is wrapped, or cannot be cached with a method.
        MissingError: If a package of `diffcache[eval]` is missing.
        RunError: If the folder holds a run of other settings.
        UnknownMethodError: If there is no method of a name.
        ValueError: If an argument or setting is out of its range, or not taken by the pipeline.

    Examples:
        >>> diffcache.evaluate(pipe, ["taylorseer:every=4", "first-block"], prompts).print()
        ... # doctest: +SKIP
    """
    plan = _plan(pipe, methods, prompts, None if out is None else Path(out), settings)
    from diffcache.eval.runs.measure import evaluate as measured
    from diffcache.eval.runs.ranks import shown

    with _as_it_was(pipe), shown(quiet) as progress:
        record = measured(plan, progress)
    if record is None:
        raise ValueError("processes beside the first one have no outcome; read it in the first")
    return Evaluation.of(record)


def latency(
    pipe: Any,
    methods: Sequence[Any] | Mapping[str, Any],
    prompts: Sequence[Any] | str | os.PathLike[str] = "",
    *,
    quiet: bool = False,
    **settings: Any,
) -> Evaluation:
    """Time a loaded pipeline uncached and under methods, in turn, as `diffcache eval latency` does.

    Args:
        pipe: A pipeline of diffusers, not wrapped.
        methods: As for `evaluate`.
        prompts: Prompts of the one batch that is timed, as for `evaluate`; if a list is named, one sample of it.
        quiet: Show no progress.
        **settings: As for `evaluate`.

    Returns:
        Medians and quartiles of the rounds; `.print()` shows them.

    Raises:
        AttachError: If the pipeline is wrapped, or cannot be cached with a method.
        MissingError: If a package of `diffcache[eval]` is missing.
        UnknownMethodError: If there is no method of a name.
        ValueError: If an argument or setting is out of its range, or not taken by the pipeline.

    Examples:
        >>> diffcache.latency(pipe, ["taylorseer", "first-block"]).print()  # doctest: +SKIP
    """
    count = settings.pop("batch_size", 1 if isinstance(prompts, (str, os.PathLike)) else len(prompts))
    given = {"samples": count, "batch_size": count, **settings}
    if settings.get("rounds", 1) == 0:
        raise ValueError("rounds=0: nothing would be timed; use 1 or more")
    with TemporaryDirectory() as folder:
        plan = _plan(pipe, methods, prompts, Path(folder) / "run", given)
        from diffcache.eval.cost.latency import measure
        from diffcache.eval.runs.ranks import shown

        with _as_it_was(pipe), shown(quiet) as progress:
            return Evaluation(measure(plan, progress))


@contextmanager
def _as_it_was(pipe: Any) -> Iterator[None]:
    """Keep a pipeline from drawing its own progress bars; restore these and torch's threads afterwards."""
    threads, bars = torch.get_num_threads(), dict(getattr(pipe, "_progress_bar_config", {}))
    pipe.set_progress_bar_config(**{**bars, "disable": True})
    try:
        yield
    finally:
        pipe.set_progress_bar_config(**bars)
        torch.set_num_threads(threads)


def check_extra() -> None:
    """Raise MissingError if a package that evaluations need is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingError(f"{', '.join(missing)} missing: pip install 'diffcache[eval]'")


def _plan(pipe: Any, methods: Any, prompts: Any, out: Path | None, settings: Mapping[str, Any]) -> Any:
    """Return the plan of an evaluation of a loaded pipeline."""
    check_extra()
    check_free(pipe, denoisers_of(pipe), Site.MODEL)
    if isinstance(methods, str) or not isinstance(methods, (Mapping, Sequence)):
        raise ValueError(f"methods={methods!r}: must be a list of methods, such as ['taylorseer']")
    settings = with_steps(settings)
    from diffcache.eval.runs.evaluate import Plan
    from diffcache.eval.runs.task import Task

    call = {name: v for name, v in settings.items() if name not in (*_TASK, *_PLAN)}
    inputs = {name: value for name, value in call.items() if not _is_plain(value)}
    given = {name: settings[name] for name in _TASK if name in settings}
    if not isinstance(prompts, (str, os.PathLike)):
        prompts = tuple(str(prompt) for prompt in prompts)
        if not prompts:
            raise ValueError("prompts=[]: give at least one, or the name of a list")
        given.setdefault("samples", len(prompts))
    given.setdefault("samples", _SAMPLES)
    given.setdefault("batch_size", 1 if inputs else min(_BATCH, given["samples"]))
    given.setdefault("threads", torch.get_num_threads())
    task = Task(
        type(pipe).__name__,
        prompts if isinstance(prompts, tuple) else str(prompts),
        call={name: value for name, value in call.items() if name not in inputs},
        **given,
    )
    chosen = {name: settings[name] for name in _PLAN if name in settings}
    return Plan(task, rows_of(methods), out, pipe=pipe, inputs=inputs, **chosen)


def _is_plain(value: Any) -> bool:
    """Return whether a value can be written to a record."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
