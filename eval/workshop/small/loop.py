"""Code that the training scripts of the small models share.

Arguments, batches, learning rate, average and log.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def training_parser(
    script: str, description: str, *, out: str, updates: int, stages: Sequence[str] = (),
    compiles: bool = False,
) -> argparse.ArgumentParser:  # fmt: skip
    """Return a parser of the arguments that every training script has.

    Args:
        script: Name of its module.
        description: Purpose, one sentence.
        out: Default of the training folder.
        updates: Default of the number of optimizer steps.
        stages: Stages that can be run alone; without any there is no such argument.
        compiles: Whether the denoiser is compiled unless `--eager` is given.
    """
    made = argparse.ArgumentParser(
        prog=f"python -m diffcache.eval.workshop.small.{script}", description=description
    )
    made.add_argument("--out", type=Path, default=Path(out), help="training folder")
    made.add_argument("--seed", type=int, default=0, help="of weights, examples, order and noise")
    made.add_argument(
        "--updates", type=int, default=updates, help="optimizer steps, the length of the schedule"
    )
    made.add_argument(
        "--minutes", type=float, default=math.inf, help="stop after so long; --resume goes on"
    )
    if stages:
        made.add_argument("--stages", nargs="+", choices=stages, default=stages, help="what to run")
    made.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    made.add_argument("--threads", type=int, default=1, help="of torch")
    if compiles:
        made.add_argument("--eager", action="store_true", help="do not compile (no C++ compiler)")
    return made


def to_unit(pictures: Tensor) -> Tensor:
    """Map pictures or films from uint8 to float32 in [-1, 1]."""
    return pictures.float() / 127.5 - 1


def shuffled(count: int, batch: int, seed: int, start: int = 0) -> Iterator[Tensor]:
    """Yield batches of indices without end, in an order that depends only on seed and start."""
    step = start
    per_epoch = count // batch
    while True:
        epoch, offset = divmod(step, per_epoch)
        generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
        order = torch.randperm(count, generator=generator)
        for index in range(offset, per_epoch):
            yield order[index * batch : (index + 1) * batch]
            step += 1


def paced(
    batches: Iterable[Tensor], total: int, start: int = 0, *, minutes: float = math.inf
) -> Iterator[tuple[int, float, Tensor]]:
    """Yield the number of each step, its share of the run, and its batch.

    The clock decides on nothing but whether the run is broken off.

    Args:
        batches: Batches from step `start` on.
        total: Steps of the whole run.
        start: The first step.
        minutes: Minutes after which no more steps are begun.
    """
    end = None if minutes == math.inf else time.monotonic() + 60 * minutes
    for step, batch in zip(range(start, total), batches, strict=False):
        if end is not None and time.monotonic() >= end:
            return
        yield step, step / total, batch


class Stopped(SystemExit):
    """A run was broken off by its time limit; what was done is in its checkpoint."""


def check_done(name: str, done: int, total: int) -> None:
    """Raise Stopped unless all steps of a run were taken."""
    if done < total:
        raise Stopped(f"{name}: stopped after {done} of {total} updates; --resume goes on")


def rate(progress: float, *, warmup: float = 0.03, floor: float = 0.02) -> float:
    """Return the share of the peak learning rate at a share of the run: linear, then cosine."""
    if progress < warmup:
        return max(progress / warmup, 0.02)
    rest = min((progress - warmup) / (1 - warmup), 1.0)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * rest))


class Average:
    """An exponential moving average of a module's weights; what is not floating is copied."""

    def __init__(self, module: nn.Module, decay: float = 0.999) -> None:
        self.decay = decay
        self.steps = 0
        self.weights = {
            name: value.detach().clone().float()
            if value.is_floating_point()
            else value.detach().clone()
            for name, value in module.state_dict().items()
        }

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Move the average towards the module's weights."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        for name, value in module.state_dict().items():
            kept, new = self.weights[name], value.detach()
            if new.is_floating_point():
                kept.lerp_(new.float(), 1 - decay)
                # Infinities, as masks hold them, have no mean with anything: they are copied.
                torch.where(kept.isfinite(), kept, new.float(), out=kept)
            else:
                self.weights[name] = new.clone()

    def copy_to(self, module: nn.Module) -> None:
        """Load the average into a module of the same class."""
        state = module.state_dict()
        module.load_state_dict({k: v.to(state[k].dtype) for k, v in self.weights.items()})


class Log:
    """A JSON-lines training log: step, loss, learning rate, seconds since the start."""

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.before = 0.0
        if resume and path.exists():
            rows = self.rows()
            self.before = rows[-1]["seconds"] if rows else 0.0
        else:
            path.write_text("", encoding="utf-8")
        self.start = time.perf_counter()

    def seconds(self) -> float:
        """Return the training time in seconds, earlier parts of a resumed run included."""
        return self.before + time.perf_counter() - self.start

    def write(self, **values: Any) -> None:
        """Append one row; floats are rounded to five significant digits."""
        row = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in values.items()}
        row["seconds"] = round(self.seconds(), 1)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """Return every row written so far."""
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
