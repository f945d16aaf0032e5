"""Learn which heads need all tokens: a gate for each, trained by distillation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from diffcache.kv.attend import Query, logits, softmax
from diffcache.kv.budgets.heads import Heads
from diffcache.kv.settings import Count, NotNegative, Positive, Settings
from diffcache.kv.slots import Slots

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class GateTraining(Settings):
    """Settings of the training of gates.

    Args:
        penalty: Weight of the mean gate in the loss; dimensionless.
        rate: Learning rate of Adam.
        epochs: Number of passes over the batches, at least 1.
    """

    penalty: NotNegative = 0.05
    rate: Positive = 0.02
    epochs: Count = 1


@dataclass
class Gates:
    """Gates between training steps; give it back to go on.

    Attributes:
        values: float32 [L, H], from 0, streaming, to 1, everything.
        losses: Loss of each step so far.
        moments: The optimizer's state.
    """

    values: Tensor
    losses: list[float]
    moments: dict[str, object] | None = None

    @classmethod
    def open(cls, layers: int, heads: int) -> Gates:
        """Return gates that are all 1."""
        return cls(torch.ones(layers, heads), [])


def mixed_attention(query: Query, slots: Slots, gate: Tensor, sinks: int, recent: int) -> Tensor:
    """Return `gate` times attention over all slots and the rest of attention over few of them.

    Args:
        query: The queries.
        slots: Slots that they attend to.
        gate: [H], differentiable.
        sinks: First tokens of a row that every query sees.
        recent: Latest tokens that every query sees, its own among them.

    Returns:
        [B, Hq, n, Dv], differentiable.

    Raises:
        ValueError: If there is not a gate for every key-value head, or no recent token is seen.

    Reference: DuoAttention, arXiv 2410.10819, section 2.2.
    """
    if gate.shape != (slots.k.shape[1],):
        raise ValueError(f"gate={list(gate.shape)}: must be [H], with H={slots.k.shape[1]}")
    if sinks < 0 or recent < 1:
        raise ValueError(f"sinks={sinks}, recent={recent}: must be at least 0 and 1 tokens")
    found = logits(query, slots)
    first = slots.valid.cumsum(-1) <= sinks
    age = query.positions()[:, None, :, None] - slots.pos.long()[:, :, None]
    near = (first[:, :, None] | (age < recent))[:, :, None]
    few = found.masked_fill(~near, float("-inf"))
    share = gate.to(found.dtype).view(1, -1, 1, 1, 1)
    probs = share * _softmax(found, query.sinks) + (1 - share) * _softmax(few, query.sinks)
    out = torch.einsum("bhgns,bhsd->bhgnd", probs, slots.v.to(found.dtype))
    return out.flatten(1, 2).to(query.q.dtype)


@torch.enable_grad()
def fit_gates(
    gates: Gates,
    batches: Iterable[Batch],
    *,
    student: Callable[[Tensor, Batch], Tensor],
    teacher: Callable[[Batch], Tensor],
    training: GateTraining | None = None,
    report: Callable[[int, float], None] | None = None,
) -> Gates:
    """Train gates so that the outputs of a model with mixed attention match its outputs with all tokens.

    Only the gates are trained. The loss is the mean squared difference of the two outputs and the
    penalty times the mean gate.

    Args:
        gates: `Gates.open(layers, heads)`, or the gates of an earlier call, to go on.
        batches: Inputs of the two callables; gone through `training.epochs` times.
        student: Function of gates [L, H] and a batch that runs the model with `mixed_attention`.
        teacher: Function of a batch that runs the model as it is. Both return the same shape: last
            hidden states, best of the tokens that need the whole context.
        training: Settings.
        report: Function called with the number of steps so far and the loss.

    Raises:
        ValueError: If the two outputs differ in shape.

    Reference: DuoAttention, arXiv 2410.10819, section 2.2, equations 1 to 3. Departure: means
    where the paper sums over tokens and gates, so that `penalty` does not depend on their number.
    """
    training = training or GateTraining()
    values = gates.values.clone().requires_grad_()
    optimizer = torch.optim.Adam([values], lr=training.rate)
    if gates.moments is not None:
        optimizer.load_state_dict(gates.moments)
    losses = list(gates.losses)
    rounds = list(batches)
    for batch in rounds * training.epochs:
        with torch.no_grad():
            wanted = teacher(batch)
        got = student(values, batch)
        if got.shape != wanted.shape:
            raise ValueError(f"student gives {list(got.shape)}, teacher {list(wanted.shape)}: must be the same")
        loss = (got - wanted).square().mean() + training.penalty * values.mean()
        (values.grad,) = torch.autograd.grad(loss, [values])
        optimizer.step()
        with torch.no_grad():
            values.clamp_(0, 1)
        losses.append(float(loss.detach()))
        if report is not None:
            report(len(losses), losses[-1])
    return Gates(values.detach().clone(), losses, optimizer.state_dict())


def retrieval_heads(gates: Tensor, share: float = 0.5) -> Heads:
    """Return the table of the heads with the highest gates.

    Args:
        gates: [L, H].
        share: Share of all heads that are to hold everything, from 0 to 1.

    Returns:
        By layer and head, whether it holds everything.

    Raises:
        ValueError: If `gates` is no table or `share` out of its range.
    """
    if gates.dim() != 2 or not 0 <= share <= 1:
        raise ValueError(f"gates={list(gates.shape)}, share={share}: must be [L, H] and from 0 to 1")
    order = torch.argsort(gates.flatten(), descending=True, stable=True)
    whole = torch.zeros(gates.numel(), dtype=torch.bool)
    whole[order[: round(share * gates.numel())].cpu()] = True
    return tuple(tuple(bool(head) for head in row) for row in whole.view(gates.shape))


def _softmax(found: Tensor, sinks: Tensor | None) -> Tensor:
    """Return probabilities, zero where nothing is seen, with gradients that are finite."""
    seen = found > float("-inf")
    some = seen.any(-1, keepdim=True)
    return softmax(found.where(some, 0.0), sinks) * some
