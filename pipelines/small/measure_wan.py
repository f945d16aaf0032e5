"""Export the small WanPipeline and measure it: does it film what held-out prompts say?

    python -m diffcache.pipelines.small.measure_wan --steps 20 50 --samples 96

loads it with plain `WanPipeline.from_pretrained`, films held-out prompts, reads the middle frame
(where the object passes its stated place) with the shipped classifier, and writes
`assets/bench/shapes-wan-quality.json` and a labelled strip of films.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm

from diffcache.files import write_json
from diffcache.pipelines.small.classifier import prompt_accuracy
from diffcache.pipelines.small.export import save_pipeline, thin, versions
from diffcache.pipelines.small.loop import Log, to_unit
from diffcache.pipelines.small.scenes import prompt, sample_scene
from diffcache.pipelines.small.train_wan_vae import draw_scenes_and_films
from diffcache.pipelines.small.train_wan_vae import measure as measure_autoencoder
from diffcache.pipelines.small.wan import CALL, DIRECTORY, FRAMES, SHIFT, build_pipeline, load

TRAINED = ("transformer", "text_encoder")
BENCH = DIRECTORY.parents[1] / "bench"
RECORD = BENCH / "shapes-wan-training.json"
REPORT = BENCH / "shapes-wan-quality.json"


def assemble(out: Path, shift: float = SHIFT) -> WanPipeline:
    """Put the pipeline together from a training folder, in float32, with averaged weights."""
    refined = out / "autoencoder-refined"
    autoencoder = refined if refined.exists() else out / "autoencoder"
    pipe = build_pipeline(AutoencoderKLWan.from_pretrained(autoencoder), shift)
    weights = nn.ModuleDict({name: getattr(pipe, name) for name in TRAINED})
    weights.load_state_dict(load_file(out / "denoiser.safetensors"))
    return pipe


def export(out: Path, directory: Path = DIRECTORY, *, shift: float = SHIFT) -> int:
    """Save the pipeline with averaged weights, as `save_pipeline` does.

    Args:
        out: the training folder.
        directory: where `WanPipeline.from_pretrained` will look.
        shift: of the sampling sigmas.

    Returns:
        The size of the directory in bytes.
    """
    return save_pipeline(assemble(out, shift), directory, CALL)


def record(out: Path, *, seed: int, updates: int, path: Path = RECORD) -> dict[str, Any]:
    """Write the training record: seed, versions, steps, seconds and thinned curves.

    Args:
        out: the training folder.
        seed: that was used.
        updates: the command's `--updates`.
        path: of the JSON file.

    Returns:
        What was written.
    """
    stages: dict[str, Any] = {}
    for name in ("autoencoder", "text", "denoiser", "decoder"):
        if not (out / f"{name}.jsonl").exists():
            continue
        rows = Log(out / f"{name}.jsonl", resume=True).rows()
        steps, seconds = rows[-1]["step"], rows[-1]["seconds"]
        stages[name] = {"steps": steps, "seconds": seconds, "curve": thin(rows)}
    command = f"python -m diffcache.pipelines.small.train_wan --seed {seed} --updates {updates}"
    done: dict[str, Any] = {"model": "shapes-wan", "seed": seed, "command": command}
    done |= {"versions": versions(), "stages": stages}
    write_json(path, done)
    return done


def held_out_prompts(count: int, seed: int = 0) -> list[str]:
    """Return different prompts of one object in combinations no model was trained on.

    Args:
        count: how many; there are 236 in all.
        seed: of the draw.
    """
    rng = np.random.default_rng([seed, 20_261])
    scenes: dict[str, str] = {}
    while len(scenes) < count:
        scene = sample_scene(rng, held=True, figures=1)
        scenes.setdefault(scene.key(), prompt(scene, int(rng.integers(2))))
    return list(scenes.values())


def draw_films(
    pipe: WanPipeline, prompts: Sequence[str], *, steps: int, seed: int, **call: Any
) -> Tensor:
    """Film each prompt; film i starts from the noise of seed + i.

    Args:
        pipe: the pipeline.
        prompts: what to film.
        steps: sampling steps.
        seed: of the first film.
        **call: overrides `CALL`.

    Returns:
        Films uint8 [B, F, 64, 64, 3].
    """
    films = []
    for start in tqdm(range(0, len(prompts), 16), desc=f"{steps} steps", leave=False):
        part = list(prompts[start : start + 16])
        noise = [torch.Generator().manual_seed(seed + start + i) for i in range(len(part))]
        made = pipe(part, num_inference_steps=steps, generator=noise, **{**CALL, **call}).frames
        films.append(torch.from_numpy(made).mul(255).round().to(torch.uint8))
    return torch.cat(films)


def measure(
    pipe: WanPipeline, *, steps: int, samples: int, seed: int, **call: Any
) -> tuple[dict[str, Any], Tensor]:
    """Measure on held-out prompts how much of them the middle frames show.

    Args:
        pipe: the pipeline.
        steps: sampling steps.
        samples: how many prompts, one film each.
        seed: of the prompts and the noise.
        **call: overrides `CALL`.

    Returns:
        A JSON-ready record, and the films.
    """
    prompts = held_out_prompts(samples, seed)
    begin = time.monotonic()
    films = draw_films(pipe, prompts, steps=steps, seed=seed, **call)
    seconds = time.monotonic() - begin
    overall, parts = prompt_accuracy(films[:, FRAMES // 2].permute(0, 3, 1, 2), prompts)
    done = {"steps": steps, "samples": samples, "seed": seed, **CALL, **call}
    done["prompt_accuracy"] = round(overall, 4)
    done["attributes"] = {name: round(value, 4) for name, value in parts.items()}
    return {**done, "seconds_per_film": round(seconds / samples, 3)}, films


def draw_strips(films: Tensor, prompts: Sequence[str]) -> Any:
    """Lay films out one a row, every second frame twice as large, each under its prompt."""
    side, gap, text = 128, 4, 20
    shown = list(range(0, films.shape[1], 2))
    grid = Image.new("RGB", (len(shown) * (side + gap), len(films) * (side + text)), "white")
    pen, font = ImageDraw.Draw(grid), ImageFont.load_default(size=13)
    for row, (film, text_of) in enumerate(zip(films, prompts, strict=True)):
        pen.text((2, row * (side + text) + 2), text_of, fill="black", font=font)
        for column, frame in enumerate(shown):
            picture = Image.fromarray(film[frame].numpy())
            place = (column * (side + gap), row * (side + text) + text)
            grid.paste(picture.resize((side, side), Image.Resampling.NEAREST), place)
    return grid


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the shipped model and write the report and the strips."""
    made = argparse.ArgumentParser(prog="python -m diffcache.pipelines.small.measure_wan")
    made.add_argument("--steps", type=int, nargs="+", default=[20, 50], help="sampling steps")
    made.add_argument("--samples", type=int, default=96, help="prompts, one film each")
    made.add_argument("--seed", type=int, default=0, help="of the prompts and the noise")
    made.add_argument("--threads", type=int, default=1, help="of torch")
    chosen = made.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    pipe = load()
    runs = []
    for steps in chosen.steps:
        run, films = measure(pipe, steps=steps, samples=chosen.samples, seed=chosen.seed)
        runs.append(run)
        print(json.dumps(run), flush=True)
    prompts = held_out_prompts(chosen.samples, chosen.seed)
    draw_strips(films[:10], prompts[:10]).save(DIRECTORY / "strips.png", optimize=True)
    _, held = draw_scenes_and_films(48, chosen.seed + 2, held=True)
    report = {
        "model": "shapes-wan",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": versions(),
        "autoencoder": {
            k: round(v, 4) for k, v in measure_autoencoder(pipe.vae, to_unit(held)).items()
        },
        "runs": runs,
    }
    write_json(REPORT, report)


if __name__ == "__main__":
    main()
