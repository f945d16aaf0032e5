"""From drawn samples to a record: scores, errors of stand-ins, time, and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diffcache.eval.clips import read_clip, write_preview
from diffcache.eval.folders import open_samples
from diffcache.eval.metrics import lite
from diffcache.eval.metrics.frechet import moments
from diffcache.eval.oracle import observe
from diffcache.eval.report.write import write_report
from diffcache.eval.runs import record as records
from diffcache.eval.runs import score
from diffcache.eval.runs.cost import costs
from diffcache.eval.runs.evaluate import Plan, Run, draw_all, start
from diffcache.eval.runs.extractors import Extractors, at_hand
from diffcache.eval.runs.folder import FILM, PREVIEW, ManifestError, remember
from diffcache.eval.runs.progress import Progress
from diffcache.eval.runs.quality import Reference, quality
from diffcache.eval.runs.task import Case, digest
from diffcache.features.base import Method
from diffcache.files import write_json

_PREVIEWS = 3  # films of every case that a report plays
_NEIGHBOURS = 2000  # real samples that KID, precision and the like look at


def evaluate(plan: Plan, progress: Progress) -> dict[str, Any] | None:
    """Draw, measure, and write record and report; whatever is done already is kept.

    Every process draws; the first one measures.

    Args:
        plan: What to evaluate.
        progress: What is shown meanwhile.

    Returns:
        The record, with the run's folder under `folder`; None in all processes but the first.

    Raises:
        FileNotFoundError: If there is no such model, or no such reference.
        RunError: If the run's folder holds a run of other settings.
        ManifestError: If samples in it cannot be read.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(plan.task.threads)  # of scores, too: they change the order of sums
    try:
        run = start(plan, progress)
        try:
            cases = draw_all(run)
        finally:
            run.ranks.close()
        return write(run, cases) if run.ranks.is_first else None
    finally:
        torch.set_num_threads(before)


def write(run: Run, cases: Sequence[Case]) -> dict[str, Any]:
    """Measure the drawn cases; write record and report."""
    found = {case.name: samples(run, case) for case in cases}
    uncached = found["uncached"]
    is_film = uncached.first.ndim == 4
    with run.timed("score"):
        extractors = at_hand(str(run.drawer.device), is_film, run.plan.reward)
        against = reference(run, extractors, is_film)
        rows = []
        for case in cases:
            run.progress.say(f"score {case.name}")
            rows.append(records.row(run, case, _scores(found, case, extractors, against, is_film)))
    with run.timed("errors of stand-ins"):
        for case, this in zip(cases, rows, strict=True):
            this["site_error"] = site_error(run, case)
    with run.timed("time"):
        timing = costs(run, cases)
    if is_film:
        previews(run, cases, rows)
    record = records.assemble(run, rows, timing, extractors, uncached.first)
    write_json(run.folder / "record.json", record)
    with run.timed("report"):
        files = write_report(record, run.folder)
    return {**record, "folder": str(run.folder), "files": [str(file) for file in files]}


def samples(run: Run, case: Case) -> score.Samples:
    """Return the samples of a case, all of which are drawn.

    Raises:
        ManifestError: If a file was taken away meanwhile.
    """
    folder = run.case_folder(case)
    done = folder.done(run.batches)
    gone = [batch.number for batch in run.batches if batch.number not in done]
    if gone:
        raise ManifestError(f"batch {gone[0]} of {folder.path} is gone; run the command again")
    sums = tuple(file["sha256"] for number in sorted(done) for file in done[number]["files"])
    ids = tuple(i for batch in run.batches for i in batch.ids)
    prompts = tuple(text for batch in run.batches for text in batch.prompts)
    return score.Samples(folder, ids, prompts, sums)


def _scores(
    found: Mapping[str, score.Samples],
    case: Case,
    extractors: Extractors,
    against: Reference | None,
    is_film: bool,
) -> dict[str, Any]:
    """Return fidelity and quality of a case; what takes time is kept."""
    mine, uncached = found[case.name], found["uncached"]
    base = score.quality_values(uncached, extractors)
    values = base if mine is uncached else score.quality_values(mine, extractors)
    parts = [mine.content, uncached.content, extractors.identity]
    key = digest([score.DEFINITION, *parts, None if against is None else against.identity])
    goodness = remember(
        mine.folder.path / "quality.json", key,
        lambda: quality(values, base, against, is_film),
    )  # fmt: skip
    if mine is uncached:
        return {"fidelity": {}, "quality": goodness, "samples": {"count": len(mine.ids)}}
    pairs = score.fidelity_values(mine, uncached, extractors)
    fidelity, ranking = score.fidelity(pairs, mine.ids)
    return {"fidelity": fidelity, "quality": goodness, "samples": ranking}


def reference(run: Run, extractors: Extractors, is_film: bool) -> Reference | None:
    """Return the real samples to compare with, None where there are none.

    Raises:
        FileNotFoundError: If the folder of the plan is not there.
        ValueError: If it holds nothing that can be read, or a damaged file.
    """
    name = records.reference_name(run)
    if name is None:
        return None
    if run.plan.reference is None:
        shipped = lite.reference()
        if is_film:
            return Reference(name, {"_lite": (shipped.films, None)})
        return Reference(name, {"_lite": (shipped.moments, shipped.features)})
    parts: dict[str, list[Tensor]] = {}
    for batch in open_samples(run.plan.reference, is_film):
        for key, column in extractors.of_real(batch).items():
            parts.setdefault(key.removeprefix("features"), []).append(column)
    sets = {}
    for ending, found in parts.items():
        features = torch.cat(found).double()
        sets[ending] = (moments(features), features[:_NEIGHBOURS])
    return Reference(name, sets)


def site_error(run: Run, case: Case) -> dict[str, Any] | None:
    """Return the error of every stand-in, by site and step, on the first batch; kept."""
    method = case.method
    if not isinstance(method, Method) or not run.plan.site_errors:
        return None
    batch = run.batches[0]
    key = digest([case.digest(run.drawer.about), batch.digest])

    def compute() -> dict[str, Any]:
        pipe = run.drawer.pipe
        found = observe(pipe, method, lambda: pipe(**run.drawer.arguments(batch, case.steps)))
        return {"sites": found.sites, "steps": found.steps, "values": found.values}

    kept: dict[str, Any] = remember(run.case_folder(case).path / "site-error.json", key, compute)
    return kept


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
                assert run.drawer.fps is not None  # or no film had been written
                write_preview(target, film, run.drawer.fps)
