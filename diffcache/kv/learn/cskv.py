"""Fit the bases of CSKV: a scaled SVD of the projections, then layer by layer on their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from diffcache.kv.settings import Count, NotNegative, Positive, Settings, Whole


@dataclass(frozen=True, eq=False)
class Bases:
    """Two matrices for keys before rotation and two for values of one layer.

    Args:
        key_down: [H * D, r].
        key_up: [r, H * D].
        value_down: [H * Dv, r].
        value_up: [r, H * Dv].
    """

    key_down: Tensor
    key_up: Tensor
    value_down: Tensor
    value_up: Tensor


@dataclass(frozen=True)
class BasisFit(Settings):
    """Settings of the fit of bases.

    Args:
        rank: Coordinates of the keys of a slot, all heads together.
        value_rank: Coordinates of the values of a slot; None for as many as of its keys.
        alpha: Power of the mean magnitude that scales each input of a projection before its SVD.
        steps: Training steps.
        rate: Learning rate.
        batch: Tokens of a step.
        seed: Seed of the tokens that steps draw.
    """

    rank: Count
    value_rank: Count | None = None
    alpha: NotNegative = 0.5
    steps: Whole = 200
    rate: Positive = 1e-3
    batch: Count = 256
    seed: int = 0


@contextmanager
def inputs_of(modules: Sequence[nn.Module]) -> Iterator[list[list[Tensor]]]:
    """Collect what modules are given: of each, a list of [N, in] float32 on the CPU.

    Args:
        modules: Modules to watch, such as the key projections of all layers.
    """
    found: list[list[Tensor]] = [[] for _ in modules]

    def note(number: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, given: found[number].append(given[0].detach().flatten(0, -2).float().cpu())

    handles = [m.register_forward_pre_hook(note(number)) for number, m in enumerate(modules)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def start(weight: Tensor, inputs: Tensor, rank: int, alpha: float = 0.5) -> tuple[Tensor, Tensor]:
    """Return a basis of a projection's outputs from the SVD of its scaled weight.

    Args:
        weight: [out, in].
        inputs: [N, in].
        rank: Basis vectors.
        alpha: Power of the mean magnitude that scales each input.

    Returns:
        [out, r] and [r, out].

    Reference: ASVD, arXiv 2312.05821, as CSKV starts from it.
    """
    scale = inputs.abs().mean(0).clamp_min(1e-6) ** alpha
    right = torch.linalg.svd(scale[:, None] * weight.T.float(), full_matrices=False).Vh
    up = right[: min(rank, len(right))]
    return up.T.contiguous(), up.contiguous()


def train(outputs: Tensor, down: Tensor, up: Tensor, how: BasisFit) -> tuple[Tensor, Tensor, list[float]]:
    """Fit a basis to the outputs of a projection, by their mean squared error.

    Args:
        outputs: [N, out].
        down: [out, r] to start from.
        up: [r, out].
        how: Steps, rate, batch and seed.

    Returns:
        down, up, and the error over all outputs before the first step and after the last.

    Reference: CSKV, arXiv 2409.10593, section 2.2. The paper's matrix on the inputs is here the
    projection's weight times `down`, which loses nothing: no more of an output can be known
    than the output itself.
    """
    drawn = torch.Generator().manual_seed(how.seed)
    with torch.enable_grad():
        pair = [part.detach().clone().requires_grad_() for part in (down, up)]
        adam = torch.optim.Adam(pair, lr=how.rate)
        errors = [_error(outputs, *pair)]
        best = [part.detach().clone() for part in pair]
        for _ in range(how.steps):
            some = outputs[torch.randint(len(outputs), (how.batch,), generator=drawn)]
            loss = functional.mse_loss(some @ pair[0] @ pair[1], some)
            adam.zero_grad()
            loss.backward()
            adam.step()
    errors.append(_error(outputs, *pair))
    if errors[-1] < errors[0]:
        best = [part.detach() for part in pair]
    return best[0], best[1], [errors[0], min(errors)]


def fit(
    projections: Sequence[tuple[nn.Linear, nn.Linear]],
    inputs: Sequence[Sequence[Tensor]],
    how: BasisFit,
    *,
    done: Mapping[int, Bases] | None = None,
    report: Callable[[int, Bases, list[float]], None] | None = None,
) -> list[Bases]:
    """Fit the bases of all layers.

    Args:
        projections: Key and value projection of each layer.
        inputs: Inputs of the projections of each layer, [N, in], as `inputs_of` collects them.
        how: Ranks and training.
        done: Layers that were fitted before, which are left as they are.
        report: Function called after each layer with its number, bases and the errors of keys and
            values before and after; a place to save.

    Raises:
        ValueError: If there are inputs of other layers, or none.
    """
    if len(inputs) != len(projections) or not all(len(each) for each in inputs):
        raise ValueError(
            f"inputs of {sum(map(bool, inputs))} layers for {len(projections)} projections: run "
            "the model on prompts inside `inputs_of`"
        )
    found = []
    for number, (pair, given) in enumerate(zip(projections, inputs, strict=True)):
        if done is not None and number in done:
            found.append(done[number])
            continue
        x, parts, errors = torch.cat(list(given)), [], []
        for module, rank in zip(pair, (how.rank, how.value_rank or how.rank), strict=True):
            weight = module.weight.detach().float().cpu()
            down, up = start(weight, x, rank, how.alpha)
            down, up, both = train(outputs_of(module, x), down, up, how)
            parts += [down, up]
            errors += both
        found.append(Bases(*parts))
        if report is not None:
            report(number, found[-1], errors)
    return found


def outputs_of(module: nn.Linear, inputs: Tensor) -> Tensor:
    """Return what a projection makes of inputs [N, in], float32 on the CPU."""
    bias: Tensor | None = module.bias  # torch declares it as a Tensor
    known = None if bias is None else bias.detach().float().cpu()
    return functional.linear(inputs, module.weight.detach().float().cpu(), known)


def _error(outputs: Tensor, down: Tensor, up: Tensor) -> float:
    with torch.no_grad():
        return float(functional.mse_loss(outputs @ down @ up, outputs))
