"""Train, export and measure the small FluxKontextPipeline, starting from shapes-flux.

    python -m diffcache.pipelines.small.train_kontext --out out/kontext --minutes 45

The model sees what `FluxKontextPipeline` will show it: the packed latents of the noisy picture with
those of the reference behind them, position ids that differ in their first coordinate, text padded
to the same length without a mask, sigma as the timestep; only the velocity of the noisy tokens
counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxKontextPipeline
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from diffcache.pipelines.small.edits import Edit, draw_edits
from diffcache.pipelines.small.export_kontext import TRAINED, export, record
from diffcache.pipelines.small.kontext import TEXT_TOKENS, build_pipeline
from diffcache.pipelines.small.loop import Average, Log, rate, shuffled
from diffcache.pipelines.small.plain_attention import PlainFluxAttention
from diffcache.pipelines.small.train_flux import draw_sigmas, encode_pictures
from diffcache.pipelines.small.train_kontext_text import Course, train_text, write_instructions

EDITS = 6_000
BATCH = 8
RATE = 7e-4
CHANGED_WEIGHT = 3.0
CHANGED_LATENT = 0.3
TEXT_FACTOR = 0.25
SAVE_EVERY = 250


@dataclass(frozen=True)
class Plan:
    """How to train: the learning rate follows the clock, so `minutes` sets the whole course.

    Attributes:
        seed: of the edits, the order and the noise.
        minutes: how long to train the denoiser, parts of a resumed run together.
        text_minutes: how long to train the text encoders before.
        resume: go on from the last checkpoint.
        compiled: compile the denoiser, which is faster after some minutes.
        edits: how many pairs of pictures to draw.
    """

    seed: int = 0
    minutes: float = 45.0
    text_minutes: float = 2.0
    resume: bool = False
    compiled: bool = False
    edits: int = EDITS


class Step(nn.Module):
    """One training step's loss; holds the three trained modules under the pipeline's names."""

    def __init__(self, pipe: FluxKontextPipeline, *, compiled: bool) -> None:
        super().__init__()
        self.transformer = pipe.transformer
        self.text_encoder = pipe.text_encoder
        self.text_encoder_2 = pipe.text_encoder_2
        self.tokenizers = (pipe.tokenizer, pipe.tokenizer_2)
        ids = pipe._prepare_latent_image_ids(1, 8, 8, "cpu", torch.float32)
        reference = ids.clone()
        reference[..., 0] = 1
        self.image_ids = torch.cat([ids, reference])
        self.text_ids = torch.zeros(TEXT_TOKENS, 3)
        pipe.transformer.set_attn_processor(PlainFluxAttention())
        self.denoise = torch.compile(pipe.transformer) if compiled else pipe.transformer

    def encode(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Return text states [B, T, D] and the pooled vector [B, D]."""
        clip, t5 = self.tokenizers
        pad: dict[str, Any] = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        first = clip(texts, max_length=clip.model_max_length, **pad).input_ids
        second = t5(texts, max_length=TEXT_TOKENS, **pad).input_ids
        return self.text_encoder_2(second)[0], self.text_encoder(first).pooler_output

    def forward(
        self, latents: Tensor, reference: Tensor, noise: Tensor, sigmas: Tensor, texts: list[str]
    ) -> Tensor:
        """Return the mean square error of the velocity, for packed latents [B, T, D].

        Tokens that the edit changes count more: they are few, and the rest is copied soon.
        """
        level = sigmas[:, None, None]
        states, pooled = self.encode(texts)
        noisy = (1 - level) * latents + level * noise
        velocity = self.denoise(
            hidden_states=torch.cat([noisy, reference], dim=1),
            timestep=sigmas,
            pooled_projections=pooled,
            encoder_hidden_states=states,
            txt_ids=self.text_ids,
            img_ids=self.image_ids,
            joint_attention_kwargs={},
            return_dict=False,
        )[0][:, : latents.shape[1]]
        error = (velocity.float() - (noise - latents)).square().mean(dim=-1)
        changed = (latents - reference).abs().amax(dim=-1) > CHANGED_LATENT
        weight = 1 + (CHANGED_WEIGHT - 1) * changed
        loss: Tensor = (error * weight).sum() / weight.sum()
        return loss


def train(out: Path, plan: Plan) -> FluxKontextPipeline:
    """Train the denoiser and the text encoders; save a checkpoint every 250 steps.

    Args:
        out: folder; gets `latents.safetensors`, `kontext.safetensors` (averaged weights),
            `kontext.state`, `text.jsonl` and `kontext.jsonl`.
        plan: how to train.

    Returns:
        The pipeline with averaged weights, in float32.
    """
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(plan.seed)
    pipe = build_pipeline()
    edits, before, after = _data(out, pipe.vae, plan)
    step = Step(pipe, compiled=plan.compiled)
    weights = nn.ModuleDict({name: getattr(pipe, name) for name in TRAINED})
    resume = plan.resume and (out / "kontext.state").exists()
    if not resume:
        course = Course(plan.seed, plan.text_minutes)
        train_text(step, edits, Log(out / "text.jsonl"), course)
    optimiser, average = _optimiser(weights), Average(weights, 0.999)
    start = _restore(out, weights, optimiser, average) if resume else 0
    log = Log(out / "kontext.jsonl", resume=resume)
    losses: list[float] = []
    bar = tqdm(shuffled(len(edits), BATCH, plan.seed, start), desc="kontext", mininterval=10)
    for index, chosen in enumerate(bar, start=start):
        progress = log.seconds() / (60 * plan.minutes)
        if progress >= 1:
            break
        batch = _batch(edits, (before, after), chosen, (plan.seed, index), progress)
        lr = RATE * rate(progress)
        losses.append(_update(step, weights, optimiser, batch, lr))
        average.update(weights)
        if index % 25 == 0:
            log.write(step=index, loss=float(np.mean(losses)), lr=lr)
            bar.set_postfix(loss=f"{np.mean(losses):.4f}")
            losses = []
        if index > start and index % SAVE_EVERY == 0:
            _save(out, index + 1, weights, optimiser, average)
    if losses:
        log.write(step=index, loss=float(np.mean(losses)), lr=lr)
    _save(out, index, weights, optimiser, average)
    average.copy_to(weights)
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


def _optimiser(weights: nn.ModuleDict) -> torch.optim.Optimizer:
    groups = [
        {"params": module.parameters(), "factor": 1.0 if name == "transformer" else TEXT_FACTOR}
        for name, module in weights.items()
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)


def _update(
    step: Step,
    weights: nn.Module,
    optimiser: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor, Tensor, Tensor, list[str]],
    lr: float,
) -> float:
    for group in optimiser.param_groups:
        group["lr"] = lr * group["factor"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = step(*batch)
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(weights.parameters(), 1.0)
    optimiser.step()
    return float(loss.detach())


def _data(out: Path, autoencoder: AutoencoderKL, plan: Plan) -> tuple[list[Edit], Tensor, Tensor]:
    edits, before, after = draw_edits(plan.edits, plan.seed + 10)
    path = out / "latents.safetensors"
    if not (plan.resume and path.exists()):
        encoded = {"before": before, "after": after}
        save_file(
            {name: encode_pictures(autoencoder, side) for name, side in encoded.items()}, path
        )
    latents = load_file(path)
    return edits, latents["before"], latents["after"]


def _save(
    out: Path, step: int, weights: nn.Module, optimiser: torch.optim.Optimizer, average: Average
) -> None:
    state = {"step": step, "weights": weights.state_dict(), "optimiser": optimiser.state_dict()}
    state |= {"average": average.weights, "average_steps": average.steps}
    torch.save(state, out / "kontext.state.part")
    (out / "kontext.state.part").replace(out / "kontext.state")
    save_file({k: v.contiguous() for k, v in average.weights.items()}, out / "kontext.part")
    (out / "kontext.part").replace(out / "kontext.safetensors")


def _restore(
    out: Path, weights: nn.Module, optimiser: torch.optim.Optimizer, average: Average
) -> int:
    state = torch.load(out / "kontext.state", weights_only=True)
    weights.load_state_dict(state["weights"])
    optimiser.load_state_dict(state["optimiser"])
    average.weights, average.steps = state["average"], state["average_steps"]
    return int(state["step"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the model and the record of its training."""
    parser = argparse.ArgumentParser(
        prog="python -m diffcache.pipelines.small.train_kontext",
        description="Train the small editing pipeline, starting from shapes-flux, on a CPU.",
    )
    parser.add_argument("--out", type=Path, default=Path("out/kontext"), help="training folder")
    parser.add_argument("--seed", type=int, default=0, help="of edits, order and noise")
    parser.add_argument("--minutes", type=float, default=45.0, help="of the denoiser")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--compile", action="store_true", help="compile the denoiser")
    parser.add_argument("--export-only", action="store_true", help="write what was trained so far")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    plan = Plan(chosen.seed, chosen.minutes, resume=chosen.resume, compiled=chosen.compile)
    if not chosen.export_only:
        train(chosen.out, plan)
    size = export(chosen.out)
    command = (
        "python -m diffcache.pipelines.small.train_kontext "
        f"--seed {chosen.seed} --minutes {chosen.minutes:g}"
    )
    done = record(chosen.out, {"seed": chosen.seed, "command": command, "batch": BATCH})
    print(f"exported {size / 1e6:.2f} MB after {done['steps']} steps")


if __name__ == "__main__":
    main()
