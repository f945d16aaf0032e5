"""Rolling Sink: the first frames stand in for all that came before the latest chunk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.layer import KVLayer
from diffcache.kv.positions import Absolute
from diffcache.kv.recipe import Recipe
from diffcache.kv.retrieve import Retriever
from diffcache.kv.view import View
from diffcache.ranges import Count
from diffcache.video.policy import VideoPolicy, frames_of
from diffcache.video.window import rolling


@dataclass(frozen=True)
class RollingSink(VideoPolicy):
    """Hold the first frames and the latest; the first ones stand in for those between.

    A chunk reads as many frames before it as there are sinks, at their own numbers. The `recent`
    latest are those that were made. In the place of each frame before them a sink is read: going
    on from frame to frame the sinks are swept from first to last, then back from last to first,
    and so on, with the last and the first of them twice in a row.

    Departures: the released code has chunks of three frames, which are `recent` there, and sweeps
    chunk by chunk, turning the order of frames around on the way back. Here frames are swept one
    by one, which is the same where `sinks` is a multiple of the chunk. It writes copies of sinks
    into the cache after each clean pass; here they are put in place when they are read, so that no
    frame is held twice. It begins every chunk with the same noise; sessions draw noise anew. After
    `Flush` a sink is read in the place of latest frames that went, too.

    Args:
        sinks: First frames, held for ever; also the number of frames that a chunk reads before it.
        recent: Latest of these that are read as they were made.

    Raises:
        ValueError: If `recent` is more than `sinks`.

    Reference: Rolling Sink, arXiv 2602.07775, and its released code.
    """

    by_head: ClassVar[bool] = True
    sinks: Count = 18
    recent: Count = 3

    def check(self) -> None:
        """Raise ValueError if more frames are read as they are than at all."""
        if self.recent > self.sinks:
            raise ValueError(
                f"recent={self.recent}: must be at most sinks={self.sinks}, the frames that a chunk reads"
            )

    def recipe(self, unit: int) -> Recipe:
        """Return the recipe that holds sinks and latest frames, and reads the sinks in between."""
        held = rolling(self.name, self.sinks * unit, self.recent * unit, Absolute())
        return replace(held, retrieve=Sweep(unit, self.sinks, self.recent))


@final
@dataclass(frozen=True)
class Sweep(Retriever):
    """Read the first frames, swept to and fro, in the place of those before the latest.

    Args:
        unit: Tokens of a frame.
        sinks: First frames, as many as are read before a chunk.
        recent: Latest of these that are read as they are.

    Reference: Rolling Sink, arXiv 2602.07775.
    """

    unit: int
    sinks: int
    recent: int

    def views(self, query: Query, layer: KVLayer, others: list[KVLayer]) -> list[View]:
        """Return the frames before the chunk, and its own."""
        start, unit = query.start // self.unit, self.unit
        slots = frames_of(layer, unit)
        held = layer.meta()["pos"][0, 0][slots[:, 0]].long() // unit
        place = torch.arange(max(start - self.sinks, 0), layer.seen // unit, device=held.device)
        is_made = (place >= start - self.recent) & torch.isin(place, held)
        frame = place.where(is_made, swept(place, self.sinks))
        index = slots[torch.searchsorted(held, frame)].flatten()
        found = layer.read()
        found = found.gather(index.expand(len(found.k), 1, -1))
        token = torch.arange(unit, device=held.device)
        pos = (place[:, None] * unit + token).flatten().to(found.pos.dtype)
        found = replace(found, meta={"pos": pos.expand(len(found.k), 1, -1)})
        return [View(layer.rotated(found), below=layer.seen)]


def swept(place: Tensor, sinks: int) -> Tensor:
    """Return the sinks that are read in the places of frames with numbers int64, like these."""
    at = place % (2 * sinks)
    return torch.minimum(at, 2 * sinks - 1 - at)
