"""Train and export the small StableDiffusionPipeline.

    python -m diffcache.eval.workshop.small.train_unet --out out/shapes-unet

The autoencoder is the one of shapes-flux, and its CLIP text encoder, which already knows the
prompts, is where the text side starts. One prompt in ten is empty.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from diffusers.models.attention_processor import AttnProcessor
from safetensors.torch import load_file
from torch import Tensor, nn

from diffcache.eval.workshop.small.course import Course, Plan, train
from diffcache.eval.workshop.small.diffusion import (
    disturb,
    draw_timesteps,
    kept_latents,
    load_autoencoder,
    record,
    velocity_error,
)
from diffcache.eval.workshop.small.export import save_pipeline
from diffcache.eval.workshop.small.loop import training_parser
from diffcache.eval.workshop.small.small_unet import CALL, DIRECTORY, build_pipeline
from diffcache.eval.workshop.small.train_flux import write_prompts
from diffcache.pipelines.small.scenes import draw

COURSE = Course(
    "unet", examples=24_000, steps=17117, batch=16, decay=0.998, factors={"text_encoder": 0.25}
)
PROMPT_DROPOUT = 0.1
SINGLES_FIRST = 0.15
EVEN_FIRST = 0.5
PLACES_UNTIL = 0.85
STAGES = ("train", "export")
BENCH = DIRECTORY.parents[1] / "bench"


class Step(nn.Module):
    """One training step's loss."""

    def __init__(self, pipe: StableDiffusionPipeline, *, compiled: bool) -> None:
        super().__init__()
        self.text_encoder = pipe.text_encoder
        self.tokenizer = pipe.tokenizer
        # The fused kernel's backward pass takes half of a step on a CPU.
        pipe.unet.set_attn_processor(AttnProcessor())
        self.denoise = torch.compile(pipe.unet) if compiled else pipe.unet
        self.signal = pipe.scheduler.alphas_cumprod

    def forward(
        self, latents: Tensor, texts: list[str], generator: torch.Generator, progress: float = 1.0
    ) -> Tensor:
        """Return the error of the velocity, for latents [B, 4, 16, 16] and their prompts.

        Timesteps are uniform at first, where many of them leave only the prompt to go by; then half
        of them are where the places of objects are decided, and at last where their outlines are.
        """
        even = 1.0 if progress < EVEN_FIRST else 0.5
        middle = 620 if progress < PLACES_UNTIL else 350
        times = draw_timesteps(len(latents), generator, even, middle)
        noise = torch.randn(latents.shape, generator=generator)
        signal = self.signal[times]
        length = self.tokenizer.model_max_length
        tokens = self.tokenizer(
            texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).input_ids
        states = self.text_encoder(tokens)[0]
        mixed = disturb(latents, noise, signal)
        predicted = self.denoise(mixed, times, encoder_hidden_states=states).sample
        return velocity_error(predicted, latents, noise, signal)


def fit(out: Path, plan: Plan, course: Course = COURSE) -> StableDiffusionPipeline:
    """Train the denoiser with its text encoder; return averaged weights, in float32.

    Args:
        out: Folder; gets `latents.safetensors` and the files of `course.train`.
        plan: Settings of the run, as in `course.train`.
        course: Settings of the training: number of pictures, batch and rate.
    """
    torch.manual_seed(plan.seed)
    pipe = build_pipeline(load_autoencoder())
    scenes, pictures = draw(course.examples, plan.seed + 10)
    latents = kept_latents(out / "latents.safetensors", pipe.vae, pictures)
    singles = torch.tensor([i for i, scene in enumerate(scenes) if len(scene.figures) == 1])
    step = Step(pipe, compiled=plan.compiled)
    weights = nn.ModuleDict({"unet": pipe.unet, "text_encoder": pipe.text_encoder})

    def loss(chosen: Tensor, index: int, progress: float) -> Tensor:
        generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + index)
        if progress < SINGLES_FIRST:
            chosen[::2] = singles[chosen[::2] % len(singles)]
        rng = np.random.default_rng([plan.seed, index])
        texts = write_prompts([scenes[i] for i in chosen], rng, PROMPT_DROPOUT)
        error: Tensor = step(latents[chosen].float(), texts, generator, progress)
        return error

    train(out, weights, loss, course, plan)
    return pipe


def assemble(out: Path) -> StableDiffusionPipeline:
    """Put the pipeline together from a training folder, in float32, with averaged weights."""
    pipe = build_pipeline(load_autoencoder())
    weights = nn.ModuleDict({"unet": pipe.unet, "text_encoder": pipe.text_encoder})
    weights.load_state_dict(load_file(out / f"{COURSE.name}.safetensors"))
    return pipe


def parser() -> argparse.ArgumentParser:
    """Return the command's arguments."""
    made = training_parser(
        "train_unet",
        "Train and export the small StableDiffusionPipeline on a CPU.",
        out="out/shapes-unet",
        updates=COURSE.steps,
        stages=STAGES,
    )
    made.add_argument("--compile", action="store_true", help="compile the denoiser")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stages asked for, in order."""
    chosen = parser().parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    if "train" in chosen.stages:
        chosen.out.mkdir(parents=True, exist_ok=True)
        settings = (chosen.seed, chosen.updates, chosen.resume, chosen.compile)
        fit(chosen.out, Plan(*settings, minutes=chosen.minutes))
    if "export" in chosen.stages:
        size = save_pipeline(assemble(chosen.out), DIRECTORY, CALL)
        command = (
            "python -m diffcache.eval.workshop.small.train_unet "
            f"--seed {chosen.seed} --updates {chosen.updates}"
        )
        path = BENCH / "shapes-unet-training.json"
        done = record(chosen.out, COURSE.name, path, seed=chosen.seed, command=command)
        print(f"exported {size / 1e6:.2f} MB after {done['steps']} steps")


if __name__ == "__main__":
    main()
