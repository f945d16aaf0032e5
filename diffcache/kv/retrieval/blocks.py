"""Blocks of neighboring slots and what stands for each: bounds, and the mean of its keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kv.retrieval.select import Ask
from diffcache.kv.retrieval.summary import Summary
from diffcache.kv.slots import Slots, level_heads

Kind = Literal["bounds", "mean"]
_EMPTY = {"lo": float("inf"), "hi": float("-inf"), "sum": 0.0}


@dataclass(frozen=True)
class Blocks:
    """Blocks of slots that follow one another; counted from the first token of each row.

    Where tokens have tags from the user (`tag` above 0), a block holds tokens of one tag.

    Args:
        size: Slots of a block of tokens without a tag.
        kind: Summary of the keys of a block: their bounds or their mean.
        tagged: Slots of a block of tokens with a tag at most; None looks at no tags.
    """

    size: int
    kind: Kind = "mean"
    tagged: int | None = None

    def extend(self, old: Summary, fresh: Slots) -> Summary:
        """Return a summary, made with these settings, whose blocks have new slots too."""
        block, state = self._number(old.state, fresh)
        found = replace(old, slots=old.slots_with(block=block), state=state)
        count = max(int(state["top"].max()) + 1, 1)  # one that is empty where all is padding
        if old.blocks:  # the row of the most blocks may be gone
            count = max(count, old.blocks["count"].shape[2])
        heads = fresh.k.shape[1]
        blocks = dict(old.blocks)
        if not blocks:
            none = torch.zeros(*block.shape[:2], 0, dtype=torch.int64, device=block.device)
            blocks = {"count": none}
            empty = torch.zeros(len(block), heads, 0, fresh.k.shape[3], device=block.device)
            names = ("lo", "hi") if self.kind == "bounds" else ("sum",)
            blocks.update(dict.fromkeys(names, empty))
        place = block.where(block >= 0, count)
        blocks["count"] = scattered(blocks["count"], place, torch.ones_like(place), count, "sum")
        wide = place.expand(-1, heads, -1)
        keys = fresh.k.float().expand(len(block), -1, -1, -1)
        for name, how in (("lo", "amin"), ("hi", "amax"), ("sum", "sum")):
            if name in blocks:
                blocks[name] = scattered(blocks[name], wide, keys, count, how, _EMPTY[name])
        return replace(found, blocks=blocks)

    def extend_whole(self, old: Summary, fresh: Slots) -> Summary:
        """Return a summary with new whole blocks, where rows have no gaps and tags do not count."""
        keys = fresh.k.float().unflatten(2, (-1, self.size))
        new = {"sum": keys.sum(3)}
        if self.kind == "bounds":
            new = {"lo": keys.amin(3), "hi": keys.amax(3)}
        blocks = {
            name: torch.cat([old.blocks[name], value], 2) if name in old.blocks else value
            for name, value in new.items()
        }
        return replace(old, blocks=blocks)

    def _number(self, state: dict[str, Tensor], fresh: Slots) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the block of each new slot, -1 for empty ones, and where each row has come to."""
        pos, tag = fresh.pos, torch.zeros_like(fresh.pos)
        if self.tagged is not None:
            pos, tag = level_heads([pos, fresh.column("tag")])
        valid = pos >= 0
        reached = [state.get(name) for name in ("top", "run", "tag")]
        top, run, last = (
            tag.new_full(tag.shape[:2], default, dtype=torch.int64) if one is None else one
            for one, default in zip(reached, (-1, 0, -1), strict=True)
        )
        width = pos.shape[2]
        order = torch.arange(width, device=pos.device).expand_as(pos)
        # The valid slot before each, -1 where that came with earlier tokens.
        before = functional.pad(order.where(valid, -1).cummax(-1).values, (1, 0), value=-1)
        former = tag.gather(2, before[..., :-1].clamp_min(0)).where(before[..., :-1] >= 0, last[..., None])
        rank = valid.cumsum(-1) - 1
        begins = valid & (tag != former)
        since = rank.where(begins, -run[..., None]).cummax(-1).values
        inside = rank - since
        limit = inside.new_full((), self.size)
        if self.tagged is not None:
            limit = torch.where(tag > 0, self.tagged, self.size)
        opens = valid & (inside % limit == 0)
        block = (top[..., None] + opens.cumsum(-1)).where(valid, -1)
        newest = before[..., -1:]
        some = newest[..., 0] >= 0
        at = newest.clamp_min(0)
        now = {
            "top": block.gather(2, at)[..., 0].where(some, top),
            "run": (inside.gather(2, at)[..., 0] + 1).where(some, run),
            "tag": tag.long().gather(2, at)[..., 0].where(some, last),
        }
        return block, {**state, **now}


def scattered(old: Tensor, place: Tensor, new: Tensor, count: int, how: str, empty: float = 0) -> Tensor:
    """Return [B, H, count, ...] to which new values [B, H, n, ...] were added at their places."""
    heads = max(old.shape[1], place.shape[1])
    old = old.expand(-1, heads, *old.shape[2:])
    place, new = (x.expand(-1, heads, *x.shape[2:]) for x in (place, new))
    more = old.new_full((*old.shape[:2], count + 1 - old.shape[2], *old.shape[3:]), empty)
    room = torch.cat([old, more], 2)
    if room.dim() == 4:
        place = place[..., None].expand_as(new)
    found = room.scatter_reduce(2, place, new.to(room.dtype), how)
    return found[:, :, :count]


def mean_keys(summary: Summary) -> Tensor:
    """Return the mean key of each block, float32 [B, H, N, D]; zero for blocks of none."""
    return summary.blocks["sum"] / summary.blocks["count"].clamp_min(1)[..., None]


def bounds(summary: Summary) -> tuple[Tensor, Tensor]:
    """Return the least and greatest of each channel of each block, float32 [B, H, N, D]."""
    if summary.run:  # all blocks are whole
        return summary.blocks["lo"], summary.blocks["hi"]
    there = (summary.blocks["count"] > 0)[..., None]
    lo, hi = summary.blocks["lo"], summary.blocks["hi"]
    return lo.where(there, 0), hi.where(there, 0)


def sizes(ask: Ask) -> Tensor:
    """Return how many slots of each block may be chosen, int64 [B, 1 or H, N]."""
    block = ask.summary.slots["block"]
    free = ask.free.expand(-1, block.shape[1], -1)
    block = block.expand(-1, free.shape[1], -1)
    count = ask.summary.blocks["count"].shape[2]
    found = torch.zeros(*block.shape[:2], count, dtype=torch.int64, device=block.device)
    return found.scatter_add_(2, block.clamp_min(0), (free & (block >= 0)).long())


def slots_of(chosen: Tensor, summary: Summary) -> Tensor:
    """Return the slots of chosen blocks.

    Args:
        chosen: bool [B, 1 or H, N].
        summary: Summary that has these blocks.

    Returns:
        bool [B, 1 or H, S].
    """
    block = summary.slots["block"]
    heads = max(chosen.shape[1], block.shape[1])
    block = block.expand(-1, heads, -1)
    return chosen.expand(-1, heads, -1).gather(2, block.clamp_min(0)) & (block >= 0)
