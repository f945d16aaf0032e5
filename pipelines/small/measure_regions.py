"""Measure RegionE on the shipped editing pipeline: what it leaves out, and what that costs.

    python -m diffcache.pipelines.small.measure_regions --samples 128

fits the ratios of the velocity's norm on edits from the training set, draws held-out edits with
and without the method, and writes `assets/bench/shapes-kontext-regione.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxKontextPipeline
from torch import Tensor

from diffcache.api import wrapped
from diffcache.calibration import calibrate
from diffcache.features.regione import RegionE
from diffcache.pipelines.small.edits import draw_edits, instruction, judge
from diffcache.pipelines.small.export import versions
from diffcache.pipelines.small.kontext import CALL, DIRECTORY, load
from diffcache.pipelines.small.measure_kontext import edit_pictures, instructions

REPORT = DIRECTORY.parents[1] / "bench" / "shapes-kontext-regione.json"


def fit(pipe: FluxKontextPipeline, method: RegionE, *, steps: int, samples: int) -> RegionE:
    """Return a method with ratios fitted to edits of the training set.

    Args:
        pipe: not wrapped.
        method: whose thresholds and stages to use.
        steps: of a run.
        samples: how many edits.
    """
    edits, before, _ = draw_edits(samples, 77)
    texts = [instruction(edit) for edit in edits]
    calls = [
        {"image": before[i : i + 16].float() / 255, "prompt": texts[i : i + 16]}
        for i in range(0, samples, 16)
    ]
    return calibrate(pipe, method, calls, steps=steps, **CALL)


def psnr_to(made: Tensor, wanted: Tensor) -> Tensor:
    """Return the PSNR in dB [B] of pictures uint8 [B, 3, H, W] to others, at most 100."""
    error = (made.double() - wanted.double()).square().mean(dim=(1, 2, 3))
    return 10 * torch.log10(255**2 / error.clamp_min(255**2 * 1e-10))


def measure(
    pipe: FluxKontextPipeline, method: RegionE | None, data: Any, texts: Sequence[str], steps: int
) -> tuple[dict[str, Any], Tensor]:
    """Draw held-out edits, one picture a run as published, and judge them.

    Args:
        pipe: not wrapped.
        method: None for the uncached pipeline.
        data: edits, pictures before and after.
        texts: instructions.
        steps: of a run.

    Returns:
        A JSON-ready record, and the pictures, uint8 [B, 3, 64, 64].
    """
    edits, before, after = data
    if method is None:
        made = edit_pictures(pipe, before, texts, steps=steps, seed=0)
        return judge(made, edits, before, after), made
    parts, computed, tokens, steps_computed = [], 0, 0, 0
    with wrapped(pipe, method) as handle:
        for i, text in enumerate(texts):
            parts.append(edit_pictures(pipe, before[i : i + 1], [text], steps=steps, seed=i))
            for call in handle.last.calls:
                ran, left = call.counts["tokens"]
                computed, tokens = computed + ran, tokens + ran + left
                steps_computed += call.computed
    made = torch.cat(parts)
    record = judge(made, edits, before, after)
    record["tokens_computed"] = round(computed / tokens, 4)
    record["steps_computed"] = round(steps_computed / len(texts), 2)
    return record, made


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(
        prog="python -m diffcache.pipelines.small.measure_regions",
        description="Measure what RegionE leaves out and what that costs on held-out edits.",
    )
    parser.add_argument("--steps", type=int, default=28, help="sampling steps")
    parser.add_argument("--samples", type=int, default=128, help="held-out edits")
    parser.add_argument("--fit", type=int, default=64, help="edits to fit the ratios to")
    parser.add_argument("--threshold", type=float, nargs="+", default=[0.93], help="of similarity")
    parser.add_argument("--model", type=Path, default=DIRECTORY, help="pipeline directory")
    parser.add_argument("--report", type=Path, default=REPORT, help="JSON file to write")
    chosen = parser.parse_args(arguments)
    pipe = load(directory=chosen.model)
    data, texts = draw_edits(chosen.samples, 0, held=True), instructions(chosen.samples, 0)
    record, wanted = measure(pipe, None, data, texts, chosen.steps)
    rows = [{"name": "uncached", **record}]
    print(json.dumps(rows[-1]))
    for threshold in chosen.threshold:
        plain = RegionE(threshold=threshold)
        methods = {"fitted ratios": fit(pipe, plain, steps=chosen.steps, samples=chosen.fit)}
        if chosen.steps == plain.steps:
            methods["published ratios"] = plain
        for name, method in methods.items():
            record, made = measure(pipe, method, data, texts, chosen.steps)
            psnr = psnr_to(made, wanted)
            fidelity = {
                "psnr_to_uncached_db": round(float(psnr.mean()), 2),
                "psnr_to_uncached_p5_db": round(float(psnr.quantile(0.05)), 2),
            }
            rows.append({"name": name, "threshold": threshold, **fidelity, **record})
            print(json.dumps(rows[-1]))
    report = {
        "model": "shapes-kontext",
        "steps": chosen.steps,
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "rows": rows,
    }
    part = chosen.report.with_name(chosen.report.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(part, chosen.report)


if __name__ == "__main__":
    main()
