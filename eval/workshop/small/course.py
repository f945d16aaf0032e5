"""Train a denoiser: optimizer, learning rate, averaged weights, checkpoints, log."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from diffcache.eval.workshop.small.checkpoint import restore, save
from diffcache.eval.workshop.small.loop import Average, Log, check_done, paced, rate, shuffled

Loss = Callable[[Tensor, int, float], Tensor]


@dataclass(frozen=True)
class Plan:
    """Plan of a training: seed and number of steps give the same weights, broken off or not.

    Attributes:
        seed: Seed of weights, examples, order and noise.
        steps: Length of the schedule in steps; None is the course's.
        resume: Go on from the last checkpoint.
        compiled: Compile the denoiser, which is faster after some minutes.
        minutes: Minutes after which to break off, at a checkpoint.
    """

    seed: int = 0
    steps: int | None = None
    resume: bool = False
    compiled: bool = True
    minutes: float = math.inf


@dataclass(frozen=True)
class Course:
    """Settings of what is trained, and on how much.

    Attributes:
        name: Name of the files.
        examples: Number of examples.
        steps: Steps of the whole run.
        batch: Examples in a step.
        decay: Decay of the averaged weights.
        rate: Highest learning rate.
        save_every: Steps from one checkpoint to the next.
        factors: Factors of the learning rate, by module; 1 where it says nothing.
        muon: Learning rate of Muon, which then trains the matrices of all blocks; 0 for AdamW
            alone.
    """

    name: str
    examples: int
    steps: int
    batch: int = 32
    decay: float = 0.999
    rate: float = 1e-3
    save_every: int = 250
    factors: Mapping[str, float] = field(default_factory=dict)
    muon: float = 0.0


class Pair:
    """Two optimizers that take their steps together."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of both."""
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        """Take a step with each."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each, by its number."""
        return {str(number): part.state_dict() for number, part in enumerate(self.parts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the state of each."""
        for number, part in enumerate(self.parts):
            part.load_state_dict(state[str(number)])


def train(out: Path, weights: nn.ModuleDict, loss: Loss, course: Course, plan: Plan) -> Log:
    """Train modules, save checkpoints on the way, and load the averaged weights in the end.

    Args:
        out: Folder; gets `NAME.safetensors` (averaged weights), `NAME.state` and `NAME.jsonl`.
        weights: The modules to train.
        loss: Loss of the examples with these numbers [B], at a step, at a share of the run.
        course: Settings of what is trained: name, rate, steps, batch and examples.
        plan: Settings of this run: seed, steps, minutes, whether it resumes and compiles.

    Returns:
        The log.

    Raises:
        Stopped: If the time limit broke the run off; the checkpoint is saved.
        ValueError: If the checkpoint is of a run of another length.
    """
    total = course.steps if plan.steps is None else plan.steps
    optimizer = build_optimizer(weights, course)
    average = Average(weights, course.decay)
    if plan.compiled:
        # Compiling takes minutes that do not count.
        _gradients(weights, loss, (torch.arange(course.batch), 0, 0.0))
    log = Log(out / f"{course.name}.jsonl", resume=plan.resume)
    state = out / f"{course.name}.state"
    start = restore(state, weights, optimizer, average, total) if plan.resume else 0
    done, lr = start, 0.0
    losses: list[float] = []
    order = shuffled(course.examples, course.batch, plan.seed, start)
    bar = tqdm(order, desc=course.name, mininterval=10)
    for index, progress, chosen in paced(bar, total, start, minutes=plan.minutes):
        lr = course.rate * rate(progress)
        losses.append(update(weights, optimizer, loss, (chosen, index, progress), lr))
        average.update(weights)
        if index % 25 == 0:
            log.write(step=index, loss=float(np.mean(losses)), lr=lr)
            bar.set_postfix(loss=f"{np.mean(losses):.4f}")
            losses = []
        done = index + 1
        if done % course.save_every == 0:
            save(state, (done, total), weights, optimizer, average, weights_file=True)
    if losses:
        log.write(step=done, loss=float(np.mean(losses)), lr=lr)
    save(state, (done, total), weights, optimizer, average, weights_file=True)
    check_done(course.name, done, total)
    average.copy_to(weights)
    return log


def build_optimizer(weights: nn.ModuleDict, course: Course) -> torch.optim.Optimizer | Pair:
    """Build AdamW with one group for each module, which holds its factor of the learning rate.

    With `course.muon`, the matrices of blocks go to Muon, which learns faster from few examples.
    """
    matrices = [
        parameter for name, parameter in weights.named_parameters()
        if course.muon and parameter.dim() == 2 and ".blocks." in name
    ]  # fmt: skip
    taken = {id(parameter) for parameter in matrices}
    groups = [
        {"params": [p for p in module.parameters() if id(p) not in taken],
         "factor": course.factors.get(name, 1.0)}
        for name, module in weights.items()
    ]  # fmt: skip
    adam = torch.optim.AdamW(groups, course.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    if not matrices:
        return adam
    muon = torch.optim.Muon(
        [{"params": matrices, "factor": course.muon / course.rate}], course.muon, weight_decay=0.01
    )
    return Pair(adam, muon)


def update(
    weights: nn.Module,
    optimizer: torch.optim.Optimizer | Pair,
    loss: Callable[..., Tensor],
    given: tuple[Any, ...],
    lr: float,
) -> float:
    """Take one optimizer step on a loss of what is given, and return the loss.

    Args:
        weights: The modules that are trained.
        optimizer: Optimizer whose groups hold factors.
        loss: Loss to lower, in bfloat16 where autocast allows it.
        given: Arguments of the loss.
        lr: The learning rate where the factor is 1.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group["factor"]
    error = _gradients(weights, loss, given)
    nn.utils.clip_grad_norm_(weights.parameters(), 1.0)
    optimizer.step()
    return error


def _gradients(weights: nn.Module, loss: Callable[..., Tensor], given: tuple[Any, ...]) -> float:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        error = loss(*given)
    weights.zero_grad(set_to_none=True)
    error.backward()
    return float(error.detach())
