"""Telling whether a sample is the next step of the trajectory that was sampled before.

From step to step a sampler moves a sample little, and what it moves is scaled and mixed with new
noise; the samples of two trajectories start from independent noise. So the cosine of consecutive
samples is high in one trajectory, and near 0 where another one starts from noise.

Samples that are nearly done, of one prompt or picture, or that share channels or tokens of a
condition, are alike in two trajectories. A sampler that draws no noise still tells them apart: its
next sample is a sum of the samples and outputs of the last steps, each times a number. With one
that does draw noise, only `diffcache.run` tells them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from diffcache.attach.argument_digest import tensors_in

FEWEST = 64  # values of a sample that can be told: fewer have a cosine of 0.5 and more by chance
_MOST = 4096  # values that are kept of a sample
# The lowest cosine of consecutive steps that was measured with 20 steps is 0.29 (SDE-DPM++ with
# Karras sigmas), with DDPM and ancestral Euler 0.59, with solvers that add no noise 0.92.
_LEAST = 0.2
# A sample outside the sums by this share of its length, and by ten times that of any step before,
# belongs to another trajectory. Rounding to bfloat16 alone makes 0.003.
_STRAY, _FURTHER = 0.01, 10.0
REACH = 3  # steps back that multistep solvers of the usual orders look
_CHANCE = 4.0  # standard deviations of the cosine of independent noise, which are 1 / sqrt(values)


def glance(sample: Any) -> Tensor | None:
    """Return some values of a sample as a copy of length 1, None where they tell too little.

    Args:
        sample: A tensor, or tensors in lists, of which the first counts.
    """
    if not isinstance(sample, Tensor):
        sample = next(iter(tensors_in({"": sample}).values()), None)
    if sample is None or not sample.is_floating_point() or sample.numel() < FEWEST:
        return None
    values = sample.detach().reshape(-1)
    stride = values.numel() // _MOST | 1  # odd, so that it meets every column of an even width
    values = values[::stride].float()
    kept: Tensor = values / torch.linalg.vector_norm(values)
    return kept


def goes_on(before: Tensor, now: Tensor) -> bool:
    """Return whether one glance can be the step after another; waits for the device."""
    least = max(_LEAST, _CHANCE / math.sqrt(len(now)))
    return float((before * now).sum()) >= least  # false where a sample is zero or not finite


def items(values: Any) -> list[Tensor]:
    """Return glances at items of a batch, of which guidance makes one: the first is the sample's.

    All of four or fewer, else those where halves and thirds begin; none where they tell too little.

    Args:
        values: A tensor [B, ...], or tensors in lists, of which the first counts.
    """
    if not isinstance(values, Tensor):
        values = next(iter(tensors_in({"": values}).values()), None)
    if values is None or not values.dim():
        return []
    size = len(values)
    chosen = range(size) if size <= 4 else (0, size // 3, size // 2, 2 * size // 3)
    return [seen for seen in (glance(values[number]) for number in chosen) if seen is not None]


def outside(now: Tensor, before: list[Tensor]) -> float:
    """Return the share of a glance's length that no sum of earlier glances holds; waits for it.

    Args:
        now: Glance at a sample, of length 1.
        before: Glances at earlier samples and outputs, each times any number in the sum.
    """
    rows = torch.stack([*before, now]).cpu().double().nan_to_num(nan=0.0)  # an output may be broken
    products = rows @ rows.T
    inner, target = products[:-1, :-1], products[:-1, -1]
    held = target @ torch.linalg.lstsq(inner, target[:, None], driver="gelsd").solution[:, 0]
    return math.sqrt(max(1.0 - float(held), 0.0))


def is_stray(share: float, most: float) -> bool:
    """Return whether a sample is outside the sums as none of its trajectory was.

    Args:
        share: What `outside` returned for it.
        most: The most that it returned at the steps before.
    """
    return share > max(_STRAY, _FURTHER * most)
