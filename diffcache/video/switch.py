"""Prompt switches: keep, flush, re-cache or cut the cache when the prompt changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diffcache.kv.layer import KVLayer
from diffcache.kv.positions import Absolute, PositionMap
from diffcache.kv.store import KVStore
from diffcache.ranges import Count, Settings, Whole


class Switch(Settings):
    """Treatment of the cache when a new prompt takes effect; a frozen dataclass."""


@dataclass(frozen=True)
class Keep(Switch):
    """Change the text alone; frames that are held go on speaking for the old prompt."""


@dataclass(frozen=True)
class Flush(Switch):
    """Drop all frames but the sinks of the policy and the latest; these stay as they are.

    Args:
        last: Latest frames that stay; 1 in the paper, 2 in the released code.

    Reference: Infinity-RoPE, arXiv 2511.20649 (KV Flush), and its released code.
    """

    last: Whole = 1

    def carry_out(self, store: KVStore, sinks: int, unit: int) -> None:
        """Drop frames of a store, if it has any, but the sinks, held before all others, and the latest."""

        def stays(layer: KVLayer) -> Tensor:
            pos = layer.meta()["pos"]
            slot = torch.arange(pos.shape[-1], device=pos.device)  # sinks may be later frames
            return (slot < sinks * unit) | (pos >= layer.seen - self.last * unit)

        if store.seen:
            store.keep(stays)


@dataclass(frozen=True)
class Recache(Switch):
    """Make the keys and values of the latest frames anew, under the new prompt.

    Args:
        frames: Latest frames that are made anew, or as many as there are; the others go.
        mask: `bidirectional` runs them in one pass, in which they see one another, as the released
            code does; `block_causal` runs them chunk by chunk, as they were made.
        keep_sinks: Whether the sinks of the policy stay as they are, of the old prompt; otherwise
            the first frames that are made anew become the sinks.

    Reference: LongLive, arXiv 2509.22622 (KV re-cache), and its released code.
    """

    frames: Count = 12
    mask: Literal["bidirectional", "block_causal"] = "bidirectional"
    keep_sinks: bool = False


@dataclass(frozen=True)
class Cut(Switch):
    """Give the next chunk numbers far beyond those of the frames that are held.

    Keys and values stay. After that chunk, frames are numbered by the policy again.

    Args:
        delta: Frames that the chunk jumps ahead.
        lead: First frames of the chunk that do not jump; 1 in the paper, 0 in the released code.

    Reference: Infinity-RoPE, arXiv 2511.20649 (RoPE Cut), and its released code.
    """

    delta: Whole = 42
    lead: Whole = 0

    def around(self, positions: PositionMap | None, start: int) -> PositionMap:
        """Return a position map in which a chunk, from frame `start` on, jumps; None has numbers as they are."""
        return Jump(positions or Absolute(), start + self.lead, self.delta)


@dataclass(frozen=True)
class Jump(PositionMap):
    """Move frames from one on ahead of where another map puts them.

    Args:
        inner: The other map.
        start: First frame that moves.
        by: Frames that it moves.
    """

    inner: PositionMap
    start: int
    by: int

    def place(self, frame: Tensor, held: Tensor) -> Tensor:
        """Return the other map's numbers, and more from the first frame that moves."""
        return self.inner.place(frame, held) + self.by * (frame >= self.start)
