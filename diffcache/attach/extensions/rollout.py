"""Computes planned rows, and notes on the plan what the next one is made by (d2Cache).

The notes are how sure the model is of each position, and how much attention flows from it. Weights
of attention are computed besides the model's own attention, which does not hand them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.attach.call import Call, current_call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extensions.row_inputs import PLAN, Held
from diffcache.attach.extensions.rows import Rows
from diffcache.attach.extensions.rows import install as install_rows
from diffcache.attach.run import Run
from diffcache.dllm.d2_cache import CONFIDENCE, INFLUENCE, NotedPlan, NotedRows, influence
from diffcache.dllm.rows import RowPlan
from diffcache.errors import AttachError
from diffcache.kv.attend import Query, logits
from diffcache.kv.layer import KVLayer

NOTED = "noted"  # in a call's storage: the plan, and attention of every layer so far


@dataclass(eq=False)
class HeldConfidence(Held[KVLayer]):
    """Keys, values and confidence of one run.

    Attributes:
        confidence: Probability of the most probable token when each position was last computed,
            `[B, T]`.
    """

    confidence: Tensor | None = None


class Rollout(Rows):
    """Computes the planned rows and notes confidence and influence on the plan."""

    holds = HeldConfidence

    def tensors(self, run: Run) -> Iterator[Tensor]:
        """Yield the keys, values and confidence of a run."""
        yield from super().tensors(run)
        held: HeldConfidence | None = run.storage.get(self)
        if held is not None and held.confidence is not None:
            yield held.confidence

    def open(self, call: Call) -> Call:
        """Give the model the planned rows alone."""
        plan = self.denoiser.named(call.args, call.kwargs).get(PLAN)
        call = super().open(call)
        if plan is not None:
            call.storage[NOTED] = (plan, [])
        return call

    def completed(self, plan: RowPlan, held: Held[KVLayer]) -> RowPlan:
        """Return the plan.

        Raises:
            AttachError: If nothing can be noted on it.
        """
        if not isinstance(plan, NotedPlan):
            raise AttachError(
                f"{PLAN}={plan!r}: must be the plan of a D2Cache, which takes notes of the forward"
            )
        return plan

    def attend(self, site: AttentionSite, call: AttentionCall) -> Tensor | None:
        """Attend as `Rows` does, and keep the mean attention of the rows."""
        out, turn, around = super().attend(site, call), self.turn(), current_call()
        if turn is None or around is None:
            return out
        query = Query(call.q.transpose(1, 2), 0, call.scale, mask=turn.mask, causal=False)
        weights = logits(query, turn.held.layers[self.numbers[site.path]].read()).softmax(-1)
        turn.products += call.q.numel() * turn.held.shape[1]
        around.storage[NOTED][1].append(weights.mean((1, 2)))
        return out

    def close(self, call: Call, out: Any) -> Any:
        """Check that every attention took part, and take notes.

        Raises:
            AttachError: If one did not.
        """
        super().close(call, out)
        turn = call.storage.get(self)
        if turn is None:
            return
        (plan, attention), held = call.storage[NOTED], turn.held
        batch, width = held.shape
        index = plan.index(batch, width, attention[0].device)
        real = torch.ones_like(index, dtype=torch.bool)
        real[:, 1:] = index[:, 1:] != index[:, :-1]  # others fill up
        mask = None if held.mask is None else held.mask[:, 0, 0]
        found = out.logits.to(torch.promote_types(out.logits.dtype, torch.float32))
        sure = (found.amax(-1) - found.logsumexp(-1)).exp()
        before = sure.new_zeros(batch, width) if held.confidence is None else held.confidence
        held.confidence = before.scatter(1, index, sure)
        plan.notes[CONFIDENCE] = held.confidence
        plan.notes[INFLUENCE] = influence(attention, index, real, mask)


def install(denoiser: Denoiser, ability: NotedRows) -> Rows:
    """Return the extension for row plans that notes are taken of.

    Raises:
        AttachError: If the model cannot have row plans.
    """
    return install_rows(denoiser, ability, Rollout)
