"""TidalDecode: a few layers choose positions, and the others read the same ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from torch import Tensor

from diffcache.kv.attend import Query, over_groups
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.gapless import Pick, Run, nothing
from diffcache.kv.retrieval.gather import at_positions, positions_of
from diffcache.kv.retrieval.select import Ask, Selecting, asked, latest, top
from diffcache.kv.retrieval.summary import Summary, known, news
from diffcache.kv.slots import Slots, chosen


@final
@dataclass(frozen=True)
class LayerReuse(Selecting):
    """Attend fully and choose in a few layers; read the same positions in those that follow.

    Reference: TidalDecode, arXiv 2410.05076: full attention in the first layers, a layer
    that chooses, and one that chooses anew further up. Each key-value head chooses for the same
    head of later layers.

    Args:
        select: Layers that choose, from 0, rising; those before the first read everything.
    """

    whole = 1
    looks_across = True
    select: tuple[int, ...] = (2, 9)

    def check(self) -> None:
        """Check the layers."""
        if not self.select or list(self.select) != sorted(set(self.select)) or self.select[0] < 0:
            raise ValueError(f"select={self.select}: must be layers from 0 on, rising, at least 1")

    def extend(self, old: Summary, fresh: Slots, query: Query, layer: KVLayer) -> Summary:
        """Keep nothing but positions."""
        return old

    def pick(self, run: Run) -> Pick | None:
        """Return what the layer that chose last chose, or choose and read all."""
        index = run.layer.index
        if index < self.select[0]:
            return None
        if index in self.select:
            pick = nothing(run)
            if run.room:
                keys = news(run.layer, 0, stored=False).k
                score = over_groups(asked(run.query, keys), self.group)[:, :, 0, run.first : run.last]
                least = score.topk(run.room).values[..., -1:]
                at, _ = chosen(latest(score, least, run.room), run.room)
                pick = Pick(at + run.first)
            state = {**run.summary.state, "chosen": pick.positions()}
            run.layer.summary = replace(known(run.layer), state=state, at=run.query.start)
            return None
        lead = run.others[max(each for each in self.select if each < index)]
        found = known(lead)
        if found.at != run.query.start:  # it was left as it is, or chose nothing
            return None
        at = found.state["chosen"].long()
        if found.run and lead.held == run.layer.held:
            return Pick(at)
        return Pick(at.clamp_min(0), (at >= run.first) & (at < run.last))

    def choose(self, ask: Ask) -> Tensor | None:
        """Return the positions of the layer that chose last, or choose and read all."""
        index = ask.layer.index
        if index < self.select[0]:
            return None
        if index in self.select:
            slots = news(ask.layer, 0, stored=False)
            score = over_groups(asked(ask.query, slots.k), self.group)
            summary, best = ask.summary, top(score, ask.free, ask.room)
            state = {**summary.state, "chosen": positions_of(best, summary.pos)}
            ask.layer.summary = replace(summary, state=state, at=ask.query.start)
            return None
        lead = known(ask.others[max(each for each in self.select if each < index)])
        if lead.at != ask.query.start:  # it was left as it is, or chose nothing
            return None
        return at_positions(lead.state["chosen"], ask.summary.pos)
