"""One decoding: its tokens, the block each sequence is in, and the commits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffcache.dllm.rows import RowPlan
from diffcache.dllm.sampler import Sampler
from diffcache.dllm.state import RowState, State
from diffcache.method import check_int


@dataclass(frozen=True)
class Schedule:
    """How an answer is decoded: its length, in blocks from left to right, and in how many steps.

    Args:
        length: Tokens of the answer, masks at first.
        block: Tokens of a block; None for one block.
        steps: Forwards of the whole answer, shared out evenly over its blocks, for rules with a
            fixed number of commits; None for one a token. Other rules take as many as they need.
        eos_id: Token that ends an answer. A sequence that has it in a finished block is filled up
            with it and done. None decodes the whole length.
        multiple: Number that the rows of a forward are filled up to a multiple of.

    Raises:
        ValueError: If blocks do not divide the length, or steps the blocks.
    """

    length: int = 128
    block: int | None = 32
    steps: int | None = None
    eos_id: int | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        check_int("length", self.length, 1)
        check_int("multiple", self.multiple, 1)
        if self.block is not None:
            check_int("block", self.block, 1)
            if self.length % self.block:
                raise ValueError(
                    f"block={self.block}: must divide length={self.length}; use block=None for one "
                    "block"
                )
        if self.steps is not None:
            check_int("steps", self.steps, 1)
            blocks = self.length // self.size
            if self.steps % blocks or self.steps > self.length:
                raise ValueError(
                    f"steps={self.steps}: must be a multiple of the {blocks} blocks, and at most "
                    f"length={self.length}"
                )

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return self.length if self.block is None else self.block

    @property
    def steps_a_block(self) -> int:
        """Steps of a block, for rules with a fixed number of commits."""
        return self.size if self.steps is None else self.steps * self.size // self.length


class Decoding:
    """The tokens of a batch while masks become words, block by block.

    Attributes:
        ids: Tokens, int64 `[B, T]`, prompts first.
        valid: Positions that are no padding, bool `[B, T]`; None where there is no padding.
        prompt: Columns before the answer.
        step: Forwards so far.
        rows: Where each sequence is.

    Args:
        prompts: Tokens of the prompts, int64 `[B, P]`, padded on the left.
        schedule: How the answer is decoded.
        sampler: Sampler.
        mask_id: Token of the mask.
        valid: Tokens of the prompts that are no padding, bool `[B, P]`; None for all.

    Raises:
        ValueError: If a prompt is not int64 `[B, P]` or holds the mask, or padding is not on the
            left.
    """

    def __init__(
        self,
        prompts: Tensor,
        schedule: Schedule,
        sampler: Sampler,
        mask_id: int,
        valid: Tensor | None = None,
    ) -> None:
        _check_prompts(prompts, mask_id, valid)
        batch, self.prompt = prompts.shape
        self.schedule, self.sampler, self.mask_id = schedule, sampler, mask_id
        answer = prompts.new_full((batch, schedule.length), mask_id)
        self.ids = torch.cat([prompts, answer], dim=1)
        self.valid: Tensor | None = None
        if valid is not None and not bool(valid.all()):
            self.valid = torch.cat([valid, torch.ones_like(answer, dtype=torch.bool)], dim=1)
        self._before = self.ids != mask_id
        self._changed = torch.zeros_like(self._before)
        self._generator = torch.Generator(prompts.device).manual_seed(sampler.seed)
        self._quotas = sampler.rule.quotas(schedule.size, schedule.steps_a_block)
        self.step = 0
        stop = self.prompt + schedule.size
        self.rows = [RowState(self.prompt, stop, 0, 0) for _ in range(batch)]
        self._order = self._drawn() if sampler.by == "random" else None

    @property
    def is_finished(self) -> bool:
        """Whether every sequence is decoded."""
        return not any(row.is_active for row in self.rows)

    @property
    def state(self) -> State:
        """What a policy sees."""
        decided = self.ids != self.mask_id
        at = self._positions()
        masks = ~decided.gather(1, at)
        upcoming = None
        if self._order is not None:
            scores = self._order.gather(1, at - self.prompt).masked_fill(~masks, float("-inf"))
            upcoming = self._spread(at, self._by_quota(scores))
        return State(
            self.ids, decided, self._before, self._changed, self.prompt, self.step,
            tuple(self.rows), self._spread(at, masks), self.valid, upcoming,
            self.schedule.multiple,
        )  # fmt: skip

    def commit(self, logits: Tensor, plan: RowPlan) -> None:
        """Decide masks by the logits of a forward, and go on to the next step.

        Args:
            logits: Logits of the rows of the plan, `[B, n, V]`.
            plan: The rows.
        """
        batch, width = self.ids.shape
        at = self._positions()
        rows = plan.index(batch, width, self.ids.device).contiguous()
        place = torch.searchsorted(rows, at).clamp_max(rows.shape[1] - 1)
        is_fed = rows.gather(1, place) == at
        chunk = logits.gather(1, place[..., None].expand(-1, -1, logits.shape[-1]))
        tokens, scores = self.sampler.candidates(chunk, self.mask_id, self._generator)
        if self._order is not None:
            scores = self._order.gather(1, at - self.prompt)
        held = self.ids.gather(1, at)
        scores = scores.masked_fill(~(is_fed & (held == self.mask_id)), float("-inf"))
        if not all(row.is_active for row in self.rows):
            going = torch.tensor([[row.is_active] for row in self.rows], device=scores.device)
            scores = scores.masked_fill(~going, float("-inf"))
        chosen = self._by_quota(scores)
        self._before = self.ids != self.mask_id
        ids = self.ids.scatter(1, at, torch.where(chosen, tokens, held))
        self._changed = ids != self.ids
        self.ids = ids
        self.step += 1
        self._advance()

    # the blocks ----------------------------------------------------------------------------

    def _by_quota(self, scores: Tensor) -> Tensor:
        """Return what is committed; with a fixed number, all sequences are at one step."""
        step = next((row.step for row in self.rows if row.is_active), 0)
        quota = self._quotas[step] if self.sampler.rule.is_fixed else 1
        return self.sampler.rule.choose(scores, quota)

    def _positions(self) -> Tensor:
        """Return the positions of each sequence's block, int64 `[B, n]`."""
        starts = torch.tensor([[row.start] for row in self.rows], device=self.ids.device)
        return starts + torch.arange(self.schedule.size, device=self.ids.device)

    def _spread(self, at: Tensor, flags: Tensor) -> Tensor:
        """Return flags of a block's positions as flags of all positions, bool `[B, T]`."""
        return torch.zeros_like(self.ids, dtype=torch.bool).scatter_(1, at, flags)

    def _drawn(self) -> Tensor:
        """Draw the order of all commits, `[B, length]`, the largest first."""
        size = (len(self.ids), self.schedule.length)
        return torch.rand(size, dtype=torch.float64, device=self.ids.device,
                          generator=self._generator)  # fmt: skip

    def _advance(self) -> None:
        """Go on to the next step, and to the next block where one is decided."""
        if self.sampler.rule.is_fixed:
            done = [row.step + 1 == len(self._quotas) for row in self.rows]
        else:
            masks = self.ids.gather(1, self._positions()) == self.mask_id
            done = [not any_left for any_left in masks.any(1).tolist()]
        ends = [is_done and row.is_active for is_done, row in zip(done, self.rows, strict=True)]
        ended = self._ended() if any(ends) else []
        for number, row in enumerate(self.rows):
            if not row.is_active:
                continue
            if not ends[number]:
                self.rows[number] = replace(row, step=row.step + 1)
            elif row.stop == self.ids.shape[1] or ended[number]:
                self.rows[number] = replace(row, is_active=False)
                self._fill(number)
            else:
                stop = row.stop + self.schedule.size
                self.rows[number] = RowState(row.stop, stop, 0, row.block + 1)

    def _ended(self) -> list[bool]:
        """Return which sequences have the token that ends an answer; the host waits."""
        eos = self.schedule.eos_id
        if eos is None:
            return [False] * len(self.rows)
        found: list[bool] = (self.ids[:, self.prompt :] == eos).any(1).tolist()
        return found

    def _fill(self, number: int) -> None:
        """Fill a sequence that is done up with the token that ends it."""
        if self.schedule.eos_id is not None:
            row = self.ids[number]
            self.ids[number] = row.where(row != self.mask_id, self.schedule.eos_id)


def _check_prompts(prompts: Tensor, mask_id: int, valid: Tensor | None) -> None:
    """Raise unless prompts can be decoded from.

    Raises:
        ValueError: If they cannot.
    """
    if prompts.dim() != 2 or prompts.dtype != torch.int64 or not prompts.numel():
        raise ValueError(
            f"prompts={list(prompts.shape)} of {prompts.dtype}: must be int64 [B, P], with at "
            "least one token a sequence"
        )
    if bool((prompts == mask_id).any()):
        raise ValueError(
            f"prompts: hold the mask, token {mask_id}, which would never be decided; take it out, "
            "or say mask_id"
        )
    if valid is None:
        return
    if valid.shape != prompts.shape or valid.dtype != torch.bool:
        raise ValueError(
            f"valid={list(valid.shape)} of {valid.dtype}: must be bool {list(prompts.shape)}"
        )
    if not bool(valid[:, -1].all()) or bool((valid[:, :-1] & ~valid[:, 1:]).any()):
        raise ValueError("valid: padding must be on the left of each prompt; pad on the left")
