"""Deep Forcing: many sinks close to the newest frames, and tokens that queries take part in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.attended import Attended
from diffcache.kv.budget import Uniform
from diffcache.kv.life.on_request import OnRequest
from diffcache.kv.observe import Observation
from diffcache.kv.plan import TopK
from diffcache.kv.positions import PositionMap
from diffcache.kv.recipe import Recipe
from diffcache.kv.score.base import Score
from diffcache.kv.store import KVStore
from diffcache.ranges import Count, Whole
from diffcache.video.policy import VideoPolicy

Phase = Literal["original", "contiguous"]
_USES = "uses"  # how often a token was chosen, a statistic of each slot


@dataclass(frozen=True)
class DeepForcing(VideoPolicy):
    """Hold many first frames, the latest, and the tokens between that queries agree with most.

    When the frames held and the chunk together are more than `window`, the first step of the chunk
    cuts them to `budget` frames in every layer: the sinks, the `recent` latest with the chunk among
    them, and single tokens of the frames between. Those are the ones of the largest dot product
    with the sum of the queries of the `recent` latest frames, of the chunk as it is denoised and of
    finished frames before it. Sinks are numbered as if they came right before the rest (Deep Sink).

    `Window(window, sinks, "slot")` is Deep Sink alone.

    Departures: numbers are given when keys are read, where the released code turns rotated keys on
    in place, which loses precision, and counts back from the first frame of the chunk instead of
    the last, so that its sinks lie a chunk further back, 3 frames. Queries of chunks that are not
    finished never count in later chunks; the released code counts every forward of a chunk. Tokens
    that reached `max_reuse` stay if fewer others are there than fit, so that the size is constant.

    Args:
        window: Most frames held, with the chunk.
        sinks: First frames, held for ever; the paper advises 40 to 60 % of the window.
        budget: Frames held after tokens were dropped, with the chunk.
        recent: Latest frames that stay whole, with the chunk, and whose queries choose; at least as
            many as a chunk has.
        topc_phase: Numbers of the chosen tokens. `original` leaves them those of their frames, as
            the released code does in effect; `contiguous` closes the gaps, as the paper says.
        max_reuse: Times that a token may be chosen, None for ever; 7 in the released code, of which
            the paper does not speak.

    Raises:
        ValueError: If the budget has no room for what stays, or is more than the window.

    Reference: Deep Forcing, arXiv 2512.05081, and its released code.
    """

    window: int = 21
    sinks: Whole = 10
    budget: Count = 16
    recent: Count = 4
    topc_phase: Phase = "original"
    max_reuse: Count | None = None
    by_query: ClassVar[bool] = True

    def check(self) -> None:
        """Raise ValueError unless the budget is between what stays and the window."""
        if not self.sinks + self.recent <= self.budget <= self.window:
            raise ValueError(
                f"budget={self.budget}: must be at least sinks + recent = "
                f"{self.sinks + self.recent} and at most window={self.window}"
            )

    def recipe(self, unit: int) -> Recipe:
        """Return the recipe that drops tokens when a layer is told to."""
        moves = self.sinks if self.topc_phase == "original" else None
        return Recipe(
            self.name,
            score=Participation(self.recent * unit, self.max_reuse),
            budget=Uniform(self.budget * unit),
            trigger=OnRequest(),
            space="pre",
            plan=TopK(sinks=self.sinks * unit, recent=self.recent * unit),
            positions=Realigned(unit, moves),
        )

    def first_step(self, store: KVStore, index: int, query: Query) -> None:
        """Drop tokens of a layer if more than the window is held; raise ValueError if a chunk is over `recent`."""
        layer = store.layers[index]
        assert layer.rotary is not None
        unit = layer.rotary.unit
        if query.count > self.recent * unit:
            raise ValueError(
                f"recent={self.recent}: a chunk of {query.count // unit} frames must be among the latest that stay"
            )
        if layer.held <= self.window * unit:
            return
        store.compress_layer(index, query, last=query.count, passing=True)
        if self.max_reuse is not None:
            layer.stats[_USES][..., self.sinks * unit : -self.recent * unit] += 1


@dataclass(frozen=True)
class Participation(Score):
    """Keep the slots of the largest dot product with the sum of the last queries, of all heads.

    Args:
        recent: Last queries.
        max_reuse: Times that a slot may be chosen before all others come first; None for ever.

    Reference: Deep Forcing, arXiv 2512.05081 (Participative Compression).
    """

    recent: int
    max_reuse: int | None = None

    @property
    def window(self) -> int:
        """Return the number of queries."""
        return self.recent

    @property
    def statistics(self) -> tuple[str, ...]:
        """Return the count of uses, where these have a bound."""
        return () if self.max_reuse is None else (_USES,)

    def note(self, stats: dict[str, Tensor], attended: Attended) -> None:
        """Take note of nothing: whoever chooses counts the uses."""

    def __call__(self, seen: Observation) -> Tensor:
        """Return the dot products, [B, H, S], alike for all heads."""
        k = seen.slots.k
        dtype = torch.promote_types(k.dtype, torch.float32)
        asked = seen.asked.grouped(k.shape[1]).to(dtype).sum((2, 3))
        score = torch.einsum("bhsd,bhd->bs", k.to(dtype), asked)[:, None].expand(k.shape[:3])
        if self.max_reuse is None:
            return score
        return score.masked_fill(seen.stats[_USES] >= self.max_reuse, float("-inf"))


@final
@dataclass(frozen=True)
class Realigned(PositionMap):
    """Number frames without gaps, as many to a number as have the tokens of one frame together.

    The newest frame keeps its number.

    Args:
        unit: Tokens of a frame.
        sinks: First frames, which alone are numbered so, the others keeping their numbers; None
            for all frames.
    """

    unit: int
    sinks: int | None = None

    def place(self, frame: Tensor, held: Tensor) -> Tensor:
        """Return the newest frame's number less the tokens held after each, in frames."""
        shape = [max(sizes) for sizes in zip(frame.shape[:2], held.shape[:2], strict=True)]
        frame, held = frame.expand(*shape, -1), held.expand(*shape, -1)
        order = held.sort(-1).values
        upto = torch.searchsorted(order, frame.contiguous(), right=True)
        after = (order.shape[-1] - upto).div(self.unit, rounding_mode="floor")
        number = order[..., -1:] - after
        return number if self.sinks is None else number.where(frame < self.sinks, frame)
