"""Which few slots of each row go where they stand, for recipes that evict at every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.layer import KVLayer
from diffcache.kv.observe import Observation
from diffcache.kv.recipe import Recipe

_SHARE = 8  # more than one slot in so many of those that stay are not dropped in place
_LATEST = torch.iinfo(torch.int32).max


def slots_to_drop(
    recipe: Recipe, layers: Sequence[KVLayer], total: int, queries: Sequence[Query | None]
) -> list[Tensor | None] | None:
    """Choose what is over budget, without ordering slots or reading anything from the device.

    The slots that stay are those that `diffcache.kv.settle.carry_out` would keep. It is left to
    that where rows hold different numbers of slots, where slots are coded or merged, or where a
    part of the recipe has to see slots in order.

    Args:
        recipe: Recipe whose score, budget and plan are used.
        layers: Layers that follow the recipe.
        total: Layers of the model.
        queries: Last queries of each layer, where the recipe keeps any.

    Returns:
        Argument of `KVLayer.refill` for each layer, None where nothing goes; None instead of all
        where it is left to `carry_out`.
    """
    found = _due(recipe, layers)
    if found is None:
        return None
    for layer in layers:
        if not _stands(layer, recipe):
            return None
    count, sinks, recent = found
    if not count:
        return [None] * len(layers)
    score = recipe.score
    assert score is not None
    chosen: list[Tensor | None] = []
    for layer, asked in zip(layers, queries, strict=True):
        if chosen and score.by_age:  # layers that hold as many slots hold the same tokens
            chosen.append(chosen[0])
            continue
        slots = layer.tail.read()
        assert slots is not None
        shape = slots.k.shape[:3]
        tokens = torch.full(shape[:2], layer.seen, device=slots.k.device)
        if asked is not None and asked.count == 1:  # that of the newest slot
            asked = replace(asked, pos=None)
        below = layer.seen
        seen = Observation(layer.index, total, slots, layer.stats, tokens, asked, below=below)
        worth = score(seen).float().expand(shape)
        if score.alike:
            worth = worth[:, :1]
        chosen.append(_least(worth, slots.pos, count, (sinks, layer.seen - recent)))
    return chosen


def _due(recipe: Recipe, layers: Sequence[KVLayer]) -> tuple[int, int, int] | None:
    """Return how many slots of each row go, and how many first and last tokens may not.

    None if rows differ, if many go, or if something else decides.
    """
    score, budget, plan = recipe.score, recipe.budget, recipe.plan
    assert score is not None
    assert budget is not None
    assert plan is not None
    if not score.in_place:
        return None
    held = layers[0].tail.length
    for layer in layers:
        if layer.segments or layer.tail.length != held:
            return None
    allowed = budget.steady(layers[0].seen, held)
    ends = None if allowed is None else plan.ends(allowed)
    if allowed is None or ends is None or sum(ends) > allowed:
        return None
    if ends[0] and isinstance(budget.size, float):
        return None  # it may have been too small for the first tokens, so that others came first
    count = held - allowed
    return (count, *ends) if count <= max(allowed // _SHARE, 1) else None


def _stands(layer: KVLayer, recipe: Recipe) -> bool:
    """Whether slots of a layer can be scored and dropped where they stand."""
    score = recipe.score
    assert score is not None
    exact = recipe.merge is None and recipe.codec is None and not recipe.ladder
    known = layer.tail.whole and layer.padding is None
    for value in layer.stats.values():
        known = known and value.shape[2] == layer.tail.length
    return exact and known and (layer.rotary is None or not score.window)


def _least(score: Tensor, pos: Tensor, count: int, between: tuple[int, int]) -> Tensor:
    """Return the slots of the lowest scores, of equals the earliest tokens; int64 [B, 1 or H, n].

    Args:
        score: [B, 1 or H, S].
        pos: Positions, int32 [B, 1 or H, S].
        count: Number of slots to return, n.
        between: First position that may go, and the first after it that may not.
    """
    stays = pos >= between[1]
    if between[0]:
        stays = stays | (pos < between[0])
    score = score.masked_fill(stays, float("inf"))
    if count == 1:
        lowest = score == score.amin(-1, keepdim=True)
        return pos.where(lowest, _LATEST).argmin(-1, keepdim=True)
    order = pos.argsort(-1).expand_as(score)
    ranked = score.gather(-1, order).argsort(dim=-1, stable=True)
    return order.gather(-1, ranked[..., :count])
