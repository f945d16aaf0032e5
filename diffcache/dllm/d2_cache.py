"""d2Cache: compute the surest masks near decided tokens, and the tokens attention flows from."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from diffcache.dllm.policy import FedRows, Policy
from diffcache.dllm.rows import RowPlan
from diffcache.dllm.rules import first
from diffcache.dllm.state import State
from diffcache.method import Ability
from diffcache.ranges import Count, Positive, Share, Whole

CONFIDENCE, INFLUENCE = "confidence", "influence"  # what is noted


@dataclass(frozen=True, eq=False)
class NotedPlan(RowPlan):
    """A row plan that the forward's notes are left on."""

    narrows: ClassVar[bool] = True

    # tensors by name, `[B, T]`: `confidence`, the probability of the most probable token when a position was last
    # computed; `influence`, the attention that flows from a position to all others through all layers of the forward.
    # Empty before it
    notes: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class NotedRows(FedRows):
    """Compute the planned rows, and note on the plan how sure the model is and what it looks at."""

    plans: ClassVar[type[RowPlan]] = NotedPlan


@dataclass(frozen=True)
class D2Cache(Policy):
    """Compute masks that are about to be decided, and tokens that others attend to.

    A step computes the `current_k` masks with the highest confidence times density of decided
    tokens around them, those of the active block first, what was just committed, and of all other
    positions those with the highest influence, together `rollout_p` of it. Gaps between computed
    rows are filled where they are narrow. The first step computes all rows.

    Influence is the column sum of the attention rollout: the product over layers of each layer's
    mean attention over heads with the identity, half of each; a row that is not computed is the
    identity. It is summed from the last layer to the first, as one vector.

    As in the published code, masks compete up to the end of the block that the `current_k`-th of
    them lies in, and other positions are masks as well as tokens.

    Departures, which are all that tells the rows from the code's: confidence is the probability of
    the most probable token when a position was last computed, as the paper means it; the code uses
    that of the first step throughout, by a slip of indexing. Rows are chosen for the block that is
    decoded; the code's block is that of the step before without what was decided in it, by a slip
    of writing in place, and blocks of that size are what the `current_k`-th mask is looked for in.
    Sequences of a batch are filled up by repeating a row, where the code computes more rows. The
    paper's decoding by confidence times density is left out: commits are the sampler's matter. Only
    computed masks can be committed.

    Args:
        current_k: Masks that are computed a step.
        sigma: Standard deviation of the Gaussian density in positions.
        rollout_p: Part of the influence, 0 to 1; at least one position is computed for it.
        inflate_w: Distance up to which all rows between two computed ones are computed; 0 for none.

    Reference: d2Cache, arXiv 2509.23094, section 4, and its released code.
    """

    current_k: Count = 32
    sigma: Positive = 10.0
    rollout_p: Share = 0.1
    inflate_w: Whole = 4

    def abilities(self) -> tuple[Ability, ...]:
        """Return the ability to compute some rows, and to note what they show."""
        return (NotedRows(),)

    def plan(self, state: State) -> NotedPlan:
        """Return the surest masks, the tokens just committed, and the most influential others.

        Raises ValueError if a step commits more masks than are computed.
        """
        if state.commits > self.current_k:
            raise ValueError(
                f"current_k={self.current_k}: a step commits {state.commits} masks, and so many "
                "are not computed; use a larger current_k, or more steps"
            )
        if state.step == 0:
            return NotedPlan()
        assert isinstance(state.last, NotedPlan)
        notes = {name: x[: len(state.ids)] for name, x in state.last.notes.items()}  # of guidance
        chosen = self._surest(state, notes[CONFIDENCE]) | state.changed
        others = ~chosen if state.valid is None else ~chosen & state.valid
        chosen = chosen | nucleus(notes[INFLUENCE], self.rollout_p, others)
        return NotedPlan(state.plan(filled(chosen, self.inflate_w)).rows)

    def _surest(self, state: State, confidence: Tensor) -> Tensor:
        """Return the masks that are computed for their own sake, bool `[B, T]`."""
        masks = ~state.decided[:, state.prompt :]
        predictors = range(state.prompt - state.shift, state.width - state.shift)
        confidence = confidence[:, predictors.start : predictors.stop]
        scores = confidence * density(~masks, self.sigma)
        scores = scores + state.open[:, state.prompt :] * scores.amax(1, keepdim=True)
        scores = scores.masked_fill(~(masks & self._search(state, masks)), float("-inf"))
        surest = first(scores, self.current_k)
        return torch.cat([torch.zeros_like(state.decided[:, : state.prompt]), surest], dim=1)

    def _search(self, state: State, masks: Tensor) -> Tensor:
        """Return the positions of the answer up to the block that the k-th mask is in, bool."""
        enough = masks.cumsum(1) >= self.current_k
        kth = enough.int().argmax(1).where(enough.any(1), masks.shape[1] - 1)
        size = state.rows[0].stop - state.rows[0].start
        last = (kth // size + 1) * size
        return torch.arange(masks.shape[1], device=masks.device) < last[:, None]


def density(decided: Tensor, sigma: float) -> Tensor:
    """Return how much of the answer around each position is decided, `[B, n]`, 0 to 1, by a Gaussian over positions.

    Tokens before the answer count as decided, and those after it if its last token is.
    """
    size = decided.shape[1]
    after = decided[:, -1:].expand(-1, size)
    around = torch.cat([torch.ones_like(decided), decided, after], dim=1).double()
    kernel, total = _gaussian(size, sigma, decided.device)
    return around @ kernel / total


@lru_cache(maxsize=8)
def _gaussian(size: int, sigma: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the densities at `size` positions of three times as many, and the sum of all.

    They are the same in every step of a decoding, and cost more than all else in a plan.
    """
    with torch.inference_mode(False):  # kept for callers of either kind
        at = torch.arange(3 * size, device=device)
        distance = at - at[size : 2 * size, None]
        kernel = (-(distance.double() ** 2) / (2 * sigma**2)).exp()
        every = torch.arange(-3 * size, 3 * size, device=device).double()
        return kernel.mT, (-(every**2) / (2 * sigma**2)).exp().sum()


def nucleus(scores: Tensor, part: float, among: Tensor) -> Tensor:
    """Return the positions with the largest scores, together at most a part of all, bool `[B, T]`.

    Scores are at least 0, `[B, T]`, and those that can be taken bool `[B, T]`; the largest one is taken in any case.
    """
    shares = (scores * among).double()
    shares = shares / (shares.sum(1, keepdim=True) + 1e-9)
    ordered, order = shares.sort(dim=1, descending=True, stable=True)
    taken = ordered.cumsum(1) <= part
    taken[:, 0] = True
    return torch.zeros_like(among).scatter_(1, order, taken) & among


def filled(chosen: Tensor, distance: int) -> Tensor:
    """Return chosen positions, bool `[B, T]`, with all between two of them that are at most a distance apart."""
    width = chosen.shape[1]
    at = torch.arange(width, device=chosen.device)
    before = at.where(chosen, -width - distance).cummax(1).values
    after = at.where(chosen, 2 * width + distance).flip(1).cummin(1).values.flip(1)
    return chosen | (after - before <= distance)


class Noting(NamedTuple):
    """Inputs of the notes of one forward."""

    at: Tensor  # positions of the rows, int64 `[B, n]`, filled up by repeating the last one
    valid: Tensor | None  # positions that are no padding, bool `[B, T]`; None for all
    before: Tensor | None  # confidence so far, `[B, T]`; None before the first forward, which is of all rows
    attention: list[Tensor]  # mean attention over heads of the rows, `[B, n, T]`, of every layer

    def begun(self) -> Noting:
        """Return the same before the first layer of a forward."""
        return self._replace(attention=[])

    def notes(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return confidence and influence of all positions, `[B, T]` each, by the logits of the rows, `[B, n, V]`."""
        found = logits.to(torch.promote_types(logits.dtype, torch.float32))
        sure = (found.amax(-1) - found.logsumexp(-1)).exp()
        before = sure.new_zeros(self.attention[0][:, 0].shape) if self.before is None else self.before
        return before.scatter(1, self.at, sure), self.influence()

    def influence(self) -> Tensor:
        """Return the column sums of the attention rollout, `[B, T]`."""
        index, flow = self.at, torch.ones_like(self.attention[0][:, 0])
        if self.valid is not None:
            flow = flow * self.valid
        half_real = torch.full_like(index, 0.5, dtype=flow.dtype)
        half_real[:, 1:] = (index[:, 1:] != index[:, :-1]) / 2  # others fill up
        for weights in reversed(self.attention):
            half = flow.gather(1, index) * half_real
            spread = (half[:, None] @ weights)[:, 0]
            flow = flow.scatter_add(1, index, -half) + spread
        return flow
