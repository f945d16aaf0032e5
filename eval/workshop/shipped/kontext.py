"""Measure methods on the shipped editing pipeline: what they leave out, and what that costs.

    python -m diffcache.eval.workshop.shipped.kontext

RegionE's ratios of the velocity's norm are fitted to edits of the training set; it draws one
picture a run as published, the others draw batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from diffusers import FluxKontextPipeline
from PIL import Image
from torch import Tensor

import diffcache
from diffcache.command import Threads, script
from diffcache.eval.metrics.intervals import metric_interval
from diffcache.eval.runs.score import kept
from diffcache.eval.runs.task import digest
from diffcache.eval.workshop.shipped.draw import edit_stickers
from diffcache.eval.workshop.shipped.table import ALL, Drawn, Only, Rounds, Subject, draw_record
from diffcache.eval.workshop.small.sticker_edits import draw_edits, judge
from diffcache.eval.workshop.small.sticker_kontext import CALL, DIRECTORY, load
from diffcache.eval.workshop.small.stickers import render
from diffcache.features.base import Method
from diffcache.features.collect import Calibrated
from diffcache.features.regione import RegionE
from diffcache.offline.calibrate import calibrate
from diffcache.psnr import psnr

KEPT = Path("runs/sticker-kontext-uncached.safetensors")
BATCH = 16
TIMED = 4  # pictures of a timed call
SEED = 77  # of the edits that ratios are fitted to
METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("interval", {"every": 3}),
    ("taylorseer", {"every": 5, "site": "stack"}),
    ("first-block", {}),
    ("regione", {"threshold": 0.93}),
    ("regione", {"threshold": 0.88}),
)


def trained_edits(samples: int) -> list[dict[str, Any]]:
    """Return calls, a picture each, with edits of the kind that the pipeline was trained on."""
    return [
        {"image": Image.fromarray(render(edit.before)), "prompt": edit.text}
        for edit in draw_edits(samples, SEED)
    ]


class Editor(Subject):
    """The editing pipeline.

    Args:
        samples: Held-out edits.
        steps: Sampling steps.
        fitted: Edits of the training set that RegionE's ratios are fitted to.
        kept: File of the uncached pictures.
    """

    name = "sticker-kontext"
    directory = DIRECTORY
    methods = METHODS
    metrics: Mapping[str, Mapping[str, Any]] = {
        "psnr_db": {"title": "PSNR", "unit": "dB", "direction": "up"},
        "whole_right": {"title": "Whole scenes right", "unit": "", "direction": "up"},
        "target_right": {"title": "Targets right", "unit": "", "direction": "up"},
    }

    def __init__(
        self, samples: int = 128, steps: int = 28, fitted: int = 32, kept: Path = KEPT
    ) -> None:
        self.samples, self.steps, self.fitted, self.kept = samples, steps, fitted, kept
        self.about = {
            "pipeline": FluxKontextPipeline.__name__, "kind": "edits",
            "prompts": {"source": "held-out edits", "count": samples}, "samples": samples,
            "seed": 0, "steps": steps, "call": CALL, "fitted_to": fitted,
        }  # fmt: skip
        self.pipe, self.plain = load(directory=DIRECTORY), load(directory=DIRECTORY)
        self.edits = draw_edits(samples, 0, held=True)
        self.before = np.stack([render(edit.before) for edit in self.edits])
        self.texts = [edit.text for edit in self.edits]

    def calibrated(self, method: Calibrated) -> Calibrated:
        """Return a method fitted to some edits of the training set."""
        calls = trained_edits(self.fitted)
        return calibrate(self.pipe, method, calls, steps=self.steps, **CALL)

    def uncached(self) -> Drawn:
        """Return the uncached pictures, from a file where they are kept."""
        task = {key: value for key, value in self.task().items() if key != "fitted_to"}
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        columns = kept(self.kept, digest(task), lambda: {"pictures": self._edit(self.plain)})
        return self._judged(columns["pictures"])

    def draw(self, method: Method) -> Drawn:
        """Draw all edits."""
        reports: list[Any] = []
        pictures = self._edit(
            self.pipe, _batch(method), lambda n: reports.append((diffcache.report(self.pipe), n))
        )
        return Drawn(self._judged(pictures).outcomes, pictures, reports)

    def fidelity(self, mine: Tensor, uncached: Tensor) -> dict[str, Any]:
        """Return the PSNR to the uncached pictures."""
        values = psnr(mine, uncached)
        found = metric_interval("psnr_db", values).to_dict()
        return {"psnr_db": {**found, "p5": float(values.quantile(0.05))}}

    def one_step(self) -> dict[str, Any]:
        """Return the arguments of a call that takes one step for one picture."""
        before = Image.fromarray(self.before[0])
        return {"image": before, "prompt": self.texts[0], "num_inference_steps": 1, **CALL}

    def timed(self, pipe: FluxKontextPipeline, method: Method) -> Callable[[], object]:
        """Return a call that draws some edits; RegionE's one by one on both sides."""
        before, texts = self.before[:TIMED], self.texts[:TIMED]
        return lambda: edit_stickers(
            pipe, before, texts, steps=self.steps, seeds=range(len(texts)), batch=_batch(method)
        )

    def _edit(
        self,
        pipe: FluxKontextPipeline,
        batch: int = BATCH,
        each: Callable[[int], None] = lambda drawn: None,
    ) -> Tensor:
        made = edit_stickers(
            pipe, self.before, self.texts, steps=self.steps, seeds=range(self.samples), batch=batch,
            each=each,
        )  # fmt: skip
        return torch.from_numpy(made).permute(0, 3, 1, 2).contiguous()

    def _judged(self, pictures: Tensor) -> Drawn:
        found = judge(pictures.permute(0, 2, 3, 1).contiguous().numpy(), self.edits)
        right = {
            key: torch.tensor([getattr(verdict, key) for verdict in found])
            for key in ("whole_right", "target_right")
        }
        return Drawn(right, pictures)


def _batch(method: Method) -> int:
    return 1 if isinstance(method, RegionE) else BATCH


def kontext(
    samples: Annotated[int, typer.Option(min=2, help="Held-out edits.")] = 128,
    rounds: Rounds = 10,
    threads: Threads = 1,
    only: Only = ALL,
) -> None:
    """Measure what methods leave out and what that costs on held-out edits."""
    torch.set_num_threads(threads)
    draw_record(Editor(samples), "kontext", {"samples": samples}, rounds, only)


main = script(kontext)

if __name__ == "__main__":
    sys.exit(main())
