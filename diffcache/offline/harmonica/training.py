"""Trains the router of HarmoniCa: step-wise denoising training with the image-error proxy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.fingerprint import facts_of
from diffcache.attach.tree import Template, leaves
from diffcache.errors import TablesError
from diffcache.features.harmonica import HarmoniCa
from diffcache.features.tables import Tables
from diffcache.offline.calibrate import CollectPlan, header_of, read_state, write_state
from diffcache.offline.harmonica.replay import Replay, Track, denoiser_of


class Mixer:
    """Mixes the fresh output of every site with its kept one, differentiably.

    While `weights` is None the model runs as it is and nothing is read or kept. Otherwise a site returns `w * fresh +
    (1 - w) * kept`, and keeps that mixed value, detached, if `w > threshold`; a site without a kept value returns and
    keeps the fresh one (HarmoniCa, section 4.1 and its official code).

    Args:
        model: The denoiser.
        sites: Paths of its modules.
        threshold: Scores above it renew what is kept.

    Attributes:
        weights: Scores `[sites]` in the sites' order, or None.
        branch: Number of the guidance branch; branches keep their features apart.
    """

    def __init__(self, model: nn.Module, sites: Sequence[str], threshold: float) -> None:
        self.model, self.threshold = model, threshold
        self.weights: Tensor | None = None
        self.branch = 0
        self._renews: list[bool] = []
        self._kept: dict[tuple[int, int, int], list[Tensor]] = {}
        self._visits: dict[int, int] = {}
        self._hooks = [
            model.get_submodule(site).register_forward_hook(self._hook(number)) for number, site in enumerate(sites)
        ]

    def enter(self, branch: int) -> None:
        """Note which guidance branch the denoiser is called for next."""
        self.branch = branch
        self._visits.clear()

    def forget(self) -> None:
        """Drop the kept features."""
        self._kept.clear()

    def kept(self) -> dict[tuple[int, int, int], list[Tensor]]:
        """Return the kept features by branch, site and call of the site."""
        return dict(self._kept)

    def restore(self, kept: dict[tuple[int, int, int], list[Tensor]]) -> None:
        """Go back to features that were kept."""
        self._kept = dict(kept)

    def remove(self) -> None:
        """Leave the model as it was found."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def mixing(self, weights: Tensor) -> Iterator[None]:
        """Mix with these scores, `[sites]`, 0 to 1."""
        self.weights = weights
        self._renews = (weights.detach() > self.threshold).tolist()
        try:
            yield
        finally:
            self.weights = None

    def _hook(self, number: int) -> Any:
        def mix(module: nn.Module, args: Any, out: Any) -> Any:
            if self.weights is None:
                return None
            visit = self._visits.get(number, 0)
            self._visits[number] = visit + 1
            key = (self.branch, number, visit)
            fresh, kept = leaves(out), self._kept.get(key)
            if kept is None:
                self._kept[key] = [tensor.detach() for tensor in fresh]
                return None
            weight = self.weights[number]
            mixed = []
            for new, old in zip(fresh, kept, strict=True):
                mixed.append(weight.to(new.dtype) * new + (1 - weight).to(new.dtype) * old)
            if self._renews[number]:
                self._kept[key] = [tensor.detach() for tensor in mixed]
            return Template(out).build(mixed)

        return mix


_LEAST = 1e-30  # of a squared error whose logarithm is taken


def step_loss(
    track: Track, mixer: Mixer, logits: Tensor, weight: float = 1.0, beta: float = 0.0
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return the loss of one step, the student's guided output, and the loss in parts.

    The mixer has what the steps before kept; logits of this step are `[sites]`. `weight` is that of the
    squared error, from `image_errors`, `beta` that of the sum of the scores.
    """
    with torch.no_grad():
        teacher = track.predict().float()
    scores = torch.sigmoid(logits)
    with torch.enable_grad(), mixer.mixing(scores):
        student = track.predict(mixer)
        mse = (teacher - student.float()).square().mean()
    error, penalty = weight * mse, beta * scores.sum()
    loss = error + penalty
    parts = {"loss": loss, "error": error, "penalty": penalty, "mse": mse}
    return loss, student, {name: float(value.detach()) for name, value in parts.items()}


@torch.no_grad()
def image_errors(track: Track, mixer: Mixer, logits: Tensor, proxy: str) -> tuple[Tensor, Tensor]:
    """Measure how much the router's choices at each step change the final sample.

    `paper` (section 4.3): the squared Frobenius norm, averaged over the batch, between the sample of the full run and
    that of a run which mixes at this step alone. `official`: from the second step to the last, mixing is switched on
    and stays on; the mean squared difference to the run before. `typical` (ours): the paper's runs, with geometric
    instead of arithmetic means over the batch, of the errors and of their causes: the mean of a few pictures that tip
    over into others says little of the rest. All cost about T * T / 2 steps. The sample is the solver's, before any
    decoder.

    Args:
        track: A batch; it is started anew for every run.
        mixer: Mixer of its denoiser.
        logits: `[T, sites]`.
        proxy: `paper`, `official` or `typical`.

    Returns:
        The image errors, float64 `[T]`, 0 at the first step, which has no router; and the mean squared errors of the
        guided outputs that caused them, `[T]`.
    """
    scores, full = torch.sigmoid(logits), torch.ones_like(logits[0])
    last = len(scores)

    def move(one: Track, row: Tensor) -> Tensor:
        with mixer.mixing(row):
            out = one.predict(mixer)
        one.advance(out)
        return out

    def finish(one: Track) -> Tensor:
        while one.index < last:
            move(one, full)
        return one.sample.double()

    def mean(each: Tensor) -> Tensor:  # over the batch
        return each.clamp_min(_LEAST).log().mean().exp() if proxy == "typical" else each.mean()

    mixer.forget()
    track.restart()
    before = finish(track)
    mixer.forget()
    track.restart()
    move(track, full)
    errors, causes = torch.zeros(2, last, dtype=torch.float64)
    for index in range(1, last):  # runs share their steps up to this one
        kept, branch, teacher = mixer.kept(), track.fork(), track.predict()
        cause = (move(branch, scores[index]) - teacher).double().square()
        causes[index] = mean(cause.flatten(1).mean(1))
        after = finish(branch)
        gap = (after - before).square().flatten(1)
        mixer.restore(kept)
        errors[index] = mean(gap.mean(1) if proxy == "official" else gap.sum(1))
        if proxy == "official":
            before = after
        move(track, scores[index] if proxy == "official" else full)
    mixer.forget()
    return errors, causes


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Switch off dropout and the gradients of a model's parameters."""
    modes = [(module, module.training) for module in model.modules()]
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval()
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter in wanted:
            parameter.requires_grad_(True)


LIMIT = 5.0  # logits stay within; also those of the constant first row
SAVE_EVERY = 10  # epochs
LEAST = 1e-9  # a mean squared error of outputs below says nothing of what it causes
FORMAT = "diffcache.offline.harmonica-training/1"
COLUMNS = ("loss", "error", "penalty", "mse", "computed")
NOT_TRAINING = ("epochs", "tables")  # fields that may change between the parts of a training


def train(pipe: Any, method: HarmoniCa, plan: CollectPlan) -> HarmoniCa:
    """Return the method with a router trained for a pipeline, which is left as it was.

    Reference: HarmoniCa, arXiv 2410.01723, section 4 and its official code. Every epoch draws prompts and noise and
    denoises them step by step. At a step the teacher is the full model, the student the same model with every site's
    output mixed with what is kept of it by the step's scores (`Mixer`); the loss is `error_t * mean((teacher -
    student)**2) + beta * sum(scores)` on the guided outputs, variance included; one AdamW step is taken on the step's
    logits, which stay within -5 and 5; the solver goes on with the student's output. The first step is always
    computed. Kept outputs are dropped between epochs; the official code drops them only when it measures the image
    errors, so that its first steps mix in 0.7 % of another batch.

    Args:
        pipe: An uncached pipeline whose loop `Replay` can learn.
        method: Method with the settings of the training.
        plan: Prompts to draw from, with replacement; steps; samples a batch; seed (no global generator is touched);
            with `out`, the state is kept in `<out>.part` every 10 epochs, and an interrupted training goes on from it
            and ends with the same logits.

    Returns:
        The method with its tables: `logits` `[T, sites]`, and `curve` `[epochs, 5]` with the loss, its parts, the
        unweighted squared error (each summed over the steps), and the part of the scores above the threshold.

    Raises:
        AttachError: If the pipeline's loop cannot be replayed.
        TablesError: If `<out>.part` is damaged, holds the state of another training, or of one that is longer.
        ValueError: If a run has one step, which is always computed, or prompts are of two kinds.
    """
    if len({isinstance(prompt, Mapping) for prompt in plan.prompts}) > 1:
        raise ValueError("prompts: texts and mappings at once, and batches are drawn of either; give one kind")
    call = plan.arguments()
    _check_steps(call.get("num_inference_steps"))
    model, _ = denoiser_of(pipe)
    with torch.inference_mode(False), frozen(model):
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
        self.about = self._about()

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
