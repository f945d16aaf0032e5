"""Train small denoisers by DDPM: what the class model and the text model share.

Either loss is the mean square error of the velocity, so that high noise levels, where shape and
color are decided but the noise is easy to tell, count: as it is or, where the noise is predicted,
held at very high levels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm

from diffcache.eval.workshop.small.checkpoint import write_tensors
from diffcache.eval.workshop.small.export import thin, versions
from diffcache.eval.workshop.small.loop import Log, to_unit
from diffcache.files import write_json
from diffcache.pipelines.small.flux import DIRECTORY as FLUX

LEAST_SIGNAL = 0.02


def build_scheduler(predicted: str = "epsilon") -> DDIMScheduler:
    """Build the DDIM scheduler: the linear betas of DDPM, which end in noise alone."""
    return DDIMScheduler(
        prediction_type=predicted,
        beta_schedule="linear",
        beta_start=1e-4,
        beta_end=0.02,
        clip_sample=False,
        set_alpha_to_one=True,
        timestep_spacing="trailing",
        steps_offset=1,  # what StableDiffusionPipeline asks for; trailing spacing ignores it
    )


def load_autoencoder() -> AutoencoderKL:
    """Load the autoencoder of shapes-flux without its shift, which these pipelines do not add."""
    autoencoder: AutoencoderKL = AutoencoderKL.from_pretrained(str(FLUX / "vae"))
    autoencoder.register_to_config(shift_factor=None)
    return autoencoder.eval()


@torch.no_grad()
def encode_pictures(autoencoder: AutoencoderKL, pictures: Tensor) -> Tensor:
    """Encode pictures uint8 [B, 3, 64, 64] into scaled latents, float16 [B, 4, 16, 16]."""
    parts = []
    for part in tqdm(pictures.split(100), desc="encode", mininterval=5, leave=False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            latents = autoencoder.encode(to_unit(part)).latent_dist.mode().float()
        parts.append((latents * autoencoder.config.scaling_factor).half())
    return torch.cat(parts)


def kept_latents(path: Path, autoencoder: AutoencoderKL, pictures: Tensor) -> Tensor:
    """Return the latents of `encode_pictures`, kept in a file that is used if its length fits."""
    if path.exists():
        kept: Tensor = load_file(path)["latents"]
        if len(kept) == len(pictures):
            return kept
    latents = encode_pictures(autoencoder, pictures)
    write_tensors(path, {"latents": latents})
    return latents


def draw_timesteps(
    count: int, generator: torch.Generator, even: float = 0.5, middle: float = 350
) -> Tensor:
    """Draw timesteps 0 to 999, int64 [B]: a share of them uniform, the rest normal about one."""
    uniform = torch.rand(count, generator=generator) * 1000
    peaked = middle + 180 * torch.randn(count, generator=generator)
    drawn = torch.where(torch.arange(count) < even * count, uniform, peaked)
    return drawn.clamp(0, 999).long()


def disturb(latents: Tensor, noise: Tensor, signal: Tensor) -> Tensor:
    """Mix latents [B, C, H, W] with noise; signal is the kept share of variance, [B]."""
    share = signal[:, None, None, None]
    return share.sqrt() * latents + (1 - share).sqrt() * noise


def noise_error(predicted: Tensor, noise: Tensor, signal: Tensor) -> Tensor:
    """Return the mean square error of the noise, divided by the signal's share of variance.

    That quotient is the error of the velocity; below a share of 0.02 the weight stays the same.

    Args:
        predicted: Noise, [B, C, H, W].
        noise: Noise that was added, [B, C, H, W].
        signal: Share of variance, [B].
    """
    error = (predicted.float() - noise).square().mean(dim=(1, 2, 3))
    return (error / signal.clamp_min(LEAST_SIGNAL)).mean()


def velocity_error(predicted: Tensor, latents: Tensor, noise: Tensor, signal: Tensor) -> Tensor:
    """Return the mean square error of the velocity; all [B, C, H, W] but signal, [B]."""
    share = signal[:, None, None, None]
    velocity = share.sqrt() * noise - (1 - share).sqrt() * latents
    return (predicted.float() - velocity).square().mean()


def record(out: Path, name: str, path: Path, *, seed: int, command: str) -> dict[str, Any]:
    """Write what a training took, with its loss curve of at most 120 points.

    Args:
        out: The training folder.
        name: Name of the course.
        path: Path of the JSON file.
        seed: Seed that was used.
        command: Command that trains the model again.
    """
    rows = Log(out / f"{name}.jsonl", resume=True).rows()
    every = -(-len(rows) // 120)
    steps, seconds = rows[-1]["step"], rows[-1]["seconds"]
    done: dict[str, Any] = {
        "model": path.name.removesuffix("-training.json"),
        "seed": seed,
        "command": command,
        "versions": versions(),
        "steps": steps,
        "seconds": seconds,
        "seconds_per_step": round(seconds / max(steps, 1), 3),
        "curve": [row for i, row in enumerate(rows) if i % every == 0 or row is rows[-1]],
    }
    write_json(path, done)
    return done


def record_accuracies(
    out: Path, name: str, path: Path, model: nn.Module, *, seed: int, command: str
) -> dict[str, Any]:
    """Write what `record` writes, with the model's size and the training's `accuracy.jsonl`.

    Args:
        out: Training folder.
        name: Name of the course.
        path: JSON file.
        model: Model, whose weights are counted.
        seed: Seed that was used.
        command: Command that trains the model again.
    """
    done = record(out, name, path, seed=seed, command=command)
    weights = {"weights": sum(p.numel() for p in model.parameters())}
    accuracy = {"accuracy": thin(Log(out / "accuracy.jsonl", resume=True).rows())}
    done = {"model": done["model"]} | weights | done | accuracy
    write_json(path, done)
    return done
