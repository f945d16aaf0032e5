"""Peak signal-to-noise ratio, the one that every part of the toolkit measures closeness with."""

from __future__ import annotations

import torch
from torch import Tensor

CAP = 100.0  # dB, of samples that are equal, so that means stay finite
_LEAST_ERROR = 10 ** (-CAP / 10)


def psnr(one: Tensor, other: Tensor, *, span: float | None = None, mask: Tensor | None = None) -> Tensor:
    """Return the peak signal-to-noise ratio of every sample, 10 log10(span² / MSE), at most 100 dB.

    Args:
        one: Samples [B, ...]: pictures, films or latents.
        other: Samples of the same shape and dtype.
        span: Width of the full range of a value; None is 255 for uint8 and 1 for floats. Floats
            in [-1, 1] have a span of 2.
        mask: Values that count, bool, of a shape that broadcasts to that of the samples; None is
            all. A sample of which none counts is at the cap.

    Returns:
        float64 [B] on the samples' device, in dB. A mean squared error below 1e-10 of `span`²
        counts as equal and gives 100 dB.

    Raises:
        ValueError: If shapes or dtypes differ, there is no sample, or `span` is not positive.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        raise ValueError(
            f"samples of shape {list(one.shape)}, {one.dtype}, and {list(other.shape)}, "
            f"{other.dtype}: a PSNR needs equal shapes and dtypes"
        )
    if one.numel() == 0:
        raise ValueError(f"samples of shape {list(one.shape)}: there is nothing to compare")
    if span is None:
        span = 255.0 if one.dtype == torch.uint8 else 1.0
    if not span > 0:
        raise ValueError(f"span={span}: must be above 0")
    error = (one.double() - other.double()).square()
    if mask is None:
        return decibels(error.flatten(1).mean(1) / span**2)
    counts = mask.expand_as(error).flatten(1)
    mean = (error.flatten(1) * counts).sum(1) / counts.sum(1).clamp_min(1)
    return decibels(mean / span**2)


def decibels(error: Tensor) -> Tensor:
    """Return the PSNR in dB of mean squared errors whose full range is 1, at most 100."""
    return 0.0 - 10 * error.clamp(min=_LEAST_ERROR).log10()  # no -0
