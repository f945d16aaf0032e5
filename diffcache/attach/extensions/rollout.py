"""Computes planned rows, and notes on the plan what the next one is made by (d2Cache).

The notes are how sure the model is of each position, and how much attention flows from it. Weights
of attention are computed besides the model's own attention, which does not hand them out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.attach.call import Call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extensions.partial import Held, HeldKV
from diffcache.attach.extensions.rows import Rows, Turn
from diffcache.attach.extensions.rows import install as install_rows
from diffcache.attach.run import Run
from diffcache.dllm.d2_cache import CONFIDENCE, INFLUENCE, NotedPlan, NotedRows, influence


@dataclass(eq=False)
class HeldConfidence(Held[HeldKV]):
    """Keys, values and confidence of one run.

    Attributes:
        confidence: Probability of the most probable token when each position was last computed,
            `[B, T]`.
    """

    confidence: Tensor | None = None


@dataclass(eq=False)
class NotedTurn(Turn):
    """Plan of attention in one call that notes are taken of.

    Attributes:
        plan: The plan that was asked for, on which they are left.
        attention: Mean attention of the rows in every layer so far, `[B, n, T]` each.
    """

    plan: NotedPlan = field(kw_only=True)
    attention: list[Tensor] = field(default_factory=list)


class Rollout(Rows):
    """Computes the planned rows and notes confidence and influence on the plan."""

    plans = NotedPlan
    wanted = "the plan of a D2Cache, which takes notes of the forward"
    holds = HeldConfidence

    def tensors(self, run: Run) -> Iterable[Tensor]:
        """Return the keys, values and confidence of a run."""
        held: HeldConfidence | None = run.storage.get(self)
        more = [] if held is None or held.confidence is None else [held.confidence]
        return [*super().tensors(run), *more]

    def turn_of(self, plan: NotedPlan, turn: Turn) -> Turn:
        """Return what attention does in a call, with what is noted besides."""
        return NotedTurn(turn.held, turn.index, turn.rows, turn.mask, plan=plan)

    def attend(
        self, site: AttentionSite, call: AttentionCall, turn: Turn | None = None
    ) -> Tensor | None:
        """Attend as `Rows` does, and keep the mean attention of the rows."""
        turn = turn or self.turn()
        out = super().attend(site, call, turn)
        if isinstance(turn, NotedTurn):
            layer = turn.held.layers[self.numbers[site.path]]
            weights = layer.weights(call.q, call.scale, turn.mask)
            turn.products += call.q.numel() * turn.held.shape[1]
            turn.attention.append(weights.mean(1))
        return out

    def close(self, call: Call, out: Any) -> Any:
        """Check that every attention took part, and take notes.

        Raises:
            AttachError: If one did not.
        """
        super().close(call, out)
        turn = call.storage.get(self)
        if not isinstance(turn, NotedTurn):
            return
        plan, attention, held = turn.plan, turn.attention, turn.held
        assert isinstance(held, HeldConfidence)
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
