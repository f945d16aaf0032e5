"""Train and export the small class-conditional DiTPipeline.

    python -m diffcache.eval.workshop.small.train_dit --out out/shapes-dit

The autoencoder is the one of shapes-flux; only the denoiser is trained, one class in ten empty.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import DiTPipeline
from diffusers.models.attention_processor import AttnProcessor
from safetensors.torch import load_file
from torch import Tensor, nn

from diffcache.eval.workshop.small.course import Course, Plan, train
from diffcache.eval.workshop.small.diffusion import (
    disturb,
    draw_timesteps,
    kept_latents,
    load_autoencoder,
    noise_error,
    record,
)
from diffcache.eval.workshop.small.dit import CALL, DIRECTORY, EMPTY, build_pipeline, draw
from diffcache.eval.workshop.small.export import save_pipeline
from diffcache.eval.workshop.small.loop import training_parser

COURSE = Course("dit", examples=24_000, steps=8186)
CLASS_DROPOUT = 0.1
STAGES = ("train", "export")
BENCH = DIRECTORY.parents[1] / "bench"


class Step(nn.Module):
    """One training step's loss."""

    def __init__(self, pipe: DiTPipeline, *, compiled: bool) -> None:
        super().__init__()
        for block in pipe.transformer.transformer_blocks:
            # The fused kernel's backward pass takes half of a step on a CPU.
            block.attn1.set_processor(AttnProcessor())
        self.denoise = torch.compile(pipe.transformer) if compiled else pipe.transformer
        self.signal = pipe.scheduler.alphas_cumprod

    def forward(self, latents: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Return the error of the noise, for latents [B, 4, 16, 16] and classes int64 [B]."""
        times = draw_timesteps(len(latents), generator)
        noise = torch.randn(latents.shape, generator=generator)
        empty = torch.rand(len(labels), generator=generator) < CLASS_DROPOUT
        signal = self.signal[times]
        predicted = self.denoise(
            disturb(latents, noise, signal),
            timestep=times,
            class_labels=torch.where(empty, EMPTY, labels),
        ).sample
        return noise_error(predicted, noise, signal)


def fit(out: Path, plan: Plan, course: Course = COURSE) -> DiTPipeline:
    """Train the denoiser and return the pipeline with averaged weights, in float32.

    Args:
        out: Folder; gets `latents.safetensors` and the files of `course.train`.
        plan: Settings of the run, as in `course.train`.
        course: Settings of the training: number of pictures, batch and rate.
    """
    torch.manual_seed(plan.seed)
    pipe = build_pipeline(load_autoencoder())
    labels, pictures = draw(course.examples, plan.seed)
    latents = kept_latents(out / "latents.safetensors", pipe.vae, pictures)
    step = Step(pipe, compiled=plan.compiled)

    def loss(chosen: Tensor, index: int, progress: float) -> Tensor:
        generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + index)
        error: Tensor = step(latents[chosen].float(), labels[chosen], generator)
        return error

    train(out, nn.ModuleDict({"transformer": pipe.transformer}), loss, course, plan)
    return pipe


def assemble(out: Path) -> DiTPipeline:
    """Put the pipeline together from a training folder, in float32, with averaged weights."""
    pipe = build_pipeline(load_autoencoder())
    weights = nn.ModuleDict({"transformer": pipe.transformer})
    weights.load_state_dict(load_file(out / f"{COURSE.name}.safetensors"))
    return pipe


def parser() -> argparse.ArgumentParser:
    """Return the command's arguments."""
    return training_parser(
        "train_dit",
        "Train and export the class-conditional shapes pipeline on a CPU.",
        out="out/shapes-dit",
        updates=COURSE.steps,
        stages=STAGES,
        compiles=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stages asked for, in order."""
    chosen = parser().parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    if "train" in chosen.stages:
        chosen.out.mkdir(parents=True, exist_ok=True)
        settings = (chosen.seed, chosen.updates, chosen.resume, not chosen.eager)
        fit(chosen.out, Plan(*settings, minutes=chosen.minutes))
    if "export" in chosen.stages:
        size = save_pipeline(assemble(chosen.out), DIRECTORY, CALL)
        command = (
            "python -m diffcache.eval.workshop.small.train_dit "
            f"--seed {chosen.seed} --updates {chosen.updates}"
        )
        path = BENCH / "shapes-dit-training.json"
        done = record(chosen.out, COURSE.name, path, seed=chosen.seed, command=command)
        print(f"exported {size / 1e6:.2f} MB after {done['steps']} steps")


if __name__ == "__main__":
    main()
