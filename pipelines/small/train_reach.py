"""Train the small policy that reaches a goal round obstacles, and export it.

    python -m diffcache.pipelines.small.train_reach --out out/reach

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

from diffcache.files import write_json
from diffcache.pipelines.policy import DiffusionPolicyPipeline, rollout
from diffcache.pipelines.small import reach
from diffcache.pipelines.small.checkpoint import restore, save
from diffcache.pipelines.small.export import save_pipeline, versions
from diffcache.pipelines.small.loop import (
    Average,
    Log,
    check_done,
    paced,
    rate,
    shuffled,
    training_parser,
)

BENCH = reach.DIRECTORY.parents[1] / "bench"
DEMONSTRATIONS = 30_000
BATCH = 128
RATE = 1.5e-3
SAVE_EVERY = 500


class Demonstrator:
    """Goes to the goal through the nearest opening on a side it draws anew at every obstacle.

    The odds are even where both openings are as near, and better for the nearer one.

    Args:
        generator: Generator of the sides.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.sides = torch.zeros(0)

    def steer(self, scenes: reach.Scenes, position: Tensor) -> Tensor:
        """Return the next moves, ahead and to the left as in `Reach.act`, `[E, 2]`."""
        left, right, _ = reach.openings(scenes, position).unbind(1)
        blocked = (left > 0) | (right > 0)
        drawn = torch.rand(len(left), generator=self.generator) < torch.sigmoid(4 * (right - left))
        sides = self.sides if len(self.sides) else torch.zeros_like(left)
        sides = torch.where(sides == 0, torch.where(drawn, 1.0, -1.0), sides)
        self.sides = torch.where(blocked, sides, 0.0)
        angle = torch.where(self.sides > 0, left + 0.03, -right - 0.03)
        angle = torch.where(blocked, angle, 0.0)
        length = (scenes.goal - position).norm(dim=1).clamp_max(reach.REACH)
        move: Tensor = length[:, None] * torch.stack((angle.cos(), angle.sin()), 1)
        return move


def demonstrate(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return windows of successful scripted demonstrations.

    Half of the demonstrations start anywhere free instead of at the bottom, and one move in
    twelve is followed by a push, so that the policy sees what it will see when it strays.

    Args:
        count: Demonstrations to attempt.
        seed: Seed of scenes, sides and pushes.

    Returns:
        Observations `[N, OBSERVED, OBSERVATION]` and actions `[N, HORIZON, 2]` in units of `REACH`;
        the first action of a window is the one that led to its last observation.
    """
    scenes = reach.draw_scenes(count, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    anywhere = 2 * torch.rand(count, 2, generator=generator) - 1
    outside = reach.gaps(anywhere, anywhere, scenes.centers, scenes.radii).amin(1) > reach.MARGIN
    scattered = outside & (torch.arange(count) % 2 == 0)
    start = torch.where(scattered[:, None], anywhere, scenes.start)
    scenes = reach.Scenes(start, scenes.goal, scenes.centers, scenes.radii)
    demonstrator = Demonstrator(generator)
    episode = reach.Reach(scenes)
    seen, moves, angles = [], [], []
    for _ in range(reach.TIME):
        seen.append(episode.observe())
        move = demonstrator.steer(scenes, episode.position)
        move = torch.where(episode.running[:, None], move, 0.0)
        angles.append(reach.heading(scenes, episode.position))
        moves.append(reach.turned(move[:, None], angles[-1])[:, 0])
        episode.act(move[:, None])
        push = 0.03 * torch.randn(count, 2, generator=generator)
        push *= (torch.rand(count, 1, generator=generator) < 1 / 12) & episode.running[:, None]
        after = episode.position + push
        safe = reach.gaps(after, after, scenes.centers, scenes.radii).amin(1, keepdim=True) > 0.01
        episode.position = torch.where(safe, after, episode.position)
    parts = (torch.stack(part, 1)[episode.succeeded] for part in (seen, moves, angles))
    return _windows(*parts)


def _windows(seen: Tensor, moves: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Cut demonstrations `[E, TIME, ...]` into windows that start while the point still moves."""
    still = moves.new_zeros(len(moves), reach.HORIZON, 2)
    alive = moves.any(2)
    moves = torch.cat((still[:, :1], moves / reach.REACH, still), 1)
    windows = moves.unfold(1, reach.HORIZON, 1)[:, : reach.TIME].transpose(2, 3)
    return seen[alive], reach.turned(windows[alive], -angles[alive])


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
        "command": "python -m diffcache.pipelines.small.train_reach "
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
