"""Plan what becomes of slots, and carry it out: drop, merge, and send them to other codecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.codec.held import KVCodec
from diffcache.kv.layer import KVLayer
from diffcache.kv.merge import Merger
from diffcache.kv.observe import Observation, Ring
from diffcache.kv.plan import KEEP
from diffcache.kv.recipe import Recipe
from diffcache.kv.segment import Coded, Segment, leveled
from diffcache.kv.slots import EMPTY, Slots, chosen, join
from diffcache.kv.tail import Tail

_SHARE = 8  # slots are dropped in place if they are at most this part, one in 8, of those that stay
_LATEST = torch.iinfo(torch.int32).max


@dataclass
class _Part:
    """Slots on their way, and where `KVLayer.read` showed each of them."""

    slots: Slots
    origin: Tensor


@dataclass
class _Held:
    """A segment, and where `KVLayer.read` showed its slots, -1 for empty ones."""

    segment: Segment
    origin: Tensor


@dataclass
class _Sorted:
    """Slots of a layer, sorted into segments, exact slots, and those for each level."""

    held: list[_Held]
    converted: list[_Held]
    exact: list[_Part]
    moving: dict[int, list[_Part]]


def planned(recipe: Recipe, seen: Sequence[Observation]) -> list[tuple[Tensor, Tensor]]:
    """Return the score of each layer's slots and what becomes of them.

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
        (score, recipe.plan(score, budget, each)) for score, budget, each in zip(scores, budgets, seen, strict=True)
    ]


def check_alone(recipe: Recipe) -> None:
    """Raise ValueError if a recipe does more than drop slots of a layer, or looks across layers."""
    across = any(part is not None and part.looks_across for part in (recipe.score, recipe.budget))
    shared = recipe.codec is not None and recipe.codec.scope > 1
    if recipe.merge is not None or recipe.ladder or across or shared:
        raise ValueError(
            f"{recipe.name or 'the recipe'} does more than drop slots of one layer: its layers are "
            "compressed together, at `begin` or by `compress`"
        )


def check_queries(recipe: Recipe, rings: Sequence[Ring]) -> None:
    """Raise ValueError if fewer queries of a layer are known than the recipe looks at."""
    window = recipe.score.window if recipe.score is not None else 0
    kept = [ring.kept() for ring in rings[recipe.skip :]]
    count = min(0 if query is None else query.count for query in kept)
    if count < window:
        raise ValueError(
            f"{recipe.name} looks at the last {window} queries, and {count} came after "
            f"the tokens that were taken over: give at least {window} tokens after `past`, or "
            "a recipe that looks at fewer"
        )


def flush(codec: KVCodec, layers: Sequence[KVLayer]) -> bool:
    """Have a codec code what is due in layers, and return whether anything was."""
    before = [(layer.tail.length, *layer.segments) for layer in layers]
    for first in range(0, len(layers), codec.scope):
        codec.flush(layers[first : first + codec.scope])
    return [(layer.tail.length, *layer.segments) for layer in layers] != before


def carry_out(layer: KVLayer, seen: Observation, score: Tensor, plan: Tensor, recipe: Recipe) -> None:
    """Change what a layer holds.

    Args:
        layer: The layer.
        seen: Observation of the layer, as scorers saw it.
        score: Score of each slot, [B, H, S].
        plan: int8 [B, H, S], as `diffcache.kv.plan.Planner` returns it.
        recipe: Recipe whose merger, ladder and layout are used.
    """
    if bool(((plan == KEEP) | ~seen.valid).all()):
        return  # nothing changes, not even the order that sums are taken in
    if recipe.merge is not None:
        if recipe.codec is not None:
            recipe.codec.align(layer)
        _merge(layer, seen, score, plan, recipe.merge, recipe.layout == "flat")
        return
    plan = _unsorted(plan, seen.order)
    if recipe.codec is not None:
        recipe.codec.align(layer)
    if not layer.segments and not recipe.ladder:
        layer.keep(plan >= KEEP, flat=recipe.layout == "flat")
        return
    _split(layer, seen, plan, recipe)


def _unsorted(plan: Tensor, order: Tensor | None) -> Tensor:
    """Return a plan in the order of `KVLayer.read`."""
    # `order` lists, for each place that scorers saw, the place of `read`: scattering inverts the gather.
    if order is None:
        return plan
    return torch.empty_like(plan).scatter_(-1, order.expand_as(plan), plan)


def _take_stats(layer: KVLayer, index: Tensor, keep: Tensor) -> None:
    layer.stats = {
        name: value.gather(2, index.expand(-1, value.shape[1], -1)) * keep for name, value in layer.stats.items()
    }


def _merge(layer: KVLayer, seen: Observation, score: Tensor, plan: Tensor, merger: Merger, flat: bool) -> None:
    """Hold exact slots that took over what others had, and the others as they are."""
    before = seen.slots
    if layer.rotary is None:
        slots, plan = merger(seen, score, plan)
    else:
        before = layer.read() if seen.order is None else layer.read().gather(seen.order)
        if merger.space == "pre":
            slots, plan = merger(replace(seen, slots=before), score, plan)
        else:
            slots, plan = merger(seen, score, plan)
            # Slots that took over nothing stay as they are stored: turning them back would round.
            same = (slots.k == seen.slots.k).all(-1, keepdim=True)
            k = layer.rotary.unrotate(slots.k, slots.rpos)
            slots = replace(slots, k=before.k.where(same, k))
    # Mergers see slots in the order of positions, but coded segments keep theirs.
    if any(segment.coded for segment in layer.segments):
        _merge_coded(layer, seen, (before, slots), plan, flat)
        return
    index, keep = chosen(plan >= KEEP)
    origin = index if seen.order is None else seen.order.expand_as(plan).gather(2, index)
    _take_stats(layer, origin, keep)
    layer.replace(slots.gather(index, keep), flat=flat)


def _merge_coded(layer: KVLayer, seen: Observation, merged: tuple[Slots, Slots], plan: Tensor, flat: bool) -> None:
    """Hold slots that took over others exactly, and leave the others in their codes."""
    before, slots = merged
    changed = (slots.k != before.k).any(-1) | (slots.v != before.v).any(-1)
    if "logn" in slots.meta:
        changed = changed | (slots.meta["logn"] != before.column("logn"))
    # Back to the order of `read`, in which the segments and the tail follow one another.
    place = torch.arange(slots.width, device=plan.device).expand_as(plan)
    slots = slots.gather(_unsorted(place, seen.order))
    plan, changed = _unsorted(plan, seen.order), _unsorted(changed, seen.order)
    held: list[_Held] = []
    exact: list[_Part] = []
    first = 0
    for source in [*layer.segments, None]:
        width = layer.tail.length if source is None else source.width
        part = slots.narrow(first, first + width)
        rests = (plan[..., first : first + width] >= KEEP) & part.valid
        if isinstance(source, Coded):
            index, keep = chosen(rests & ~changed[..., first : first + width])
            if index.shape[2]:
                meta = part.gather(index, keep).meta
                taken = replace(source.take(index, keep), meta=meta)
                held.append(_Held(leveled(taken), (first + index).where(keep, EMPTY)))
            rests = rests & changed[..., first : first + width]
        index, keep = chosen(rests)
        exact.append(_Part(part.gather(index, keep), first + index))
        first += width
    _hold(layer, held, exact, flat)


def _split(layer: KVLayer, seen: Observation, plan: Tensor, recipe: Recipe) -> None:
    """Keep coded slots in their codes, and send those that change level to their codec."""
    sources: list[Segment | None] = [*layer.segments, None]  # None is the tail
    sorted_ = _Sorted([], [], [], {level: [] for level in range(1, len(recipe.ladder) + 1)})
    first = 0
    for source in sources:
        slots = source.read() if source is not None else layer.tail.read()
        if slots is None or not slots.width:
            continue
        part = plan[..., first : first + slots.width].where(slots.valid, -1)
        _sort(sorted_, source, _Part(slots, first + torch.zeros_like(part).long()), part, recipe)
        first += slots.width
    held = [*sorted_.held, *sorted_.converted]
    for level, parts in sorted_.moving.items():
        if parts:
            # Codecs that are fitted to data take over what the segment of the same level was coded with.
            old = next((each.segment for each in held if each.segment.level == level), None)
            new = join([part.slots for part in parts])
            segment = recipe.ladder[level - 1].hold_beside(new, level, seen, old)
            held.append(_Held(segment, _origin(parts, segment.width)))
    held = _by_level(held, recipe.ladder)
    _hold(layer, held, sorted_.exact, recipe.layout == "flat")


def _hold(layer: KVLayer, held: Sequence[_Held], exact: Sequence[_Part], flat: bool) -> None:
    """Have a layer hold segments and, after them, exact slots; its statistics follow."""
    where = [each.origin for each in held]  # in the order in which `read` will show the slots
    if any(part.slots.width for part in exact):
        slots, origin = _together(exact)
        layer.replace(slots, flat=flat)
        where.append(origin)
    else:
        layer.segments, layer.summary, layer.tail = [], None, Tail(layer.seen)
    layer.segments = [*(each.segment for each in held), *layer.segments]
    index = torch.cat(where, -1)
    _take_stats(layer, index.clamp_min(0), index >= 0)


def _sort(into: _Sorted, source: Segment | None, shown: _Part, plan: Tensor, recipe: Recipe) -> None:
    """Sort the slots of a segment, or of the tail, by what becomes of them."""
    level = 0 if source is None else source.level
    rests = (plan == KEEP) | (plan == level)
    index, keep = chosen(rests)
    origin = shown.origin[..., :1] + index
    coded = source if source is not None and source.coded else None
    if coded is None:
        into.exact.append(_Part(shown.slots.gather(index, keep), origin))
    elif bool(rests.all()):
        into.held.append(_Held(coded, origin))
    elif index.shape[2]:
        into.held.append(_Held(leveled(coded.take(index, keep)), origin.where(keep, EMPTY)))
    for to, parts in into.moving.items():
        index, keep = chosen((plan == to) & ~rests)
        if not index.shape[2]:
            continue
        origin = shown.origin[..., :1] + index
        # From code to code where the codec can: decoding first would round twice.
        moved = coded and recipe.ladder[to - 1].converted(coded, index, keep, to)
        if moved:
            into.converted.append(_Held(moved, origin.where(keep, EMPTY)))
        else:
            parts.append(_Part(shown.slots.gather(index, keep), origin))


def _by_level(held: Sequence[_Held], ladder: Sequence[KVCodec]) -> list[_Held]:
    """Join what is held at the same level, where the codec of the level can."""
    found: list[_Held] = []
    for each in held:
        level = each.segment.level
        same = [place for place, other in enumerate(found) if level and level == other.segment.level]
        both = ladder[level - 1].joined(found[same[-1]].segment, each.segment) if same else None
        if both is None:
            found.append(each)
        else:
            origin = torch.cat([found[same[-1]].origin, each.origin], -1)
            found[same[-1]] = _Held(both, origin)
    return found


def _together(parts: Sequence[_Part]) -> tuple[Slots, Tensor]:
    """Return exact slots with nothing between them, and where they were."""
    slots, origin = join([part.slots for part in parts]), _origin(parts, 0)
    index, keep = chosen(slots.valid.expand_as(origin))
    return slots.gather(index, keep), origin.gather(2, index).where(keep, EMPTY)


def _origin(parts: Sequence[_Part], width: int) -> Tensor:
    """Return where slots were, -1 for those that are filled up; [B, H, width]."""
    found = torch.cat([part.origin.where(part.slots.valid, EMPTY) for part in parts], -1)
    filler = found.new_full((*found.shape[:2], max(width - found.shape[2], 0)), EMPTY)
    return torch.cat([found, filler], -1)


def slots_to_drop(
    recipe: Recipe, layers: Sequence[KVLayer], total: int, queries: Sequence[Query | None]
) -> list[Tensor | None] | None:
    """Choose what is over budget, without ordering slots or reading anything from the device.

    The slots that stay are those that `diffcache.kv.settle.carry_out` would keep. It is left to
    that where rows hold different numbers of slots, where slots are coded or merged, or where a
    part of the recipe has to see slots in order. `total` is the number of layers of the model.

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
        if asked is not None and asked.count == 1:  # the query of the newest slot, which sees all of them
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
        # It may have been too small for the first tokens, so that others came first.
        for layer in layers:
            lead = None if layer.mover is None else layer.mover.lead(layer.tail, layer.seen)
            if lead is None or lead < ends[0]:
                return None
    # `refill` moves a slot for each that goes; where many go, `carry_out` gathers those that stay.
    count = held - allowed
    return (count, *ends) if count <= max(allowed // _SHARE, 1) else None


def _stands(layer: KVLayer, recipe: Recipe) -> bool:
    """Return whether slots of a layer can be scored and dropped where they stand."""
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
    stays = pos >= between[1]  # first and last tokens, whatever their scores
    if between[0]:
        stays = stays | (pos < between[0])
    score = score.masked_fill(stays, float("inf"))
    if count == 1:
        lowest = score == score.amin(-1, keepdim=True)
        return pos.where(lowest, _LATEST).argmin(-1, keepdim=True)
    # Sorted by position first, so that the stable sort by score leaves the earliest of equals in front.
    order = pos.argsort(-1).expand_as(score)
    ranked = score.gather(-1, order).argsort(dim=-1, stable=True)
    return order.gather(-1, ranked[..., :count])
