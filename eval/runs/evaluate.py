"""Evaluate methods on a model: draw, measure, and put everything into one record."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from diffcache.errors import DiffcacheError
from diffcache.eval.cost.flops import count
from diffcache.eval.metrics import reward
from diffcache.eval.metrics.inception import CONVENTIONS
from diffcache.eval.runs.draw import Drawer, relative_errors
from diffcache.eval.runs.extractors import Extractors, at_hand
from diffcache.eval.runs.folder import (
    MARKER,
    Batch,
    CaseFolder,
    ManifestError,
    RunError,
    batches,
    check_claim,
    evaluations,
)
from diffcache.eval.runs.peers import Peer
from diffcache.eval.runs.ranks import Progress, Ranks, join
from diffcache.eval.runs.task import Case, Task, digest
from diffcache.eval.samples.sources import Source, Wish, open_source, summary
from diffcache.features.base import Method
from diffcache.files import read_json, write_file, write_json

FOLDER = Path("runs")
STAGES = ("draw", "score", "time")
WARM_UP = 1  # untimed rounds before the timed ones
LATENT_SAMPLES = 16  # the first ones, whose latents are compared step by step
_LATENT_BYTES = 1 << 28  # most bytes of a batch's latents that are kept
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Plan:
    """Plan of an evaluation."""

    task: Task
    methods: Mapping[str, Method | Peer]  # name in the table -> method
    out: Path | None = None  # folder of the run; None is `runs/<model>-<hash of the task>`
    # Real pictures or films: a folder, an npz of pictures, or one of statistics; None is the scenes of stickers
    # where prompts are of its lists
    reference: Path | None = None
    resize: int | None = None  # real pictures are scaled and cut to squares of so many pixels; None leaves them
    convention: str = "torch-fidelity"  # way of preparing pictures for Inception, `torch-fidelity` or `clean`
    stages: Sequence[str] = STAGES  # stages to run, of `STAGES`; the work of an earlier job is there already
    rounds: int = 10  # timed rounds of every case, 0 for none
    memory: bool = False  # measure peak memory, of each case in a process of its own (always on CUDA, in this process)
    reward: str = ""  # rewards of pictures for prompts, as `metrics.reward.load` takes them
    command: str = ""  # command that repeats the run, for the record
    pipe: Any = None  # a loaded pipeline to evaluate; the task's `model` is its name in tables then
    # Arguments of the call that are no plain data, such as a picture to edit; all samples share them
    inputs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rounds < 0:
            raise ValueError(f"rounds={self.rounds}: must be 0 (nothing is timed) or more")
        if "uncached" in self.methods:
            raise ValueError("methods: 'uncached' is the name of the first row; use another")
        for stage in self.stages or ("",):
            if stage not in STAGES:
                raise ValueError(f"stages: {stage!r}: must be of {', '.join(STAGES)}")
        if self.convention not in CONVENTIONS:
            raise ValueError(f"convention={self.convention!r}: must be one of {', '.join(CONVENTIONS)}")
        if self.resize is not None and (self.reference is None or self.resize < 1):
            raise ValueError(f"resize={self.resize}: must be a number of pixels, beside a reference to resize")


@dataclass
class Run:
    """A run under way: the objects that its parts share."""

    plan: Plan
    drawer: Drawer
    ranks: Ranks  # this process among those of the run
    progress: Progress
    real: Source | None = None  # real samples that `plan.reference` names, checked; None without a reference
    parts_seconds: dict[str, float] = field(default_factory=dict)  # wall time of every part

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        if self.plan.out is not None:
            return self.plan.out
        name = re.sub("[/:]", "--", self.drawer.name)
        return FOLDER / f"{name}-{self.identity[:8]}"

    @property
    def identity(self) -> str:
        """Sixteen hexadecimal digits of everything but methods and number of samples."""
        return digest({**self.drawer.about, "steps": self.drawer.steps})

    @property
    def is_film(self) -> bool:
        """Say whether the pipeline makes films."""
        return "num_frames" in self.drawer.parameters

    @property
    def in_words(self) -> bool:
        """Say whether prompts are texts, no class numbers."""
        return "prompt" in self.drawer.parameters

    @property
    def batches(self) -> list[Batch]:
        """All batches of a case."""
        task = self.plan.task
        return batches(self.drawer.prompts.texts, task.samples, task.batch_size, task.seed)

    @property
    def share(self) -> list[Batch]:
        """The batches that fall to this process."""
        return [b for b in self.batches if b.number % self.ranks.count == self.ranks.index]

    def networks(self, device: str) -> Extractors:
        """Return the back end that reads the samples, on a device."""
        plan = self.plan
        return at_hand(device, self.is_film, plan.reward, plan.convention, self.in_words)

    def case_folder(self, case: Case) -> CaseFolder:
        """Return the folder of a case."""
        path = self.folder / "cases" / case.folder(self.drawer.about)
        return CaseFolder(path, self.ranks.index, self.drawer.fps)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Note the wall time of a part."""
        self.progress.say(part)
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.parts_seconds[part] = round(self.parts_seconds.get(part, 0.0) + seconds, 3)


def start(plan: Plan, progress: Progress) -> Run:
    """Join the other processes, look at the model, and claim the run's folder.

    Raises:
        FileNotFoundError: If there is no such model, or no such reference.
        MissingError: If the reference is of a network that is missing here.
        RunError: If the folder holds a run of other settings.
        ValueError: If the reference or the reward cannot be read, or pictures of the reference differ in size.
    """
    ranks = join(plan.task.device)
    run = Run(plan, Drawer(plan.task, ranks, plan.pipe, plan.inputs), ranks, progress)
    if plan.memory and (plan.pipe is not None or plan.inputs) and run.drawer.device.type != "cuda":
        raise ValueError(
            "memory=True: the memory of a CPU is measured in fresh processes, which cannot "
            "be given a live pipeline or a picture; leave memory out"
        )
    mine = {"identity": run.identity, **run.drawer.about, "steps": run.drawer.steps}
    is_new = check_claim(run.folder, mine)
    if plan.reference is not None:
        run.real = open_source(plan.reference, Wish(run.is_film, plan.resize))
    if plan.reward:
        named = {name.strip() for name in plan.reward.split(",")}
        if named & set(reward.NAMES) and (run.is_film or not run.in_words):
            raise ValueError(f"reward {plan.reward}: scores pictures for texts, not films or classes; leave it out")
        reward.load(plan.reward)
    if ranks.is_first and "score" in plan.stages:
        networks = run.networks("cpu")  # only to check that they can be loaded
        if run.real is not None:
            run.real.check(networks)
        for line in summary(list(networks.entries), lacking(run, networks)):
            progress.note(line)
    run.ranks.wait()
    if is_new and ranks.is_first:
        write_json(run.folder / MARKER, mine)
    return run


def lacking(run: Run, networks: Extractors) -> dict[str, str]:
    """Return the real metrics that are left out, with the reason."""
    return networks.lacking | ({} if run.real is None else run.real.lacking())


def draw_all(run: Run) -> list[Case]:
    """Draw every case that is not drawn yet; uncached runs of fewer steps come last.

    The cases come in the order of the table: uncached, methods, fewer steps.
    """
    steps, count = run.drawer.steps, sum(len(batch.ids) for batch in run.share)
    uncached = Case("uncached", "uncached", steps)
    cases = [Case(name, "method", steps, method) for name, method in run.plan.methods.items()]
    run.progress.expect(count * (1 + 2 * len(cases)) + _timed(run, 1 + 2 * len(cases)))
    if "draw" in run.plan.stages:
        _try(run, cases)
    draw(run, uncached)
    run.ranks.wait()  # the others compare their latents with these
    for case in cases:
        draw(run, case, uncached)
    run.ranks.wait()
    fewer = fewer_steps(run, cases)
    rows = 1 + len(cases) + len(fewer)
    run.progress.expect(count * rows + _timed(run, rows))
    for case in fewer:
        draw(run, case)
    run.ranks.wait()
    return [uncached, *cases, *fewer]


def _timed(run: Run, rows: int) -> int:
    """Return the number of samples that the timed calls of `rows` rows draw at the end."""
    if not run.plan.rounds or not run.ranks.is_first or "time" not in run.plan.stages:
        return 0
    return rows * (run.plan.rounds + WARM_UP) * len(run.batches[0].ids)


def _try(run: Run, cases: Sequence[Case]) -> None:
    """Check the whole plan before hours are spent on a part of it.

    Raises AttachError if a method cannot be used with the pipeline, and RunError if the pipeline cannot draw a
    batch.
    """
    try:
        step_flops(run)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        if isinstance(error, DiffcacheError):
            raise
        raise RunError(
            f"{run.drawer.pipeline} cannot draw from prompts or class numbers alone "
            f"({type(error).__name__}: {error}); other arguments are passed with --call KEY=VALUE"
        ) from error
    mine = run.share
    for case in cases:
        if len(run.case_folder(case).done(mine)) < len(mine):
            with run.drawer.wrapped(case):
                pass


def draw(run: Run, case: Case, uncached: Case | None = None) -> None:
    """Draw the batches of a case that fall to this process and are not drawn yet.

    Raises RunError if there are some, and drawing is no stage of the plan.
    """
    folder = run.case_folder(case)
    mine = run.share
    done = folder.done(mine)
    run.progress.advance(sum(len(line["ids"]) for line in done.values()), case.name, drawn=False)
    todo = [batch for batch in mine if batch.number not in done]
    if not todo:
        return
    if "draw" not in run.plan.stages:
        raise RunError(
            f"{len(todo)} batches of {case.name} are not drawn in {folder.path}, the first is "
            f"{todo[0].number}; the same command with --stages draw draws them"
        )
    with run.timed(f"{case.name}: draw"), run.drawer.wrapped(case):
        for batch in todo:
            wanted = 0 if case.kind == "fewer steps" else max(LATENT_SAMPLES - batch.ids[0], 0)
            drawn = run.drawer.draw(case, batch, keep_latents=wanted)
            if drawn.latents is not None:
                drawn.about |= _latents(run, folder, batch, drawn.latents, uncached)
            folder.write(batch, drawn.samples, drawn.about)
            run.progress.advance(len(batch.ids), case.name)


def _latents(run: Run, folder: CaseFolder, batch: Batch, latents: Tensor, uncached: Case | None) -> dict[str, Any]:
    """Keep the latents of the uncached case; for a method, return their errors relative to those."""
    name = f"latents/{batch.number:05d}.safetensors"
    if uncached is None:
        if latents.nbytes <= _LATENT_BYTES:
            write_file(folder.path / name, save({"latents": latents.contiguous()}))
        return {}
    kept = run.case_folder(uncached).path / name
    if not kept.exists():
        return {}
    try:
        theirs = load_file(kept)["latents"]
    except (OSError, LookupError, SafetensorError) as error:
        place = kept.parents[1]
        raise ManifestError(f"cannot read {kept}: {error}; delete the folder {place}") from error
    # Half precision may overflow, and JSON has no infinities.
    if theirs.shape != latents.shape or not (theirs - latents).isfinite().all():
        return {}
    return {"latent_error": relative_errors(theirs, latents)}


def fewer_steps(run: Run, cases: Sequence[Case]) -> list[Case]:
    """Return uncached cases with the number of evaluations that each method took, rounded up."""
    full = step_flops(run)
    found: dict[int, list[str]] = {}
    for case in cases:
        lines = run.case_folder(case).done(run.batches)
        needed = evaluations(list(lines.values()), case.steps, full) - _ROUNDING
        enough = (n for n in range(1, run.drawer.steps) if run.drawer.full_steps(n) >= needed)
        steps = next(enough, None)
        if steps is not None:
            found.setdefault(steps, []).append(case.name)
    return [
        Case(f"uncached, {steps} step{'s' * (steps > 1)}", "fewer steps", steps, None, tuple(names))
        for steps, names in found.items()
    ]


def step_flops(run: Run) -> float | None:
    """Return the FLOPs of one uncached step and sample, all branches; None if uncounted."""
    place = run.folder / "flops.json"
    found = read_json(place)
    if not isinstance(found, dict) or "flops_per_step_and_sample" not in found:
        batch = run.batches[0]
        with run.timed("count FLOPs"):
            counted = count(run.drawer.pipe, run.drawer.arguments(batch, 2)).per_step
        per_sample = None if counted is None else counted / len(batch.ids)
        found = {"flops_per_step_and_sample": per_sample}
        write_json(place, found)
    value: float | None = found["flops_per_step_and_sample"]
    return value
