"""Measure drawn samples: scores, seconds in turn, peak memory; a record and its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from diffcache.errors import UnknownMethodError
from diffcache.eval.cost.clock import DenoiserClock
from diffcache.eval.cost.interleave import Turn, measure
from diffcache.eval.cost.peak_memory import Place, peak, peak_bytes
from diffcache.eval.methods import parse_method
from diffcache.eval.metrics import lite
from diffcache.eval.metrics.sets import Reference, quality
from diffcache.eval.record import Setting
from diffcache.eval.record import values as plain
from diffcache.eval.report.write import write_report
from diffcache.eval.runs import record as records
from diffcache.eval.runs import score
from diffcache.eval.runs.evaluate import WARM_UP, Plan, Run, draw_all, start
from diffcache.eval.runs.extractors import Columns, Extractors
from diffcache.eval.runs.folder import FILM, PREVIEW, ManifestError, remember
from diffcache.eval.runs.peers import Peer
from diffcache.eval.runs.ranks import Progress
from diffcache.eval.runs.task import Case, digest
from diffcache.eval.samples.clips import read_clip, write_preview
from diffcache.features.base import Method
from diffcache.features.combine import reuse_of
from diffcache.files import write_json
from diffcache.pipelines.demo.saved import DTYPES

_VALUES = 1024  # most samples of which a record keeps every value
_PREVIEWS = 3  # films of every case that a report plays


def evaluate(plan: Plan, progress: Progress) -> dict[str, Any] | None:
    """Draw, measure, and write record and report; finished parts are kept.

    Every process draws its share of the batches and scores it; the first one joins the values.

    Returns:
        The record, with the run's folder under `folder`; None in all processes but the first, and where scoring is
        no stage of the plan.

    Raises:
        FileNotFoundError: If there is no such model, or no such reference.
        MissingError: If the reference is of a network that is missing here.
        RunError: If the run's folder holds a run of other settings, or lacks samples that are not to be drawn.
        ManifestError: If samples in it cannot be read.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(plan.task.threads)
    try:
        run = start(plan, progress)
        try:
            cases = draw_all(run)
            if "score" not in plan.stages:
                return None
            drawn = score_share(run, cases)
        finally:
            run.ranks.close()
        return write(run, cases, drawn) if run.ranks.is_first else None
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Drawn:
    """Samples of a run, and the networks that read them."""

    samples: Mapping[str, score.Samples]  # samples of every case, by its name
    networks: Extractors
    place: Path  # folder of the features of real samples


def score_share(run: Run, cases: Sequence[Case]) -> Drawn:
    """Compute the values of the batches that fall to this process; they are kept.

    One batch is a piece of work for one thread, so that neither the number of threads nor of
    processes changes a value.
    """
    device = run.drawer.device
    networks = run.networks(str(device) if device.type == "cuda" else "cpu")
    samples = {case.name: samples_of(run, case) for case in cases}
    drawn = Drawn(samples, networks, run.folder / "reference")
    work: list[Callable[[], Any]] = []
    for mine in samples.values():
        base = None if mine is samples["uncached"] else samples["uncached"]
        work += [partial(score.batch_values, mine, b, base, networks) for b in run.share]
    if run.real is not None:
        parts = run.real.parts[run.ranks.index :: run.ranks.count]
        work += [partial(run.real.columns, part, networks, drawn.place) for part in parts]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with run.timed("score"), ThreadPoolExecutor(run.ranks.workers) as pool:
            for number, _ in enumerate(pool.map(lambda piece: piece(), work), 1):
                run.progress.say(f"score, batch {number} of {len(work)}")
    finally:
        torch.set_num_threads(threads)
    run.ranks.wait()
    return drawn


def write(run: Run, cases: Sequence[Case], drawn: Drawn) -> dict[str, Any]:
    """Join the values of the cases; time them; write record and report."""
    first = drawn.samples["uncached"].first
    with run.timed("score"):
        base = score.values(drawn.samples["uncached"], None, drawn.networks)
        against = cache(lambda: reference(run, drawn))
        rows = [_row(run, case, drawn, base, against) for case in cases]
    timing: dict[str, Any] = {"rows": {}, "warning": None}
    if "time" in run.plan.stages:
        with run.timed("time"):
            timing = costs(run, cases)
    if first.ndim == 4:
        previews(run, cases, rows)
    record = records.assemble(run, rows, timing, drawn.networks, first)
    write_json(run.folder / "record.json", record)
    with run.timed("report"):
        files = write_report(record, run.folder)
    return {**record, "folder": str(run.folder), "files": [str(file) for file in files]}


def samples_of(run: Run, case: Case) -> score.Samples:
    """Return the samples of a case, all of which are drawn.

    Raises ManifestError if a file was taken away meanwhile.
    """
    folder = run.case_folder(case)
    done = folder.done(run.batches)
    gone = [batch.number for batch in run.batches if batch.number not in done]
    if gone:
        raise ManifestError(f"batch {gone[0]} of {folder.path} is gone; run the command again")
    sums = {
        i: file["sha256"]
        for batch in run.batches
        for i, file in zip(batch.ids, done[batch.number]["files"], strict=True)
    }
    return score.Samples(folder, tuple(run.batches), sums)


def _row(run: Run, case: Case, drawn: Drawn, base: Columns, against: Callable[[], Reference | None]) -> dict[str, Any]:
    """Return the row of a case; slow results are kept."""
    run.progress.say(f"score {case.name}")
    mine, uncached = drawn.samples[case.name], drawn.samples["uncached"]
    values = base if mine is uncached else score.values(mine, uncached, drawn.networks)
    real = records.reference_name(run), run.real and run.real.identity
    parts = [mine.content, uncached.content, drawn.networks.identity, real]
    shown = {key: values[key] for key in values if key == "psnr_db" or key.startswith("reward_")}
    measured: dict[str, Any] = {
        "fidelity": {},
        "samples": {"count": len(mine.ids)},
        "values": {key: plain(each) for key, each in shown.items() if len(each) <= _VALUES},
    }
    if mine is not uncached:
        measured["fidelity"], measured["samples"] = score.fidelity(values, mine.ids)
    measured["quality"] = remember(
        mine.folder.path / "quality.json",
        digest([score.DEFINITION, *parts]),
        lambda: quality(values, base, against(), run.is_film),
    )
    return records.row(run, case, measured)


def reference(run: Run, drawn: Drawn) -> Reference | None:
    """Return the real samples to compare with, None where there are none.

    Raises ValueError if one of them is a damaged file.
    """
    if run.real is not None:
        return run.real.reference(drawn.networks, drawn.place)
    name = records.reference_name(run)
    if name is None:
        return None
    shipped = lite.reference()
    if run.is_film:
        return Reference(name, {"_lite": (shipped.films, None)})
    return Reference(name, {"_lite": (shipped.moments, shipped.features)})


def previews(run: Run, cases: Sequence[Case], rows: Sequence[Mapping[str, Any]]) -> None:
    """Encode the films that a report shows for viewing, in a folder of their own."""
    wanted = {i for row in rows for i in row["samples"].get("worst", [])[:_PREVIEWS]}
    for case in cases:
        folder = run.case_folder(case)
        for number in sorted(wanted):
            target = folder.path / PREVIEW.format(number)
            if not target.exists():
                target.parent.mkdir(exist_ok=True)
                film = read_clip(folder.path / FILM.format(number))
                assert run.drawer.fps is not None  # without it no film could have been written
                write_preview(target, film, run.drawer.fps)


UNTIMED_STEPS = 4  # masks of steps need at least as many


def costs(run: Run, cases: Sequence[Case]) -> dict[str, Any]:
    """Return `rows` (case -> seconds, ratio, throughput, bytes) and a `warning` or None.

    They are kept until settings, device or the samples of a call change, and empty where nothing is to be timed.
    Raises MeasureError if a process failed whose memory was to be measured.
    """
    setting = Setting(run.drawer.device, DTYPES[run.drawer.dtype])
    names = [(case.name, case.digest(run.drawer.about)) for case in cases]
    size = len(run.batches[0].ids)  # of few samples it is less than that of a batch
    key = digest([names, run.plan.rounds, setting.device_name, size])
    kept: dict[str, Any] = {"rows": {}, "warning": None}
    if run.plan.rounds:
        place = run.folder / "times.json"
        kept = remember(place, key, lambda: _times(run, cases, setting))
        left = run.progress.total - run.progress.done  # calls whose times were kept
        run.progress.advance(left, "time", drawn=False)
    if run.plan.memory or setting.device.type == "cuda":
        key = digest([names, setting.device_name, size])
        peaks = remember(run.folder / "memory.json", key, lambda: _peaks(run, cases))
        for name, count in peaks.items():
            kept["rows"].setdefault(name, {})["peak_bytes"] = count
    return kept


def _times(run: Run, cases: Sequence[Case], setting: Setting) -> dict[str, Any]:
    turns = {case.name: _Turns(run, case, setting).turn() for case in cases}
    size = len(run.batches[0].ids)

    def show(done: int, total: int, name: str) -> None:
        run.progress.advance(size if done else 0, f"time {name}, {done} of {total}")

    timings = measure(turns, run.plan.rounds, WARM_UP, replace(setting, progress=show))
    return {"rows": timings.rows(size), "warning": timings.warning}


class _Turns:
    """A case's turns: the cache goes in, learns in a few untimed steps, then one batch is timed.

    The first batch of the run is drawn.
    """

    def __init__(self, run: Run, case: Case, setting: Setting) -> None:
        self.run, self.case, self.setting = run, case, setting
        self.clock = DenoiserClock(run.drawer.pipe, setting)

    def turn(self) -> Turn:
        """Return the turn of this row in interleaved timing."""
        return Turn(self.draw, self.within, self.prepare, self.readings)

    def draw(self) -> None:
        """Draw the batch."""
        self.run.drawer.draw(self.case, self.run.batches[0], timed=True)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Put the cache in for a turn, and the clock around it."""
        with self.run.drawer.wrapped(self.case), self.clock:
            yield

    def prepare(self) -> None:
        """Draw a few steps untimed, or all for a method that is made for their number; reset."""
        steps = self.case.steps if self._is_bound() else min(UNTIMED_STEPS, self.case.steps)
        short = Case(self.case.name, self.case.kind, steps, self.case.method)
        self.run.drawer.draw(short, self.run.batches[0], timed=True)
        self.clock.reset()
        self.setting.wait()

    def _is_bound(self) -> bool:
        method = self.case.method
        if not isinstance(method, Method):
            return False
        reuse = reuse_of(method)
        return bool(method.total or (reuse is not None and reuse.when.total))

    def readings(self) -> Mapping[str, float | None]:
        """Return seconds within the denoiser."""
        return {"denoiser_seconds": self.clock.seconds}


def _peaks(run: Run, cases: Sequence[Case]) -> dict[str, int]:
    """Return the most memory in use in a call of each case.

    On an accelerator what torch allocated, in this process, which holds the weights already; on
    the CPU resident memory, which only a fresh process can tell.
    """
    task, batch = run.plan.task, run.batches[0]
    found = {}
    for case in cases:
        run.progress.say(f"memory of {case.name}")
        if run.drawer.device.type == "cuda":
            turns = _Turns(run, case, Setting(run.drawer.device))
            with turns.within():
                turns.prepare()
                found[case.name] = peak(turns.draw, run.drawer.device)
            continue
        method = None if case.method is None else _spelled(case.method)
        if method is None and case.method is not None:
            continue  # the fresh process makes what words can say
        call = run.drawer.arguments(batch, case.steps)
        call.pop("generator", None)  # noise takes the same memory whatever its seed
        # The folder is that of the revision already.
        place = Place("cpu", run.drawer.dtype, task.threads, replace(task.loading, revision=""))
        found[case.name] = peak_bytes(str(run.drawer.directory), method, call, place)
    return found


def _spelled(method: Method | Peer) -> str | None:
    """Return the text from which `parse_method` makes a method: its name and all its settings, None for no such text.

    There is none for peers, for methods that are in no catalogue, and for those that hold another method.
    """
    text = f"{method.name}:{repr(method).partition('(')[2][:-1]}"
    try:
        return text if repr(parse_method(text)) == repr(method) else None
    except (UnknownMethodError, ValueError):
        return None
