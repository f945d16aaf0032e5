"""Elastic-Cache: deep layers are computed anew when the most attended token's attention moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from diffcache.dllm.decode import Schedule
from diffcache.dllm.policy import FedRows, Policy
from diffcache.dllm.rows import RowPlan
from diffcache.dllm.state import State
from diffcache.method import Ability, check_bool, check_int, is_number

Axis = Literal["head", "key"]


@dataclass(frozen=True, eq=False)
class WatchedPlan(RowPlan):
    """A row plan, with the positions that the test for drift looks at.

    Attributes:
        window: Positions whose queries choose the tracked tokens, bool `[B, T]`.
        known: Positions that may be tracked, bool `[B, T]`.
        multiple: Number that rows are filled up to a multiple of.
    """

    compiles: ClassVar[bool] = False

    window: Tensor = field(kw_only=True)
    known: Tensor = field(kw_only=True)
    multiple: int = field(default=1, kw_only=True)


@dataclass(frozen=True)
class WideningRows(FedRows):
    """Compute the planned rows and tracked tokens, and all rows from a layer on after a drift.

    Args:
        gamma: Least similarity, dimensionless.
        similarity: Axis of the cosine.
        track: Tokens that are tracked in each layer.
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

    The host waits for one number a layer, the outcome of its test. Beside keys and values, the
    input and the queries of every layer are held at full length where `gamma` is above 0.

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

    name: ClassVar[str] = "elastic"
    note: ClassVar[str] = "The host waited for one number a layer: whether attention had drifted."
    schedule: ClassVar[Schedule] = Schedule(block=None, window=16)

    gamma: float = 0.9
    similarity: Axis = "head"
    track: int = 1
    block_caching: bool = True
    force_full: bool = False

    def __post_init__(self) -> None:
        if not is_number(self.gamma) or self.gamma != self.gamma:
            raise ValueError(f"gamma={self.gamma!r}: must be a number")
        if self.similarity not in get_args(Axis):
            raise ValueError(f"similarity={self.similarity!r}: must be one of 'head', 'key'")
        check_int("track", self.track, 1)
        check_bool("block_caching", self.block_caching)
        check_bool("force_full", self.force_full)

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
    """Return the tokens that queries attend to most in any layer, bool `[B, T]`.

    Args:
        masses: Attention from the queries to each token in every layer, `[L, B, T]`.
        known: Tokens that can be chosen, bool `[B, T]`.
        count: Tokens that are chosen in each sequence and layer.
    """
    masses = masses.masked_fill(~known, float("-inf"))
    best = masses.topk(min(count, masses.shape[2]), dim=2).indices
    return torch.zeros_like(masses, dtype=torch.bool).scatter_(2, best, True).any(0) & known


def likeness(before: Tensor, after: Tensor, real: Tensor | None, seen: Tensor | None, axis: Axis) -> Tensor:
    """Return how alike the attention of tokens is at two times, `[B]`, from 0 to 1.

    Args:
        before: Attention of each token at the first time, `[B, H, n, T]`.
        after: The same at the second time.
        real: Tokens that count, bool `[B, n]`; None for all.
        seen: Keys that are no padding, bool `[B, T]`; None for all.
        axis: Axis of the cosine; its mean over the others counts.
    """
    dim = 3 if axis == "key" else 1
    # torch's own cosine takes five times as long over heads; 1e-16 is the square of its least norm
    squares = [x.square().sum(dim).clamp_min(1e-16) for x in (before, after)]
    cosine = (before * after).sum(dim) / (squares[0] * squares[1]).sqrt()
    if real is None and (seen is None or axis == "key"):
        return cosine.sum((1, 2)) / cosine[0].numel()
    real = cosine.new_ones(cosine.shape[0], before.shape[2]).bool() if real is None else real
    counts = (real[:, None] if axis == "key" else real[:, :, None]).expand_as(cosine)
    if axis == "head" and seen is not None:
        counts = counts & seen[:, None]
    return (cosine * counts).sum((1, 2)) / counts.sum((1, 2))
