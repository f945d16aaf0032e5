"""Trains the router of HarmoniCa: step-wise denoising training with the image-error proxy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diffcache.attach.fingerprint import facts_of
from diffcache.errors import TablesError
from diffcache.features.harmonica import HarmoniCa
from diffcache.features.tables import Tables
from diffcache.offline.harmonica.mixing import Mixer, frozen, image_errors, step_loss
from diffcache.offline.harmonica.record import denoiser_of
from diffcache.offline.harmonica.replay import Replay, Track
from diffcache.offline.resume import read_state, write_state

if TYPE_CHECKING:
    from diffcache.offline.calibrate import CollectPlan

LIMIT = 5.0  # logits stay within; also those of the constant first row
SAVE_EVERY = 10  # epochs
LEAST = 1e-9  # a mean squared error of outputs below says nothing of what it causes
FORMAT = "diffcache.offline.harmonica-training/1"
COLUMNS = ("loss", "error", "penalty", "mse", "computed")
NOT_TRAINING = ("epochs", "tables")  # fields that may change between the parts of a training


def train(pipe: Any, method: HarmoniCa, plan: CollectPlan) -> HarmoniCa:
    """Return the method with a router trained for a pipeline, which is left as it was.

    Reference: HarmoniCa, arXiv 2410.01723, section 4 and its official code. Every epoch draws
    prompts and noise and denoises them step by step. At a step the teacher is the full model, the
    student the same model with every site's output mixed with what is kept of it by the step's
    scores (`Mixer`); the loss is `error_t * mean((teacher - student)**2) + beta * sum(scores)` on
    the guided outputs, variance included; one AdamW step is taken on the step's logits, which
    stay within -5 and 5; the solver goes on with the student's output. The first step is always
    computed. Kept outputs are dropped between epochs; the official code drops them only when it
    measures the image errors, so that its first steps mix in 0.7 % of another batch.

    Args:
        pipe: An uncached pipeline whose loop `Replay` can learn.
        method: Method with the settings of the training.
        plan: Prompts to draw from, with replacement; steps; samples a batch; seed (no global
            generator is touched); with `out`, the state is kept in `<out>.part` every 10 epochs,
            and an interrupted training goes on from it and ends with the same logits.

    Returns:
        The method with its tables: `logits` `[T, sites]`, and `curve` `[epochs, 5]` with the loss,
        its parts, the unweighted squared error (each summed over the steps), and the part of the
        scores above the threshold.

    Raises:
        AttachError: If the pipeline's loop cannot be replayed.
        TablesError: If `<out>.part` is damaged, holds the state of another training, or of one
            that is longer.
        ValueError: If a run has one step, which is always computed.
    """
    call = plan.arguments()
    _check_steps(call.get("num_inference_steps"))
    model, _ = denoiser_of(pipe)
    with frozen(model):
        replay = Replay(pipe, call, _drawn(plan, _generator(plan.seed, 0)))
        _check_steps(replay.total)
        trainer = _Trainer(replay, method, plan)
        try:
            trainer.run()
        finally:
            trainer.mixer.remove()
    tables = Tables(trainer.header(), trainer.tables())
    if plan.out is not None:
        tables = tables.save(plan.out)
        if trainer.path is not None:
            trainer.path.unlink(missing_ok=True)
    return dataclasses.replace(method, tables=tables)


class _Trainer:
    """The state of a training: logits, optimizer, image errors, curve."""

    def __init__(self, replay: Replay, method: HarmoniCa, plan: CollectPlan) -> None:
        self.replay, self.method, self.plan = replay, method, plan
        self.sites = replay.sites()
        self.mixer = Mixer(replay.model, self.sites, method.threshold)
        device = next(replay.model.parameters()).device
        shape = (replay.total, len(self.sites))
        drawn = torch.randn(shape, generator=_generator(plan.seed, 1)).clamp(-LIMIT, LIMIT)
        self.first = torch.full_like(drawn[0], LIMIT, device=device)
        self.rows = [nn.Parameter(row.to(device)) for row in drawn[1:]]
        self.optimizer = torch.optim.AdamW(self.rows, lr=method.rate, weight_decay=0)
        self.weights = torch.zeros(replay.total, dtype=torch.float64)
        self.curve: list[list[float]] = []
        of = method.beta_sites
        self.beta = method.beta * (of / len(self.sites) if of else 1.0)
        out = plan.out
        self.path = None if out is None else out.with_name(out.name + ".part")
        self.about = self._about()  # now: runs move the state of a generator in the call

    def logits(self) -> Tensor:
        """Return the router, `[T, sites]`, detached."""
        return torch.stack([self.first, *(row.detach() for row in self.rows)]).float()

    def run(self) -> None:
        """Train to the last epoch, from where an interrupted training left off."""
        if self.path is not None and self.path.exists() and self.plan.resume:
            self._load(self.path)
        epochs = self.method.epochs
        while len(self.curve) < epochs:
            record = self._epoch(len(self.curve))
            self.curve.append([record[name] for name in COLUMNS])
            done = len(self.curve)
            if self.path is not None and (done % SAVE_EVERY == 0 or done == epochs):
                self._save(self.path)
            if self.plan.progress is not None:
                word = f"loss {record['loss']:.3g}, {record['computed']:.0%} computed"
                self.plan.progress(done, epochs, word)

    def _begin(self, number: int) -> Track:
        """Return batch `number`, from 2 on for the epochs; 1 is that of the image errors."""
        generator = _generator(self.plan.seed, number + 1)
        prompts = _drawn(self.plan, generator)
        return self.replay.begin(prompts, int(torch.randint(2**31, (), generator=generator)))

    def _epoch(self, epoch: int) -> dict[str, float]:
        """Train on one batch; return the epoch's record."""
        method, mixer, total = self.method, self.mixer, self.replay.total
        if epoch == 0 or epoch * total // method.refresh > (epoch - 1) * total // method.refresh:
            # always the same batch, so that one measurement compares with the next
            errors, causes = image_errors(self._begin(1), mixer, self.logits(), method.proxy)
            if method.relative:
                errors = torch.where(causes > LEAST, errors / causes, self.weights)
            self.weights = errors
        track = self._begin(2 + epoch)
        mixer.forget()
        with torch.no_grad(), mixer.mixing(torch.sigmoid(self.first)):
            track.advance(track.predict(mixer))
        record = dict.fromkeys(COLUMNS, 0.0)
        for row, weight in zip(self.rows, self.weights[1:].tolist(), strict=True):
            loss, student, parts = step_loss(track, mixer, row, weight, self.beta)
            self.optimizer.zero_grad()
            (row.grad,) = torch.autograd.grad(loss, row)
            self.optimizer.step()
            with torch.no_grad():
                row.clamp_(-LIMIT, LIMIT)
            track.advance(student)
            for name, value in parts.items():
                record[name] += value
        computed = torch.sigmoid(self.logits()) > method.threshold
        computed[0] = True
        return {**record, "computed": float(computed.double().mean())}

    # what is kept of it ----------------------------------------------------------------------

    def tables(self) -> dict[str, Tensor]:
        """Return the tensors of the tables."""
        return {"logits": self.logits(), "curve": torch.tensor(self.curve)}

    def header(self) -> dict[str, Any]:
        """Return the header of the tables."""
        from diffcache.offline.calibrate import header_of

        facts = facts_of(self.replay.model, self.replay.pipe.scheduler)
        replay, plan = self.replay, self.plan
        run = {"steps": replay.total, "shape": replay.shape, "sites": self.sites}
        run |= {"guidance": plan.guidance(replay.pipe), "seed": plan.seed}
        return header_of(self.method, facts, plan, batch_size=plan.batch_size, **run)

    def _about(self) -> dict[str, Any]:
        """Return the facts that must be alike for a training to go on, as plain data."""
        names = [f.name for f in dataclasses.fields(self.method) if f.name not in NOT_TRAINING]
        about = {name: getattr(self.method, name) for name in names}
        about |= facts_of(self.replay.model, self.replay.pipe.scheduler)
        about |= self.plan.about() | {"steps": self.replay.total}
        plain: dict[str, Any] = json.loads(_json(about))
        return plain

    def _save(self, path: Path) -> None:
        states = [self.optimizer.state[row] for row in self.rows]
        tensors = {
            "logits": self.logits(),
            "weights": self.weights,
            "curve": torch.tensor(self.curve, dtype=torch.float64),
            "step": torch.tensor([float(state["step"]) for state in states]),
            "first_moments": torch.stack([state["exp_avg"] for state in states]),
            "second_moments": torch.stack([state["exp_avg_sq"] for state in states]),
        }
        write_state(path, tensors, {"format": FORMAT, "about": _json(self.about)})

    def _load(self, path: Path) -> None:
        held, metadata = read_state(path, "about", "format")
        mine, theirs = self.about, dict(json.loads(metadata["about"]))
        odd = [f"{k}: {theirs.get(k)!r}, now {v!r}" for k, v in mine.items() if theirs.get(k) != v]
        if metadata["format"] != FORMAT or odd:
            raise TablesError(f"{path} is of another training ({'; '.join(odd)}); delete it, or pass resume=False")
        epochs = self.method.epochs
        if len(held["curve"]) > epochs:
            raise TablesError(
                f"epochs={epochs}: {path} holds {len(held['curve'])} already; give at least as "
                "many, delete it, or pass resume=False"
            )
        self.weights, self.curve = held["weights"], held["curve"].tolist()
        with torch.no_grad():
            for number, row in enumerate(self.rows):
                row.copy_(held["logits"][number + 1])
                self.optimizer.state[row] = {
                    "step": held["step"][number].clone(),
                    "exp_avg": held["first_moments"][number].to(row),
                    "exp_avg_sq": held["second_moments"][number].to(row),
                }


def _check_steps(steps: Any) -> None:
    """Raise ValueError for a run with nothing to decide."""
    if steps is not None and steps < 2:
        raise ValueError(
            f"steps={steps}: HarmoniCa always computes the first step, so that nothing is left to "
            "train; use at least 2"
        )


def _generator(seed: int, number: int) -> torch.Generator:
    """Return a generator for one use of a training's seed."""
    return torch.Generator("cpu").manual_seed(seed * 1_000_003 + number)


def _drawn(plan: CollectPlan, generator: torch.Generator) -> Sequence[Any]:
    """Return one batch of the prompts, drawn with replacement; a mapping is one by itself."""
    picks = torch.randint(len(plan.prompts), (plan.batch_size,), generator=generator).tolist()
    first = plan.prompts[picks[0]]
    if isinstance(first, Mapping):  # its generator would draw the same noise every time
        return [{name: value for name, value in first.items() if name != "generator"}]
    return [plan.prompts[pick] for pick in picks]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)
