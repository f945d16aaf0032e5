"""Choosing scales and zeros: a search for weights, the seen range for activations."""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 80  # shrunk ranges that are tried, one percent apart
POWER = 2.4  # of the error that is made small


def weight_grid(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Choose a scale and a zero for every output channel.

    Tries the channel's own range and that range shrunk by 1, 2, ... 79 percent at both ends, and
    keeps the one with the least sum of `|rounded - weight|**2.4` (the search CacheQuant, arXiv
    2503.01323, takes over from its quantizer; its reconstruction by AdaRound is left out). Every
    range holds 0, so that zero padding stays exact.

    Args:
        weight: `[O, ...]`, any float dtype.
        bits: Bits of a code, 8 or 4.

    Returns:
        Scales `[O]` float32, above 0, and zeros `[O]` int32, 0 to `2**bits - 1`.

    Raises:
        ValueError: If the weight holds a number that is not finite.
    """
    flat = weight.detach().reshape(weight.shape[0], -1).float()
    if not torch.isfinite(flat).all():
        raise ValueError("weight: holds a number that is not finite, which has no code")
    low, high = flat.amin(1).clamp(max=0), flat.amax(1).clamp(min=0)
    best = torch.full_like(low, torch.inf)
    scale, zero = grid_of(low, high, bits)
    for level in range(LEVELS):
        kept = 1 - level / 100
        tried, offset = grid_of(low * kept, high * kept, bits)
        error = (rounded(flat, tried[:, None], offset[:, None], bits) - flat).abs_()
        loss = error.pow_(POWER).sum(1)
        better = loss < best
        best = torch.where(better, loss, best)
        scale, zero = torch.where(better, tried, scale), torch.where(better, offset, zero)
    return scale, zero


def grid_of(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero that spread the codes over ranges from `low` to `high`, of any one shape.

    Ranges are made to hold 0: lower ends above it, and upper ends below it, are taken for 0. Scales
    are float32, 1 where a range is empty, zeros int32, 0 to `2**bits - 1`.
    """
    low, high = low.float().clamp(max=0), high.float().clamp(min=0)
    width = (high - low) / (2**bits - 1)
    scale = torch.where(width > 0, width, 1.0)
    zero = torch.round(-low / scale).clamp_(0, 2**bits - 1)
    return scale, zero.to(torch.int32)


def rounded(values: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Return values rounded to their codes and back; all arguments broadcast."""
    codes = (torch.round(values / scale) + zero).clamp_(0, 2**bits - 1)
    return (codes - zero) * scale


class InputRanges:
    """The least and greatest number a layer was given at every step; parts can be merged.

    Args:
        total: Steps of a run.
    """

    __slots__ = ("low_high",)

    def __init__(self, total: int) -> None:
        self.low_high = torch.tensor([[torch.inf], [-torch.inf]]).repeat(1, total)

    def add(self, step: int, given: Tensor) -> None:
        """Widen the range of a step by a tensor of any shape."""
        low, high = torch.aminmax(given.detach())
        self.low_high[0, step] = torch.minimum(self.low_high[0, step], low.float().cpu())
        self.low_high[1, step] = torch.maximum(self.low_high[1, step], high.float().cpu())

    @property
    def complete(self) -> bool:
        """Return whether the layer ran at every step, on finite numbers."""
        return bool(torch.isfinite(self.low_high).all())

    def grid(self, bits: int = 8) -> tuple[Tensor, Tensor]:
        """Return scales `[T]` float32 and zeros `[T]` int32."""
        return grid_of(self.low_high[0], self.low_high[1], bits)
