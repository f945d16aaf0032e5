"""Train the autoencoder of the small 64x64 models.

A mean-absolute and mean-square error with a slight pull of the latents to a unit Gaussian; noise
on the latents comes from the posterior itself, which keeps the decoder tolerant of small errors.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch.nn import functional
from tqdm import tqdm

from diffcache.eval.workshop.small.loop import Average, Log, paced, rate, shuffled, to_unit
from diffcache.pipelines.small.flux import build_autoencoder
from diffcache.pipelines.small.scenes import draw
from diffcache.psnr import psnr

PICTURES = 16_000
BATCH = 16
RATE = 2e-3
KL_WEIGHT = 3e-4
NOISE = 0.05


def train(out: Path, *, seed: int, steps: int) -> AutoencoderKL:
    """Train, measure and save the autoencoder.

    Args:
        out: Folder for `autoencoder/` and `autoencoder.jsonl`.
        seed: Seed of the weights, the pictures and the order.
        steps: Number of training steps.

    Returns:
        The averaged autoencoder in float32, with shift and scaling factors from the data.
    """
    torch.manual_seed(seed)
    model = build_autoencoder()
    _, pictures = draw(PICTURES, seed + 1)
    _, held = draw(256, seed + 2, held=True)
    average = Average(model, 0.998)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=1e-3)
    log = Log(out / "autoencoder.jsonl")
    bar = tqdm(shuffled(PICTURES, BATCH, seed), desc="autoencoder", mininterval=5, leave=False)
    for step, progress, chosen in paced(bar, steps):
        lr = RATE * rate(progress)
        optimizer.param_groups[0]["lr"] = lr
        batch = to_unit(pictures[chosen])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            posterior = model.encode(batch).latent_dist
            made = model.decode(posterior.sample()).sample
        divergence = posterior.kl().mean() / posterior.mean[0].numel()
        loss = _error(made.float(), batch) + KL_WEIGHT * divergence
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update(model)
        if step % 50 == 0:
            log.write(step=step, loss=float(loss.detach()), kl=float(divergence.detach()), lr=lr)
            bar.set_postfix(loss=f"{float(loss.detach()):.4f}")
        if step and step % 1000 == 0:
            log.write(step=step, psnr=measure(_averaged(average), to_unit(held)), lr=lr)
    final = _averaged(average)
    set_factors(final, to_unit(pictures[:2000]))
    log.write(step=steps, psnr=measure(final, to_unit(held)), lr=0.0)
    final.save_pretrained(out / "autoencoder")
    return final


def refine(out: Path, *, seed: int, steps: int) -> AutoencoderKL:
    """Train the decoder on, against fixed latents, for sharper edges; the latents stay as they are.

    Args:
        out: Folder with `autoencoder/`; `autoencoder-refined/` and `decoder.jsonl` are added.
        seed: Seed of the pictures, the order and the noise.
        steps: Number of training steps.

    Returns:
        The autoencoder in float32.
    """
    torch.manual_seed(seed)
    model = AutoencoderKL.from_pretrained(out / "autoencoder")
    _, pictures = draw(PICTURES, seed + 3)
    _, held = draw(256, seed + 2, held=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        parts = [model.encode(to_unit(p)).latent_dist.mode().float() for p in pictures.split(100)]
    latents = torch.cat(parts)
    weights = model.decoder.parameters()
    optimizer = torch.optim.AdamW(weights, lr=0.5 * RATE, betas=(0.9, 0.98), weight_decay=1e-3)
    average = Average(model, 0.998)
    log = Log(out / "decoder.jsonl")
    spread = NOISE / model.config.scaling_factor
    bar = tqdm(shuffled(PICTURES, BATCH, seed), desc="decoder", mininterval=5, leave=False)
    for step, progress, chosen in paced(bar, steps):
        optimizer.param_groups[0]["lr"] = 0.5 * RATE * rate(progress)
        batch = to_unit(pictures[chosen])
        disturbed = latents[chosen] + spread * torch.randn_like(latents[chosen])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = model.decode(disturbed).sample
        loss = _error(made.float(), batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.decoder.parameters(), 1.0)
        optimizer.step()
        average.update(model)
        if step % 50 == 0:
            log.write(step=step, loss=float(loss.detach()))
            bar.set_postfix(loss=f"{float(loss.detach()):.4f}")
    average.copy_to(model)
    log.write(step=steps, psnr=measure(model.eval(), to_unit(held)))
    model.save_pretrained(out / "autoencoder-refined")
    return model


def _error(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return functional.l1_loss(made, wanted) + 2 * functional.mse_loss(made, wanted)


def _averaged(average: Average) -> AutoencoderKL:
    model = build_autoencoder()
    average.copy_to(model)
    return model.eval()


@torch.no_grad()
def measure(model: AutoencoderKL, pictures: torch.Tensor) -> float:
    """Return the PSNR in dB of pictures in [-1, 1] after encoding and decoding."""
    made = model.decode(model.encode(pictures).latent_dist.mode()).sample
    return float(psnr(made.clamp(-1, 1), pictures, span=2).mean())


@torch.no_grad()
def set_factors(model: AutoencoderKL, pictures: torch.Tensor) -> None:
    """Set the shift and scaling factors so that the latents have mean 0 and deviation 1."""
    latents = torch.cat([model.encode(part).latent_dist.mode() for part in pictures.split(100)])
    model.register_to_config(
        shift_factor=round(float(latents.mean()), 5),
        scaling_factor=round(1 / float(latents.std()), 5),
    )
