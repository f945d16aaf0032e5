"""Add up the terms of a forecast, and take the finite differences that forecasts are made of.

Taylor's and Newton's forecasts and fitted ones are weighted sums of a few held tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from diffcache.kernels.dispatch import define, no_products, nothing

MOST = 5  # terms


def weighted_sum(
    terms: Sequence[Tensor], weights: Sequence[float], base: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """Return `base + gate * (weights[0] * terms[0] + weights[1] * terms[1] + ...)`.

    The kernel passes over memory once, adds in float32 and rounds once. Plain PyTorch rounds after
    every term.

    Args:
        terms: One to five tensors of one shape and dtype.
        weights: One number for each term.
        base: Same shape; is added, as a residual connection does.
        gate: Multiplies the sum before the base is added; broadcasts to the shape.

    Returns:
        A fresh tensor like `terms[0]`.

    Raises:
        ValueError: If there are no terms, more than five, or another number of weights.
    """
    if not 1 <= len(terms) == len(weights) <= MOST:
        raise ValueError(
            f"terms: must be 1 to {MOST} tensors with a weight each, got {len(terms)} and {len(weights)} weights"
        )
    run = SUM if SUM.takes(*terms, base, gate) and _alike(terms, base, gate) else sum_twin
    found: Tensor = run(list(terms), list(map(float, weights)), base, gate)
    return found


def sum_twin(
    terms: list[Tensor], weights: list[float], base: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """Compute `weighted_sum` in plain PyTorch; float16 in float32, as terms may overflow it."""
    if terms[0].dtype is torch.float16:
        first, *rest = terms
        given = [each.dtype for each in (*terms, base, gate) if each is not None]
        return sum_twin([first.float(), *rest], weights, base, gate).to(reduce(torch.promote_types, given))
    total = terms[0] if weights[0] == 1 else terms[0] * weights[0]
    for weight, term in zip(weights[1:], terms[1:], strict=True):
        total = torch.add(total, term, alpha=weight)
    if gate is not None:
        total = gate * total
    if base is not None:
        total = base + total
    return total.clone() if total is terms[0] else total


def _sum_like(terms: list[Tensor], weights: list[float], base: Tensor | None, gate: Tensor | None) -> Tensor:
    """Compute `sum_twin` with the strides that compilers were told."""
    found, like = sum_twin(terms, weights, base, gate), _like(terms)
    return found if found.stride() == like.stride() else like.copy_(found)


def finite_differences(factors: Sequence[Tensor], feature: Tensor, distances: Sequence[float]) -> list[Tensor]:
    """Return a feature and its differences `d[i + 1] = (d[i] - factors[i]) / distances[i]`.

    The kernel writes differences over the old ones, `factors[1:]`, so that a run holds the same
    memory once all orders are there. Plain PyTorch makes new tensors.

    Args:
        factors: Old feature and its differences, lowest order first, of one shape and dtype.
        feature: Fresh feature, of the same shape and dtype.
        distances: Steps that each difference is taken over, for as many of the factors as are
            used, up to four; not 0.

    Returns:
        `1 + len(distances)` tensors, the feature itself first.

    Raises:
        ValueError: If a distance is 0, or there are more distances than factors, or than four.
    """
    count = len(distances)
    if count > min(len(factors), MOST - 1) or not all(distances):
        raise ValueError(
            f"distances={list(distances)}: must be numbers other than 0, for up to {MOST - 1} of "
            f"the {len(factors)} factors"
        )
    if not count:
        return [feature]
    old, steps = list(factors[:count]), [float(distance) for distance in distances]
    if not (_alike([feature, *factors]) and DIFFERENCES.takes(feature, *factors)):
        return [feature, *differences_twin(feature, old, steps)]
    room = [place for place in factors[1 : count + 1] if _writable(place, feature)]
    room += [torch.empty_like(feature) for _ in range(count - len(room))]
    DIFFERENCES(feature, old, room, steps)
    return [feature, *room]


def differences_twin(feature: Tensor, old: list[Tensor], distances: list[float]) -> list[Tensor]:
    """Return the differences of a feature from its old factors, by order, in plain PyTorch.

    Those of float16 are taken in float32: a difference may overflow that its share of the distance
    does not.
    """
    if feature.dtype is torch.float16:
        wide = differences_twin(feature.float(), old, distances)
        dtypes = accumulate((each.dtype for each in (feature, *old)), torch.promote_types)
        return [each.to(dtype) for each, dtype in zip(wide, dtypes, strict=False)]
    found = [feature]
    for factor, distance in zip(old, distances, strict=True):
        found.append((found[-1] - factor) / distance)
    return found[1:]


def write_twin(feature: Tensor, old: list[Tensor], room: list[Tensor], distances: list[float]) -> None:
    """Write the differences of a feature over `room`, whose tensors may be the next of `old`."""
    for place, found in zip(room, differences_twin(feature, old, distances), strict=True):
        place.copy_(found)


def _alike(tensors: Sequence[Tensor], base: Tensor | None = None, gate: Tensor | None = None) -> bool:
    """Return whether a result has the shape and the dtype of the first tensor."""
    first, rest = tensors[0], [*tensors[1:], *([] if base is None else [base])]
    if any(each.shape != first.shape or each.dtype != first.dtype for each in rest):
        return False
    if gate is None:
        return True
    over = gate.dim() > first.dim()
    pairs = zip(reversed(gate.shape), reversed(first.shape), strict=False)
    return gate.dtype == first.dtype and not over and all(a in (1, b) for a, b in pairs)


def _writable(old: Tensor, feature: Tensor) -> bool:
    """Return whether a held difference may be written over.

    It lies as the fresh feature does and without gaps, as kernels go over memory from end to end.
    """
    alike = old.shape == feature.shape and old.stride() == feature.stride()
    if alike and not old.is_contiguous():
        alike = old.stride() == torch.empty_like(old, device="meta").stride()
    return alike and (torch.is_inference_mode_enabled() or not old.is_inference())


def _like(terms: list[Tensor], *_: Any) -> Tensor:
    return torch.empty_like(terms[0])


SUM = define(
    "weighted_sum(Tensor[] terms, float[] weights, Tensor? base, Tensor? gate) -> Tensor",
    _sum_like,
    _like,
    "forecast:weighted_sum",
    no_products,
)
DIFFERENCES = define(
    "finite_differences(Tensor feature, Tensor[] old, Tensor(a!)[] room, float[] distances) -> ()",
    write_twin,
    nothing,
    "forecast:finite_differences",
    no_products,
)
