"""Move slots from the tail of a layer into coded segments."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from diffcache.kv.layer import KVLayer
from diffcache.kv.segment import Coded, Dense, Flat, Segment
from diffcache.kv.slots import EMPTY, Slots, join, join_meta
from diffcache.kv.tail import Tail


def due(length: int, block: int, whole: bool, multiple: int) -> int:
    """Return how many of `length` tokens are coded now."""
    if length < block:
        return 0
    step = multiple if whole else block
    return length // step * step


def gather_exact(layer: KVLayer) -> None:
    """Bring exact slots of rows of different lengths back to the tail, in order of position.

    Rows end together there, so that the last tokens of each stay the last.
    """
    if not any(isinstance(segment, Flat) for segment in layer.segments):
        return
    rest: list[Segment] = []
    flat: list[Slots] = []
    kept: list[Tensor] = []  # where `read` showed what stays, and what is gathered
    moved: list[Tensor] = []
    first = 0
    for segment in layer.segments:
        place = torch.arange(first, first + segment.width)
        (moved if isinstance(segment, Flat) else kept).append(place)
        if isinstance(segment, Flat):
            flat.append(segment.read())
        else:
            rest.append(segment)
        first += segment.width
    slots = join(flat)
    order = slots.pos.argsort(dim=-1, stable=True)
    slots = slots.gather(order)
    columns = torch.cat(moved).to(order.device)[order]
    tail = layer.tail.read()
    stay = torch.cat([*kept, torch.zeros(0, dtype=torch.long)]).to(order.device)
    end = torch.arange(first, layer.held, device=order.device)
    where = [stay.expand(*order.shape[:2], -1), columns, end.expand(*order.shape[:2], -1)]
    index = torch.cat(where, -1)
    layer.stats = {name: value.gather(2, index) for name, value in layer.stats.items()}
    layer.segments, layer.summary = rest, None
    layer.tail = Tail.of(join([slots, tail]) if tail is not None and tail.width else slots)


def set_apart(layer: KVLayer, count: int) -> None:
    """Turn the first tokens of each row of the tail into an exact segment."""
    if layer.tail.start is None:
        slots = layer.tail.read()
        assert slots is not None
        number = slots.valid.cumsum(-1)
        late = ~slots.valid | (number > count)
        order = late.to(torch.int8).argsort(dim=-1, stable=True)
        first = layer.held - layer.tail.length
        place = torch.arange(first, device=order.device).expand(*order.shape[:2], -1)
        where = torch.cat([place, order + first], -1)
        layer.stats = {
            name: value.gather(2, where.expand(-1, value.shape[1], -1)) for name, value in layer.stats.items()
        }
        layer.tail, layer.summary = Tail.of(slots.gather(order)), None
    slots, _ = cut(layer, count)
    layer.segments.append(Dense(slots.clone()))


def cut(layer: KVLayer, count: int) -> tuple[Slots, int | None]:
    """Take the first slots out of the tail, and return them and the position of the first.

    The position is None where positions do not follow one another. Empty slots get keys and values
    of others, so that no codec has to spend its range on them.
    """
    first = layer.tail.start
    slots = layer.tail.split(count)
    if not layer.tail.length:
        layer.tail = Tail(layer.seen)
    return (without_gaps(slots) if first is None else slots), first


def append(layer: KVLayer, new: Coded, appended: Callable[[Coded, Coded], Coded]) -> None:
    """Append to the last segment, where that is coded by the same codec, or begin one."""
    last = layer.segments[-1] if layer.segments else None
    if isinstance(last, Coded) and not last.level:
        layer.segments[-1] = appended(last, new)
    else:
        layer.segments.append(new)


def own_meta(slots: Slots, first: int | None) -> dict[str, Tensor]:
    """Return copies of the metadata; without positions, where these follow one another."""
    named = slots.meta.items()
    return {name: value.clone() for name, value in named if first is None or name != "pos"}


def appended_meta(old: Coded, new: Coded) -> dict[str, Tensor]:
    """Return the metadata of two segments one after the other."""
    follows = "pos" not in old.meta and "pos" not in new.meta
    if follows and old.start + old.width == new.start and not (old.meta or new.meta):
        return {}
    known = [*old.meta.values(), *new.meta.values()]
    like = known[0] if known else old.k.decode()
    return join_meta([part.known(len(like), like.device) for part in (old, new)])


def without_gaps(slots: Slots) -> Slots:
    """Return slots whose empty ones have keys and values of the first that is not."""
    valid = slots.valid.expand(*slots.k.shape[:2], -1)
    if bool(valid.all()):
        return slots
    place = torch.arange(slots.width, device=valid.device)
    index = place.where(valid, valid.to(torch.int8).argmax(-1, keepdim=True))
    filled = slots.gather(index)
    return Slots(filled.k, filled.v, slots.meta)


def filled_up(slots: Slots, multiple: int) -> Slots:
    """Return slots of a width that is a multiple, filled up with empty copies of the first."""
    missing = -slots.width % multiple
    if not missing:
        return slots
    meta = {}
    for name, value in slots.meta.items():
        meta[name] = torch.cat([value, value[..., :1].expand(-1, -1, missing)], -1)
    meta["pos"] = meta["pos"].clone()
    meta["pos"][..., slots.width :] = EMPTY
    k, v = (torch.cat([x, x[:, :, :1].expand(-1, -1, missing, -1)], 2) for x in (slots.k, slots.v))
    return Slots(k, v, meta)
