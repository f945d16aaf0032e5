"""Draw a picture with and without a cache, for the page of `diffcache serve`."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Any

import numpy as np
from PIL import Image

import diffcache
from diffcache.attach.record import CallRecord
from diffcache.errors import DiffcacheError
from diffcache.pipelines.demo import generate, saved
from diffcache.pipelines.demo.program import MOST_STEPS, checked_prompt, whole
from diffcache.pipelines.load import load
from diffcache.registry import read_word, rows_of
from diffcache.timeline import steps_of

AUTOMATIC = "what fits the model"
LONGEST = 200  # letters of a method with its settings
MOST_TIMES = 64  # largest factor that a difference is scaled by
BRIGHT = 200  # gray value, of 255, up to which a difference is scaled
# Pairs of stickers that are held out of training, of objects that the shipped model draws well.
PROMPTS = (
    "a cupcake left of a car on gravel",
    "a fox above a sunflower in the sky",
    "a lion below an owl in space",
    "a pineapple right of a sunflower on grass",
)


@dataclass
class Drawer:
    """A pipeline of pictures, which draws for one viewer at a time; it is loaded when it is needed.

    Model, dtype and device are names for `diffcache.pipelines.load.load`; `prompts` are examples.

    Raises:
        FileNotFoundError: If there is no such pipeline.
        ValueError: If it does not draw pictures from prompts alone.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    prompts: Sequence[str] = PROMPTS
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        name, taken = saved.pipeline_of(saved.locate(self.model))
        if "prompt" not in taken or {"num_frames", "image"} & set(taken):
            raise ValueError(f"--images {self.model}: {name} draws no pictures from prompts alone; name another")

    @cached_property
    def _loaded(self) -> tuple[Any, dict[str, Any]]:
        pipe, defaults = load(self.model, self.dtype, self.device)
        pipe.set_progress_bar_config(disable=True)
        return pipe, defaults

    def methods(self) -> list[str]:
        """Return the methods that can be chosen: those that need no tables and have a default for every setting."""
        found = [AUTOMATIC]
        for name, row in rows_of("method").items():
            try:
                row.load()().abilities()
            except (DiffcacheError, TypeError, ValueError):  # tables, or a setting without default
                continue
            found.append(name)
        return found

    def draw(self, prompt: Any, method: Any, steps: Any, seed: Any) -> Drawn:
        """Draw a picture without a cache, then with it.

        The method is `AUTOMATIC`, or one with numeric settings: `taylorseer:every=3`.

        Raises:
            ValueError: If a value is out of its range; the message is for the viewer.
            AttachError: If the pipeline cannot be cached with this method.
        """
        text, word = checked_prompt(prompt), self._checked(method)
        order = generate.Order(text, whole("steps", steps, 1, MOST_STEPS), whole("seed", seed, 0, 2**32 - 1))
        with self._lock:
            pipe, defaults = self._loaded
            try:
                done = generate.run(pipe, word, order, defaults, compare=True)
            finally:
                with suppress(DiffcacheError, ValueError):  # a method that was refused is not on
                    diffcache.unwrap(pipe)
        return Drawn(done, text)

    def _checked(self, method: Any) -> str | None:
        """Return a method as `diffcache.wrap` reads it; None for `AUTOMATIC`.

        Raises:
            ValueError: If a viewer may not choose it.
        """
        if method in (None, "", AUTOMATIC):
            return None
        word = str(method)
        if len(word) > LONGEST:
            raise ValueError(f"method={word[:40]!r}... has {len(word):,} letters; at most {LONGEST} are read")
        name, settings = read_word(word)
        known = self.methods()
        if name not in known:
            raise ValueError(f"no method {name!r}; there are {', '.join(known[1:])}")
        for key, value in settings.items():  # text may name a file
            if not isinstance(value, int | float):
                raise ValueError(f"method {word!r}: {key}={value!r}: must be a number here")
        return word


@dataclass
class Drawn:
    """A picture without a cache and with it, and the cost of both."""

    done: generate.Done
    prompt: str

    def html(self) -> str:
        """Return pictures, difference, decisions and report as HTML, every text escaped."""
        done, report = self.done, self.done.report
        plain, cached = done.plain[0].convert("RGB"), done.made[0].convert("RGB")
        apart, times = scaled_difference(plain, cached)
        seconds = done.plain_seconds or 0.0
        ratio = f"{done.seconds:.2f} s, {seconds / done.seconds:.2f} times as fast"
        title = f"difference, {times} times" if times else "no difference"
        figures = [
            (plain, "without a cache", f"{seconds:.2f} s"),
            (cached, "with the cache", ratio),
            (apart, title, f"PSNR {generate.decibels(done.psnr_db or 0.0)}"),
        ]
        shown = "".join(
            f'<figure><img src="{_uri(picture)}" alt="{escape(f"{self.prompt}: {title}")}">'
            f"<figcaption><b>{title}</b> {told}</figcaption></figure>"
            for picture, title, told in figures
        )
        steps = report.steps_computed + report.steps_skipped
        return (
            f'<div class="drawn">{shown}</div>{decisions(report.calls)}'
            f"<p>{report.steps_computed} of {steps} steps computed; {escape(done.place)}; one run "
            "of each</p>"
            f"<details><summary>Report</summary><pre>{escape(report.to_text(100))}</pre></details>"
        )


def scaled_difference(one: Image.Image, other: Image.Image) -> tuple[Image.Image, int]:
    """Return the absolute difference of two pictures of one size, made visible, and its factor.

    It is the largest difference of the channels, in gray, times a power of 2 up to 64 that makes the upper tenth of it
    bright. The factor is 0 for pictures that are the same.
    """
    apart = np.abs(np.asarray(one, np.int16) - np.asarray(other, np.int16)).max(2)
    if not apart.any():
        return Image.fromarray(apart.astype(np.uint8)), 0
    upper = max(1, int(np.quantile(apart, 0.9)))
    times = min(MOST_TIMES, 1 << max(0, (BRIGHT // upper).bit_length() - 1))
    return Image.fromarray((apart * times).clip(0, 255).astype(np.uint8)), times


def decisions(calls: Sequence[CallRecord]) -> str:
    """Return a strip of a run's steps as HTML: one cell a call, filled in proportion to what was computed."""
    cells = []
    for number, step in enumerate(steps_of(calls)):
        part = max(call.share for call in step)
        said = "computed" if part == 1 else "skipped" if part == 0 else f"{part:.0%} computed"
        reasons = ", ".join(dict.fromkeys(call.reason for call in step if call.reason))
        title = escape(f"step {number}: {said}{f' ({reasons})' if reasons else ''}")
        cells.append(f'<i title="{title}" style="--part:{part:.2f}"></i>')
    return f'<div class="decisions" role="img" aria-label="steps">{"".join(cells)}</div>'


def _uri(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
