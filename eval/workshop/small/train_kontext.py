"""Train and export the small FluxKontextPipeline, starting from shapes-flux.

    python -m diffcache.eval.workshop.small.train_kontext --out out/kontext

The model sees what `FluxKontextPipeline` will show it: the packed latents of the noisy picture with
those of the reference behind them, position ids that differ in their first coordinate, text padded
to the same length without a mask, sigma as the timestep; only the velocity of the noisy tokens
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxKontextPipeline
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from safetensors.torch import load_file
from torch import Tensor, nn

from diffcache.eval.workshop.small import course
from diffcache.eval.workshop.small.checkpoint import write_tensors
from diffcache.eval.workshop.small.course import Course
from diffcache.eval.workshop.small.export import TRAINED
from diffcache.eval.workshop.small.export_kontext import export, record
from diffcache.eval.workshop.small.loop import Log, training_parser
from diffcache.eval.workshop.small.train_flux import Prompted, draw_sigmas, encode_pictures
from diffcache.eval.workshop.small.train_kontext_text import (
    TextCourse,
    train_text,
    write_instructions,
)
from diffcache.pipelines.small.edits import Edit, draw_edits
from diffcache.pipelines.small.kontext import TEXT_TOKENS, build_pipeline

COURSE = Course(
    "kontext",
    examples=6_000,
    steps=2418,
    batch=8,
    rate=7e-4,
    factors={"text_encoder": 0.25, "text_encoder_2": 0.25},
)
CHANGED_WEIGHT = 3.0
CHANGED_LATENT = 0.3


@dataclass(frozen=True)
class Plan(course.Plan):
    """Settings of the run, the text encoders first.

    Attributes:
        text_steps: Training steps of the text encoders before the denoiser.
        edits: Number of pairs of pictures to draw.
    """

    compiled: bool = False
    text_steps: int = 475
    edits: int = COURSE.examples


class Step(Prompted):
    """One training step's loss."""

    def __init__(self, pipe: FluxKontextPipeline, *, compiled: bool) -> None:
        super().__init__(pipe, TEXT_TOKENS, compiled=compiled)
        reference = self.image_ids.clone()
        reference[..., 0] = 1
        self.image_ids = torch.cat([self.image_ids, reference])

    def forward(
        self, latents: Tensor, reference: Tensor, noise: Tensor, sigmas: Tensor, texts: list[str]
    ) -> Tensor:
        """Return the mean square error of the velocity, for packed latents [B, T, D].

        Tokens that the edit changes count more: they are few, and the rest is copied soon.
        """
        level = sigmas[:, None, None]
        noisy = (1 - level) * latents + level * noise
        velocity = self.velocity(torch.cat([noisy, reference], dim=1), sigmas, texts)
        error = (velocity[:, : latents.shape[1]] - (noise - latents)).square().mean(dim=-1)
        changed = (latents - reference).abs().amax(dim=-1) > CHANGED_LATENT
        weight = 1 + (CHANGED_WEIGHT - 1) * changed
        loss: Tensor = (error * weight).sum() / weight.sum()
        return loss


def train(out: Path, plan: Plan) -> FluxKontextPipeline:
    """Train the denoiser and the text encoders; save a checkpoint every 250 steps.

    Args:
        out: Folder; gets `latents.safetensors`, `kontext.safetensors` (averaged weights),
            `kontext.state`, `text.jsonl` and `kontext.jsonl`.
        plan: Settings of the run.

    Returns:
        The pipeline with averaged weights, in float32.
    """
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(plan.seed)
    pipe = build_pipeline()
    edits, before, after = _data(out, pipe.vae, plan)
    step = Step(pipe, compiled=plan.compiled)
    weights = nn.ModuleDict({name: getattr(pipe, name) for name in TRAINED})
    plan = replace(plan, resume=plan.resume and (out / "kontext.state").exists())
    if not plan.resume:
        text = TextCourse(plan.seed, plan.text_steps)
        train_text(step, edits, Log(out / "text.jsonl"), text)

    def loss(chosen: Tensor, index: int, progress: float) -> Tensor:
        error: Tensor = step(*_batch(edits, (before, after), chosen, (plan.seed, index), progress))
        return error

    course.train(out, weights, loss, replace(COURSE, examples=len(edits)), plan)
    pipe.transformer.set_attn_processor(FluxAttnProcessor())
    return pipe


def _batch(
    edits: Sequence[Edit],
    latents: tuple[Tensor, Tensor],
    chosen: Tensor,
    numbers: tuple[int, int],
    progress: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[str]]:
    # half of the edits that can be undone are learned backwards
    rng = np.random.default_rng(list(numbers))
    generator = torch.Generator().manual_seed(numbers[0] * 1_000_003 + numbers[1])
    part = [edits[i] for i in chosen]
    turned = [bool(rng.random() < 0.5) and edit.kind != "remove" for edit in part]
    texts = write_instructions(
        [edit.reversed() if turn else edit for edit, turn in zip(part, turned, strict=True)], rng
    )
    swap = torch.tensor(turned)[:, None, None]
    before, after = (side[chosen].float() for side in latents)
    clean, reference = torch.where(swap, before, after), torch.where(swap, after, before)
    noise = torch.randn(clean.shape, generator=generator)
    # noise levels stay shifted upwards for long: what to change is decided there
    sigmas = draw_sigmas(len(clean), generator, 0.7 * max(0.0, progress - 0.6) / 0.4)
    return clean, reference, noise, sigmas, texts


def _data(out: Path, autoencoder: AutoencoderKL, plan: Plan) -> tuple[list[Edit], Tensor, Tensor]:
    edits, before, after = draw_edits(plan.edits, plan.seed + 10)
    path = out / "latents.safetensors"
    if not (plan.resume and path.exists()):
        sides = {"before": before, "after": after}
        write_tensors(path, {k: encode_pictures(autoencoder, side) for k, side in sides.items()})
    latents = load_file(path)
    return edits, latents["before"], latents["after"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the model and the record of its training."""
    parser = training_parser(
        "train_kontext",
        "Train the small editing pipeline from shapes-flux on a CPU; updates are the denoiser's.",
        out="out/kontext",
        updates=COURSE.steps,
    )
    parser.add_argument("--compile", action="store_true", help="compile the denoiser")
    parser.add_argument("--export-only", action="store_true", help="write what was trained so far")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    plan = Plan(chosen.seed, chosen.updates, chosen.resume, chosen.compile, chosen.minutes)
    if not chosen.export_only:
        train(chosen.out, plan)
    size = export(chosen.out)
    command = (
        "python -m diffcache.eval.workshop.small.train_kontext "
        f"--seed {chosen.seed} --updates {chosen.updates}"
    )
    done = record(chosen.out, {"seed": chosen.seed, "command": command, "batch": COURSE.batch})
    print(f"exported {size / 1e6:.2f} MB after {done['steps']} steps")


if __name__ == "__main__":
    main()
