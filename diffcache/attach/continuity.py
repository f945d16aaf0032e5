"""Telling whether a sample is the next step of the trajectory that was sampled before.

From step to step a sampler moves a sample little, and what it moves is scaled and mixed with new
noise; the samples of two trajectories start from independent noise. So the cosine of consecutive
samples is high in one trajectory, and near 0 where another one starts from noise.

It does not tell samples that are nearly done, of one prompt or picture, or that share channels or
tokens of a condition: those are alike in two trajectories. Only `diffcache.run` does.
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
