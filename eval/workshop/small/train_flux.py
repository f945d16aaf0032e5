"""Train the denoiser and the text encoders of the small FluxPipeline by flow matching.

The model sees what `FluxPipeline` will show it: packed latents, the same position ids, text padded
to the same length without a mask, sigma as the timestep, and `noise - latents` as the target.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxKontextPipeline, FluxPipeline
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from diffcache.eval.workshop.small import course
from diffcache.eval.workshop.small.checkpoint import write_tensors
from diffcache.eval.workshop.small.course import Course, Plan
from diffcache.eval.workshop.small.export import TRAINED
from diffcache.eval.workshop.small.loop import to_unit
from diffcache.eval.workshop.small.plain_attention import PlainFluxAttention
from diffcache.pipelines.small.flux import TEXT_TOKENS, build_pipeline
from diffcache.pipelines.small.scenes import Scene, draw, prompt

COURSE = Course(
    "flux",
    examples=60_000,
    steps=6485,
    save_every=500,
    factors={"text_encoder": 0.25, "text_encoder_2": 0.25},
)
PROMPT_DROPOUT = 0.05
SINGLES_FIRST = 0.15


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


class Prompted(nn.Module):
    """A denoiser with its text encoders, under the pipeline's names, for a training step.

    Args:
        pipe: Pipeline whose attention is replaced by `PlainFluxAttention`.
        text_tokens: Number of tokens that prompts are padded to.
        compiled: Compile the denoiser.
    """

    def __init__(
        self, pipe: FluxPipeline | FluxKontextPipeline, text_tokens: int, *, compiled: bool
    ) -> None:
        super().__init__()
        self.transformer = pipe.transformer
        self.text_encoder = pipe.text_encoder
        self.text_encoder_2 = pipe.text_encoder_2
        self.tokenizers = (pipe.tokenizer, pipe.tokenizer_2)
        self.image_ids = pipe._prepare_latent_image_ids(1, 8, 8, "cpu", torch.float32)
        self.text_ids = torch.zeros(text_tokens, 3)
        pipe.transformer.set_attn_processor(PlainFluxAttention())
        self.denoise = torch.compile(pipe.transformer) if compiled else pipe.transformer

    def encode(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Return text states [B, T, D] and the pooled vector [B, D]."""
        clip, t5 = self.tokenizers
        pad: dict[str, Any] = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        first = clip(texts, max_length=clip.model_max_length, **pad).input_ids
        second = t5(texts, max_length=len(self.text_ids), **pad).input_ids
        return self.text_encoder_2(second)[0], self.text_encoder(first).pooler_output

    def velocity(self, tokens: Tensor, sigmas: Tensor, texts: list[str]) -> Tensor:
        """Return what the denoiser answers to tokens [B, T, D], in float32."""
        states, pooled = self.encode(texts)
        made: Tensor = self.denoise(
            hidden_states=tokens,
            timestep=sigmas,
            pooled_projections=pooled,
            encoder_hidden_states=states,
            txt_ids=self.text_ids,
            img_ids=self.image_ids,
            joint_attention_kwargs={},
            return_dict=False,
        )[0]
        return made.float()


class Step(Prompted):
    """One training step's loss."""

    def __init__(self, pipe: FluxPipeline, *, compiled: bool) -> None:
        super().__init__(pipe, TEXT_TOKENS, compiled=compiled)

    def forward(self, latents: Tensor, noise: Tensor, sigmas: Tensor, texts: list[str]) -> Tensor:
        """Return the mean square error of the velocity, for packed latents [B, T, D]."""
        level = sigmas[:, None, None]
        velocity = self.velocity((1 - level) * latents + level * noise, sigmas, texts)
        return functional.mse_loss(velocity, noise - latents)


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


def train(out: Path, autoencoder: AutoencoderKL, plan: Plan) -> FluxPipeline:
    """Train the denoiser and the text encoders; save a checkpoint every 500 steps.

    Args:
        out: Folder with `text.safetensors`; gets `flux.safetensors` (averaged weights),
            `flux.state`, `flux.jsonl` and `latents.safetensors`.
        autoencoder: Trained autoencoder, with its factors set.
        plan: Settings of the run, as in `course.train`.

    Returns:
        The pipeline with averaged weights, in float32.
    """
    torch.manual_seed(plan.seed)
    pipe = build_pipeline(autoencoder)
    step = Step(pipe, compiled=plan.compiled)
    weights = nn.ModuleDict({name: getattr(pipe, name) for name in TRAINED})
    weights.load_state_dict(load_file(out / "text.safetensors"), strict=False)
    scenes, latents = _data(out, autoencoder, plan)
    singles = torch.tensor([i for i, scene in enumerate(scenes) if len(scene.figures) == 1])

    def loss(chosen: Tensor, index: int, progress: float) -> Tensor:
        generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + index)
        if progress < SINGLES_FIRST:
            chosen[::2] = singles[chosen[::2] % len(singles)]
        rng = np.random.default_rng([plan.seed, index])
        texts = write_prompts([scenes[i] for i in chosen], rng)
        batch = latents[chosen].float()
        noise = torch.randn(batch.shape, generator=generator)
        error: Tensor = step(batch, noise, draw_sigmas(len(batch), generator, progress), texts)
        return error

    course.train(out, weights, loss, COURSE, plan)
    pipe.transformer.set_attn_processor(FluxAttnProcessor())
    return pipe


def _data(out: Path, autoencoder: AutoencoderKL, plan: Plan) -> tuple[list[Scene], Tensor]:
    scenes, pictures = draw(COURSE.examples, plan.seed + 10)
    path = out / "latents.safetensors"
    if not (plan.resume and path.exists()):
        write_tensors(path, {"latents": encode_pictures(autoencoder, pictures)})
    return scenes, load_file(path)["latents"]
