"""Train the denoiser and the text encoders of the small FluxPipeline by flow matching.

The model sees what `FluxPipeline` will show it: packed latents, the same position ids, text padded
to the same length without a mask, sigma as the timestep, and `noise - latents` as the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxPipeline
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from diffcache.pipelines.small.flux import TEXT_TOKENS, build_pipeline
from diffcache.pipelines.small.loop import Average, Log, draw, rate, shuffled, to_unit
from diffcache.pipelines.small.plain_attention import PlainFluxAttention
from diffcache.pipelines.small.scenes import Scene, prompt

PICTURES = 60_000
BATCH = 32
RATE = 1e-3
TEXT_FACTOR = 0.25
PROMPT_DROPOUT = 0.05
SINGLES_FIRST = 0.15
SAVE_EVERY = 500


def write_prompts(
    scenes: list[Scene], rng: np.random.Generator, dropout: float = PROMPT_DROPOUT
) -> list[str]:
    """Write scenes as prompts, in a random phrasing and order; some are left empty."""
    texts = []
    for scene in scenes:
        if rng.random() < dropout:
            texts.append("")
            continue
        figures = scene.figures if rng.random() < 0.5 else scene.figures[::-1]
        text = prompt(Scene(scene.background, figures), int(rng.integers(2)))
        if rng.random() < 0.1:
            text = text[0].upper() + text[1:]
        if rng.random() < 0.1:
            text += "."
        texts.append(text)
    return texts


def draw_sigmas(count: int, generator: torch.Generator, progress: float = 1.0) -> Tensor:
    """Draw noise levels in (0, 1): half of them uniform, half logit-normal; float32 [B].

    Early in training they are shifted upwards, where only the prompt tells what to draw; the
    shift falls from 4 to 1 (none) over the first seven tenths.
    """
    uniform = torch.rand(count, generator=generator)
    peaked = torch.sigmoid(torch.randn(count, generator=generator))
    drawn = torch.where(torch.arange(count) % 2 == 0, uniform, peaked)
    shift = max(1.0, 4.0 - 3.0 * progress / 0.7)
    return shift * drawn / (1 + (shift - 1) * drawn)


class Step(nn.Module):
    """One training step's loss; holds the three trained modules under the pipeline's names."""

    def __init__(self, pipe: FluxPipeline, *, compiled: bool) -> None:
        super().__init__()
        self.transformer = pipe.transformer
        self.text_encoder = pipe.text_encoder
        self.text_encoder_2 = pipe.text_encoder_2
        self.tokenizers = (pipe.tokenizer, pipe.tokenizer_2)
        self.image_ids = pipe._prepare_latent_image_ids(1, 8, 8, "cpu", torch.float32)
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

    def forward(self, latents: Tensor, noise: Tensor, sigmas: Tensor, texts: list[str]) -> Tensor:
        """Return the mean square error of the velocity, for packed latents [B, T, D]."""
        level = sigmas[:, None, None]
        states, pooled = self.encode(texts)
        velocity = self.denoise(
            hidden_states=(1 - level) * latents + level * noise,
            timestep=sigmas,
            pooled_projections=pooled,
            encoder_hidden_states=states,
            txt_ids=self.text_ids,
            img_ids=self.image_ids,
            joint_attention_kwargs={},
            return_dict=False,
        )[0]
        return functional.mse_loss(velocity.float(), noise - latents)


@torch.no_grad()
def encode_pictures(autoencoder: AutoencoderKL, pictures: Tensor) -> Tensor:
    """Encode pictures uint8 [B, 3, 64, 64] into packed, scaled latents, float16 [B, 64, 16]."""
    config = autoencoder.config
    parts = []
    for part in tqdm(pictures.split(100), desc="encode", mininterval=5, leave=False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            latents = autoencoder.encode(to_unit(part)).latent_dist.mode().float()
        latents = (latents - config.shift_factor) * config.scaling_factor
        count, channels, height, width = latents.shape
        parts.append(FluxPipeline._pack_latents(latents, count, channels, height, width).half())
    return torch.cat(parts)


@dataclass(frozen=True)
class Plan:
    """How to train: the learning rate follows the clock, so `minutes` sets the whole course.

    Attributes:
        seed: of the weights, the pictures, the order and the noise.
        minutes: how long to train, parts of a resumed run together.
        resume: go on from the last checkpoint.
        compiled: compile the denoiser, which is faster after some minutes.
    """

    seed: int = 0
    minutes: float = 66.0
    resume: bool = False
    compiled: bool = True


def train(out: Path, autoencoder: AutoencoderKL, plan: Plan) -> FluxPipeline:
    """Train the denoiser and the text encoders; save a checkpoint every 500 steps.

    Args:
        out: folder with `text.safetensors`; gets `flux.safetensors` (averaged weights),
            `flux.state` and `flux.jsonl`.
        autoencoder: trained, with its factors set.
        plan: how to train.

    Returns:
        The pipeline with averaged weights, in float32.
    """
    seed, resume = plan.seed, plan.resume
    torch.manual_seed(seed)
    pipe = build_pipeline(autoencoder)
    step = Step(pipe, compiled=plan.compiled)
    weights = nn.ModuleDict(
        {name: getattr(pipe, name) for name in ("transformer", "text_encoder", "text_encoder_2")}
    )
    weights.load_state_dict(load_file(out / "text.safetensors"), strict=False)
    scenes, latents = _data(out, autoencoder, plan)
    singles = torch.tensor([i for i, scene in enumerate(scenes) if len(scene.figures) == 1])
    optimiser = _optimiser(weights)
    average = Average(weights, 0.999)
    log = Log(out / "flux.jsonl", resume=resume)
    start = _restore(out, weights, optimiser, average) if resume else 0
    losses: list[float] = []
    bar = tqdm(shuffled(len(scenes), BATCH, seed, start), desc="flux", mininterval=10)
    for index, chosen in enumerate(bar, start=start):
        progress = log.seconds() / (60 * plan.minutes)
        if progress >= 1:
            break
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        if progress < SINGLES_FIRST:
            chosen[::2] = singles[chosen[::2] % len(singles)]
        texts = write_prompts([scenes[i] for i in chosen], np.random.default_rng([seed, index]))
        batch = latents[chosen].float()
        noise = torch.randn(batch.shape, generator=generator)
        sigmas = draw_sigmas(len(batch), generator, progress)
        lr = RATE * rate(progress)
        losses.append(_update(step, weights, optimiser, (batch, noise, sigmas, texts), lr))
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
    batch: tuple[Tensor, Tensor, Tensor, list[str]],
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


def _data(out: Path, autoencoder: AutoencoderKL, plan: Plan) -> tuple[list[Scene], Tensor]:
    scenes, pictures = draw(PICTURES, plan.seed + 10)
    path = out / "latents.safetensors"
    if not (plan.resume and path.exists()):
        save_file({"latents": encode_pictures(autoencoder, pictures)}, path)
    return scenes, load_file(path)["latents"]


def _save(
    out: Path, step: int, weights: nn.Module, optimiser: torch.optim.Optimizer, average: Average
) -> None:
    state = {"step": step, "weights": weights.state_dict(), "optimiser": optimiser.state_dict()}
    state |= {"average": average.weights, "average_steps": average.steps}
    torch.save(state, out / "flux.state.part")
    (out / "flux.state.part").replace(out / "flux.state")
    save_file({k: v.contiguous() for k, v in average.weights.items()}, out / "flux.part")
    (out / "flux.part").replace(out / "flux.safetensors")


def _restore(
    out: Path, weights: nn.Module, optimiser: torch.optim.Optimizer, average: Average
) -> int:
    state = torch.load(out / "flux.state", weights_only=True)
    weights.load_state_dict(state["weights"])
    optimiser.load_state_dict(state["optimiser"])
    average.weights, average.steps = state["average"], state["average_steps"]
    return int(state["step"])
