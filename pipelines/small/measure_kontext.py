"""Measure the shipped editing pipeline: does it change what is asked for, and nothing else?

    python -m diffcache.pipelines.small.measure_kontext --steps 28 --samples 256

loads it with plain `FluxKontextPipeline.from_pretrained`, edits held-out pictures, reads the
results with the shipped classifier, and writes `assets/bench/shapes-kontext-quality.json` and a
labelled grid.
"""

from __future__ import annotations

import argparse
import json
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FluxKontextPipeline
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from tqdm import tqdm

from diffcache.pipelines.small.edits import draw_edits, instruction, judge, untouched_psnr
from diffcache.pipelines.small.kontext import CALL, DIRECTORY, load
from diffcache.pipelines.small.loop import to_unit
from diffcache.pipelines.small.measure import write_report

REPORT = DIRECTORY.parents[1] / "bench" / "shapes-kontext-quality.json"


def instructions(count: int, seed: int) -> list[str]:
    """Return the instructions of the held-out edits of `draw_edits(count, seed, held=True)`."""
    edits, _, _ = draw_edits(count, seed, held=True)
    return [instruction(e, np.random.default_rng([seed, i, 9])) for i, e in enumerate(edits)]


def edit_pictures(
    pipe: FluxKontextPipeline,
    before: Tensor,
    texts: Sequence[str],
    *,
    steps: int,
    seed: int,
    batch: int = 32,
) -> Tensor:
    """Edit pictures; picture i starts from the noise of seed + i.

    Args:
        pipe: the pipeline.
        before: the reference pictures, uint8 [B, 3, 64, 64].
        texts: one instruction for each.
        steps: sampling steps.
        seed: of the first picture.
        batch: pictures edited at once.

    Returns:
        The results, uint8 [B, 3, 64, 64].
    """
    made = []
    for start in tqdm(range(0, len(texts), batch), desc=f"{steps} steps", leave=False):
        part = list(texts[start : start + batch])
        seeds = range(seed + start, seed + start + len(part))
        images = pipe(
            image=before[start : start + batch].float() / 255,
            prompt=part,
            num_inference_steps=steps,
            generator=[torch.Generator("cpu").manual_seed(number) for number in seeds],
            output_type="np",
            **CALL,
        ).images
        made.append(torch.from_numpy(np.round(images * 255).astype(np.uint8)))
    return torch.cat(made).permute(0, 3, 1, 2).contiguous()


@torch.no_grad()
def ceiling(pipe: FluxKontextPipeline, before: Tensor, after: Tensor) -> float:
    """Return the mean PSNR in dB of the untouched part behind the autoencoder alone."""
    decoded = pipe.vae.decode(pipe.vae.encode(to_unit(after)).latent_dist.mode()).sample
    pictures = ((decoded.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return float(untouched_psnr(pictures, before, after).mean())


def measure(
    pipe: FluxKontextPipeline, *, steps: int, samples: int, seed: int
) -> tuple[dict[str, Any], Tensor]:
    """Measure held-out edits.

    Returns:
        A JSON-ready record, and the pictures, uint8 [B, 3, 64, 64].
    """
    edits, before, after = draw_edits(samples, seed, held=True)
    begin = time.monotonic()
    made = edit_pictures(pipe, before, instructions(samples, seed), steps=steps, seed=seed)
    seconds = time.monotonic() - begin
    record = {"steps": steps, "seed": seed, **judge(made, edits, before, after)}
    record["autoencoder_untouched_psnr_db"] = round(ceiling(pipe, before, after), 2)
    record["seconds_per_picture"] = round(seconds / samples, 3)
    return record, made


def draw_grid(before: Tensor, made: Tensor, texts: Sequence[str], columns: int = 6) -> Any:
    """Lay reference and result side by side, twice as large, over the instruction."""
    side, gap, text = 128, 10, 40
    rows = -(-len(texts) // columns)
    wide, high = 2 * side + gap, side + text
    grid = Image.new("RGB", (columns * wide + gap, rows * high + gap), "white")
    pen, font = ImageDraw.Draw(grid), ImageFont.load_default(size=13)
    for index, words in enumerate(texts):
        row, column = divmod(index, columns)
        x, y = gap + column * wide, gap + row * high
        for place, picture in enumerate((before[index], made[index])):
            image = Image.fromarray(picture.permute(1, 2, 0).numpy())
            grid.paste(image.resize((side, side), Image.Resampling.NEAREST), (x + place * side, y))
        pen.multiline_text(
            (x, y + side + 2), "\n".join(textwrap.wrap(words, 40)), fill="black", font=font
        )
    return grid.quantize(128, dither=Image.Dither.NONE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the report and the grid."""
    parser = argparse.ArgumentParser(
        prog="python -m diffcache.pipelines.small.measure_kontext",
        description="Measure how well the small editing pipeline follows held-out instructions.",
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[28], help="sampling steps")
    parser.add_argument("--samples", type=int, default=256, help="edits for each step count")
    parser.add_argument("--seed", type=int, default=0, help="of edits and noise")
    parser.add_argument("--model", type=Path, default=DIRECTORY, help="pipeline directory")
    parser.add_argument("--report", type=Path, default=REPORT, help="JSON file to write")
    chosen = parser.parse_args(arguments)
    pipe = load(directory=chosen.model)
    runs = []
    for steps in chosen.steps:
        run, made = measure(pipe, steps=steps, samples=chosen.samples, seed=chosen.seed)
        print(json.dumps(run))
        runs.append(run)
    measured = (
        "share of held-out edits whose target the classifier reads right, and PSNR to "
        "the reference over the pixels that the edit does not touch"
    )
    write_report(chosen.report, {"model": "shapes-kontext", "measure": measured}, runs)
    _, before, _ = draw_edits(chosen.samples, chosen.seed, held=True)
    texts = instructions(chosen.samples, chosen.seed)[:24]
    draw_grid(before[:24], made[:24], texts).save(chosen.model / "grid.png", optimize=True)
    print(f"wrote {chosen.report.name} and grid.png")


if __name__ == "__main__":
    main()
