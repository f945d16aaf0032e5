"""Measure methods on the shipped editing pipeline: what they leave out, and what that costs.

    python -m diffcache.pipelines.small.measure_regions

writes `assets/bench/shapes-kontext-methods.json` and a plot beside it. RegionE's ratios of the
velocity's norm are fitted to edits of the training set; it draws one picture a run as published,
the others draw batches. Rows that are in the report are kept: an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxKontextPipeline
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

import diffcache
from diffcache.catalog import make_method
from diffcache.features.base import Method
from diffcache.features.regione import RegionE
from diffcache.offline.calibrate import calibrate
from diffcache.pipelines.small.checkpoint import write_tensors
from diffcache.pipelines.small.classifier import read
from diffcache.pipelines.small.edits import draw_edits, instruction, judge, target_shown
from diffcache.pipelines.small.kontext import CALL, DIRECTORY, load
from diffcache.pipelines.small.measure_kontext import edit_pictures, instructions
from diffcache.pipelines.small.method_cost import Tally, denoiser_flops, ratio_in_turn
from diffcache.pipelines.small.method_rows import (
    UNCACHED,
    Report,
    Row,
    change,
    described,
    digest,
    flags_of,
    interval,
    named,
    rounded,
    text_of,
)
from diffcache.psnr import psnr

REPORT = DIRECTORY.parents[1] / "bench" / "shapes-kontext-methods.json"
KEPT = Path("out/shapes-kontext-uncached.safetensors")
BATCH = 16
TIMED = 4  # pictures of a timed call
_METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("interval", {"every": 3}),
    ("taylorseer", {"every": 5, "site": "stack"}),
    ("first-block", {}),
    ("regione", {"threshold": 0.93}),
    ("regione", {"threshold": 0.88}),
)
ROWS = {named(name, settings): (name, settings) for name, settings in _METHODS}
WORDS = {
    "measure": "share of held-out edits whose target the classifier reads right",
    "quality": {"key": "target_right", "title": "edits right"},
    "fidelity": {"key": "psnr_db", "title": "PSNR dB"},
    "psnr_db": "to the uncached pictures, same noise",
    "held_bytes": "of one picture, the most of any run",
    "seconds_ratio": f"of {TIMED} pictures; RegionE's one by one on both sides",
}


def fit(pipe: FluxKontextPipeline, method: RegionE, *, steps: int, samples: int) -> RegionE:
    """Return a method with ratios fitted to some edits of the training set.

    Args:
        pipe: Not wrapped.
        method: Whose thresholds and stages to use.
        steps: Of a run.
        samples: Edits.
    """
    edits, before, _ = draw_edits(samples, 77)
    texts = [instruction(edit) for edit in edits]
    calls = [
        {"image": before[i : i + BATCH].float() / 255, "prompt": texts[i : i + BATCH]}
        for i in range(0, samples, BATCH)
    ]
    return calibrate(pipe, method, calls, steps=steps, **CALL)


@dataclass(frozen=True)
class Measurement:
    """What every method is measured with.

    Args:
        directory: The pipeline.
        samples: Held-out edits.
        steps: Of a run.
        fitted: Edits of the training set that RegionE's ratios are fitted to.
        rounds: Timed calls of the uncached pipeline and of each method.
    """

    directory: Path = DIRECTORY
    samples: int = 256
    steps: int = 28
    fitted: int = 32
    rounds: int = 3

    @cached_property
    def pipe(self) -> FluxKontextPipeline:
        """The pipeline that methods are put on."""
        return load(directory=self.directory)

    @cached_property
    def plain(self) -> FluxKontextPipeline:
        """The pipeline that stays uncached, for seconds in turn."""
        return load(directory=self.directory)

    @cached_property
    def data(self) -> tuple[Any, Tensor, Tensor, list[str]]:
        """Edits, pictures before and after, uint8 [B, 3, 64, 64], and instructions."""
        return *draw_edits(self.samples, 0, held=True), instructions(self.samples, 0)

    @cached_property
    def once(self) -> float:
        """Operations of one uncached denoiser call for one picture."""
        _, before, _, texts = self.data
        return denoiser_flops(
            self.plain.transformer,
            lambda: edit_pictures(self.plain, before[:1], texts[:1], steps=1, seed=0),
        )

    def about(self) -> dict[str, Any]:
        """Return what must be equal for rows to be of the same measurement."""
        return {
            "model": "shapes-kontext",
            "model_sha256": digest(self.directory),
            "samples": self.samples,
            "seed": 0,
            "steps": self.steps,
            "fitted_to": self.fitted,
            "dtype": "float32",
        }

    def draw(self, batch: int, title: str) -> Iterator[Tensor]:
        """Yield held-out edits batch by batch, uint8 [B, 3, 64, 64]; i starts from noise i."""
        _, before, _, texts = self.data
        for first in tqdm(range(0, self.samples, batch), desc=title):
            part = slice(first, first + batch)
            yield edit_pictures(
                self.pipe, before[part], texts[part], steps=self.steps, seed=first, batch=batch
            )

    def timed(self, pipe: FluxKontextPipeline, batch: int, number: int) -> None:
        """Draw `TIMED` edits, others for each number."""
        _, before, _, texts = self.data
        chosen = [(TIMED * number + i) % self.samples for i in range(TIMED)]
        words = [texts[i] for i in chosen]
        edit_pictures(pipe, before[chosen], words, steps=self.steps, seed=number, batch=batch)

    def uncached(self, kept: Path) -> Tensor:
        """Return the uncached pictures, uint8 [B, 3, 64, 64], from a file, made if need be."""
        about = json.dumps({k: v for k, v in self.about().items() if k != "fitted_to"})
        if kept.exists():
            with safe_open(kept, framework="pt") as file:
                if (file.metadata() or {}).get("about") == about:
                    found: Tensor = file.get_tensor("pictures")
                    return found
        made = torch.cat(list(self.draw(BATCH, UNCACHED)))
        write_tensors(kept, {"pictures": made}, {"about": about})
        return made

    def method(self, name: str) -> Method:
        """Return the method of a row, fitted if it is to be."""
        kind, settings = ROWS[name]
        method = make_method(kind, **settings)
        if isinstance(method, RegionE):
            return fit(self.pipe, method, steps=self.steps, samples=self.fitted)
        return method

    def row(self, name: str, wanted: Tensor, base: Tensor | None) -> Row:
        """Measure one row.

        Args:
            name: Of the row.
            wanted: The uncached pictures.
            base: Which edits are right uncached, bool `[B]`; None for the uncached row itself.
        """
        if base is None:
            cost: Row = {"computed_steps": float(self.steps), "flops_ratio": 1.0, "held_bytes": 0}
            return {"name": name, "method": None, **cost, **self.judged(wanted, None)}
        method = self.method(name)
        batch = 1 if isinstance(method, RegionE) else BATCH
        tally, parts = Tally(), []
        with diffcache.wrapped(self.pipe, method):
            for part in self.draw(batch, name):
                parts.append(part)
                tally.add(diffcache.report(self.pipe), len(part))
            pipes = (self.plain, self.pipe)
            plain, cached = (partial(self.timed, pipe, batch) for pipe in pipes)
            ratio = ratio_in_turn(plain, cached, self.rounds)
        closeness = psnr(torch.cat(parts), wanted)
        fidelity = {
            **rounded(interval(closeness), 2),
            "p5": round(float(closeness.quantile(0.05)), 2),
        }
        full = self.once * self.steps * self.samples
        return {
            "name": name,
            "method": described(method),
            "pictures_a_run": batch,
            "computed_steps": round(tally.steps / tally.samples, 2),
            "tokens_computed": round(tally.computed / (tally.computed + tally.skipped), 4),
            "flops_ratio": round(full / (full - tally.saved), 3),
            "held_bytes": tally.held,
            "seconds_ratio": ratio,
            "fidelity": {"psnr_db": fidelity},
            **self.judged(torch.cat(parts), base),
        }

    def judged(self, made: Tensor, base: Tensor | None) -> Row:
        """Return how many edits are right, against the uncached ones if they are given.

        Args:
            made: Pictures, uint8 [B, 3, 64, 64].
            base: Which edits are right uncached, bool `[B]`.
        """
        edits, before, after, _ = self.data
        pairs = zip(read(made), edits, strict=True)
        right = torch.tensor([target_shown(scene, edit) for scene, edit in pairs])
        quality: Row = {"target_right": rounded(interval(right))}
        if base is not None:
            quality["target_right_change"] = rounded(change(right, base))
        said = judge(made, edits, before, after)
        more = {key: value for key, value in said.items() if key not in ("edits", "target_right")}
        return {"quality": quality, **more, "outcomes": text_of(right)}


def run(
    with_: Measurement, report: Path, kept: Path = KEPT, only: Sequence[str] = ()
) -> Mapping[str, Row]:
    """Measure every row that the report does not have yet, write it after each, and plot it.

    Args:
        with_: What every method is measured with.
        report: JSON file.
        kept: File of the uncached pictures, which other rows are compared with.
        only: Rows to measure besides the uncached pipeline; all by default.

    Returns:
        The rows by name.

    Raises:
        ValueError: If a row is unknown.
    """
    for name in only:
        if name not in ROWS:
            raise ValueError(f"only={name!r}: must be one of {', '.join(ROWS)}")
    done = Report(report, with_.about(), WORDS)
    missing = [name for name in (UNCACHED, *(only or ROWS)) if name not in done.rows]
    if missing:
        wanted = with_.uncached(kept)
        for name in missing:
            right = done.rows.get(UNCACHED)
            base = None if right is None else flags_of(right["outcomes"])
            done.add(with_.row(name, wanted, base))
    done.plot()
    return done.rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(
        prog="python -m diffcache.pipelines.small.measure_regions",
        description="Measure what methods leave out and what that costs on held-out edits.",
    )
    parser.add_argument("--steps", type=int, default=28, help="sampling steps")
    parser.add_argument("--samples", type=int, default=256, help="held-out edits")
    parser.add_argument("--fit", type=int, default=32, help="edits to fit RegionE's ratios to")
    parser.add_argument("--rounds", type=int, default=3, help="timed calls of each method")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--model", type=Path, default=DIRECTORY, help="pipeline directory")
    parser.add_argument("--report", type=Path, default=REPORT, help="JSON file to write")
    parser.add_argument("--keep", type=Path, default=KEPT, help="file of the uncached pictures")
    parser.add_argument("--only", nargs="+", default=(), help="rows besides the uncached")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    how = Measurement(given.model, given.samples, given.steps, given.fit, given.rounds)
    run(how, given.report, given.keep, given.only)


if __name__ == "__main__":
    main()
