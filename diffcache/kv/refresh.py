"""Refresh: which of the tokens that are held are computed anew."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, eq=False)
class Stale:
    """State of tokens that are held, from which those that are computed anew are chosen.

    Attributes:
        pos: int [B, T], position of each token, -1 where there is none.
        step: Forwards since all were computed, from 0, dimensionless.
        old: Tensor that is held of one layer, such as its values, [B, H, T, D].
        new: The same, computed now.
        tag: int [B, T], tag that the user gives each token.
        ids: int64 [B, T], the tokens.
        before: int64 [B, T'], tokens that the held keys and values were made for.
    """

    pos: Tensor
    step: int = 0
    old: Tensor | None = None
    new: Tensor | None = None
    tag: Tensor | None = None
    ids: Tensor | None = None
    before: Tensor | None = None

    @property
    def valid(self) -> Tensor:
        """Mask of the tokens, bool [B, T]; False is padding."""
        return self.pos >= 0

    def both(self) -> tuple[Tensor, Tensor]:
        """Return `old` and `new` in float32, or float64 for float64.

        Raises:
            ValueError: If one is missing or their shapes differ.
        """
        if self.old is None or self.new is None or self.old.shape != self.new.shape:
            shapes = [None if x is None else list(x.shape) for x in (self.old, self.new)]
            raise ValueError(f"old={shapes[0]}, new={shapes[1]}: give both, of one shape")
        work = torch.promote_types(self.old.dtype, torch.float32)
        return self.old.to(work), self.new.to(work)


class Refresh(ABC):
    """Choice of the tokens that are computed anew; a frozen dataclass of settings.

    `a | b` computes what either of them chooses.
    """

    @abstractmethod
    def select(self, seen: Stale) -> Tensor:
        """Return the tokens to compute, bool [B, T], False where there is none."""

    def __or__(self, other: Refresh) -> Either:
        """Return what chooses all that either chooses."""
        if not isinstance(other, Refresh):
            return NotImplemented
        return Either((self, other))


@dataclass(frozen=True)
class All(Refresh):
    """All tokens, always."""

    def select(self, seen: Stale) -> Tensor:
        """Return every token."""
        return seen.valid


@dataclass(frozen=True)
class Interval(Refresh):
    """All tokens, once in so many steps.

    Args:
        every: Steps from one time to the next; 1 is always.

    Raises:
        ValueError: If `every` is less than 1.
    """

    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every={self.every}: must be at least 1 step")

    def select(self, seen: Stale) -> Tensor:
        """Return every token or none."""
        return seen.valid if seen.step % self.every == 0 else torch.zeros_like(seen.valid)


@dataclass(frozen=True)
class TopDeviation(Refresh):
    """The tokens whose values differ most from what they would be now, by squared difference.

    Reference: CacheBlend, arXiv 2405.16444, section 4.3.

    Args:
        share: Share of the tokens of each row, 0 to 1, rounded up to whole tokens.

    Raises:
        ValueError: If `share` is out of its range.
    """

    share: float = 0.15

    def __post_init__(self) -> None:
        _check_share(self.share)

    def select(self, seen: Stale) -> Tensor:
        """Return the tokens that differ most; of equal ones the first."""
        old, new = seen.both()
        return top((new - old).square().sum((1, 3)), seen.valid, self.share)


@dataclass(frozen=True)
class CosineChange(Refresh):
    """The tokens whose values point in the most different direction from what is held.

    Reference: dLLM-Cache, arXiv 2506.06295.

    Args:
        share: Share of the tokens of each row, 0 to 1, rounded up to whole tokens.

    Raises:
        ValueError: If `share` is out of its range.
    """

    share: float = 0.25

    def __post_init__(self) -> None:
        _check_share(self.share)

    def select(self, seen: Stale) -> Tensor:
        """Return the tokens with the lowest cosine, heads taken together."""
        old, new = (x.transpose(1, 2).flatten(2) for x in seen.both())
        return top(-functional.cosine_similarity(old, new, dim=-1), seen.valid, self.share)


@dataclass(frozen=True)
class EditScript(Refresh):
    """The tokens that were not in the text before, by the shortest edit that difflib finds.

    Reference: KVShare, arXiv 2503.16525; PIE, arXiv 2407.03157.
    """

    def select(self, seen: Stale) -> Tensor:
        """Return the tokens that were put in.

        Raises:
            ValueError: If the tokens, or those before, are not given.
        """
        if seen.ids is None or seen.before is None:
            raise ValueError("ids and before must be given: an edit is between two texts")
        rows = [align(old, new) for old, new in zip(seen.before, seen.ids, strict=True)]
        return (torch.stack(rows).to(seen.pos.device) < 0) & seen.valid


@dataclass(frozen=True)
class OfTag(Refresh):
    """What another refresh chooses among the tokens of one tag.

    Args:
        tag: The tag, such as that of the prompt.
        inner: Chooses.
    """

    tag: int
    inner: Refresh

    def select(self, seen: Stale) -> Tensor:
        """Return what is chosen.

        Raises:
            ValueError: If the tokens have no tags.
        """
        if seen.tag is None:
            raise ValueError(f"tag={self.tag}: the tokens have no tags; give `tag`")
        ours = seen.tag == self.tag
        mine = Stale(seen.pos.where(ours, -1), seen.step, seen.old, seen.new, seen.tag, seen.ids,
                     seen.before)  # fmt: skip
        return self.inner.select(mine)


@dataclass(frozen=True)
class Either(Refresh):
    """All that any of several chooses.

    Args:
        parts: They choose.
    """

    parts: tuple[Refresh, ...]

    def select(self, seen: Stale) -> Tensor:
        """Return what is chosen."""
        found = torch.zeros_like(seen.valid)
        for part in self.parts:
            found = found | part.select(seen)
        return found


def top(worth: Tensor, valid: Tensor, share: float) -> Tensor:
    """Return the most worthy tokens of each row; of equal ones the first.

    Args:
        worth: Worth of each token, [B, T].
        valid: bool [B, T]; the others are never chosen.
        share: Share of the valid tokens that is returned, rounded up to whole tokens.

    Returns:
        bool [B, T].
    """
    low = worth.masked_fill(~valid, float("-inf"))
    order = low.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    counts = [ceil(round(share * count, 6)) for count in valid.sum(1).tolist()]  # one wait
    return (rank < torch.tensor(counts, device=rank.device)[:, None]) & valid


def slots_of(chosen: Tensor) -> Tensor:
    """Return chosen tokens as numbers, rows filled up with their last one, int64 [B, n].

    To compute a token twice is to compute it once; a row without any computes its last token.

    Args:
        chosen: bool [B, T].
    """
    width = chosen.shape[1]
    longest = int(chosen.sum(1).max()) if chosen.numel() else 0
    order = torch.argsort((~chosen).to(torch.int8), dim=1, stable=True)[:, :longest]
    there = chosen.gather(1, order)
    numbers = torch.arange(width, device=chosen.device)
    last = numbers.where(chosen, -1).amax(1, keepdim=True) if longest else order
    return order.where(there, last.where(last >= 0, width - 1))


def align(before: Tensor | Sequence[int], after: Tensor | Sequence[int]) -> Tensor:
    """Return where each token of a text was in another one, -1 where it was put in; int64 [T].

    Args:
        before: int64 [T'].
        after: int64 [T].
    """
    old, new = (x.tolist() if isinstance(x, Tensor) else list(x) for x in (before, after))
    source = torch.full((len(new),), -1)
    for match in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        source[match.b : match.b + match.size] = torch.arange(match.a, match.a + match.size)
    return source


def _check_share(share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"share={share}: must be at least 0 and at most 1")
