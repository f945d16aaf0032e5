"""Read chosen slots of a layer and no others."""

from __future__ import annotations

import torch
from torch import Tensor

from diffcache.kv.layer import KVLayer
from diffcache.kv.segment import PLAIN
from diffcache.kv.slots import EMPTY, Slots, chosen, join
from diffcache.kv.view import ListedView, View


def met_slots(layer: KVLayer) -> Slots | None:
    """Return all slots of a layer; None where some are settled, or not held as queries meet them.

    Chosen ones of these are gathered when they are asked for, if a kernel does not attend to them
    where they are.
    """
    if layer.segments or layer.rotary or layer.mover or layer.latent:
        return None
    return layer.tail.read()


def views_of(layer: KVLayer, mask: Tensor) -> list[View]:
    """Return the slots that a mask names as queries meet them.

    Work on keys and values is in proportion to what is named: no other codes are decoded.

    Args:
        layer: The layer.
        mask: bool [B, 1 or H, S], as `KVLayer.read` orders its slots; at least one a row.
    """
    whole = met_slots(layer)
    if whole is not None:
        return [View(ListedView(whole, *chosen(mask), layer.seen))]
    plain: list[Slots] = []
    apart: list[View] = []
    tail = layer.tail.read()
    heads = (layer.read() if tail is None else tail).k.shape[1]
    first = 0
    for segment in layer.segments:
        part = mask[..., first : first + segment.width]
        first += segment.width
        index, keep = chosen(part)
        if not index.shape[2]:
            continue
        slots = segment.read_at(*(x.expand(-1, heads, -1) for x in (index, keep)))
        if segment.traits == PLAIN:
            plain.append(slots)
        else:
            apart.append(View(layer.rotated(slots), None, segment.traits))
    if tail is not None and tail.width:
        index, keep = chosen(mask[..., first:])
        if index.shape[2]:
            plain.append(tail.gather(index, keep))
    if plain:
        apart.insert(0, View(layer.rotated(join(plain))))
    return apart


def positions_of(mask: Tensor, pos: Tensor) -> Tensor:
    """Return the positions of the slots a mask names, int32 [B, 1 or H, n], filled up with -1."""
    index, keep = chosen(mask)
    pos = pos.expand(-1, index.shape[1], -1)
    return pos.gather(2, index.expand(-1, pos.shape[1], -1)).where(keep, EMPTY)


def at_positions(wanted: Tensor, pos: Tensor) -> Tensor:
    """Return which slots are at some positions.

    Args:
        wanted: int32 [B, 1 or H, n], -1 for none.
        pos: Positions of the slots, int32 [B, 1 or H, S].

    Returns:
        bool [B, 1 or H, S].
    """
    heads = max(wanted.shape[1], pos.shape[1])
    wanted = wanted.expand(-1, heads, -1).long()
    pos = pos.expand(-1, heads, -1).long()
    size = max(int(pos.max()), int(wanted.max()) if wanted.numel() else 0) + 2
    table = torch.zeros(*pos.shape[:2], size, dtype=torch.bool, device=pos.device)
    table.scatter_(2, wanted.where(wanted >= 0, size - 1), True)
    table[..., size - 1] = False
    return table.gather(2, pos.clamp_min(0)) & (pos >= 0)
