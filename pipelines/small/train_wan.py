"""Train, export and measure the small WanPipeline with one command.

    python -m diffcache.pipelines.small.train_wan --out out/shapes-wan

The denoiser and the text encoder learn by flow matching; the model sees what `WanPipeline` shows
it: normalised latents, text cut to its length and padded with zeros, 1000 sigma as the timestep,
and `noise - latents` as the target.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from diffcache.pipelines.small import measure_wan, train_wan_text, train_wan_vae
from diffcache.pipelines.small.loop import Average, Log, rate, shuffled
from diffcache.pipelines.small.scenes import Scene
from diffcache.pipelines.small.train_flux import write_prompts
from diffcache.pipelines.small.train_wan_vae import draw_scenes_and_films, to_unit
from diffcache.pipelines.small.wan import TEXT_TOKENS, build_pipeline
from diffcache.pipelines.small.wan_step import Step, draw_sigmas
from diffcache.pipelines.small.wan_whole import encode

FILMS = 4_000
PART = 200
BATCH = 32
RATE = 1.5e-3
TEXT_FACTOR = 0.2
PROMPT_DROPOUT = 0.1
MOST_TEXT_TOKENS = 512
SAVE_EVERY = 200
STAGES = ("autoencoder", "text", "denoiser", "decoder", "export", "measure")
MINUTES = {"autoencoder": 13, "text": 3, "denoiser": 28, "decoder": 15}


@dataclass(frozen=True)
class Plan:
    """How to train: the learning rate follows the clock, so `minutes` sets the whole course.

    Attributes:
        seed: of the weights, the films, the order and the noise.
        minutes: how long to train, parts of a resumed run together.
        resume: go on from the last checkpoint.
        films: how many are encoded and trained on.
        compiled: compile the denoiser's block, once for all of them.
    """

    seed: int = 0
    minutes: float = float(MINUTES["denoiser"])
    resume: bool = False
    films: int = FILMS
    compiled: bool = True


@torch.no_grad()
def encode_films(autoencoder: AutoencoderKLWan, films: Tensor) -> Tensor:
    """Encode films uint8 [B, 3, F, 64, 64] into normalised latents, float16 [B, Z, f, h, w]."""
    shape = (1, -1, 1, 1, 1)
    mean = torch.tensor(autoencoder.config.latents_mean).view(shape)
    deviation = torch.tensor(autoencoder.config.latents_std).view(shape)
    parts = []
    for part in films.split(8):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            latents = encode(autoencoder, to_unit(part))[0]
        parts.append(((latents - mean) / deviation).half().contiguous())
    return torch.cat(parts)


def draw_latents(
    out: Path, autoencoder: AutoencoderKLWan, plan: Plan
) -> tuple[list[Scene], Tensor]:
    """Draw films in parts and encode each once; parts already on disk are read when resuming."""
    folder = out / "latents"
    folder.mkdir(parents=True, exist_ok=True)
    scenes: list[Scene] = []
    latents: list[Tensor] = []
    for index in tqdm(range(-(-plan.films // PART)), desc="encode", mininterval=5):
        path, seed = folder / f"{index}.safetensors", plan.seed + 1000 + index
        if plan.resume and path.exists():
            latents.append(load_file(path)["latents"])
            scenes += train_wan_vae.draw_scenes(len(latents[-1]), seed)
            continue
        drawn, films = draw_scenes_and_films(min(PART, plan.films - len(scenes)), seed)
        scenes += drawn
        latents.append(encode_films(autoencoder, films))
        save_file({"latents": latents[-1]}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
    return scenes, torch.cat(latents)


def train(out: Path, autoencoder: AutoencoderKLWan, plan: Plan) -> WanPipeline:
    """Train the denoiser and the text encoder; save a checkpoint every 200 steps.

    Args:
        out: folder with `text.safetensors`; gets `denoiser.safetensors` (averaged weights),
            `denoiser.state`, `denoiser.jsonl` and `latents/`.
        autoencoder: trained, with its means and deviations set.
        plan: how to train.

    Returns:
        The pipeline with averaged weights, in float32.
    """
    seed, resume = plan.seed, plan.resume
    torch.manual_seed(seed)
    pipe = build_pipeline(autoencoder)
    pipe.text_encoder.load_state_dict(load_file(out / "text.safetensors"))
    step = Step(pipe, compiled=plan.compiled)
    weights = nn.ModuleDict({name: getattr(pipe, name) for name in measure_wan.TRAINED})
    scenes, latents = draw_latents(out, autoencoder, plan)
    optimiser = _optimiser(weights)
    average = Average(weights, 0.998)
    log = Log(out / "denoiser.jsonl", resume=resume)
    start = _restore(out, weights, optimiser, average) if resume else 0
    losses: list[float] = []
    bar = tqdm(shuffled(len(scenes), BATCH, seed, start), desc="denoiser", mininterval=10)
    for index, chosen in enumerate(bar, start=start):
        progress = log.seconds() / (60 * plan.minutes)
        if progress >= 1:
            break
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        rng = np.random.default_rng([seed, index])
        texts = write_prompts([scenes[i] for i in chosen], rng, PROMPT_DROPOUT)
        batch = latents[chosen].float()
        noise = torch.randn(batch.shape, generator=generator)
        sigmas = draw_sigmas(len(batch), generator, progress)
        lr = RATE * rate(progress)
        drawn = (batch, noise, sigmas, texts, draw_text_tokens(rng))
        losses.append(update(step, weights, optimiser, drawn, lr))
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
    pipe.transformer.set_attn_processor(WanAttnProcessor())
    return pipe


def draw_text_tokens(rng: np.random.Generator) -> int:
    """Draw how many text tokens a step pads to: mostly 24, else up to 512, logarithmically."""
    if rng.random() < 0.7:
        return TEXT_TOKENS
    low, high = np.log(TEXT_TOKENS), np.log(MOST_TEXT_TOKENS)
    return round(float(np.exp(rng.uniform(low, high))))


def update(
    step: Step,
    weights: nn.Module,
    optimiser: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor, Tensor, list[str], int],
    lr: float,
) -> float:
    """Take one optimiser step and return its loss."""
    for group in optimiser.param_groups:
        group["lr"] = lr * group["factor"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = step(*batch)
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(weights.parameters(), 1.0)
    optimiser.step()
    return float(loss.detach())


def _optimiser(weights: nn.ModuleDict) -> torch.optim.Optimizer:
    groups = [
        {"params": module.parameters(), "factor": 1.0 if name == "transformer" else TEXT_FACTOR}
        for name, module in weights.items()
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)


def _save(
    out: Path, step: int, weights: nn.Module, optimiser: torch.optim.Optimizer, average: Average
) -> None:
    state = {"step": step, "weights": weights.state_dict(), "optimiser": optimiser.state_dict()}
    state |= {"average": average.weights, "average_steps": average.steps}
    torch.save(state, out / "denoiser.state.part")
    (out / "denoiser.state.part").replace(out / "denoiser.state")
    save_file({k: v.contiguous() for k, v in average.weights.items()}, out / "denoiser.part")
    (out / "denoiser.part").replace(out / "denoiser.safetensors")


def _restore(
    out: Path, weights: nn.Module, optimiser: torch.optim.Optimizer, average: Average
) -> int:
    state = torch.load(out / "denoiser.state", weights_only=True)
    weights.load_state_dict(state["weights"])
    optimiser.load_state_dict(state["optimiser"])
    average.weights, average.steps = state["average"], state["average_steps"]
    return int(state["step"])


def parser() -> argparse.ArgumentParser:
    """Return the command's arguments."""
    made = argparse.ArgumentParser(
        prog="python -m diffcache.pipelines.small.train_wan",
        description="Train the shapes WanPipeline on a CPU.",
    )
    made.add_argument("--out", type=Path, default=Path("out/shapes-wan"), help="training folder")
    made.add_argument("--seed", type=int, default=0, help="of weights, films, order and noise")
    made.add_argument("--minutes", type=float, default=sum(MINUTES.values()), help="for all")
    made.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="what to run")
    made.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    made.add_argument("--threads", type=int, default=1, help="of torch")
    made.add_argument("--eager", action="store_true", help="do not compile (no C++ compiler)")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stages asked for, in order."""
    chosen = parser().parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    out, seed, resume = chosen.out, chosen.seed, chosen.resume
    out.mkdir(parents=True, exist_ok=True)
    scale = chosen.minutes / sum(MINUTES.values())
    minutes = {name: scale * share for name, share in MINUTES.items()}
    for stage in [name for name in STAGES if name in chosen.stages]:
        print(f"== {stage}", flush=True)
        if stage == "autoencoder":
            train_wan_vae.train(out, seed=seed, minutes=minutes[stage], resume=resume)
        elif stage == "text":
            train_wan_text.train(out, seed=seed, minutes=minutes[stage])
        elif stage == "denoiser":
            trained = AutoencoderKLWan.from_pretrained(out / "autoencoder")
            train(out, trained, Plan(seed, minutes[stage], resume, compiled=not chosen.eager))
        elif stage == "decoder":
            train_wan_vae.refine(out, seed=seed, minutes=minutes[stage])
        elif stage == "export":
            print(f"exported {measure_wan.export(out) / 1e6:.2f} MB")
            measure_wan.record(out, seed=seed, minutes=chosen.minutes)
        else:
            measure_wan.main([])


if __name__ == "__main__":
    main()
