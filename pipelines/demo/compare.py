"""Draw the same pictures with and without a cache, and measure both."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

import diffcache
from diffcache.command import device_of
from diffcache.features.base import Method
from diffcache.pipelines.demo.saved import DTYPES, dtype_of
from diffcache.pipelines.small import flux, scenes
from diffcache.psnr import CAP, psnr
from diffcache.run_report import Report, human, share

PROMPT = (
    "a large red circle on the left and a small blue square at the top right, "
    "on a yellow background"
)
ROUNDS = 3
WARMUP_STEPS = 4


@dataclass(frozen=True)
class Task:
    """Pictures to draw.

    Attributes:
        prompt: Prompt in the words of `diffcache.pipelines.small.scenes`.
        steps: Sampling steps.
        seed: Seed of the first picture's noise; picture i starts from `seed + i`.
        samples: Number of pictures.
        dtype: Name of the dtype, for `diffcache.pipelines.demo.saved.dtype_of`.
        device: Name of the device, for `diffcache.command.device_of`.
    """

    prompt: str = PROMPT
    steps: int = 50
    seed: int = 0
    samples: int = 1
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.steps < 1 or not 1 <= self.samples <= 4:
            raise ValueError(
                f"steps={self.steps}, samples={self.samples}: draw 1 to 4 samples in 1 step or more"
            )


@dataclass
class Side:
    """One of the two pipelines: its pictures, its times, and what the classifier reads.

    Attributes:
        images: One picture a sample.
        seconds: Wall time of every measured run of the pipeline.
        denoiser_seconds: The part of it within the denoiser, on the host's clock.
        reads: One description of each picture, empty without a classifier.
        accuracy: Share of what the prompt states that the pictures show, None if unknown.
    """

    images: list[Image.Image] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    denoiser_seconds: list[float] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    accuracy: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the pictures as plain data."""
        return {
            "seconds": [round(value, 4) for value in self.seconds],
            "denoiser_seconds": [round(value, 4) for value in self.denoiser_seconds],
            "reads": self.reads,
            "prompt_accuracy": None if self.accuracy is None else round(self.accuracy, 4),
        }


@dataclass
class Comparison:
    """The outcome: both sides, the report of the last cached run, and how close they are.

    Attributes:
        task: Task that was drawn.
        method: The cache.
        baseline: The uncached side.
        cached: The cached side.
        report: The report of the last cached run.
        place: Device and dtype.
    """

    task: Task
    method: Method
    baseline: Side
    cached: Side
    report: Report
    place: str = "cpu, float32"

    @property
    def psnr_db(self) -> list[float]:
        """PSNR of each cached picture to the uncached one, in dB."""
        return closeness(self.baseline.images, self.cached.images)

    @property
    def speedup(self) -> float:
        """Ratio of the median times of the whole pipeline."""
        return median(self.baseline.seconds) / median(self.cached.seconds)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return what was measured, as rows of (what, baseline, cached)."""
        base, cached, report = self.baseline, self.cached, self.report
        denoiser = (median(base.denoiser_seconds), median(cached.denoiser_seconds))
        steps = report.steps_computed + report.steps_skipped
        sites = report.computed + report.skipped
        rows = [
            ("seconds, whole pipeline", f"{median(base.seconds):.3f}",
             f"{median(cached.seconds):.3f}  ({self.speedup:.2f}x)"),
            ("seconds, denoiser", f"{denoiser[0]:.3f}",
             f"{denoiser[1]:.3f}  ({denoiser[0] / denoiser[1]:.2f}x)"),
            ("steps computed", str(steps), str(report.steps_computed)),
            ("blocks or modules computed", str(sites), str(report.computed)),
        ]  # fmt: skip
        if report.flops_computed is not None and report.flops_saved is not None:
            total = report.flops_computed + report.flops_saved
            saved = share(report.flops_saved, report.flops_computed)
            rows.append(
                ("FLOPs of these", human(total), f"{human(report.flops_computed)}  ({saved} saved)")
            )
        rows.append(("PSNR to uncached (8 bit)", "-", ", ".join(map(decibels, self.psnr_db))))
        rows.append(("bytes of features, at most", "0 B", human(report.peak_bytes, "B")))
        for number, (one, other) in enumerate(zip(base.reads, cached.reads, strict=True)):
            rows.append((f"picture {number} shows", one, "the same" if one == other else other))
        if base.accuracy is not None and cached.accuracy is not None:
            rows.append(("of the prompt", f"{base.accuracy:.0%}", f"{cached.accuracy:.0%}"))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the pictures as plain data."""
        return {
            "task": vars(self.task),
            "seed": self.task.seed,
            "method": repr(self.method),
            "place": self.place,
            "speedup": round(self.speedup, 3),
            "psnr_db": [round(value, 3) for value in self.psnr_db],
            "baseline": self.baseline.to_dict(),
            "cached": self.cached.to_dict(),
            "report": self.report.to_dict(),
        }


def closeness(ones: Sequence[Image.Image], others: Sequence[Image.Image]) -> list[float]:
    """Return the PSNR of pairs of 8-bit pictures of equal size, in dB, at most 100."""
    pairs = zip(ones, others, strict=True)
    arrays = [[np.array(picture.convert("RGB")) for picture in pair] for pair in pairs]
    return [float(psnr(*(torch.from_numpy(a)[None] for a in pair))) for pair in arrays]


def decibels(value: float) -> str:
    """Return a PSNR as text; at the cap pictures are equal, or too close to tell."""
    return "100 dB or more" if value >= CAP else f"{value:.1f} dB"


def load(model: Path | None = None, dtype: str = "auto", device: str = "auto") -> Any:
    """Load the shipped pipeline, or one like it from another directory.

    Args:
        model: Directory; the shipped one by default.
        dtype: Name of the dtype, for `diffcache.pipelines.demo.saved.dtype_of`.
        device: Name of the device, for `diffcache.command.device_of`.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If dtype or device is unknown, or the device is not there.
    """
    directory = model or flux.DIRECTORY
    if not (directory / "model_index.json").exists():
        raise FileNotFoundError(
            f"no pipeline at {directory}: --model takes a directory of a pipeline built like "
            "shapes-flux; without it the shipped one is taken"
        )
    place = device_of(device)
    kind = DTYPES[dtype_of(dtype, directory, place)]
    return flux.load(kind, directory).to(place)


def compare(
    task: Task,
    method: Method,
    model: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Draw every sample with and without the method, turn about, after warming both up.

    Each side runs at least three times, so that its median says something.

    Args:
        task: Task to draw.
        method: The cache.
        model: Directory of a pipeline built like shapes-flux; the shipped one by default.
        progress: Called after every run with (runs done, runs in all).

    Raises:
        FileNotFoundError: If the model is not there.
        AttachError: If the model cannot be cached with this method.
    """
    pipes = tuple(load(model, task.dtype, task.device) for _ in range(2))
    diffcache.wrap(pipes[1], method)
    rounds = max(task.samples, ROUNDS)
    total = 2 * rounds + 2
    for number, pipe in enumerate(pipes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", diffcache.CacheWarning)
            draw(pipe, task, task.seed, min(WARMUP_STEPS, task.steps))
        progress(number + 1, total)
    sides = (Side(), Side())
    for turn in range(rounds):
        for number, (pipe, side) in enumerate(zip(pipes, sides, strict=True)):
            run(pipe, side, task, turn)
            progress(2 * turn + number + 3, total)
    for side in sides:
        read(side, task.prompt)
    dtype = str(pipes[1].transformer.dtype).removeprefix("torch.")
    place = f"{pipes[1].device}, {dtype}"
    return Comparison(task, method, *sides, diffcache.report(pipes[1]), place)


def run(pipe: Any, side: Side, task: Task, turn: int) -> None:
    """Draw one sample and note its times; in the first turns, keep the picture."""
    start = time.perf_counter()
    with clock(pipe.transformer) as ticks:
        image = draw(pipe, task, task.seed + turn % task.samples, task.steps)
    side.seconds.append(time.perf_counter() - start)
    side.denoiser_seconds.append(sum(ticks))
    if turn < task.samples:
        side.images.append(image)


def draw(pipe: Any, task: Task, seed: int, steps: int) -> Image.Image:
    """Draw one picture."""
    noise = torch.Generator("cpu").manual_seed(seed)
    out = pipe(task.prompt, num_inference_steps=steps, generator=noise, **flux.CALL)
    image: Image.Image = out.images[0]
    return image


@contextmanager
def clock(model: nn.Module) -> Iterator[list[float]]:
    """Collect the seconds of every call of a model, its hooks included.

    An accelerator is waited for at both ends of a call.
    """
    ticks: list[float] = []
    starts: list[float] = []
    on_host = next(model.parameters()).device.type == "cpu"

    def now() -> float:
        if not on_host:
            torch.accelerator.synchronize()
        return time.perf_counter()

    before = model.register_forward_pre_hook(lambda *_: starts.append(now()), prepend=True)
    after = model.register_forward_hook(lambda *_: ticks.append(now() - starts.pop()))
    try:
        yield ticks
    finally:
        before.remove()
        after.remove()


def read(side: Side, prompt: str) -> None:
    """Let the shipped classifier describe the pictures, if it is there and they fit."""
    from diffcache.pipelines.small import classifier

    if not (classifier.DIRECTORY / "model.safetensors").exists():
        return
    if any(image.size != (scenes.SIZE, scenes.SIZE) for image in side.images):
        return
    found = classifier.read(side.images)
    side.reads = [scenes.prompt(s) if s.figures else f"a {s.background} background" for s in found]
    try:
        prompts = [prompt] * len(side.images)
        side.accuracy = classifier.prompt_accuracy(side.images, prompts)[0]
    except ValueError:  # a prompt in other words than the classifier's
        side.accuracy = None
