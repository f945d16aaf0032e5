"""dLLM-Cache: outputs of attention and feed-forward are kept, of the answer all but a few."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.dllm.policy import Policy
from diffcache.dllm.rows import RowPlan
from diffcache.dllm.state import State
from diffcache.method import Ability
from diffcache.ranges import Count, Share


@dataclass(frozen=True, eq=False)
class BranchPlan(RowPlan):
    """All rows, and of which of them each layer computes its attention and feed-forward anew."""

    prompt: int = 0  # columns before the rows of the answer, padding among them
    renews_prompt: bool = True  # whether every layer computes all rows of the prompt
    renews_answer: bool = True  # whether every layer computes all rows of the answer, instead of a few


@dataclass(frozen=True)
class BranchRows(Ability):
    """Compute attention and feed-forward of some rows in each layer, and serve those held.

    Args:
        ratio: Part of the answer's rows that a layer computes where it does not compute them all.
    """

    ratio: float

    def choose(self, new: Tensor, old: Tensor) -> Tensor:
        """Return the rows whose values, `[B, T, D]`, changed their direction most, int64 `[B, n]`, ascending.

        All heads of a row count together. Of equal ones the first are taken.
        """
        work = torch.promote_types(new.dtype, torch.float32)
        alike = functional.cosine_similarity(new.to(work), old.to(work), dim=-1)
        count = int(self.ratio * new.shape[1])
        return alike.argsort(dim=-1, stable=True)[:, :count].sort(dim=-1).values


@dataclass(frozen=True)
class DLLMCache(Policy):
    """Keep each layer's attention and feed-forward outputs, of the prompt long, of the answer less.

    Every forward gives logits of all rows. At most steps a layer computes the values of all rows of
    the answer, and its attention and feed-forward only of those whose values have turned most since
    the step before; what it holds of the other rows is added to their streams. The first layer
    computes all rows.

    Departures: similarity is computed in float32 or better, the published code's in the model's
    precision. A chosen row's value is projected a second time together with its query and key. The
    code's third clock, of the unconditional branch of guidance, is left out: both branches keep
    time together.
    Prompt and answer are told apart by columns, so that prompts of a batch may differ in length;
    where a row predicts the token after its own (Dream), the prompt's last row is the answer's.

    Args:
        prompt_every: Steps from one refresh of the prompt's rows to the next, 1 for every step;
            None for the first step alone.
        answer_every: The same of the answer's rows.
        ratio: Part of the answer's rows, 0 to 1, that a layer computes at the other steps, rounded
            down. 0 is a negative control: what was just decided is not computed.

    Reference: dLLM-Cache, arXiv 2506.06295, section 3. Defaults are the code's for LLaDA on GSM8K.
    """

    prompt_every: Count | None = 50
    answer_every: Count | None = 7
    ratio: Share = 0.25

    def abilities(self) -> tuple[Ability, ...]:
        """Return the ability to compute some rows of each layer."""
        return (BranchRows(self.ratio),)

    def plan(self, state: State) -> BranchPlan:
        """Return which parts every layer computes at this step."""
        prompt = _is_due(self.prompt_every, state.step)
        answer = _is_due(self.answer_every, state.step)
        return BranchPlan(None, state.prompt - state.shift, prompt, answer)


def _is_due(every: int | None, step: int) -> bool:
    """Return whether a refresh is due at a step."""
    return step == 0 or (every is not None and step % every == 0)
