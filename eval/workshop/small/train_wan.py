"""Train and export the small WanPipeline with one command.

    python -m diffcache.eval.workshop.small.train_wan --out out/shapes-wan

The denoiser and the text encoder learn by flow matching; the model sees what `WanPipeline` shows
it: normalized latents, text cut to its length and padded with zeros, 1000 sigma as the timestep,
and `noise - latents` as the target.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm

from diffcache.eval.workshop.small import course, export_wan, train_wan_text, train_wan_vae
from diffcache.eval.workshop.small.checkpoint import write_tensors
from diffcache.eval.workshop.small.course import Course
from diffcache.eval.workshop.small.loop import to_unit, training_parser
from diffcache.eval.workshop.small.train_flux import write_prompts
from diffcache.eval.workshop.small.train_wan_vae import draw_scenes_and_films
from diffcache.eval.workshop.small.wan_step import Step, draw_sigmas
from diffcache.eval.workshop.small.wan_whole import encode
from diffcache.pipelines.small.scenes import Scene
from diffcache.pipelines.small.wan import TEXT_TOKENS, build_pipeline

COURSE = Course(
    "denoiser",
    examples=4_000,
    steps=9399,
    decay=0.998,
    rate=1.5e-3,
    save_every=200,
    factors={"text_encoder": 0.2},
)
PART = 200
PROMPT_DROPOUT = 0.1
MOST_TEXT_TOKENS = 512
STAGES = ("autoencoder", "text", "denoiser", "decoder", "export")
UPDATES = {"autoencoder": 3750, "text": 490, "denoiser": COURSE.steps, "decoder": 2083}


@dataclass(frozen=True)
class Plan(course.Plan):
    """Settings of the run, and the number of films.

    Attributes:
        films: Number of films that are encoded and trained on.
    """

    films: int = COURSE.examples


@torch.no_grad()
def encode_films(autoencoder: AutoencoderKLWan, films: Tensor) -> Tensor:
    """Encode films uint8 [B, 3, F, 64, 64] into normalized latents, float16 [B, Z, f, h, w]."""
    shape = (1, -1, 1, 1, 1)
    mean = torch.tensor(autoencoder.config.latents_mean).view(shape)
    deviation = torch.tensor(autoencoder.config.latents_std).view(shape)
    parts = []
    for part in films.split(8):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            latents = encode(autoencoder, to_unit(part))[0]
        parts.append(((latents - mean) / deviation).half().contiguous())
    return torch.cat(parts)


def draw_latents(
    out: Path, autoencoder: AutoencoderKLWan, plan: Plan
) -> tuple[list[Scene], Tensor]:
    """Draw films in parts and encode each once; parts already on disk are read when resuming."""
    folder = out / "latents"
    folder.mkdir(parents=True, exist_ok=True)
    scenes: list[Scene] = []
    latents: list[Tensor] = []
    for index in tqdm(range(-(-plan.films // PART)), desc="encode", mininterval=5):
        path, seed = folder / f"{index}.safetensors", plan.seed + 1000 + index
        if plan.resume and path.exists():
            latents.append(load_file(path)["latents"])
            scenes += train_wan_vae.draw_scenes(len(latents[-1]), seed)
            continue
        drawn, films = draw_scenes_and_films(min(PART, plan.films - len(scenes)), seed)
        scenes += drawn
        latents.append(encode_films(autoencoder, films))
        write_tensors(path, {"latents": latents[-1]})
    return scenes, torch.cat(latents)


def train(out: Path, autoencoder: AutoencoderKLWan, plan: Plan) -> WanPipeline:
    """Train the denoiser and the text encoder; save a checkpoint every 200 steps.

    Args:
        out: Folder with `text.safetensors`; gets `denoiser.safetensors` (averaged weights),
            `denoiser.state`, `denoiser.jsonl` and `latents/`.
        autoencoder: Trained autoencoder, with its means and deviations set.
        plan: Settings of the run.

    Returns:
        The pipeline with averaged weights, in float32.
    """
    torch.manual_seed(plan.seed)
    pipe = build_pipeline(autoencoder)
    pipe.text_encoder.load_state_dict(load_file(out / "text.safetensors"))
    step = Step(pipe, compiled=plan.compiled)
    weights = nn.ModuleDict({name: getattr(pipe, name) for name in export_wan.TRAINED})
    scenes, latents = draw_latents(out, autoencoder, plan)

    def loss(chosen: Tensor, index: int, progress: float) -> Tensor:
        generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + index)
        rng = np.random.default_rng([plan.seed, index])
        texts = write_prompts([scenes[i] for i in chosen], rng, PROMPT_DROPOUT)
        batch = latents[chosen].float()
        noise = torch.randn(batch.shape, generator=generator)
        sigmas = draw_sigmas(len(batch), generator, progress)
        error: Tensor = step(batch, noise, sigmas, texts, draw_text_tokens(rng))
        return error

    course.train(out, weights, loss, replace(COURSE, examples=len(scenes)), plan)
    pipe.transformer.set_attn_processor(WanAttnProcessor())
    return pipe


def draw_text_tokens(rng: np.random.Generator) -> int:
    """Draw how many text tokens a step pads to: mostly 24, else up to 512, logarithmically."""
    if rng.random() < 0.7:
        return TEXT_TOKENS
    low, high = np.log(TEXT_TOKENS), np.log(MOST_TEXT_TOKENS)
    return round(float(np.exp(rng.uniform(low, high))))


def parser() -> argparse.ArgumentParser:
    """Return the command's arguments."""
    return training_parser(
        "train_wan",
        "Train the shapes WanPipeline on a CPU; updates are the denoiser's, others in proportion.",
        out="out/shapes-wan",
        updates=COURSE.steps,
        stages=STAGES,
        compiles=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stages asked for, in order."""
    chosen = parser().parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    out, seed, resume, minutes = chosen.out, chosen.seed, chosen.resume, chosen.minutes
    out.mkdir(parents=True, exist_ok=True)
    steps = {n: -(-count * chosen.updates // COURSE.steps) for n, count in UPDATES.items()}
    for stage in [name for name in STAGES if name in chosen.stages]:
        print(f"== {stage}", flush=True)
        if stage == "autoencoder":
            train_wan_vae.train(out, seed=seed, steps=steps[stage], resume=resume, minutes=minutes)
        elif stage == "text":
            train_wan_text.train(out, seed=seed, steps=steps[stage])
        elif stage == "denoiser":
            trained = AutoencoderKLWan.from_pretrained(out / "autoencoder")
            train(out, trained, Plan(seed, chosen.updates, resume, not chosen.eager, minutes))
        elif stage == "decoder":
            train_wan_vae.refine(out, seed=seed, steps=steps[stage])
        else:
            print(f"exported {export_wan.export(out) / 1e6:.2f} MB")
            export_wan.record(out, seed=seed, updates=chosen.updates)


if __name__ == "__main__":
    main()
