"""Train the small policy that reaches a goal round obstacles, and export it.

    python -m diffcache.eval.workshop.small.train_reach --out out/reach

The policy imitates scripted demonstrations: it learns to tell the actions from noisy chunks of
them at the timesteps its scheduler uses (arXiv 2303.04137, section II).
"""

from __future__ import annotations

import argparse
import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from diffcache.eval.workshop.small.checkpoint import restore, save
from diffcache.eval.workshop.small.export import save_pipeline, versions
from diffcache.eval.workshop.small.loop import (
    Average,
    Log,
    check_done,
    paced,
    rate,
    shuffled,
    training_parser,
)
from diffcache.files import write_json
from diffcache.pipelines.policy import DiffusionPolicyPipeline, rollout
from diffcache.pipelines.small import reach
from diffcache.pipelines.small.demonstrations import demonstrate

BENCH = reach.DIRECTORY.parents[1] / "bench"
DEMONSTRATIONS = 30_000
BATCH = 128
RATE = 1.5e-3
SAVE_EVERY = 500


@dataclass(frozen=True)
class Plan:
    """Settings of the run: a seed and a number of steps give the same weights, broken off or not.

    Attributes:
        seed: Seed of the weights, the demonstrations, the order and the noise.
        steps: Length of the schedule in steps.
        resume: Go on from the last checkpoint.
        demonstrations: Number of demonstrations to attempt.
        minutes: Minutes after which to break off, at a checkpoint.
    """

    seed: int = 0
    steps: int = 2850
    resume: bool = False
    demonstrations: int = DEMONSTRATIONS
    minutes: float = math.inf


def train(out: Path, plan: Plan) -> DiffusionPolicyPipeline:
    """Train the policy; save a checkpoint every 500 steps.

    Args:
        out: Folder; gets `reach.state` (checkpoint) and `reach.jsonl` (log).
        plan: Plan of the training.

    Returns:
        The pipeline with averaged weights.

    Raises:
        Stopped: If the time limit broke the run off; the checkpoint is saved.
        ValueError: If the checkpoint is of a run of another length.
    """
    torch.manual_seed(plan.seed)
    pipe = reach.build()
    model = pipe.transformer.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=1e-3, fused=True
    )
    average = Average(model, 0.999)
    seen, moves = demonstrate(plan.demonstrations, plan.seed)
    log = Log(out / "reach.jsonl", resume=plan.resume)
    state = out / "reach.state"
    start = restore(state, model, optimizer, average, plan.steps) if plan.resume else 0
    done, losses = start, []
    bar = tqdm(shuffled(len(seen), BATCH, plan.seed, start), desc="reach", mininterval=10)
    for step, progress, chosen in paced(bar, plan.steps, start, minutes=plan.minutes):
        generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
        loss = policy_loss(pipe, seen[chosen], moves[chosen], generator)
        for group in optimizer.param_groups:
            group["lr"] = RATE * rate(progress)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update(model)
        losses.append(float(loss.detach()))
        done = step + 1
        if done % 50 == 0:
            log.write(step=done, loss=float(np.mean(losses)), lr=RATE * rate(progress))
            losses.clear()
        if done % SAVE_EVERY == 0 or done == plan.steps:
            save(state, (done, plan.steps), model, optimizer, average, weights_file=False)
    if done < plan.steps:
        save(state, (done, plan.steps), model, optimizer, average, weights_file=False)
    check_done("reach", done, plan.steps)
    average.copy_to(model)
    model.eval()
    return pipe


def policy_loss(
    pipe: DiffusionPolicyPipeline, seen: Tensor, moves: Tensor, generator: torch.Generator
) -> Tensor:
    """Return the mean square error of the predicted actions.

    Args:
        pipe: The policy.
        seen: Observations, `[B, OBSERVED, OBSERVATION]`.
        moves: Chunks of actions in units of `REACH`, `[B, HORIZON, 2]`.
        generator: Generator of noise and timesteps.
    """
    noise = torch.randn(moves.shape, generator=generator)
    steps = pipe.scheduler.config.num_train_timesteps
    timesteps = torch.randint(steps, (len(moves),), generator=generator)
    noisy = pipe.scheduler.add_noise(moves, noise, timesteps)
    return functional.mse_loss(pipe.transformer(noisy, timesteps, seen), moves)


def success_rate(pipe: DiffusionPolicyPipeline, episodes: int, seed: int, steps: int) -> float:
    """Return the share of held-out episodes that succeed."""
    environment = reach.Reach(reach.draw_scenes(episodes, reach.HELD_OUT + seed))
    rollout(pipe, environment, num_inference_steps=steps, seed=seed)
    return float(environment.succeeded.float().mean())


def record(out: Path, plan: Plan, path: Path = BENCH / "reach-policy-training.json") -> None:
    """Write what was trained, how, and the curve of the loss."""
    rows = Log(out / "reach.jsonl", resume=True).rows()
    done: dict[str, Any] = {
        "model": "reach-policy",
        "seed": plan.seed,
        "demonstrations": plan.demonstrations,
        "batch": BATCH,
        "steps": rows[-1]["step"],
        "seconds": rows[-1]["seconds"],
        "seconds_per_step": round(rows[-1]["seconds"] / rows[-1]["step"], 4),
        "command": "python -m diffcache.eval.workshop.small.train_reach "
        f"--seed {plan.seed} --updates {plan.steps}",
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "curve": rows[:: max(len(rows) // 100, 1)],
    }
    write_json(path, done)


def parser() -> argparse.ArgumentParser:
    """Return the command's arguments."""
    made = training_parser(
        "train_reach",
        "Train the policy that reaches a goal round obstacles, on a CPU.",
        out="out/reach",
        updates=Plan.steps,
    )
    made.add_argument("--episodes", type=int, default=64, help="of a quick trial at the end")
    made.add_argument("--export", action="store_true", help="write the shipped directory")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, try, and export if asked to."""
    chosen = parser().parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    chosen.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(chosen.seed, chosen.updates, chosen.resume, minutes=chosen.minutes)
    pipe = train(chosen.out, plan)
    pipe.set_progress_bar_config(disable=True)
    print(f"success rate {success_rate(pipe, chosen.episodes, chosen.seed, 100):.3f}", flush=True)
    if chosen.export:
        print(f"exported {save_pipeline(pipe, reach.DIRECTORY)} bytes")
        record(chosen.out, plan)


if __name__ == "__main__":
    main()
