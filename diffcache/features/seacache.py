"""Skip while the content of the first block's input, filtered from its noise, stands (SeaCache)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from diffcache.errors import AttachError
from diffcache.features.base import Ability, Change, Order, Warmup, check_int
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.parts.accumulated import Accumulated, Indicator
from diffcache.features.parts.instead import Newton
from diffcache.features.parts.when import Every
from diffcache.ranges import Count, Range
from diffcache.step import Scene, Step

ADVICE = "pass grid=(height, width) or (frames, height, width) in tokens, or use TeaCache"


@dataclass(frozen=True)
class SceneRule(Ability):
    """Tell the method the noise level and the token grid of every denoiser call.

    Args:
        grid: The token grid where it cannot be found from the call.
    """

    grid: tuple[int, ...] | None = None


def grid_of(scene: Scene, tokens: int) -> tuple[int, ...]:
    """Return the grid of `tokens` tokens: one that the call names, or that of the patches of the sample.

    Raises AttachError if neither has as many.
    """
    for grid in scene.grids:
        if math.prod(grid) == tokens:
            return grid
    sizes = scene.sizes
    for patch in product((1, 2, 4), (1, 2, 4, 8)):
        parts = (patch[0], patch[1], patch[1])[-len(sizes) :]
        grid = tuple(-(-size // part) for size, part in zip(sizes, parts, strict=False))
        if sizes and math.prod(grid) == tokens:
            return grid
    raise AttachError(
        f"the first attention has {tokens} tokens, which lie on no grid that the call shows "
        f"(spoken of: {scene.grids or 'none'}, sample: {sizes or 'packed'}); {ADVICE}"
    )


def gain(grid: tuple[int, ...], signal: float, noise: float, power: float) -> Tensor:
    """Return the SEA filter over the frequencies of a grid, float64 of its shape, with a mean of 1.

    Along each axis it is the linear filter that best recovers a signal with the power spectrum
    `|f|^-power` from its noisy mixture, `signal * S / (signal^2 * S + noise^2)`; the filter of the
    grid is the product over its axes (SeaCache, arXiv 2602.18993, equations 5 to 7).
    """
    signal, noise = max(signal, 1e-6), max(noise, 1e-6)
    made = torch.ones((), dtype=torch.float64)
    for size in grid:
        shape = torch.fft.fftfreq(size, dtype=torch.float64).abs() ** power  # 1 / S, 0 at rest
        along = signal / (signal**2 + noise**2 * shape)
        made = made[..., None] * along
    return made / made.mean()


def power_of(grid: tuple[int, ...]) -> float:
    """Return the usual exponent of the spectrum: 3 for several frames, 2 for an image."""
    return 3.0 if len(grid) > 2 and grid[0] > 1 else 2.0


@dataclass(frozen=True)
class Filtered(Indicator):
    """The probe behind the filter of its noise level.

    Args:
        power: Exponent of the spectrum; None is 3 where the grid has frames, else 2.
        plain: First steps whose probe is left as it is.
    """

    power: float | None = None
    plain: int = 0

    def see(self, probe: Tensor, step: Step) -> Tensor:
        """Return the filtered tokens `[B, *grid, D]`."""
        scene = step.scene
        if scene is None:
            raise ValueError("the noise level of this call is not known; wrap the pipeline")
        tokens = probe.detach().float()
        tokens = tokens.reshape(tokens.shape[0], -1, tokens.shape[-1])
        grid = grid_of(scene, tokens.shape[1])
        tokens = tokens.reshape(tokens.shape[0], *grid, tokens.shape[-1])
        if step.index < self.plain:
            return tokens.clone()
        power = power_of(grid) if self.power is None else self.power
        filtered = gain(grid, scene.signal, scene.noise, power)
        axes = tuple(range(1, 1 + len(grid)))
        spectrum = torch.fft.fftn(tokens, dim=axes)
        weights = filtered.to(tokens)[None, ..., None]
        found: Tensor = torch.fft.ifftn(spectrum * weights, dim=axes).real
        return found.contiguous()

    def error(self, change: float) -> float:
        """Return the change itself."""
        return change


@dataclass(frozen=True)
class SeaCache(FeatureMethod):
    """Reuse the stack's residual until the change of its filtered input adds up.

    As TeaCache, but without a fitted polynomial: before the modulated input of the first block is
    compared with that of the step before, it is filtered over the token grid so that what is
    content at the current noise level passes and noise does not. Reference: SeaCache, arXiv
    2602.18993, section 3 (SEA filter, normalized to a mean gain of 1, on the timestep-modulated
    input). Differs: the first guidance branch decides for all; each list of blocks keeps its own
    residual. `order=1`, `warmup`, `last` and `longest` are those of diffusers' `SeaCacheConfig`,
    which filters the latents of videos instead.

    The official scripts differ in what the first step leaves to be compared with: that for
    HunyuanVideo filters it (`first="filtered"`), those for FLUX and Wan2.1 leave the steps of the
    warm-up as they are (`first="plain"`), so that the step after them is nearly always computed.
    With `use_ret_steps` the script for Wan2.1 takes `warmup=5, last=False`.

    Args:
        threshold: Smallest sum that is computed; dimensionless; 0 turns the cache off. 0.3 to 0.6
            on FLUX, 0.1 to 0.2 for videos.
        power: Exponent of the signal's power spectrum; None is that of the official scripts, 3
            where the token grid has several frames and 2 for images.
        order: Order of the forecast of the residual, 0 (reuse, as in the paper) to 4; through the
            last `order + 1` computed steps.
        warmup: First steps that are always computed, at least 1.
        last: Whether the last step of the run is always computed.
        longest: Steps that are skipped in a row at most, None for any number.
        grid: Token grid, `(height, width)` or `(frames, height, width)`, for models whose call
            does not show it.
        first: Whether the steps of the warm-up are kept `plain` or `filtered`, to be compared with.
    """

    threshold: Change = 0.3
    power: Annotated[float, Range(0, 99, above=True, below=True)] | None = None
    order: Order = 0
    warmup: Warmup = 1
    longest: Count | None = None
    grid: tuple[int, ...] | None = None
    first: Literal["plain", "filtered"] = "plain"
    last: bool = True

    def check(self) -> None:
        """Raise ValueError unless the grid has axes."""
        if self.grid is not None:
            object.__setattr__(self, "grid", check_grid(self.grid))
        super().check()

    def parts(self) -> Combine:
        """Return a gate on the change of the filtered input, and the forecast behind it."""
        filtered = Filtered(self.power, self.warmup if self.first == "plain" else 0)
        when = Accumulated(self.threshold, filtered, self.warmup, self.longest, self.last)
        return Combine(Every(1) if self.threshold == 0 else when, Newton(self.order))

    def abilities(self) -> tuple[Ability, ...]:
        """Return the rule that tells the noise level and the token grid, and feature reuse."""
        rules = () if self.threshold == 0 else (SceneRule(self.grid),)
        return (*rules, *super().abilities())


def check_grid(value: Any) -> tuple[int, ...]:
    """Return a grid as a tuple; raise ValueError if it is not made of whole numbers of at least 1."""
    made = tuple(value) if isinstance(value, (tuple, list)) else ()
    if not made:
        raise ValueError(f"grid={value!r}: must be (height, width) or (frames, height, width)")
    for size in made:
        check_int("grid", size, 1)
    return made
