"""Draw the same pictures with and without a cache, measure both, and show them side by side."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

import diffcache
from diffcache.eval.cost.clock import DenoiserClock
from diffcache.eval.cost.interleave import Turn, measure
from diffcache.eval.record import Progress, Setting, untold
from diffcache.features.base import Method
from diffcache.pipelines.demo.generate import closeness, decibels
from diffcache.pipelines.demo.images import PROMPTS
from diffcache.pipelines.demo.saved import locate, pipeline_of
from diffcache.pipelines.load import load
from diffcache.run_report import Report, human, share

MODEL = "sticker-flux"
MOST = 4  # pictures
ROUNDS = 3
WARMUP_STEPS = 4
WIDTH, HEAD, TIMELINE = 848, 48, 132
_INK, _GREY, _LINE = (28, 32, 40), (105, 112, 122), (208, 212, 218)


@dataclass(frozen=True)
class Task:
    """Pictures to draw."""

    prompts: tuple[str, ...] = PROMPTS
    steps: int = 28
    seed: int = 0  # seed of the first picture's noise; picture i starts from `seed + i`
    model: str = MODEL  # path, shipped name or Hugging Face model ID, for `diffcache.pipelines.load.load`
    dtype: str = "auto"  # name of the dtype, for the same
    device: str = "auto"  # name of the device, for the same

    def __post_init__(self) -> None:
        if self.steps < 1 or not 1 <= len(self.prompts) <= MOST:
            raise ValueError(
                f"steps={self.steps}, prompts={self.prompts!r}: draw 1 to {MOST} pictures in 1 step or more"
            )


def prompts_of(model: str, prompt: str, samples: int | None) -> tuple[str, ...]:
    """Return the prompt of each picture.

    Args:
        model: Model that the command line names.
        prompt: Prompt of all pictures; empty for those of `PROMPTS`, in turn.
        samples: Number of pictures; None for one a prompt.

    Raises:
        ValueError: If nobody says what the model draws.
    """
    if not prompt and Path(model).name != MODEL:
        raise ValueError(
            f"--model {model}: the demo has prompts for {MODEL} alone; say with --prompt what it shall draw"
        )
    known = (prompt,) if prompt else PROMPTS
    return tuple(islice(cycle(known), samples or len(known)))


@dataclass
class Side:
    """One of the two pipelines: its pictures and its times."""

    images: list[Image.Image] = field(default_factory=list)  # one picture a prompt
    seconds: list[float] = field(default_factory=list)  # wall time of every measured run of the pipeline
    denoiser_seconds: list[float] = field(default_factory=list)  # the part of it within the denoiser

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the pictures as plain data."""
        return {
            "seconds": [round(value, 4) for value in self.seconds],
            "denoiser_seconds": [round(value, 4) for value in self.denoiser_seconds],
        }


@dataclass
class Comparison:
    """The outcome: both sides, the report of the last cached run, and how close they are."""

    task: Task
    method: Method
    baseline: Side
    cached: Side
    report: Report
    place: str = "cpu, float32"  # device and dtype

    @property
    def psnr_db(self) -> list[float]:
        """PSNR of each cached picture to the uncached one, in dB."""
        return closeness(self.baseline.images, self.cached.images)

    @property
    def speedup(self) -> float:
        """Ratio of the median times of the whole pipeline."""
        return median(self.baseline.seconds) / median(self.cached.seconds)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the measurements, as rows of (name, baseline, cached)."""
        base, cached, report = self.baseline, self.cached, self.report
        denoiser = (median(base.denoiser_seconds), median(cached.denoiser_seconds))
        steps = report.steps_computed + report.steps_skipped
        sites = report.computed + report.skipped
        rows = [
            (
                "seconds, whole pipeline",
                f"{median(base.seconds):.3f}",
                f"{median(cached.seconds):.3f}  ({self.speedup:.2f}x)",
            ),
            ("seconds, denoiser", f"{denoiser[0]:.3f}", f"{denoiser[1]:.3f}  ({denoiser[0] / denoiser[1]:.2f}x)"),
            ("steps computed", str(steps), str(report.steps_computed)),
            ("blocks or modules computed", str(sites), str(report.computed)),
        ]
        if report.flops_computed is not None and report.flops_saved is not None:
            total = report.flops_computed + report.flops_saved
            saved = share(report.flops_saved, report.flops_computed)
            rows.append(("FLOPs of these", human(total), f"{human(report.flops_computed)}  ({saved} saved)"))
        rows.append(("PSNR to uncached (8 bit)", "-", ", ".join(map(decibels, self.psnr_db))))
        rows.append(("bytes of features, at most", "0 B", human(report.peak_bytes, "B")))
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


def compare(task: Task, method: Method, progress: Progress = untold) -> Comparison:
    """Draw all pictures, as one batch, with and without the method in turn, both warmed up.

    Each side runs three times, so that its median is meaningful. `progress` is called with (runs done, runs in all,
    name of the next).

    Raises:
        FileNotFoundError: If the model is not there.
        AttachError: If the model cannot be cached with this method.
        ValueError: If the model draws no pictures from prompts.
    """
    _check_draws(task.model)
    (plain, call), (cached, _) = (load(task.model, task.dtype, task.device) for _ in range(2))
    diffcache.wrap(cached, method)
    setting = Setting(plain.device, plain.dtype, progress)
    pipes, sides, turns = {"uncached": plain, "cached": cached}, {}, {}
    for name, pipe in pipes.items():
        pipe.set_progress_bar_config(disable=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", diffcache.CacheWarning)
            _draw(pipe, call, task, Side(), min(WARMUP_STEPS, task.steps))
        sides[name] = Side()
        draw = partial(_draw, pipe, call, task, sides[name], task.steps)
        turns[name] = _turn(draw, DenoiserClock(pipe, setting))
    timings = measure(turns, ROUNDS, 0, setting)
    for name, side in sides.items():
        side.seconds = timings.seconds[name]
        side.denoiser_seconds = timings.readings[name]["denoiser_seconds"]
    place = f"{setting.device}, {str(setting.dtype).removeprefix('torch.')}"
    baseline, ours = sides.values()
    return Comparison(task, method, baseline, ours, diffcache.report(cached), place)


def _check_draws(model: str) -> None:
    """Raise ValueError unless a saved pipeline draws pictures from prompts alone."""
    name, taken = pipeline_of(locate(model))
    if "prompt" not in taken or {"num_frames", "image"} & set(taken):
        raise ValueError(
            f"--model {model}: {name} draws no pictures from prompts alone; take "
            f"`diffcache run {model} PROMPT --compare`"
        )


def _draw(pipe: Any, call: Mapping[str, Any], task: Task, side: Side, steps: int) -> None:
    """Draw the pictures of a side."""
    numbers = range(task.seed, task.seed + len(task.prompts))
    noise = [torch.Generator("cpu").manual_seed(number) for number in numbers]
    given = {**call, "prompt": list(task.prompts), "num_inference_steps": steps}
    side.images = pipe(**given, generator=noise).images


def _turn(draw: Callable[[], None], clock: DenoiserClock) -> Turn:
    return Turn(draw, lambda: clock, clock.reset, lambda: {"denoiser_seconds": clock.seconds})


# The figure ---------------------------------------------------------------------------------------


def figure(result: Comparison) -> Image.Image:
    """Draw a comparison: one column for each picture, uncached above cached, and the timeline below."""
    count = len(result.task.prompts)
    gap = 20 if count < MOST else 16
    side = 256 if count < MOST else 192
    rows = (HEAD + 70, HEAD + 70 + side + 34)  # tops of the pictures
    foot = rows[1] + side + 42
    canvas = Image.new("RGB", (WIDTH, foot + TIMELINE + gap), "white")
    pen = ImageDraw.Draw(canvas)
    title = repr(result.method)
    pen.text((gap, 14), title, fill=_INK, font=_fitting(title, WIDTH - 2 * gap))
    for top, words in zip(rows, _titles(result), strict=True):
        pen.text((gap, top - 25), words[0], fill=_INK, font=_font(16))
        away = gap + 8 + _font(16).getlength(words[0])
        pen.text((away, top - 22), words[1], fill=_GREY, font=_font(13))
    pairs = zip(result.baseline.images, result.cached.images, strict=True)
    for column, pair in enumerate(pairs):
        left = gap + column * (side + gap)
        lines = _wrapped(f"“{result.task.prompts[column]}”", side)
        pen.text((left, HEAD), "\n".join(lines), fill=_GREY, font=_font(13))
        for top, picture in zip(rows, pair, strict=True):
            canvas.paste(_enlarge(picture, side), (left, top))
            pen.rectangle((left - 1, top - 1, left + side, top + side), outline=_LINE)
        apart = f"PSNR {decibels(result.psnr_db[column])} to the uncached"
        pen.text((left, rows[1] + side + 5), apart, fill=_GREY, font=_font(13))
    report = result.report
    pen.text((gap, foot), "decisions", fill=_INK, font=_font(16))
    outcome = f"{report.steps_computed} of {result.task.steps} steps computed"
    if report.flops_saved and report.flops_computed is not None:
        saved = report.flops_saved / (report.flops_saved + report.flops_computed)
        outcome += f", {saved:.0%} of the blocks' FLOPs saved"
    pen.text((gap + 88, foot + 3), outcome, fill=_GREY, font=_font(13))
    canvas.paste(report.timeline_image(WIDTH - 2 * gap, TIMELINE - 24), (gap, foot + 24))
    return canvas


def _titles(result: Comparison) -> list[tuple[str, str]]:
    """Return the titles of both rows of pictures: the name of the side and its time."""
    task = result.task
    base, cached = median(result.baseline.seconds), median(result.cached.seconds)
    return [
        ("without a cache", f"{base:.2f} s, {task.steps} steps, noise from seed {task.seed} on"),
        ("with the cache, same noise", f"{cached:.2f} s, {result.speedup:.2f} times as fast"),
    ]


def _wrapped(text: str, width: int) -> list[str]:
    """Return the first two lines of a prompt that stands above a picture."""
    font = _font(13)
    letters = max(n for n in range(1, len(text) + 1) if font.getlength(text[:n]) <= width)
    return textwrap.wrap(text, letters, max_lines=2, placeholder=" …")


def _enlarge(panel: Image.Image, side: int) -> Image.Image:
    """Bring a panel to its place's size: whole multiples keep their pixels."""
    exact = panel.width == panel.height and side % panel.width == 0
    how = Image.Resampling.NEAREST if exact else Image.Resampling.LANCZOS
    return panel.convert("RGB").resize((side, side), how)


def _fitting(text: str, width: int) -> Any:
    """Return the largest font in which a title fits a width."""
    sizes = range(20, 9, -1)
    return next((f for f in map(_font, sizes) if f.getlength(text) <= width), _font(9))


def _font(size: int) -> Any:
    return ImageFont.load_default(size=size)
