"""History retrieval: of the frames before the window, those that are most like the newest one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kv.attend import Query
from diffcache.kv.layer import KVLayer
from diffcache.kv.positions import Absolute, Slot
from diffcache.kv.recipe import Recipe
from diffcache.kv.retrieval.summary import Summary, known
from diffcache.kv.retrieve import Retriever
from diffcache.kv.view import View
from diffcache.ranges import Count, Whole
from diffcache.video.policy import VideoPolicy, check_pool, frames_of
from diffcache.video.window import rolling


@dataclass(frozen=True)
class HistoryRetrieval(VideoPolicy):
    """Read the latest frames, and of a pool of earlier ones those most like the newest.

    The pool has the first frames and the latest that left the window. At the start of a chunk the
    newest finished frame is compared with each frame of the pool by the cosine of their means over
    the tokens of a frame, and the `count` most like it are read throughout the chunk, whatever
    their age.

    Departures: MagicWorld gives frames to the model anew, as latents, through an embedding that is
    trained for it, and its released causal model leaves them out; here they are keys and values as
    they were made, which any model can read. Its means are of latents; here they are of the values
    of the first layer, which are made of a frame's latents alone. A window is read as well, and the
    pool begins behind it. The released code for few steps does not keep the first frame.

    Args:
        window: Latest frames that are always read beside the chunk.
        pool: Most frames that are held beside the window.
        sinks: First frames, which stay in the pool for ever.
        count: Frames of the pool that are read; 0 for the window alone.
        numbers: Numbers that the frames of the pool are rotated under: right `before` the window,
            in their order; or right `after` the chunk, the most alike first, as in MagicWorld,
            which is trained so.

    Raises:
        ValueError: If the pool is less than its sinks, or than what is read of it.

    Reference: MagicWorld, arXiv 2511.18886 (History Cache Retrieval), and its released code.
    """

    window: Count = 6
    pool: int = 20
    sinks: Whole = 1
    count: Whole = 3
    numbers: Literal["before", "after"] = "before"

    def check(self) -> None:
        """Raise ValueError unless the pool has room."""
        check_pool(self.pool, self.sinks, self.count)

    def recipe(self, unit: int) -> Recipe:
        """Return the recipe that holds pool and window, and reads similar frames."""
        after = self.numbers == "after"
        latest = self.pool - self.sinks + self.window
        positions = Absolute() if after else Slot()
        held = rolling(self.name, self.sinks * unit, latest * unit, positions)
        return replace(held, retrieve=Alike(unit, self.window, self.count, after))


@final
@dataclass(frozen=True)
class Alike(Retriever):
    """Read the latest frames and those before them that are most like the newest.

    All layers read the same frames, which the values of the first layer choose.

    Args:
        unit: Tokens of a frame.
        window: Latest frames that are always read.
        count: Others that are read.
        after: Whether those are numbered after the chunk.

    Reference: MagicWorld, arXiv 2511.18886.
    """

    unit: int
    window: int
    count: int
    after: bool = False

    @property
    def looks_across(self) -> bool:
        """Every layer reads the frames that the first has found."""
        return True

    def views(self, query: Query, layer: KVLayer, others: list[KVLayer]) -> list[View]:
        """Return the frames that are alike, the window and the chunk."""
        chosen = self._chosen(query, others[0])
        slots = frames_of(layer, self.unit)
        width = min(self.window, query.start // self.unit) + query.count // self.unit
        latest = torch.arange(len(slots) - width, len(slots), device=slots.device)
        frames = torch.cat([chosen, latest.expand(len(chosen), -1)], 1)
        found = layer.read().gather(slots[frames].flatten(1)[:, None])
        if self.after:
            many = chosen.shape[1] * self.unit
            ahead = torch.arange(layer.seen, layer.seen + many, device=slots.device)
            ahead = ahead.to(found.pos.dtype).expand(*found.pos.shape[:2], -1)
            rpos = torch.cat([ahead, found.pos[..., many:]], 2)
            found = replace(found, meta={**found.meta, "rpos": rpos})
        return [View(layer.rotated(found), below=layer.seen)]

    def _chosen(self, query: Query, layer: KVLayer) -> Tensor:
        """Return the frames of the pool that are read in a chunk, most alike first, int64 [B, n].

        Frames are counted from the oldest that is held.
        """
        summary = known(layer)
        if summary.at != query.start:
            slots = frames_of(layer, self.unit)
            finished = slots[: len(slots) - query.count // self.unit]
            chosen = self._choose(layer.read().v, finished)
            summary = Summary(state={"chosen": chosen}, at=query.start)
            layer.summary = summary
        return summary.state["chosen"]

    def _choose(self, values: Tensor, finished: Tensor) -> Tensor:
        """Return the frames most like the newest, of those before the window.

        Values of all slots are `[B, H, S, D]`, slots of finished frames int64 [F, unit], the oldest first.
        """
        earlier = max(len(finished) - self.window, 0)
        count = min(self.count, earlier)
        if not count:
            return finished.new_zeros(len(values), 0)
        wanted = torch.cat([finished[:earlier], finished[-1:]])
        marks = values[:, :, wanted].float().mean(3).transpose(1, 2).flatten(2)
        alike = functional.cosine_similarity(marks[:, :-1], marks[:, -1:], dim=-1)
        return alike.topk(count, 1).indices
