"""Training of a router: mixed features, the loss of a step, and the image errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diffcache.attach.tree import Template, leaves

if TYPE_CHECKING:
    from diffcache.offline.harmonica.replay import Track


class Mixer:
    """Mixes the fresh output of every site with its kept one, differentiably.

    While `weights` is None the model runs as it is and nothing is read or kept. Otherwise a site
    returns `w * fresh + (1 - w) * kept`, and keeps that mixed value, detached, if
    `w > threshold`; a site without a kept value returns and keeps the fresh one (HarmoniCa,
    section 4.1 and its official code).

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

    `paper` (section 4.3): the squared Frobenius norm, averaged over the batch, between the sample
    of the full run and that of a run which mixes at this step alone. `official`: from the second
    step to the last, mixing is switched on and stays on; the mean squared difference to the run
    before. `typical` (ours): the paper's runs, with geometric instead of arithmetic means over the
    batch, of the errors and of their causes: the mean of a few pictures that tip over into others
    says little of the rest. All cost about T * T / 2 steps. The sample is the solver's, before any
    decoder.

    Args:
        track: A batch; it is started anew for every run.
        mixer: Mixer of its denoiser.
        logits: `[T, sites]`.
        proxy: `paper`, `official` or `typical`.

    Returns:
        The image errors, float64 `[T]`, 0 at the first step, which has no router; and the mean
        squared errors of the guided outputs that caused them, `[T]`.
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
