"""Train the autoencoder of the small WanPipeline on films of one moving shape.

A mean-absolute and mean-square error with a slight pull of the latents to a unit Gaussian; noise
on the latents comes from the posterior itself, which keeps the decoder tolerant of small errors.
Single frames come first, as films of one frame: they tell as much about colors and edges as whole
films, at a ninth of the cost. Then every second step is on whole films.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor
from tqdm import tqdm

from diffcache.eval.workshop.small.checkpoint import restore, save
from diffcache.eval.workshop.small.loop import (
    Average,
    Log,
    check_done,
    paced,
    rate,
    shuffled,
    to_unit,
)
from diffcache.eval.workshop.small.wan_whole import decode, encode
from diffcache.pipelines.small.moving import film
from diffcache.pipelines.small.scenes import Scene, sample_scene
from diffcache.pipelines.small.wan import FRAMES, LATENT_CHANNELS, build_autoencoder
from diffcache.psnr import psnr

WIDE_CHANNELS = 16
FILMS = 2_000
HELD = 48
BATCH = 16
FRAMES_UNTIL = 0.45
RATE = 1.5e-3
OBJECT_WEIGHT = 5.0
KL_WEIGHT = 3e-4
NOISE = 0.05
SAVE_EVERY = 200


def draw_scenes(count: int, seed: int, *, held: bool = False) -> list[Scene]:
    """Draw scenes of one object.

    Args:
        count: Number of scenes.
        seed: Seed of the draw.
        held: Whether the combinations of attributes are held-out ones.
    """
    rng = np.random.default_rng([seed, 13])
    return [sample_scene(rng, held=held, figures=1) for _ in range(count)]


def draw_scenes_and_films(
    count: int, seed: int, *, held: bool = False, frames: int = FRAMES
) -> tuple[list[Scene], Tensor]:
    """Draw scenes of one moving object, those of `draw_scenes`, and their films.

    Args:
        count: Number of scenes.
        seed: Seed of the draw.
        held: Whether the combinations of attributes are held-out ones.
        frames: Number of frames of each film.

    Returns:
        The scenes and their films, uint8 [B, 3, F, 64, 64].
    """
    scenes = draw_scenes(count, seed, held=held)
    rng = np.random.default_rng([seed, 14])
    films = torch.empty(count, 3, frames, 64, 64, dtype=torch.uint8)
    for index, scene in enumerate(scenes):
        films[index] = torch.from_numpy(film(scene, rng, frames)).permute(3, 0, 1, 2)
    return scenes, films


def train(
    out: Path, *, seed: int, steps: int, resume: bool = False, minutes: float = math.inf
) -> AutoencoderKLWan:
    """Train, measure and save the autoencoder.

    Args:
        out: Folder for `autoencoder/`, `autoencoder.jsonl` and `autoencoder.state`.
        seed: Seed of the weights, the films and the order.
        steps: Number of training steps.
        resume: Go on from the last checkpoint.
        minutes: Minutes after which to break off, at a checkpoint.

    Returns:
        The averaged autoencoder in float32, with the means and deviations of its latents set.

    Raises:
        Stopped: If the time limit broke the run off.
        ValueError: If the checkpoint is of a run of another length.
    """
    torch.manual_seed(seed)
    model = build_autoencoder(WIDE_CHANNELS)
    _, films = draw_scenes_and_films(FILMS, seed + 1)
    _, held = draw_scenes_and_films(HELD, seed + 2, held=True)
    average = Average(model, 0.995)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=1e-3)
    log = Log(out / "autoencoder.jsonl", resume=resume)
    state = out / "autoencoder.state"
    done = start = restore(state, model, optimizer, average, steps) if resume else 0
    bar = tqdm(shuffled(FILMS, BATCH, seed, start), desc="autoencoder", mininterval=10)
    for step, progress, chosen in paced(bar, steps, start, minutes=minutes):
        lr = RATE * rate(progress)
        optimizer.param_groups[0]["lr"] = lr
        whole = progress >= FRAMES_UNTIL and step % 2 == 0
        batch = _cut(films[chosen], whole, np.random.default_rng([seed, step]))
        loss, divergence = _update(model, optimizer, to_unit(batch))
        average.update(model)
        if step % 25 == 0:
            log.write(step=step, loss=loss, kl=divergence, lr=lr)
            bar.set_postfix(loss=f"{loss:.4f}")
        done = step + 1
        if done % SAVE_EVERY == 0:
            save(state, (done, steps), model, optimizer, average, weights_file=False)
            log.write(step=step, lr=lr, **measure(_averaged(average), to_unit(held[:16])))
    save(state, (done, steps), model, optimizer, average, weights_file=False)
    check_done("autoencoder", done, steps)
    final = narrow(_averaged(average), to_unit(films[:200]))
    log.write(step=steps, lr=0.0, **measure(final, to_unit(held)))
    final.save_pretrained(out / "autoencoder")
    return final


def refine(out: Path, *, seed: int, steps: int) -> AutoencoderKLWan:
    """Train the decoder on, against fixed latents, for sharper edges; the latents stay as they are.

    Args:
        out: Folder with `autoencoder/`; `autoencoder-refined/` and `decoder.jsonl` are added.
        seed: Seed of the films, the order and the noise.
        steps: Number of training steps.

    Returns:
        The autoencoder in float32.
    """
    torch.manual_seed(seed)
    model = AutoencoderKLWan.from_pretrained(out / "autoencoder")
    model.encoder.requires_grad_(False)
    _, films = draw_scenes_and_films(FILMS, seed + 3)
    _, held = draw_scenes_and_films(HELD, seed + 2, held=True)
    spread = NOISE * torch.tensor(model.config.latents_std).view(1, -1, 1, 1, 1)
    weights = [*model.decoder.parameters(), *model.post_quant_conv.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=0.5 * RATE, betas=(0.9, 0.98), weight_decay=1e-3)
    average = Average(model, 0.995)
    log = Log(out / "decoder.jsonl")
    bar = tqdm(shuffled(FILMS, BATCH // 8, seed), desc="decoder", mininterval=10)
    for step, progress, chosen in paced(bar, steps):
        optimizer.param_groups[0]["lr"] = 0.5 * RATE * rate(progress)
        batch = to_unit(films[chosen])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                latents = encode(model, batch)[0]
            made = decode(model, latents + spread * torch.randn_like(latents)).float()
        loss = error_of(made, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        average.update(model)
        if step % 25 == 0:
            log.write(step=step, loss=float(loss.detach()))
            bar.set_postfix(loss=f"{float(loss.detach()):.4f}")
    average.copy_to(model)
    log.write(step=steps, **measure(model.eval(), to_unit(held)))
    model.save_pretrained(out / "autoencoder-refined")
    return model


def error_of(made: Tensor, wanted: Tensor) -> Tensor:
    """Return the error of films [B, 3, F, H, W]: absolute and twice squared, objects weighted.

    Objects fill a twentieth of a film, so that with every pixel alike a model can live long without
    them.
    """
    background = wanted.flatten(2).median(dim=2).values[..., None, None, None]
    object_there = (wanted - background).abs().amax(dim=1, keepdim=True) > 0.15
    weights = 1 + (OBJECT_WEIGHT - 1) * object_there
    apart = (made - wanted).abs()
    return (weights * (apart + 2 * apart.square())).mean() / weights.mean()


def _cut(films: Tensor, whole: bool, rng: np.random.Generator) -> Tensor:
    """Keep an eighth of films uint8 [B, 3, F, H, W] whole, or take one frame of each."""
    if whole:
        return films[: len(films) // 8]
    chosen = torch.from_numpy(rng.integers(films.shape[2], size=len(films)))
    return films[torch.arange(len(films)), :, chosen][:, :, None]


def _update(
    model: AutoencoderKLWan, optimizer: torch.optim.Optimizer, batch: Tensor
) -> tuple[float, float]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean, logarithm = encode(model, batch)
        latents = mean + (0.5 * logarithm).exp() * torch.randn_like(mean)
        made = decode(model, latents).float()
    divergence = 0.5 * (mean.square() + logarithm.exp() - 1 - logarithm).mean()
    loss = error_of(made, batch) + KL_WEIGHT * divergence
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach()), float(divergence.detach())


def _averaged(average: Average) -> AutoencoderKLWan:
    model = build_autoencoder(WIDE_CHANNELS)
    average.copy_to(model)
    return model.eval()


@torch.no_grad()
def measure(model: AutoencoderKLWan, films: Tensor) -> dict[str, float]:
    """Measure films in [-1, 1], [B, 3, F, H, W], after encoding and decoding.

    Returns:
        `psnr`, the mean over films and frames in dB; and `motion_error`, the mean square error of
        the change from frame to frame over that change's own mean square.
    """
    made = torch.cat([decode(model, encode(model, part)[0]) for part in films.split(8)])
    made = made.clamp(-1, 1)
    frames = (part.transpose(1, 2).flatten(0, 1) for part in (made, films))
    change = films.diff(dim=2)
    lost = (made.diff(dim=2) - change).square().mean() / change.square().mean()
    return {"psnr": float(psnr(*frames, span=2).mean()), "motion_error": float(lost)}


@torch.no_grad()
def narrow(model: AutoencoderKLWan, films: Tensor) -> AutoencoderKLWan:
    """Keep the principal directions of the latents only, and make them the latent channels.

    The decoder has to be refined afterwards: a constant that it saw is lost at the edges.

    Args:
        model: Autoencoder with any number of latent channels.
        films: Films in [-1, 1], [B, 3, F, H, W], to find the directions with.

    Returns:
        A model with `LATENT_CHANNELS` channels, whose means and deviations are set.
    """
    latents, logarithms = (
        torch.cat(parts) for parts in zip(*(encode(model, p) for p in films.split(8)), strict=True)
    )
    flat = latents.transpose(0, 1).flatten(1)
    kept = torch.linalg.eigh(flat @ flat.T).eigenvectors.flip(1)[:, :LATENT_CHANNELS]
    made, wide = build_autoencoder(), len(flat)
    state = {k: v for k, v in model.state_dict().items() if v.shape == made.state_dict()[k].shape}
    made.load_state_dict(state, strict=False)
    inner, outer = model.encoder.conv_out, model.quant_conv
    into = kept.T @ outer.weight[:wide, :, 0, 0, 0]
    for name, value in (("weight", inner.weight.flatten(1)), ("bias", inner.bias[:, None])):
        target = getattr(made.encoder.conv_out, name)
        mean = (into @ value).reshape(LATENT_CHANNELS, *target.shape[1:])
        target.copy_(torch.cat([mean, torch.zeros_like(mean)]))
    noise = (kept.square().T @ logarithms.exp().mean(dim=(0, 2, 3, 4))).log()
    _set_identity(made.quant_conv)
    made.quant_conv.bias.copy_(torch.cat([kept.T @ outer.bias[:wide], noise]))
    _set_identity(made.post_quant_conv)
    first, second = model.post_quant_conv, model.decoder.conv_in
    out = first.weight[:, :, 0, 0, 0] @ kept
    made.decoder.conv_in.weight.copy_(torch.einsum("oithw,ic->octhw", second.weight, out))
    lost = flat.mean(dim=1) - kept @ (kept.T @ flat.mean(dim=1))
    constant = first.bias + first.weight[:, :, 0, 0, 0] @ lost
    made.decoder.conv_in.bias.copy_(second.bias + second.weight.sum(dim=(2, 3, 4)) @ constant)
    set_factors(made, films)
    return made.eval()


def _set_identity(layer: torch.nn.Conv3d) -> None:
    count = layer.out_channels
    weight = torch.eye(count)[:, :, None, None, None]
    layer.load_state_dict({"weight": weight, "bias": torch.zeros(count)})


@torch.no_grad()
def set_factors(model: AutoencoderKLWan, films: Tensor) -> None:
    """Set the means and deviations that bring every latent channel to mean 0 and deviation 1."""
    latents = torch.cat([encode(model, part)[0] for part in films.split(8)])
    flat = latents.transpose(0, 1).flatten(1)
    model.register_to_config(
        latents_mean=[round(float(value), 5) for value in flat.mean(dim=1)],
        latents_std=[round(float(value), 5) for value in flat.std(dim=1)],
    )
