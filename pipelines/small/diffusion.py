"""Train small denoisers by DDPM: what the class model and the text model share.

Either loss is the mean square error of the velocity, so that high noise levels, where shape and
colour are decided but the noise is easy to tell, count: as it is or, where the noise is predicted,
held at very high levels.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiffusionPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from diffcache.pipelines.small.export import versions
from diffcache.pipelines.small.flux import DIRECTORY as FLUX
from diffcache.pipelines.small.loop import Average, Log, rate, shuffled, to_unit

RATE = 1e-3
SAVE_EVERY = 250
LEAST_SIGNAL = 0.02

Loss = Callable[[Tensor, int, float], Tensor]


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
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    save_file({"latents": latents}, part)
    part.replace(path)
    return latents


def draw_timesteps(count: int, generator: torch.Generator, even: float = 0.5) -> Tensor:
    """Draw timesteps 0 to 999, int64 [B]: a share of them uniform, the rest normal about 350."""
    uniform = torch.rand(count, generator=generator) * 1000
    peaked = 350 + 180 * torch.randn(count, generator=generator)
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
        predicted: noise, [B, C, H, W].
        noise: that was added, [B, C, H, W].
        signal: share of variance, [B].
    """
    error = (predicted.float() - noise).square().mean(dim=(1, 2, 3))
    return (error / signal.clamp_min(LEAST_SIGNAL)).mean()


def velocity_error(predicted: Tensor, latents: Tensor, noise: Tensor, signal: Tensor) -> Tensor:
    """Return the mean square error of the velocity; all [B, C, H, W] but signal, [B]."""
    share = signal[:, None, None, None]
    velocity = share.sqrt() * noise - (1 - share).sqrt() * latents
    return (predicted.float() - velocity).square().mean()


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
    minutes: float = 85.0
    resume: bool = False
    compiled: bool = True


@dataclass(frozen=True)
class Course:
    """What is trained, on how much.

    Attributes:
        name: of the files.
        pictures: their number.
        batch: pictures in a step.
        decay: of the averaged weights.
        factors: of the learning rate, by module; 1 where it says nothing.
    """

    name: str
    pictures: int
    batch: int = 32
    decay: float = 0.999
    factors: Mapping[str, float] = field(default_factory=dict)


def train(out: Path, weights: nn.ModuleDict, loss: Loss, course: Course, plan: Plan) -> Log:
    """Train modules; save a checkpoint every 250 steps and load the averaged weights in the end.

    Args:
        out: folder; gets `NAME.safetensors` (averaged weights), `NAME.state` and `NAME.jsonl`.
        weights: the modules to train.
        loss: of the pictures with these numbers [B], at a step, at a share of the run.
        course: what is trained.
        plan: how.

    Returns:
        The log.
    """
    optimiser = _optimiser(weights, course.factors)
    average = Average(weights, course.decay)
    if plan.compiled:
        # Compiling takes minutes that are none of the clock's.
        _gradients(weights, loss, (torch.arange(course.batch), 0, 0.0))
    log = Log(out / f"{course.name}.jsonl", resume=plan.resume)
    state = out / f"{course.name}.state"
    start = _restore(state, weights, optimiser, average) if plan.resume else 0
    losses: list[float] = []
    order = shuffled(course.pictures, course.batch, plan.seed, start)
    bar = tqdm(order, desc=course.name, mininterval=10)
    for index, chosen in enumerate(bar, start=start):
        progress = log.seconds() / (60 * plan.minutes)
        if progress >= 1:
            break
        for group in optimiser.param_groups:
            group["lr"] = RATE * rate(progress) * group["factor"]
        losses.append(_update(weights, optimiser, loss, (chosen, index, progress)))
        average.update(weights)
        if index % 25 == 0:
            log.write(step=index, loss=float(np.mean(losses)), lr=RATE * rate(progress))
            bar.set_postfix(loss=f"{np.mean(losses):.4f}")
            losses = []
        if index > start and index % SAVE_EVERY == 0:
            _save(state, index + 1, weights, optimiser, average)
    if losses:
        log.write(step=index, loss=float(np.mean(losses)), lr=RATE * rate(1.0))
    _save(state, index, weights, optimiser, average)
    average.copy_to(weights)
    return log


def _optimiser(weights: nn.ModuleDict, factors: Mapping[str, float]) -> torch.optim.Optimizer:
    groups = [
        {"params": module.parameters(), "factor": factors.get(name, 1.0)}
        for name, module in weights.items()
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)


def _update(
    weights: nn.Module, optimiser: torch.optim.Optimizer, loss: Loss, given: tuple[Any, ...]
) -> float:
    error = _gradients(weights, loss, given)
    nn.utils.clip_grad_norm_(weights.parameters(), 1.0)
    optimiser.step()
    return error


def _gradients(weights: nn.Module, loss: Loss, given: tuple[Any, ...]) -> float:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        error = loss(*given)
    weights.zero_grad(set_to_none=True)
    error.backward()
    return float(error.detach())


def _save(
    path: Path, step: int, weights: nn.Module, optimiser: torch.optim.Optimizer, average: Average
) -> None:
    state = {"step": step, "weights": weights.state_dict(), "optimiser": optimiser.state_dict()}
    state |= {"average": average.weights, "average_steps": average.steps}
    part = path.with_suffix(".state.part")
    torch.save(state, part)
    part.replace(path)
    part = path.with_suffix(".part")
    save_file({k: v.contiguous() for k, v in average.weights.items()}, part)
    part.replace(path.with_suffix(".safetensors"))


def _restore(
    path: Path, weights: nn.Module, optimiser: torch.optim.Optimizer, average: Average
) -> int:
    state = torch.load(path, weights_only=True)
    weights.load_state_dict(state["weights"])
    optimiser.load_state_dict(state["optimiser"])
    average.weights, average.steps = state["average"], state["average_steps"]
    return int(state["step"])


def export(pipe: DiffusionPipeline, directory: Path) -> int:
    """Save a pipeline in bfloat16; files are replaced one by one, each whole.

    Args:
        pipe: with trained weights.
        directory: where `from_pretrained` will look; its size in bytes is returned.
    """
    part = directory.with_name(f".{directory.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    pipe.to(torch.bfloat16).save_pretrained(part)
    for config in part.glob("*/config.json"):
        # transformers 5 loads in the dtype of the file, diffusers in float32.
        values = json.loads(config.read_text(encoding="utf-8"))
        values.pop("_name_or_path", None)
        values = {k: "float32" if k in ("dtype", "torch_dtype") else v for k, v in values.items()}
        config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    for file in sorted(path for path in part.rglob("*") if path.is_file()):
        target = directory / file.relative_to(part)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.chmod(0o644)
        file.replace(target)
    shutil.rmtree(part)
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def record(out: Path, name: str, command: str, path: Path) -> dict[str, Any]:
    """Write what a training took, with its loss curve of at most 120 points.

    Args:
        out: the training folder.
        name: of the course.
        command: that trains the model again.
        path: of the JSON file.
    """
    rows = Log(out / f"{name}.jsonl", resume=True).rows()
    every = -(-len(rows) // 120)
    steps, seconds = rows[-1]["step"], rows[-1]["seconds"]
    done: dict[str, Any] = {
        "model": path.name.removesuffix("-training.json"),
        "command": command,
        "versions": versions(),
        "steps": steps,
        "seconds": seconds,
        "seconds_per_step": round(seconds / max(steps, 1), 3),
        "curve": [row for i, row in enumerate(rows) if i % every == 0 or row is rows[-1]],
    }
    write(path, json.dumps(done, indent=1) + "\n")
    return done


def write(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
