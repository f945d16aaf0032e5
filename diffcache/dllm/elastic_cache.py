"""Elastic-Cache: deep layers are computed anew when the most attended token's attention moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from diffcache.dllm.decode import Schedule
from diffcache.dllm.policy import FedRows, Policy
from diffcache.dllm.rows import RowPlan, picked, put
from diffcache.dllm.state import State
from diffcache.method import Ability
from diffcache.ranges import Count, Range

Axis = Literal["head", "key"]


@dataclass(frozen=True, eq=False)
class WatchedPlan(RowPlan):
    """A row plan, with the positions that the test for drift looks at."""

    window: Tensor = field(kw_only=True)  # positions whose queries choose the tracked tokens, bool `[B, T]`
    known: Tensor = field(kw_only=True)  # positions that may be tracked, bool `[B, T]`
    multiple: int = field(default=1, kw_only=True)  # number that rows are filled up to a multiple of


@dataclass(frozen=True)
class WideningRows(FedRows):
    """Compute the planned rows and tracked tokens, and all rows from a layer on after a drift.

    Settings are those of `ElasticCache`.
    """

    plans: ClassVar[type[RowPlan]] = WatchedPlan

    gamma: float
    similarity: Axis
    track: int


@dataclass(frozen=True)
class ElasticCache(Policy):
    """Compute a window of masks, and every row of deep layers once attention has drifted.

    A step computes the masks that may be committed, the tokens of the last commit, and the tracked
    tokens: in each layer the decided ones that the computed masks attended to most. Each layer
    compares the tracked tokens' attention with what it was after the last step. Where they are less
    alike than `gamma`, all layers after it compute every row of the sequence, from the hidden
    states that they were last given; layers up to it keep what they hold.

    The window is the schedule's: `Schedule(block=None, window=16)`, which is used where none is
    given. The paper's commits are a rule of the sampler, `Threshold(0.9)`.

    `similarity="head"` is what the published code computes: the cosine over heads, for each tracked
    token and key, and its mean. `"key"` is the paper's: the cosine over keys, for each tracked
    token and head. Which of them falls more, and so recomputes more, depends on the model: on
    chain-llada `head` at 0.8 computes 1.6 times the token-layers of `key` at 0.9.

    Departures: as in the published code, all tracked tokens are tested in each layer; the paper
    tests that layer's own. Sequences of a batch drift and widen on their own; the code is for one.
    Masks after the end token are never tracked; in the code they can be. Without `block_caching`
    they are computed all the same; the code drops them. The last layer is not
    tested, since no layer follows it. With `gamma` above 1 the first layer is still computed for
    the planned rows alone, so that decoding without a cache is `force_full`.

    The host waits for one number a layer, the outcome of its test; those of a compiled forward come
    together at its end, and the layers after a drift then run once more. Beside keys and values,
    the input and the queries of every layer are held at full length where `gamma` is above 0.

    Args:
        gamma: Least similarity, dimensionless; 0 or less never recomputes and is not tested, above
            1 always does.
        similarity: Axis of the cosine, `head` or `key`.
        track: Tokens that are tracked in each layer.
        block_caching: Whether masks outside the window are served from what is held, instead of
            being computed at every step.
        force_full: Compute every row at every step, as a reference.

    Reference: Elastic-Cache, arXiv 2510.14973, section 3.
    """

    note: ClassVar[str] = "The host waited for one number a layer, or all at once: whether attention had drifted."
    schedule: ClassVar[Schedule] = Schedule(block=None, window=16)

    gamma: Annotated[float, Range(-inf, endless=True)] = 0.9
    similarity: Axis = "head"
    track: Count = 1
    block_caching: bool = True
    force_full: bool = False

    def abilities(self) -> tuple[Ability, ...]:
        """Return the ability to compute some rows, and all of them from a layer on."""
        return (WideningRows(self.gamma, self.similarity, self.track),)

    def plan(self, state: State) -> WatchedPlan:
        """Return the masks that may be committed and the tokens that were committed last."""
        known = state.decided if state.valid is None else state.decided & state.valid
        masks = state.open if self.block_caching else ~state.decided
        watched: dict[str, Any] = {"window": masks, "known": known, "multiple": state.multiple}
        if state.step == 0 or self.force_full:
            return WatchedPlan(**watched)
        return WatchedPlan(state.plan(masks | state.changed).rows, **watched)


def most_attended(masses: Tensor, known: Tensor, count: int) -> Tensor:
    """Return the known tokens that queries attend to most, `count` in each layer, of any layer: bool `[B, T]`.

    Masses are the attention from the queries to each token in every layer, `[L, B, T]`.
    """
    masses = masses.masked_fill(~known, float("-inf"))
    best = masses.topk(min(count, masses.shape[2]), dim=2).indices
    return torch.zeros_like(masses, dtype=torch.bool).scatter_(2, best, True).any(0) & known


def likeness(before: Tensor, after: Tensor, real: Tensor, seen: Tensor | None, axis: Axis) -> Tensor:
    """Return how alike the attention of tokens is at two times, `[B, H, n, T]` each, `[B]`, from 0 to 1.

    Tokens that are `real`, bool `[B, n]`, count; without any, the likeness is not a number. `seen`
    are keys that are no padding, bool `[B, T]`, None for all. The mean of the cosine over the axes
    but its own counts.
    """
    dim = 3 if axis == "key" else 1
    # torch's own cosine takes five times as long over heads; 1e-16 is the square of its least norm
    squares = [x.square().sum(dim).clamp_min(1e-16) for x in (before, after)]
    cosine = (before * after).sum(dim) / (squares[0] * squares[1]).sqrt()
    if axis == "key" or seen is None:
        each = cosine.mean(1 if axis == "key" else 2)
    else:
        each = (cosine * seen[:, None]).sum(2) / seen.sum(1, keepdim=True)
    return (each * real).sum(1) / real.sum(1)


class Watching(NamedTuple):
    """Attention that one forward looks at, to test for drift and to choose tracked tokens."""

    # positions whose attention is looked at, int64 `[B, n]`, in ascending order, filled up by repeating the last one
    places: Tensor
    window: Tensor  # positions whose queries choose the tracked tokens, bool `[B, T]`
    known: Tensor  # positions that may be tracked, bool `[B, T]`
    tracked: Tensor | None  # positions that are tested, bool `[B, T]`; None for no test
    valid: Tensor | None  # positions that are no padding, bool `[B, T]`; None for all
    track: int  # tokens that are tracked in each layer
    axis: Axis  # axis of the cosine
    inputs: dict[int, Tensor]  # hidden states that each layer was given, `[B, T, C]`; empty where none are held
    queries: dict[int, Tensor]  # queries of each layer, `[B, T, H, D]`; empty where none are held
    masses: list[Tensor]  # attention from the window to each token in the layers so far, `[B, T]` each
    alike: list[Tensor]  # likeness in the tested layers so far, `[B]` each; infinite without a window
    blocks: list[int]  # numbers of the blocks of a compiled forward so far
    looks: Tensor | None = None  # places of the window, without those that fill up a sequence, bool `[B, n]`
    tokens: Tensor | None = None  # tested positions, filled up by others to a fixed number, int64 `[B, t]`
    real: Tensor | None = None  # those of them that are tested, bool `[B, t]`

    def begun(self) -> Watching:
        """Return what a forward looks at before its first layer."""
        places, tokens, real = self.places, None, None
        looks = self.window.gather(1, places)
        looks[:, 1:] &= places[:, 1:] != places[:, :-1]  # others fill up
        if self.tracked is not None:
            # as many at every step, so that nobody waits for their number, and one graph does
            most = min(self.track * len(self.queries), self.tracked.shape[1])
            tokens = self.tracked.int().topk(most, dim=1).indices
            real = self.tracked.gather(1, tokens)
        return self._replace(looks=looks, tokens=tokens, real=real, masses=[], alike=[], blocks=[])

    def earlier(self, number: int) -> Tensor | None:
        """Return held queries of the tested tokens in a layer, `[B, t, H, D]`; None without a test, as in the last."""
        if self.tokens is None or number + 1 == len(self.queries):
            return None
        return picked(self.queries[number], self.tokens)

    def see(self, weights: Tensor, before: Tensor | None) -> None:
        """Note a layer's attention: of the places, `[B, H, n, T]`, and of tested tokens before, `[B, H, t, T]`."""
        looks = self.looks
        assert looks is not None
        self.masses.append((weights * looks[:, None, :, None]).sum((1, 2)))
        if before is not None:
            assert self.tokens is not None
            assert self.real is not None
            tested = torch.searchsorted(self.places, self.tokens) * self.real
            after = picked(weights.transpose(1, 2), tested).transpose(1, 2)
            alike = likeness(before, after, self.real, self.valid, self.axis)
            self.alike.append(alike.masked_fill(~looks.any(1), torch.inf))

    def put(self, held: dict[int, Tensor], number: int, fresh: Tensor) -> None:
        """Write inputs or queries of the places, `[B, n, ...]`, where they are held."""
        if number in held:
            put(held[number], self.places, fresh)

    def notes(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None, list[int]]:
        """Return the tokens to track, `[B, T]`, masses and likeness of the layers, and the blocks."""
        masses = torch.stack(self.masses)
        alike = torch.stack(self.alike) if self.alike else None
        return most_attended(masses, self.known, self.track), masses, alike, self.blocks
