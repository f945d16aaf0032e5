"""Tokens that an edit changes, and work on those alone: masks, rows, and the plan of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.features.base import Ability, When
from diffcache.step import Step

Phase = Literal["full", "store", "region"]


def edited_tokens(clean: Tensor, reference: Tensor, threshold: float, grid: tuple[int, int] | None) -> Tensor:
    """Return which tokens an edit changes: those whose clean estimate left the reference.

    Args:
        clean: One-step estimate of the clean latents, `[B, T, C]`.
        reference: Latents of the reference picture, `[B, T, C]`.
        threshold: Cosine similarity, in float32, up to which a token is edited; dimensionless.
        grid: Height and width of the token grid, to remove scattered tokens; None leaves them.

    Returns:
        bool `[B, T]`, True where edited.

    Raises:
        ValueError: If the shapes differ, or the grid does not have T cells.
    """
    if clean.shape != reference.shape or clean.dim() != 3:
        raise ValueError(f"clean {list(clean.shape)} and reference {list(reference.shape)}: must be [B, T, C]")
    mask = functional.cosine_similarity(clean.float(), reference.float(), dim=-1) <= threshold
    if grid is None:
        return mask
    if grid[0] * grid[1] != mask.shape[1]:
        raise ValueError(f"grid={grid!r}: must have {mask.shape[1]} cells, one a token")
    return without_scattered(mask.unflatten(1, grid)).flatten(1)


def without_scattered(mask: Tensor) -> Tensor:
    """Remove scattered cells and widen the others: erosion by a cross, dilation by a square.

    The cross is 3x3, the square 5x5, and outside the grid nothing is set, so that erosion eats
    borders too.

    Args:
        mask: bool `[B, H, W]`.

    Returns:
        bool `[B, H, W]`.
    """
    padded = functional.pad(mask, (1, 1, 1, 1))
    middle = padded[:, 1:-1, 1:-1]
    across = padded[:, 1:-1, :-2] & padded[:, 1:-1, 2:]
    kept = middle & across & padded[:, :-2, 1:-1] & padded[:, 2:, 1:-1]
    return functional.max_pool2d(kept[:, None].float(), 5, stride=1, padding=2)[:, 0] > 0


def rows_of(mask: Tensor) -> Tensor:
    """Return the indices of the set tokens of bool `[B, T]`, int64 `[B, M]`, M the most that any sample has.

    Shorter lists are filled up by repeating the sample's first set token: equal rows stay equal
    through the model and are written to the same place, so that nothing has to be masked. A sample
    without any repeats token 0, whose results nobody takes.
    """
    counts = mask.sum(dim=1)
    most = int(counts.max()) if len(mask) else 0
    order = torch.argsort(~mask, dim=1, stable=True)[:, :most]
    place = torch.arange(most, device=mask.device)
    return torch.where(place < counts[:, None], order, order[:, :1] * (counts[:, None] > 0))


def gather(tokens: Tensor, rows: Tensor) -> Tensor:
    """Return the rows `[B, M]` of tokens `[B, T, ...]`, `[B, M, ...]`."""
    return tokens.gather(1, _spread(rows, tokens))


def scatter(tokens: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Return tokens `[B, T, ...]` with their rows `[B, M]` replaced by values `[B, M, ...]`."""
    return tokens.scatter(1, _spread(rows, tokens), values.to(tokens.dtype))


def _spread(rows: Tensor, like: Tensor) -> Tensor:
    extra = like.shape[2:]
    return rows.reshape(*rows.shape, *(1 for _ in extra)).expand(*rows.shape, *extra)


@dataclass(frozen=True)
class RegionPlan(Ability):
    """Compute only the tokens that an edit changes, on some steps of an editing pipeline.

    Steps are counted from 0. The tokens are chosen at the end of step `warmup - 1` and stay
    chosen; keys and values of all picture tokens are kept there and at every refresh.

    Args:
        total: Steps T of a run.
        warmup: First steps, which compute all tokens; at least 1.
        post: Last steps that compute all tokens again.
        refresh: Steps in between that compute all tokens and keep keys and values anew.
        threshold: Cosine similarity up to which a token is edited.
        morphology: Remove scattered tokens and widen what is left.
        gamma: T - 1 ratios, the first for step 1: how much faster than `1 - dt` the norm of the
            velocity changes.
        decay: Most decay, as a part of 1, through which steps are skipped; below 0 none is.
        official: Multiply with the current step's ratio instead of all since the last computed.
    """

    total: int
    warmup: int
    post: int
    refresh: tuple[int, ...]
    threshold: float
    morphology: bool
    gamma: tuple[float, ...]
    decay: float
    official: bool

    @property
    def split(self) -> int:
        """The step behind which the edited tokens are chosen."""
        return self.warmup - 1

    def phase(self, index: int) -> Phase:
        """Return the phase of a step: all tokens, all tokens to be kept, or edited tokens."""
        if index == self.split or index in self.refresh:
            return "store"
        return "region" if self.warmup <= index < self.total - self.post else "full"

    @property
    def regions(self) -> frozenset[int]:
        """The steps that compute no more than the edited tokens."""
        return frozenset(i for i in range(self.total) if self.phase(i) == "region")

    def skips(self, timesteps: Sequence[float], span: float = 1000.0) -> dict[int, float]:
        """Return the steps that are not computed, each with the factor of its velocity, by T falling times."""
        found: dict[int, float] = {}
        total = 1.0
        for index in range(1, self.total):
            ratio = self.gamma[index - 1]
            ratio *= 1 - (timesteps[index - 1] - timesteps[index]) / span
            forced = index <= self.warmup or self.phase(index) != "region"
            total *= ratio
            if forced or ratio >= 1 or 1 - total > self.decay:
                total = 1.0
            else:
                found[index] = ratio if self.official else total
        return found


@dataclass(frozen=True)
class Planned(When):
    """Compute the steps that the plan of the run does not leave out.

    Args:
        total: Steps of the runs it is made for.
    """

    total: int | None

    def should_compute(self, state: None, step: Step, probe: Tensor | None) -> bool:
        """Return whether the step is not left out."""
        return not step.is_left_out
