"""Train a small model: one loop for all of them, with checkpoints that a run goes on from.

    python -m diffcache.eval.workshop.small.trainer sticker-flux --out runs/stickers --minutes 90

`settings/MODEL.toml` holds the settings, a table for each name. A job says what is
trained and what its loss is; the loop takes care of precision, learning rates, averaged weights,
checkpoints and the curve. Seed, settings and precision give the same
weights on one machine, broken off or not.

With `--device cuda` models and losses are there. Examples are drawn on the CPU, by `--workers`
processes ahead of the step that needs them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from diffcache.eval.record import Setting, commit
from diffcache.eval.workshop.small.job import JOBS, Job, Settings, load_job, seeded, start_from
from diffcache.pipelines.shipped_models import MODELS

PRECISIONS = ("float32", "bfloat16", "compiled", "compiled-bfloat16")


def build_optimizers(models: nn.ModuleDict, settings: Settings) -> list[torch.optim.Optimizer]:
    """Build AdamW, and Muon for the matrices that settings name; groups hold their factors."""
    matrices = {
        name: weight
        for name, weight in models.named_parameters()
        if settings.muon and weight.dim() > 1 and re.search(settings.muon_in, name)
    }
    rest: list[dict[str, Any]] = []
    orthogonalized: list[dict[str, Any]] = []
    for module in models:
        factor = settings.factors.get(module, 1.0)
        own = [(n, w) for n, w in models.named_parameters() if n.startswith(f"{module}.")]
        plain = [weight for name, weight in own if name not in matrices]
        rest.append({"params": plain, "peak": settings.rate * factor})
        if taken := [weight for name, weight in own if name in matrices]:
            orthogonalized.append({"params": taken, "peak": settings.muon * factor})
    adam = torch.optim.AdamW(rest, settings.rate, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    return [adam, Muon(orthogonalized, settings.muon)] if orthogonalized else [adam]


def set_rates(optimizers: list[torch.optim.Optimizer], share: float) -> None:
    """Set learning rates to a share of their peaks."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share


def pace(step: int, settings: Settings) -> float:
    """Return the share of the peak learning rate: a rise, level, then a fall to a fiftieth."""
    left = (settings.steps - step) / max(settings.cooldown * settings.steps, 1)
    return min(1.0, (step + 1) / max(settings.warmup, 1)) * max(0.02, min(1.0, left))


def numbers(settings: Settings, step: int) -> Tensor:
    """Return the numbers of the examples of a step, int64 [B]: each comes once in a round."""
    per_round = max(settings.examples // settings.batch, 1)
    turn, place = divmod(step, per_round)
    shuffled = _shuffled(settings.examples, settings.seed * 7_919 + turn)
    return shuffled[place * settings.batch : (place + 1) * settings.batch]


@lru_cache(maxsize=2)
def _shuffled(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator, device="cpu")


class Draws(Dataset[dict[str, Any]]):
    """Examples of every step of a run, drawn on the CPU.

    Args:
        job: Model to train.
    """

    def __init__(self, job: Job) -> None:
        self.job = job

    def __getitem__(self, step: int) -> dict[str, Any]:
        """Draw the examples of a step."""
        settings = self.job.settings
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
        with torch.device("cpu"):
            return self.job.draw(numbers(settings, step), generator)


def moved(drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Return drawn examples with their tensors on the default device."""
    device = torch.get_default_device()
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in drawn.items()
    }


def autocast(precision: str) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a loss is computed in a precision."""
    if precision.endswith("bfloat16"):
        return torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


class Muon(torch.optim.Optimizer):
    """Step along the nearest orthogonal matrix to the momentum, in float32.

    `torch.optim.Muon` rounds to bfloat16, which is slow on processors without hardware for it,
    and takes matrices alone; kernels of convolutions are flattened here.

    Reference: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
    """

    def __init__(self, groups: list[dict[str, Any]], rate: float) -> None:
        super().__init__(groups, {"lr": rate, "momentum": 0.95, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            alike: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(weight)
                momentum = state["momentum"]
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                moved = weight.grad.lerp(momentum, group["momentum"]).flatten(1)
                alike.setdefault((moved.shape[0], moved.shape[1]), []).append((weight, moved))
            for (rows, columns), pairs in alike.items():
                changes = orthogonal(torch.stack([moved for _, moved in pairs]))
                size = max(1.0, rows / columns) ** 0.5
                for (weight, _), change in zip(pairs, changes, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.sub_(change.view_as(weight) * (group["lr"] * size))


def orthogonal(matrices: Tensor) -> Tensor:
    """Return about the nearest orthogonal matrices [..., M, N], by five steps of Newton-Schulz."""
    high = matrices.shape[-2] > matrices.shape[-1]
    wide: Tensor = matrices.mT if high else matrices
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = wide @ wide.mT
        wide = 3.4445 * wide + (-4.775 * square + 2.0315 * square @ square) @ wide
    return wide.mT if high else wide


class Training:
    """A training under way: weights, their average, optimizers and the curve.

    Args:
        job: Model to train.
        precision: One of `PRECISIONS`.
    """

    def __init__(self, job: Job, precision: str) -> None:
        torch.manual_seed(job.settings.seed)
        self.job = job
        self.models = job.build()
        if job.settings.start:
            start_from(self.models, MODELS / job.settings.start)
        self.average = copy.deepcopy(self.models).requires_grad_(False)
        self.optimizers = build_optimizers(self.models, job.settings)
        self.step = 0
        self.rows: list[dict[str, Any]] = []
        self.seconds = {"wall": 0.0, "cpu": 0.0}
        self.commits: list[str] = []  # of the code of each part of a run
        self.device = Setting(torch.get_default_device()).device_name
        self.generator = seeded(0)
        self.precision = precision
        job.compiled = precision.startswith("compiled")

    def update(self, drawn: Mapping[str, Any]) -> Tensor:
        """Take one step on examples that `Job.draw` returned; the loss is a 0-d tensor."""
        settings = self.job.settings
        self.job.step = self.step
        self.generator.manual_seed(settings.seed * 1_000_003 + self.step)
        set_rates(self.optimizers, pace(self.step, settings))
        with autocast(self.precision):
            loss = self.job.loss(self.models, moved(drawn), self.generator)
        self.models.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.models.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        self._average()
        return loss.detach()

    @torch.no_grad()
    def _average(self) -> None:
        # Early averages forget faster, so that they are not held back by the first weights.
        decay = min(self.job.settings.average, (1 + self.step) / (10 + self.step))
        kept: list[Tensor] = list(self.average.parameters())
        new: list[Tensor] = list(self.models.parameters())
        torch._foreach_lerp_(kept, new, 1 - decay)
        for held, value in zip(self.average.buffers(), self.models.buffers(), strict=True):
            held.copy_(value)  # such as masks, whose infinities have no mean

    def save(self, path: Path) -> None:
        """Write all that a run needs to go on, whole or not at all."""
        state = {
            "models": self.models.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "rows": self.rows,
            "seconds": self.seconds,
            "precision": self.precision,
            "commits": self.commits,
            "device": self.device,
        }
        part = path.with_name(path.name + ".part")
        torch.save(state, part)
        part.replace(path)

    def restore(self, path: Path) -> None:
        """Take up what `save` wrote."""
        state = torch.load(path, weights_only=True, map_location=torch.get_default_device())
        self.models.load_state_dict(state["models"])
        self.average.load_state_dict(state["average"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            peaks = [group["peak"] for group in optimizer.param_groups]
            optimizer.load_state_dict(saved)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["peak"] = peak  # settings may be changed between two parts of a run
                group |= {"capturable": False} if "capturable" in group else {}  # of older checkpoints
        self.step, self.rows, self.seconds = state["step"], state["rows"], state["seconds"]
        self.precision = state["precision"]
        self.job.compiled = self.precision.startswith("compiled")
        self.commits = state.get("commits", [])
        self.device = state.get("device", self.device)


def train(
    job: Job, name: str, *, precision: str = "float32", minutes: float = math.inf, fit: bool = False, workers: int = 0
) -> Training:
    """Train from the last checkpoint on, or from the start, until the end or a time limit.

    Args:
        job: Model to train.
        name: Name of the checkpoint in the job's folder: `NAME.state`.
        precision: One of `PRECISIONS`, of a run that begins here.
        minutes: Minutes after which to stop at a checkpoint.
        fit: Shorten the run to the steps that fit in `minutes`, so that the learning rate falls to
            its end. The record holds the steps that came of it.
        workers: Processes that draw examples; 0 draws them in this one.
    """
    state = job.folder / f"{name}.state"
    run = Training(job, precision)
    if state.exists():
        run.restore(state)
    if (now := commit() or "") not in run.commits:
        run.commits.append(now)
    begun, begun_cpu = time.monotonic(), time.process_time()
    before, first = dict(run.seconds), run.step
    losses: list[Tensor] = []
    loader = DataLoader(
        Draws(job),
        batch_size=None,
        sampler=range(run.step, job.settings.steps),
        num_workers=workers,
        prefetch_factor=4 if workers else None,
    )
    for drawn in loader:
        losses.append(run.update(drawn))
        run.seconds = {
            "wall": before["wall"] + time.monotonic() - begun,
            "cpu": before["cpu"] + time.process_time() - begun_cpu,
        }
        share = (time.monotonic() - begun) / max(60 * minutes, 1e-9)
        if fit and (plan := fitting(first, run.step, share, job.settings)):
            job.settings = replace(job.settings, steps=plan)
        late = share > 1
        last = late or run.step >= job.settings.steps
        if last or run.step % job.settings.save_every == 0:
            run.save(state)
        measured = last or run.step % job.settings.measure_every == 0
        if measured or run.step % 50 == 0:
            row = {"step": run.step, "loss": float(torch.stack(losses).mean())}
            row |= {"rate": pace(run.step - 1, job.settings), "cpu_seconds": run.seconds["cpu"]}
            row["wall_seconds"] = run.seconds["wall"]
            if measured:
                row |= job.measure(run.average.eval())
            run.rows.append({key: float(f"{value:.5g}") for key, value in row.items()})
            print(json.dumps(run.rows[-1]), flush=True)
            losses = []
        if last:
            run.save(state)  # with its last measurement
            break
    return run


def fitting(first: int, step: int, share: float, settings: Settings) -> int | None:
    """Return the length of a run, in steps, that ends within its time; None between two looks.

    It is looked at in every hundredth step, until the learning rate begins to fall.

    Args:
        first: Step at which this part of the run began.
        step: Steps taken.
        share: Share of the time that is used up.
        settings: Settings of the run.
    """
    if (step - first) % 100 or not 0.02 < share < 1 - settings.cooldown:
        return None
    return first + int(0.97 * (step - first) / share)


def record(run: Training, name: str, command: str) -> dict[str, Any]:
    """Describe how a model was trained, with a curve of at most 150 rows."""
    every = -(-len(run.rows) // 150)
    settings = run.job.settings
    return {
        "model": name,
        "commits": run.commits,
        "command": command,
        "settings": asdict(settings),
        "steps": run.step,
        "samples": run.step * settings.batch,
        "precision": run.precision,
        "cpu_hours": round(run.seconds["cpu"] / 3600, 3),
        "wall_hours": round(run.seconds["wall"] / 3600, 3),
        "device": run.device,
        "torch": torch.__version__,
        "weights": sum(weight.numel() for weight in run.models.parameters()),
        "curve": [r for i, r in enumerate(run.rows) if i % every == 0 or r is run.rows[-1]],
    }


def main(arguments: list[str] | None = None) -> None:
    """Train a model, or ship its last checkpoint with the record of its training."""
    parser = argparse.ArgumentParser("trainer", description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=JOBS)
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and examples")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many minutes")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a number among the settings, such as batch=64"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw examples")
    parser.add_argument("--fit", action="store_true", help="shorten the run to what fits in --minutes")
    parser.add_argument("--export", action="store_true", help="train no more; ship the last checkpoint")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    if chosen.device == "cuda":
        torch.set_default_device("cuda")
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    if chosen.fit and math.isinf(chosen.minutes):
        parser.error("--fit needs --minutes")
    chosen.out.mkdir(parents=True, exist_ok=True)
    job = load_job(chosen.model, chosen.out, chosen.set)
    if chosen.device == "cuda" and not job.on_gpu:
        parser.error(f"{chosen.model} trains on the CPU alone; leave out --device")
    if not chosen.export:
        train(
            job,
            chosen.model,
            precision=chosen.precision,
            minutes=chosen.minutes,
            fit=chosen.fit,
            workers=chosen.workers,
        )
        return
    run = Training(job, "float32")
    run.restore(chosen.out / f"{chosen.model}.state")
    directory = MODELS / JOBS[chosen.model][1]
    job.export(run.average.eval(), directory)
    command = f"python -m diffcache.eval.workshop.small.trainer {chosen.model} --out DIR --precision {run.precision}"
    command += "".join(f" --set {setting}" for setting in chosen.set)
    path = directory / f"training-{chosen.model}.json"
    path.write_text(json.dumps(record(run, chosen.model, command), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
