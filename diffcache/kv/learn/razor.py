"""Find heads that look for earlier tokens, on random tokens that are repeated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.budget import Uniform
from diffcache.kv.budgets.heads import Heads
from diffcache.kv.observe import Observation
from diffcache.kv.plan import TopK
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.base import Score
from diffcache.kv.settings import Count, Several, Whole
from diffcache.kv.store import KVStore


@dataclass(frozen=True)
class Repeating(Score):
    """Take note of attention to earlier copies of a token, and to what came after them.

    Reference: RazorAttention, arXiv 2407.15891 (echo and induction heads).

    Args:
        period: Tokens until they repeat.
        first: Tokens before the first copy.
        groups: Query heads of a key-value head, each of which is measured.
    """

    period: Several
    first: Whole = 0
    groups: Count = 1

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics it keeps of every slot."""
        return tuple(f"{kind}{g}" for g in range(self.groups) for kind in ("echo", "induction"))

    def __call__(self, seen: Observation) -> Tensor:
        """Return nothing of worth: it only measures."""
        return torch.zeros_like(seen.stats["echo0"])

    def track(self, stats: dict[str, Tensor], asked: Query, found: Tensor, probs: Tensor) -> None:
        """Add what slots got from queries for which they are a copy, or follow one."""
        if probs.shape[2] != self.groups:
            raise ValueError(
                f"groups={self.groups}: this model has {probs.shape[2]} query heads for each key-value head"
            )
        at = asked.positions()[..., None]
        slot = torch.arange(probs.shape[-1], device=probs.device)
        back = at - slot
        copied = (at >= self.first + self.period) & (slot >= self.first)
        echo = copied & (back > 0) & (back % self.period == 0)
        after = copied & (back >= 0) & (slot > self.first) & ((back + 1) % self.period == 0)
        for g in range(self.groups):
            stats[f"echo{g}"] += (probs[:, :, g] * echo[:, None]).sum(2)
            stats[f"induction{g}"] += (probs[:, :, g] * after[:, None]).sum(2)


def probe(period: int, *, first: int = 0, groups: int = 1) -> Recipe:
    """Return a recipe that drops nothing and measures heads on repeated tokens.

    Run a model once on `repeated_tokens` with a cache of this recipe, in native mode, then call
    `head_scores`.

    Args:
        period: Tokens until they repeat.
        first: Tokens before the first copy.
        groups: Query heads of a key-value head.
    """
    return Recipe("repeats", Repeating(period, first, groups), Uniform(1.0), TopK())


def repeated_tokens(
    vocabulary: int, period: int = 2500, times: int = 4, *, first: int | None = None, seed: int = 0
) -> Tensor:
    """Draw tokens and repeat them, int64 [1, first + period * times].

    Args:
        vocabulary: Token ids are drawn from 0 to this.
        period: Tokens until they repeat.
        times: Copies, at least 2.
        first: A token id that comes before all, as models expect it; None for none.
        seed: Any integer.

    Raises:
        ValueError: If a setting is out of its range.

    Reference: RazorAttention, arXiv 2407.15891, with 2500 tokens four times.
    """
    if vocabulary < 2 or period < 2 or times < 2:
        raise ValueError(f"vocabulary={vocabulary}, period={period}, times={times}: must all be at least 2")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (1, period), generator=generator).repeat(1, times)
    return ids if first is None else torch.cat([torch.tensor([[first]]), ids], 1)


def head_scores(store: KVStore) -> tuple[Tensor, Tensor]:
    """Return how much every query head attends to copies, and to what followed them.

    Args:
        store: Store of a cache with the recipe `probe`, after one forward over all tokens.

    Returns:
        Two of float32 [L, Hq]: the attention paid to all earlier copies of a token, and to the
        tokens after them, means over the tokens that have one.

    Raises:
        ValueError: If the store has another recipe, or has seen no repetition.

    Reference: RazorAttention, arXiv 2407.15891.
    """
    score = store.recipe.score
    if not isinstance(score, Repeating):
        raise ValueError(f"recipe={store.recipe.name!r}: the cache must have the recipe of `probe`")
    count = store.seen - score.first - score.period
    if count < 1:
        raise ValueError(f"{store.seen} tokens were seen: no token is repeated among them")
    kinds = []
    for kind in ("echo", "induction"):
        rows = []
        for layer in store.layers:
            groups = [layer.stats[f"{kind}{g}"].sum(-1).mean(0) for g in range(score.groups)]
            rows.append(torch.stack(groups, -1).flatten() / count)
        kinds.append(torch.stack(rows))
    return kinds[0], kinds[1]


def retrieval_heads(
    echo: Tensor, induction: Tensor, groups: int = 1, *, echo_share: float = 0.01, induction_share: float = 0.14
) -> Heads:
    """Return the table of the heads that look for earlier tokens.

    Args:
        echo: [L, Hq], as `head_scores` returns it.
        induction: [L, Hq].
        groups: Query heads of a key-value head, which is one if any of them is.
        echo_share: Share of all query heads that are taken by `echo`, at least one head.
        induction_share: Share of all query heads that are taken by `induction`, at least one.

    Returns:
        By layer and key-value head, whether it holds everything.

    Raises:
        ValueError: If shapes do not fit or a share is out of its range.

    Reference: RazorAttention, arXiv 2407.15891, with 1 % and 14 %.
    """
    if echo.dim() != 2 or echo.shape != induction.shape or echo.shape[1] % groups:
        raise ValueError(
            f"echo={list(echo.shape)}, induction={list(induction.shape)}, groups={groups}: must "
            "be two of [L, Hq] with Hq a multiple of groups"
        )
    found = torch.zeros(echo.numel(), dtype=torch.bool)
    for name, score, share in (("echo", echo, echo_share), ("induction", induction, induction_share)):
        if not 0 < share <= 1:
            raise ValueError(f"{name}_share={share}: must be above 0 and at most 1")
        order = torch.argsort(score.flatten(), descending=True, stable=True).cpu()
        found[order[: max(round(share * score.numel()), 1)]] = True
    whole = found.view(len(echo), -1, groups).any(-1)
    return tuple(tuple(bool(head) for head in row) for row in whole)
