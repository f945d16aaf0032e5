"""Draw the same pictures with and without a cache, measure both, and show them side by side."""

from __future__ import annotations

import textwrap
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont

import diffcache
from diffcache.command import device_of
from diffcache.eval.cost.clock import DenoiserClock
from diffcache.eval.cost.interleave import Turn, measure
from diffcache.eval.record import Progress, Setting
from diffcache.features.base import Method
from diffcache.pipelines.demo.generate import Order, closeness, decibels, generate
from diffcache.pipelines.demo.saved import DTYPES, dtype_of
from diffcache.pipelines.small import classifier, flux, scenes
from diffcache.run_report import Report, human, share

PROMPT = (
    "a large red circle on the left and a small blue square at the top right, "
    "on a yellow background"
)
ROUNDS = 3
WARMUP_STEPS = 4
SIDE, GAP, HEAD, LABEL, TIMELINE = 256, 20, 82, 50, 132
_INK, _GREY, _LINE = (28, 32, 40), (105, 112, 122), (208, 212, 218)


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
        denoiser_seconds: The part of it within the denoiser.
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
    task: Task, method: Method, model: Path | None = None, progress: Progress | None = None
) -> Comparison:
    """Draw every sample with and without the method, in turn, after warming both up.

    Each side runs at least three times, so that its median says something.

    Args:
        task: Task to draw.
        method: The cache.
        model: Directory of a pipeline built like shapes-flux; the shipped one by default.
        progress: Callback for the progress, given (runs done, runs in all, name of the next).

    Raises:
        FileNotFoundError: If the model is not there.
        AttachError: If the model cannot be cached with this method.
    """
    plain, cached = (load(model, task.dtype, task.device) for _ in range(2))
    diffcache.wrap(cached, method)
    setting = Setting(cached.device, cached.transformer.dtype, progress)
    pipes, sides, turns = {"uncached": plain, "cached": cached}, {}, {}
    for name, pipe in pipes.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", diffcache.CacheWarning)
            _draw(pipe, task, Side(), min(WARMUP_STEPS, task.steps))
        sides[name], clock = Side(), DenoiserClock(pipe, setting)
        turns[name] = Turn(
            partial(_draw, pipe, task, sides[name], task.steps), partial(_watched, clock),
            readings=partial(_seconds_of, clock),
        )  # fmt: skip
    timings = measure(turns, max(task.samples, ROUNDS), 0, setting)
    for name, side in sides.items():
        side.seconds = timings.seconds[name]
        side.denoiser_seconds = timings.readings[name]["denoiser_seconds"]
        side.images = side.images[: task.samples]
        read(side, task.prompt)
    place = f"{setting.device}, {str(setting.dtype).removeprefix('torch.')}"
    baseline, ours = sides.values()
    return Comparison(task, method, baseline, ours, diffcache.report(cached), place)


def _draw(pipe: Any, task: Task, side: Side, steps: int) -> None:
    """Draw the next picture of a side."""
    seed = task.seed + len(side.images) % task.samples
    side.images += generate(pipe, Order(task.prompt, steps, seed), flux.CALL)


def _watched(clock: DenoiserClock) -> DenoiserClock:
    """Return a clock that has counted nothing yet."""
    clock.reset()
    return clock


def _seconds_of(clock: DenoiserClock) -> dict[str, float | None]:
    return {"denoiser_seconds": clock.seconds}


def read(side: Side, prompt: str) -> None:
    """Let the shipped classifier describe the pictures, if it is there and they fit."""
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


# The figure ---------------------------------------------------------------------------------------


def figure(result: Comparison) -> Image.Image:
    """Draw the outcome of a comparison: one row of three panels a sample, and the timeline."""
    rows = len(result.baseline.images)
    width = 3 * SIDE + 4 * GAP
    height = HEAD + rows * (SIDE + LABEL) + GAP + TIMELINE + GAP
    canvas = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(canvas)
    task = result.task
    pen.text((GAP, 16), repr(result.method), fill=_INK, font=_fitting(repr(result.method), width))
    lines = textwrap.wrap(f"“{task.prompt}”, {task.steps} steps, seed {task.seed}", 118)
    pen.text((GAP, 46), "\n".join(lines[:2]), fill=_GREY, font=_font(14))
    pairs = zip(result.baseline.images, result.cached.images, strict=True)
    for row, (base, cached) in enumerate(pairs):
        top = HEAD + row * (SIDE + LABEL)
        apart, scale = difference(base, cached)
        labels = _labels(result, row, scale)
        for column, (panel, words) in enumerate(zip((base, cached, apart), labels, strict=True)):
            left = GAP + column * (SIDE + GAP)
            canvas.paste(_enlarge(panel), (left, top))
            pen.rectangle((left - 1, top - 1, left + SIDE, top + SIDE), outline=_LINE)
            pen.text((left, top + SIDE + 6), words[0], fill=_INK, font=_font(16))
            pen.text((left, top + SIDE + 27), words[1], fill=_GREY, font=_font(13))
    report = result.report
    top = HEAD + rows * (SIDE + LABEL) + GAP
    pen.text((GAP, top), "decisions", fill=_INK, font=_font(16))
    outcome = f"{report.steps_computed} of {task.steps} steps computed"
    if report.flops_saved and report.flops_computed is not None:
        saved = report.flops_saved / (report.flops_saved + report.flops_computed)
        outcome += f", {saved:.0%} of the blocks' FLOPs saved"
    pen.text((GAP + 88, top + 3), outcome, fill=_GREY, font=_font(13))
    canvas.paste(report.timeline_image(width - 2 * GAP, TIMELINE - 24), (GAP, top + 24))
    return canvas


def difference(one: Image.Image, other: Image.Image) -> tuple[Image.Image, float]:
    """Return the absolute difference of two pictures, its largest value white, and the factor."""
    apart = np.asarray(ImageChops.difference(one.convert("RGB"), other.convert("RGB")))
    scale = 255 / max(int(apart.max()), 1)
    return Image.fromarray((apart * scale).round().astype(np.uint8)), scale


def _labels(result: Comparison, row: int, scale: float) -> list[tuple[str, str]]:
    base, cached = median(result.baseline.seconds), median(result.cached.seconds)
    apart = f"PSNR {decibels(result.psnr_db[row])} to the uncached"
    return [
        ("without a cache", f"{base:.2f} s"),
        ("with the cache", f"{cached:.2f} s, {result.speedup:.2f} times as fast"),
        (f"difference, {scale:.0f} times as strong", apart),
    ]


def _enlarge(panel: Image.Image) -> Image.Image:
    """Bring a panel to its place's size: whole multiples keep their pixels."""
    exact = panel.width == panel.height and SIDE % panel.width == 0
    how = Image.Resampling.NEAREST if exact else Image.Resampling.LANCZOS
    return panel.convert("RGB").resize((SIDE, SIDE), how)


def _fitting(text: str, width: int) -> Any:
    """Return the largest font of a title that fits the figure."""
    sizes = range(20, 9, -1)
    return next((f for f in map(_font, sizes) if f.getlength(text) <= width - 2 * GAP), _font(9))


def _font(size: int) -> Any:
    return ImageFont.load_default(size=size)
