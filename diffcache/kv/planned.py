"""Plans of layers: what a recipe makes of what was observed of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from diffcache.kv.observe import Observation, Ring
from diffcache.kv.recipe import Recipe


def planned(recipe: Recipe, seen: Sequence[Observation]) -> list[tuple[Tensor, Tensor]]:
    """Return the score of each layer's slots and what becomes of them.

    Args:
        recipe: Its score, budget and plan are used.
        seen: The layers.

    Returns:
        Of each layer float32 [B, H, S], -inf in empty slots, and what the planner returns.

    Raises:
        ValueError: If the recipe has no score.
    """
    if recipe.score is None or recipe.budget is None or recipe.plan is None:
        raise ValueError(f"{recipe.name or 'the recipe'} drops nothing: it has no score")
    scores = []
    for each in seen:
        score = recipe.score(each).float().expand(each.slots.k.shape[:3])
        scores.append(score.masked_fill(~each.valid, float("-inf")))
    scores = list(recipe.score.across(scores, seen))
    budgets = recipe.budget.allot(scores, seen)
    return [
        (score, recipe.plan(score, budget, each))
        for score, budget, each in zip(scores, budgets, seen, strict=True)
    ]


def check_alone(recipe: Recipe) -> None:
    """Refuse a recipe whose layers cannot be compressed one at a time.

    Raises:
        ValueError: If it does more than drop slots of a layer, or looks across layers.
    """
    across = any(part is not None and part.looks_across for part in (recipe.score, recipe.budget))
    shared = recipe.codec is not None and recipe.codec.scope > 1
    if recipe.merge is not None or recipe.ladder or across or shared:
        raise ValueError(
            f"{recipe.name or 'the recipe'} does more than drop slots of one layer: its layers are "
            "compressed together, at `begin` or by `compress`"
        )


def check_queries(recipe: Recipe, rings: Sequence[Ring]) -> None:
    """Refuse to score by fewer queries than the recipe looks at, others being unknown.

    Args:
        recipe: Recipe that scores.
        rings: The last queries of each layer.

    Raises:
        ValueError: If there are fewer.
    """
    window = recipe.score.window if recipe.score is not None else 0
    kept = [ring.kept() for ring in rings[recipe.skip :]]
    count = min(0 if query is None else query.count for query in kept)
    if count < window:
        raise ValueError(
            f"{recipe.name} looks at the last {window} queries, and {count} came after "
            f"the tokens that were taken over: give at least {window} tokens after `past`, or "
            "a recipe that looks at fewer"
        )
