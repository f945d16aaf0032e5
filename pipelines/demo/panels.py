"""The demo's figure: uncached, cached, their difference, and which steps were computed."""

from __future__ import annotations

import textwrap
from statistics import median
from typing import Any

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont

from diffcache.pipelines.demo.compare import Comparison, decibels

SIDE, GAP, HEAD, LABEL, TIMELINE = 256, 20, 82, 50, 132
_INK, _GREY, _LINE = (28, 32, 40), (105, 112, 122), (208, 212, 218)


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
