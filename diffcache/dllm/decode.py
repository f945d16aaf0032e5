"""One decoding: its tokens, the block each sequence is in, and the commits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.dllm.guided import Guide, Guided
from diffcache.dllm.rows import RowPlan
from diffcache.dllm.sampler import Sampler
from diffcache.dllm.state import RowState, State
from diffcache.ranges import Count, Settings, Whole


@dataclass(frozen=True)
class Schedule(Settings):
    """Schedule of an answer: its length, in blocks from left to right, and in how many steps.

    Args:
        length: Tokens of the answer, masks at first.
        block: Tokens of a block; None for one block, or for the model's own where its attention is
            causal over blocks. There it divides those, or is a multiple of them and means them.
        steps: Forwards of the whole answer, shared out evenly over its blocks, for rules with a
            fixed number of commits; None for one a token. Other rules take as many as they need.
        eos_id: Token that ends an answer. A sequence that has it in a finished block is filled up
            with it and done. None decodes the whole length.
        multiple: Number that the rows of a forward are filled up to a multiple of.
        window: Masks of a sliding window, the first ones of the block: no others are decided, and
            none after `eos_id`. With `block=None` the window takes the place of blocks. None for
            all masks of the block.

    Raises:
        ValueError: If blocks do not divide the length, or steps the blocks.
    """

    length: Count = 128
    block: Count | None = 32
    steps: Count | None = None
    eos_id: Whole | None = None
    multiple: Count = 1
    window: Count | None = None

    def check(self) -> None:
        """Raise ValueError unless blocks divide the length, and steps the blocks."""
        if self.block is not None and self.length % self.block:
            raise ValueError(f"block={self.block}: must divide length={self.length}; use block=None for one block")
        if self.steps is not None:
            blocks = self.length // self.size
            if self.steps % blocks or self.steps > self.length:
                raise ValueError(
                    f"steps={self.steps}: must be a multiple of the {blocks} blocks, and at most length={self.length}"
                )

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return self.length if self.block is None else self.block


class Decoding:
    """The tokens of a batch while masks become words, block by block.

    Attributes:
        ids: Tokens, int64 `[B, T]`, prompts first.
        valid: Positions that are no padding, bool `[B, T]`; None where there is no padding.
        prompt: Columns before the answer.
        step: Forwards so far.
        rows: Place of each sequence: its active block and step.
        guide: Scores drafts; None where the rule asks for none.
        causal: Tokens of a block of attention; None where every token sees all others.
        width: Positions of a forward: all, or those up to the furthest block of attention so far.
        valid_now: Those of them that are no padding, bool `[B, width]`, one tensor for as long as
            they are the same; None where there is no padding.

    Args:
        prompts: Tokens of the prompts, int64 `[B, P]`, padded on the left.
        schedule: Blocks and steps of the answer.
        sampler: Sampler.
        mask_id: Token of the mask.
        valid: Tokens of the prompts that are no padding, bool `[B, P]`; None for all.
        guide: Scores drafts for the rule `Guided`; None for other rules.
        shift: Whether a row predicts the token after its own (Dream), instead of its own.
        causal: Tokens of a block of attention, counted from each prompt's first token, where a
            token sees its own block and those before it alone; None where it sees all. An answer
            then begins in the block that its prompt ends in, and its last block (of `schedule`) is
            decoded to the end. With `shift`, the last row of a finished block decides the first
            token of the next one, in a forward of its own (Fast-dLLM v2).

    Raises:
        ValueError: If a prompt is not int64 `[B, P]` or holds the mask, padding is not on the left,
            the end token is the mask, a guide is missing, a step commits more than the window, or
            something does not go with blocks of attention.
    """

    def __init__(
        self,
        prompts: Tensor,
        schedule: Schedule,
        sampler: Sampler,
        mask_id: int,
        valid: Tensor | None = None,
        guide: Guide | None = None,
        shift: bool = False,
        causal: int | None = None,
    ) -> None:
        _check_prompts(prompts, mask_id, valid)
        if schedule.eos_id == mask_id:
            raise ValueError(f"eos_id={mask_id}: is the mask, which no answer ends with; give another token, or None")
        if isinstance(sampler.rule, Guided) and guide is None:
            raise ValueError(
                f"rule={sampler.rule!r}: there is no guide; give DiffusionLM(..., guide=...) an "
                "autoregressive model with the same tokenizer, or use another rule"
            )
        if sampler.rule.editing is not None and causal is None:
            raise ValueError(
                f"rule={sampler.rule!r}: edits tokens of models that are causal over blocks; give "
                "DiffusionLM(..., block=...) how many tokens those have, or leave editing out"
            )
        self.guide = guide if isinstance(sampler.rule, Guided) else None
        batch, self.prompt = prompts.shape
        self.schedule, self.sampler, self.mask_id = schedule, sampler, mask_id
        self._shift, self.causal = int(shift), causal
        counts = [self.prompt] * batch if valid is None else valid.sum(1).tolist()
        size, more = schedule.size, 0
        if causal is not None:
            size = _size_within(schedule, sampler, causal)
            more = max(-(count + schedule.length) % causal for count in counts)
        self._size = size
        answer = prompts.new_full((batch, schedule.length + more), mask_id)
        self.ids = torch.cat([prompts, answer], dim=1)
        self.valid: Tensor | None = None
        self.valid_now: Tensor | None = None
        if valid is not None and not bool(valid.all()):
            self.valid = torch.cat([valid, torch.ones_like(answer, dtype=torch.bool)], dim=1)
        self._before = self.ids != mask_id
        self._changed = torch.zeros_like(self._before)
        self._since = torch.full_like(self.ids, -1)
        self._generator = torch.Generator(prompts.device).manual_seed(sampler.seed)
        steps = size if schedule.steps is None else max(schedule.steps * size // schedule.length, 1)
        self._quotas = sampler.rule.quotas(size, min(steps, size))
        self._is_fixed = sampler.rule.is_fixed
        self._most = max(self._quotas) if self._is_fixed else 1
        self._check_window()
        self._block = torch.arange(size, device=prompts.device)
        self._last: RowPlan | None = None
        self._memory: dict[Any, Any] = {}  # of the rule
        self._starts: list[list[int]] = []
        self.step = self.width = 0
        self.rows = [self._first(count) for count in counts]
        self._order = self._drawn() if sampler.by == "random" else None
        self._look()

    @property
    def is_finished(self) -> bool:
        """Return True if every sequence is decoded."""
        return not any(self._active)

    @property
    def answer(self) -> Tensor:
        """Tokens of the answers, int64 `[B, length]`."""
        return self.ids[:, self.prompt : self.prompt + self.schedule.length]

    def settled(self) -> list[list[int]]:
        """Return the tokens of each answer before its first mask, which stay; the host waits."""
        answers: list[list[int]] = self.answer.tolist()
        for number, (ids, row) in enumerate(zip(answers, self.rows, strict=True)):
            if self.sampler.rule.editing is not None and row.is_active:
                ids = ids[: max(row.start - self.prompt, 0)]
            answers[number] = ids[: ids.index(self.mask_id)] if self.mask_id in ids else ids
        return answers

    @property
    def state(self) -> State:
        """Return the view that a policy has."""
        decided = self.ids != self.mask_id
        at, may, upcoming, width = self._at, self._may, None, self.width
        if self._order is not None:
            upcoming = self._spread(at, self._by_quota(self._drawn_scores(may)))[:, :width]
        return State(
            self.ids[:, :width],
            decided[:, :width],
            self._before[:, :width],
            self._changed[:, :width],
            self._since[:, :width],
            self.prompt,
            self.step,
            tuple(self.rows),
            self._spread(at, may)[:, :width],
            self.valid_now,
            upcoming,
            None if self._order is None else self._order[:, : width - self.prompt],
            self.schedule.multiple,
            self._most,
            self._last,
            self._shift,
        )

    def commit(self, logits: Tensor, plan: RowPlan) -> None:
        """Decide masks by the logits of a plan's rows, `[B, n, V]`, and go on to the next step.

        Raises ValueError if masks are left that nothing decides, as where logits are NaN.
        """
        at = self._at
        chunk, fed = self._predicted(logits, plan)
        if not all(self._active):
            going = torch.tensor(self._active, device=fed.device)[:, None]
            fed = fed & going
        may = self._may & fed
        chunk = self.sampler.rule.weighed(chunk, may, self.rows, self._memory)
        tokens, sure = self.sampler.candidates(chunk, self.mask_id, self._generator)
        if self._order is not None:
            scores = self._drawn_scores(may & sure.isfinite())
        else:
            scores = sure.masked_fill(~may, float("-inf"))
        if self.guide is not None:
            scores = self._judged(at, tokens, scores.isfinite())
        held = self.ids.gather(1, at)
        chosen = self._by_quota(scores)
        if self.sampler.rule.editing is not None:
            decided = (held != self.mask_id) & (at >= self.prompt) & fed
            chosen = chosen | (decided & (tokens != held) & (sure > self.sampler.rule.editing))
        self._before = self.ids != self.mask_id
        ids = self.ids.scatter(1, at, torch.where(chosen, tokens, held))
        self._changed = ids != self.ids
        self._since = self._since.masked_fill(self._changed, self.step)
        self.ids = ids
        self._last = plan
        self.step += 1
        if self.causal is None:
            self._advance()
        else:
            self._advance_within(plan)
        self._look()

    def _predicted(self, logits: Tensor, plan: RowPlan) -> tuple[Tensor, Tensor]:
        """Return the logits of the blocks' tokens, `[B, n, V]`, and which of them there are."""
        batch, width = len(self.ids), self.width
        run = range(width) if plan.rows is None else plan.rows
        starts = {row.start - self._shift for row in self.rows}
        if isinstance(run, range) and len(starts) == 1:  # the same place in every sequence
            first = starts.pop() - run.start
            if 0 <= first <= len(run) - self._size:
                there = torch.ones_like(self._may)
                return logits[:, first : first + self._size], there
        rows = plan.index(batch, width, self.ids.device).contiguous()
        row = self._at - self._shift  # the one that predicts; a prompt has at least one
        place = torch.searchsorted(rows, row).clamp_max(rows.shape[1] - 1)
        is_fed = rows.gather(1, place) == row
        chunk = logits.gather(1, place[..., None].expand(-1, -1, logits.shape[-1]))
        return chunk, is_fed

    # the blocks ----------------------------------------------------------------------------

    def _check_window(self) -> None:
        """Raise ValueError unless the window has room for the commits of a step, so that no masks are left over."""
        window = self.schedule.window
        if window is not None and self._most > window:
            raise ValueError(
                f"window={window}: a step commits {self._most} masks; use more steps, or a window "
                f"of at least {self._most}"
            )

    def _by_quota(self, scores: Tensor) -> Tensor:
        """Return the tokens to commit, bool `[B, n]`.

        With a fixed number all sequences are at one step, except where prompts end in the midst of
        blocks of attention.
        """
        if self.causal is not None or not self._is_fixed:
            last = len(self._quotas) - 1
            quotas = [[self._quotas[min(row.step, last)]] for row in self.rows]
            counts = torch.tensor(quotas, device=scores.device)
            return self.sampler.rule.commit(scores, counts, self.rows, self._memory)
        active = self._active.index(True) if True in self._active else 0
        step = self.rows[active].step
        return self.sampler.rule.choose(scores, self._quotas[step])

    def _judged(self, at: Tensor, tokens: Tensor, candidates: Tensor) -> Tensor:
        """Return the scores that the guide gives a draft, `[B, n]`."""
        rule, guide, eos = self.sampler.rule, self.guide, self.schedule.eos_id
        assert isinstance(rule, Guided)
        assert guide is not None
        draft = tokens.where(candidates, self.ids.gather(1, at))
        logits = guide(self.ids.scatter(1, at, draft), at, candidates, self.valid)
        ends = draft == self.mask_id  # a mask that was not computed
        if eos is not None:
            ends |= draft == eos
        return rule.scores(draft, logits, candidates, ends)

    def _look(self) -> None:
        """Find out which sequences are decoded, and their blocks' positions and open masks."""
        self._active = [row.is_active for row in self.rows]
        starts = [[row.start] for row in self.rows]
        if starts != self._starts:
            self._starts = starts
            self._at = torch.tensor(starts, device=self.ids.device) + self._block
        self._may = self._may_commit()
        if self.valid is not None and (self.valid_now is None or self.valid_now.shape[1] != self.width):
            self.valid_now = self.valid[:, : self.width]

    def _may_commit(self) -> Tensor:
        """Return which positions of each sequence's block may be decided, bool `[B, n]`."""
        held = self.ids.gather(1, self._at)
        masks = held == self.mask_id
        if not all(row.is_filled for row in self.rows):
            filled = torch.tensor([row.is_filled for row in self.rows], device=masks.device)
            masks = masks & filled[:, None]
        if any(row.leads for row in self.rows):
            leads = torch.tensor([row.leads for row in self.rows], device=masks.device)
            masks = masks & ~(leads[:, None] & (self._block > 0))
        if self.schedule.window is None:
            return masks
        if self.schedule.eos_id is not None:
            ends = (held == self.schedule.eos_id) & (self._at >= self.prompt)  # not of the prompt
            masks = masks & (ends.cumsum(1) == 0)
        return masks & (masks.cumsum(1) <= self.schedule.window)

    def _spread(self, at: Tensor, flags: Tensor) -> Tensor:
        """Return flags of a block's positions as flags of all positions, bool `[B, T]`."""
        return torch.zeros_like(self.ids, dtype=torch.bool).scatter_(1, at, flags)

    def _drawn(self) -> Tensor:
        """Draw the order of all commits, `[B, length]`, the largest first."""
        size = (len(self.ids), self.ids.shape[1] - self.prompt)
        return torch.rand(size, dtype=torch.float64, device=self.ids.device, generator=self._generator)

    def _drawn_scores(self, may: Tensor) -> Tensor:
        """Return the places in the order drawn, `[B, n]`, the largest first, -inf elsewhere."""
        assert self._order is not None
        places = (self._at - self.prompt).clamp_min(0)  # a block may begin within the prompt
        return self._order.gather(1, places).masked_fill(~may, float("-inf"))

    def _advance(self) -> None:
        """Go on to the next step, and to the next block where one is decided."""
        is_fixed = self._is_fixed
        ends_early = self.schedule.window is not None and self.schedule.eos_id is not None
        done = is_last = [row.step + 1 == len(self._quotas) for row in self.rows]
        if not is_fixed or ends_early or any(is_last):
            open_ = self._may_commit().any(1)
            left, committed = torch.stack([open_, self._changed.any(1)]).tolist()
            self._check_goes_on(left, is_last if is_fixed else [not any_ for any_ in committed])
            if not is_fixed or ends_early:
                done = [not any_left for any_left in left]
        if self.guide is not None:  # drafts end with the token that ends the answer
            done = [one or end for one, end in zip(done, self._ended().tolist(), strict=True)]
        ends = [is_done and row.is_active for is_done, row in zip(done, self.rows, strict=True)]
        ended = self._ended().tolist() if any(ends) else []
        for number, row in enumerate(self.rows):
            if not row.is_active:
                continue
            if not ends[number]:
                self.rows[number] = replace(row, step=row.step + 1)
            elif row.stop == self.ids.shape[1] or ended[number]:
                self.rows[number] = replace(row, is_active=False)
                self._fill(number)
            else:
                stop = row.stop + self._size
                self.rows[number] = RowState(row.stop, stop, 0, row.block + 1)

    # blocks of attention -------------------------------------------------------------------

    def _first(self, count: int) -> RowState:
        """Return the place of a sequence, whose prompt has `count` tokens, before its first forward."""
        if self.causal is None:
            self.width = self.ids.shape[1]
            return RowState(self.prompt, self.prompt + self._size, 0, 0)
        origin, start = self.prompt - count, self.prompt - count % self._size
        begin = start - (start - origin) % self.causal
        row = RowState(start, start + self._size, 0, 0, final=origin, known=origin)
        leads = bool(self._shift) and begin == self.prompt
        row = replace(row, span=range(begin, begin + self.causal), leads=leads)
        self._widen(row)
        return row

    def leave(self, number: int) -> None:
        """Stop decoding a sequence."""
        self.rows[number] = replace(self.rows[number], is_active=False)
        self._look()

    def place(self, number: int, prompt: list[int], fill: int = 0) -> None:
        """Put a prompt in the place of a sequence that is done, in a model causal over blocks.

        It is no longer than the columns before the answer. A forward computes `fill` of its tokens
        at most, so that others need not compute as many rows along with them; 0 for all at once.
        """
        assert self.causal is not None
        count, whole = len(prompt), len(prompt) + self.schedule.length
        more = self.prompt - count + whole + -whole % self.causal - self.ids.shape[1]
        pad = (0, max(more, 0))  # its last block may end later than all before
        valid = torch.ones_like(self._before) if self.valid is None else self.valid
        ids = functional.pad(self.ids, pad, value=self.mask_id)
        ids[number] = self.mask_id
        ids[number, : self.prompt] = 0 if self.mask_id else 1  # what nothing sees
        start = self.prompt - count
        ids[number, start : self.prompt] = ids.new_tensor(prompt)
        self.ids, self.valid = ids, functional.pad(valid, pad, value=True)
        self.valid[number] = torch.arange(ids.shape[1], device=ids.device) >= start
        self._before, self._changed = ids != self.mask_id, functional.pad(self._changed, pad)
        self._since = functional.pad(self._since, pad, value=-1)
        self._changed[number], self._since[number] = False, -1
        if self._order is not None:
            self._order = functional.pad(self._order, pad)
        self.rows[number] = replace(self._first(count), fill=fill - fill % self.causal)
        self.valid_now = None
        self._look()

    def _widen(self, row: RowState) -> None:
        """Let forwards reach the end of a sequence's block of attention, its start if it leads."""
        self.width = max(self.width, row.span.start if row.leads else row.span.stop)

    def _advance_within(self, plan: RowPlan) -> None:
        """Go on to the next step, where attention is causal over blocks; the host waits once."""
        after = self.ids.gather(1, self._at)
        before = self._before.gather(1, self._at)
        left, new = after == self.mask_id, self._changed.gather(1, self._at)
        facts = torch.stack([left, ~before, new & ~before, new & before]).any(2)
        masks, had, decided, edited, ended = torch.cat([facts, self._ended()[None]]).tolist()
        waits = [any_ and row.is_filled for any_, row in zip(had, self.rows, strict=True)]
        over = [  # a fixed number may be 0 at first
            not any_ and (not self._is_fixed or row.step + 1 >= len(self._quotas))
            for any_, row in zip(decided, self.rows, strict=True)
        ]
        self._check_goes_on(waits, over)
        rule = self.sampler.rule
        for number, row in enumerate(self.rows):
            if not row.is_active:
                continue
            if not row.is_filled:
                self.rows[number] = replace(row, final=row.final + row.fill)
                continue
            span, run = row.span, range(self.width) if plan.rows is None else plan.rows
            row = replace(  # a forward computes what was not computed as it stays
                row, final=max(row.final, span.start), known=max(row.known, span.start if row.leads else span.stop)
            )
            is_over = row.step + 1 >= len(self._quotas)
            if row.leads:
                done, row = False, replace(row, leads=False)
            elif had[number]:
                done = not masks[number] and (rule.editing is None or is_over)
                row = replace(row, step=row.step + 1)
            else:
                row = replace(row, edits=row.edits + 1)
                done = not edited[number] or row.edits > rule.post_steps
                is_whole = isinstance(run, range) and run[0] <= span.start and span[-1] <= run[-1]
                if is_whole and row.stop == span.stop and not edited[number]:
                    row = replace(row, final=span.stop)  # looked at as it stays
            if ended[number] or (done and row.stop >= self.prompt + self.schedule.length):
                self.rows[number] = replace(row, is_active=False)
                self._fill(number)
                continue
            self.rows[number] = row = self._next(row) if done else row
            self._widen(row)

    def _next(self, row: RowState) -> RowState:
        """Return the place of a sequence at the start of its next block."""
        is_new = row.stop == row.span.stop
        return replace(
            row,
            start=row.stop,
            stop=row.stop + self._size,
            step=0,
            block=row.block + 1,
            span=range(row.stop, row.stop + len(row.span)) if is_new else row.span,
            leads=is_new and bool(self._shift),
            edits=0,
        )

    # the end -------------------------------------------------------------------------------

    def _check_goes_on(self, left: list[bool], is_over: list[bool]) -> None:
        """Raise ValueError if a sequence has masks left in its block, and no step decides any more of them."""
        for number, row in enumerate(self.rows):
            if row.is_active and left[number] and is_over[number]:
                raise ValueError(
                    f"step {self.step - 1}: masks of sequence {number} could not be decided; "
                    "either their logits are not finite (NaN in float16, say: use bfloat16 or "
                    "float32), or the policy did not compute them"
                )

    def _ended(self) -> Tensor:
        """Return which sequences have the token that ends an answer, bool `[B]`."""
        eos, answer = self.schedule.eos_id, self.answer
        if eos is None:
            return torch.zeros_like(answer[:, 0], dtype=torch.bool)
        settled = (answer != self.mask_id).cumprod(1).bool()
        return (settled & (answer == eos)).any(1)

    def _fill(self, number: int) -> None:
        """Fill a sequence that is done up with the token that ends it."""
        if self.schedule.eos_id is not None:
            row = self.ids[number]
            self.ids[number] = row.where(row != self.mask_id, self.schedule.eos_id)


def _size_within(schedule: Schedule, sampler: Sampler, causal: int) -> int:
    """Return the tokens of a block that are decided at a time, within blocks of attention, without guidance."""
    size = causal if schedule.block is None else min(schedule.block, causal)
    if causal % size or (schedule.block or size) % size:
        raise ValueError(
            f"block={schedule.block}: must divide the {causal} tokens that the model's attention "
            "is causal over, or be a multiple of them; use block=None for those"
        )
    is_guided = isinstance(sampler.rule, Guided)
    for name, setting in (("cfg_scale", sampler.cfg_scale), ("rule", is_guided and sampler.rule)):
        if setting:
            raise ValueError(
                f"{name}={setting!r}: is for models that attend both ways; this one is causal over "
                f"blocks of {causal} tokens, use another"
            )
    return size


def _check_prompts(prompts: Tensor, mask_id: int, valid: Tensor | None) -> None:
    """Raise ValueError unless prompts can be decoded from."""
    if prompts.dim() != 2 or prompts.dtype != torch.int64 or not prompts.numel():
        raise ValueError(
            f"prompts={list(prompts.shape)} of {prompts.dtype}: must be int64 [B, P], with at "
            "least one token a sequence"
        )
    if bool((prompts == mask_id).any()):
        raise ValueError(
            f"prompts: hold the mask, token {mask_id}, which would never be decided; take it out, or say mask_id"
        )
    if valid is None:
        return
    if valid.shape != prompts.shape or valid.dtype != torch.bool:
        raise ValueError(f"valid={list(valid.shape)} of {valid.dtype}: must be bool {list(prompts.shape)}")
    if not bool(valid[:, -1].all()) or bool((valid[:, :-1] & ~valid[:, 1:]).any()):
        raise ValueError("valid: padding must be on the left of each prompt; pad on the left")
