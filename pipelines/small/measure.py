"""Measure the shipped shapes pipeline: does it draw what held-out prompts say?

    python -m diffcache.pipelines.small.measure --steps 28 50 --samples 256

loads it with plain `FluxPipeline.from_pretrained`, draws held-out prompts, reads the pictures with
the shipped classifier, and writes `assets/bench/shapes-flux-quality.json` and a labelled grid.
"""

from __future__ import annotations

import argparse
import datetime
import json
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, FluxPipeline
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from diffcache.files import write_json
from diffcache.pipelines.small.classifier import prompt_accuracy
from diffcache.pipelines.small.export import versions
from diffcache.pipelines.small.flux import CALL, DIRECTORY, load
from diffcache.pipelines.small.scenes import held_out_prompts, shipped_prompts

REPORT = DIRECTORY.parents[1] / "bench" / "shapes-flux-quality.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def draw_pictures(
    pipe: DiffusionPipeline,
    prompts: Sequence[Any],
    *,
    steps: int,
    seed: int,
    batch: int = 32,
    call: Mapping[str, Any] = CALL,
) -> list[Image.Image]:
    """Draw one picture for each prompt; picture i starts from the noise of seed + i.

    Args:
        pipe: the pipeline.
        prompts: what to draw: texts or classes.
        steps: sampling steps.
        seed: of the first picture.
        batch: pictures drawn at once.
        call: what else the pipeline is called with.
    """
    pictures: list[Image.Image] = []
    for start in tqdm(range(0, len(prompts), batch), desc=f"{steps} steps", leave=False):
        part = list(prompts[start : start + batch])
        seeds = range(seed + start, seed + start + len(part))
        noise = [torch.Generator("cpu").manual_seed(number) for number in seeds]
        pictures += pipe(part, num_inference_steps=steps, generator=noise, **call).images
    return pictures


def measure(
    pipe: FluxPipeline, *, steps: int, samples: int, seed: int
) -> tuple[dict[str, Any], list[Image.Image]]:
    """Measure prompt accuracy on held-out prompts.

    Args:
        pipe: the pipeline.
        steps: sampling steps.
        samples: how many prompts, one picture each.
        seed: of the prompts and the noise.

    Returns:
        A JSON-ready record, and the pictures.
    """
    prompts = held_out_prompts(samples, seed)
    begin = time.monotonic()
    pictures = draw_pictures(pipe, prompts, steps=steps, seed=seed)
    seconds = time.monotonic() - begin
    overall, parts = prompt_accuracy(pictures, prompts)
    record = {
        "steps": steps,
        "samples": samples,
        "seed": seed,
        "prompt_accuracy": round(overall, 4),
        "attributes": {name: round(value, 4) for name, value in parts.items()},
        "seconds": round(seconds, 1),
        "seconds_per_picture": round(seconds / samples, 3),
    }
    return record, pictures


def draw_grid(pictures: Sequence[Image.Image], prompts: Sequence[str], columns: int = 6) -> Any:
    """Lay pictures out in a grid, three times as large, each over its prompt."""
    side, gap, text = 192, 10, 72
    rows = -(-len(pictures) // columns)
    grid = Image.new("RGB", (columns * (side + gap) + gap, rows * (side + text) + gap), "white")
    pen, font = ImageDraw.Draw(grid), ImageFont.load_default(size=13)
    for index, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True)):
        row, column = divmod(index, columns)
        x, y = gap + column * (side + gap), gap + row * (side + text)
        grid.paste(picture.resize((side, side), Image.Resampling.NEAREST), (x, y))
        pen.rectangle((x - 1, y - 1, x + side, y + side), outline=(200, 200, 200))
        lines = "\n".join(textwrap.wrap(prompt, 31))
        pen.multiline_text((x, y + side + 2), lines, fill="black", font=font, spacing=1)
    return grid.quantize(128, dither=Image.Dither.NONE)


def write_report(path: Path, about: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> None:
    """Write what was measured with when and with what; `about` names the model and the measure."""
    done = {**about, "device": "cpu", "threads": torch.get_num_threads()}
    done |= {"date": datetime.date.today().isoformat(), "versions": versions(), "runs": list(runs)}
    write_json(path, done)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the report and the grid."""
    parser = argparse.ArgumentParser(
        prog="python -m diffcache.pipelines.small.measure",
        description="Measure how much of held-out prompts the shapes pipeline draws.",
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[28], help="sampling steps")
    parser.add_argument("--samples", type=int, default=256, help="pictures for each step count")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and noise")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the models")
    parser.add_argument("--model", type=Path, default=DIRECTORY, help="pipeline directory")
    parser.add_argument("--report", type=Path, default=REPORT, help="JSON file to write")
    chosen = parser.parse_args(arguments)
    pipe = load(DTYPES[chosen.dtype], chosen.model)
    runs = []
    for steps in chosen.steps:
        run, _ = measure(pipe, steps=steps, samples=chosen.samples, seed=chosen.seed)
        print(json.dumps(run))
        runs.append(run)
    measured = "share of the attributes stated in held-out prompts that the classifier reads"
    about = {"model": "shapes-flux", "measure": measured, "dtype": chosen.dtype}
    write_report(chosen.report, about, runs)
    prompts = shipped_prompts()[:24]
    pictures = draw_pictures(pipe, prompts, steps=chosen.steps[0], seed=chosen.seed)
    draw_grid(pictures, prompts).save(chosen.model / "grid.png", optimize=True)
    print(f"wrote {chosen.report.name} and grid.png")


if __name__ == "__main__":
    main()
