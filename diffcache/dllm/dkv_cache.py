"""dKV-Cache: keys and values of decided tokens are kept, one step after they were decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diffcache.dllm.policy import Policy
from diffcache.dllm.rows import ALL, RowPlan
from diffcache.dllm.state import RowState, State
from diffcache.ranges import Count, Whole

Variant = Literal["decode", "greedy", "prefill", "pd"]
Center = Literal["next", "previous"]
_EVERY: dict[str, int | None] = {"decode": 8, "greedy": 2, "prefill": None, "pd": 4}


@dataclass(frozen=True)
class DKVCache(Policy):
    """Keep keys and values of tokens that have been decided for a step.

    A token's keys and values change most when it turns from mask to word, so they are kept only
    once the word has been computed (the one-step delay). The variants:

    - `decode` computes all that was not decided before the last commit. The first two steps of a
      block, and one step in `every` of it, compute all rows.
    - `greedy` computes what is committed now, what was committed last, and a window of masks.
      One step in `every` of a block computes all rows. The order has to be drawn beforehand.
    - `prefill` computes the prompt once, and the answer at every step.
    - `pd` computes the prompt once, and of the answer what `decode` would; one step in `every` of
      the decoding computes the whole answer.

    Departures: the paper's prefill and PD leave out the prompt's last position, which predicts the
    first token of models with shifted outputs (Dream). For these, the code keeps a row by whether
    its own token is decided, or the next one (`right`, `un`); here every row is kept by its own
    token, and the row before each token that may be committed is computed besides. The window of
    `center="previous"` is the paper's, as wide as that of the code: `window` positions around each
    token, half of them before it.

    Args:
        variant: `decode`, `greedy`, `prefill` or `pd`.
        every: Steps from one refresh to the next, 1 for no cache; None for the paper's setting: 8
            for `decode`, 2 for `greedy`, 4 for `pd`. `prefill` has no refresh.
        delay: Whether a token is computed once after its commit. False is a negative control, which
            freezes tokens with the keys and values of their masks.
        window: Masks that are computed along with each token, for `greedy`; None for 4.
        center: Tokens that the window of `greedy` lies around: those of the coming commit, in the
            order drawn, each with the masks nearest to it that the window does not have yet
            (`next`, the published code), or those of the last one, contiguous (`previous`, the
            paper).

    Reference: dKV-Cache, arXiv 2505.15781, section 3.
    """

    variant: Variant = "decode"
    every: Count | None = None
    delay: bool = True
    window: Whole | None = None
    center: Center = "next"

    def check(self) -> None:
        """Raise ValueError unless settings are those of the variant."""
        if self.every is not None and self.variant == "prefill":
            raise ValueError(
                f"every={self.every!r}: variant='prefill' has no refresh; leave it out, or use variant='pd'"
            )
        if self.variant != "greedy" and (self.window is not None or self.center != "next"):
            raise ValueError(
                f"window={self.window!r}, center={self.center!r}: variant={self.variant!r} has no "
                "window; leave them out, or use variant='greedy'"
            )
        if self.variant in ("prefill", "greedy") and not self.delay:
            raise ValueError(f"delay=False: variant={self.variant!r} has no delay; use 'decode' or 'pd'")

    @property
    def needs_order(self) -> bool:
        """Return True if the order of commits has to be drawn beforehand."""
        return self.variant == "greedy" and self.interval > 1

    @property
    def interval(self) -> int:
        """Steps from one refresh to the next; 0 where there is none."""
        return (_EVERY[self.variant] or 0) if self.every is None else self.every

    def plan(self, state: State) -> RowPlan:
        """Return the rows that were not decided long enough, or all of them."""
        if state.step == 0:
            return ALL
        if self.variant == "prefill":
            return state.runs(lambda _: range(state.prompt, state.width))
        late = ~(state.before if self.delay else state.decided)
        if self.variant == "pd":
            if state.step % self.interval == 0:
                return state.runs(lambda _: range(state.prompt, state.width))
            return state.plan(late & state.answer)
        if self.variant == "decode":
            return state.plan(late, whole=lambda row: row.step < 2 or self._refreshes(row))
        if self.interval == 1:
            return ALL
        assert state.upcoming is not None
        near = self._window(state, state.upcoming)
        return state.plan(state.upcoming | state.committed | near, whole=self._refreshes)

    def _refreshes(self, row: RowState) -> bool:
        return row.step % self.interval == 0

    def _window(self, state: State, upcoming: Tensor) -> Tensor:
        """Return the masks that are computed along with a commit, bool `[B, T]`."""
        size = 4 if self.window is None else self.window
        masks = ~state.decided
        if self.center == "next":
            assert state.order is not None
            order = state.order.masked_fill(~upcoming[:, state.prompt :], float("-inf"))
            centers = order.argsort(dim=1, descending=True)[:, : state.commits] + state.prompt
            centers = centers.where(upcoming.gather(1, centers), -1)
            return nearest(centers, masks & ~upcoming, size)
        around = torch.zeros_like(masks)
        at = torch.arange(state.width, device=masks.device)
        for shift in range(-(size // 2), size - size // 2 + 1):
            moved = state.committed.roll(shift, dims=1)
            inside = (at - shift >= 0) & (at - shift < state.width)
            around |= moved & inside
        return around & masks


def nearest(centers: Tensor, masks: Tensor, count: int) -> Tensor:
    """Return the masks that are nearest to any center, bool `[B, T]`; of two at one distance the left one.

    Each center, int64 `[B, n]`, -1 for none, gets `count` of them. Centers take turns: masks that
    one has taken are not taken by those after it, which look further.
    """
    width = masks.shape[1]
    at = torch.arange(width, device=masks.device)
    taken = torch.zeros_like(masks)
    for center in centers[:, :, None].unbind(1):
        free = masks & ~taken & (center >= 0)
        order = (2 * (at - center).abs() - (at < center).long()).where(free, 2 * width)
        near = torch.zeros_like(taken).scatter_(1, order.argsort(dim=1)[:, :count], True)
        taken = taken | near & free
    return taken
