"""Train the convolutions of LoCoCo: attention over the memory is to give what all slots give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffcache.kv.attend import Query, attend
from diffcache.kv.merging.lococo import ConvolutionMerge, MixWeights
from diffcache.kv.observe import Observation
from diffcache.kv.plan import KEEP
from diffcache.kv.slots import EMPTY
from diffcache.kv.view import View


@dataclass(frozen=True, eq=False)
class MixSample:
    """One layer before it is compressed, and what will be asked of it.

    Attributes:
        seen: The layer.
        plan: int8 [B, H, S], what is kept.
        later: Queries that come after, [B, Hq, n, D].
    """

    seen: Observation
    plan: Tensor
    later: Query


def fresh(layers: int, memory: int, channels: int, taps: int = 21, gate: float = 2.0) -> MixWeights:
    """Return weights to start from: even mixing, and mostly a slot's own token.

    Args:
        layers: L.
        memory: Memory slots of a row.
        channels: D + Dv.
        taps: Slots under the convolution, odd.
        gate: Logit of the weight of a slot's own token.

    Raises:
        ValueError: If `taps` is even.
    """
    return MixWeights(
        torch.zeros(layers, memory, channels, taps), torch.zeros(layers, memory), torch.full((layers,), gate)
    )


def loss(merge: ConvolutionMerge, sample: MixSample) -> Tensor:
    """Return the mean squared difference of what later queries of a sample get, from all slots and from the memory."""
    slots, plan = merge(sample.seen, sample.plan.float(), sample.plan)
    pos = slots.pos.expand(plan.shape).where(plan >= KEEP, EMPTY)
    kept = replace(slots, meta={**slots.meta, "pos": pos})
    found = attend(sample.later, [View(kept)])
    with torch.no_grad():
        wanted = attend(sample.later, [View(sample.seen.slots)])
    return (found - wanted).square().mean()


@torch.enable_grad()
def train(
    weights: MixWeights,
    samples: Sequence[MixSample],
    *,
    recent: int = 0,
    steps: int = 200,
    rate: float = 1e-3,
    watch: Callable[[int, float], None] | None = None,
) -> MixWeights:
    """Return weights trained by Adam, one sample a step in turn.

    Reference: LoCoCo, arXiv 2406.05317. The paper trains on the loss of the language
    model; this takes the output of each attention layer as its target, which needs no model.

    Args:
        weights: Weights to start from; left as they are.
        samples: Layers, of any number.
        recent: Last tokens that stay as they are, as in `ConvolutionMerge`.
        steps: Number of training steps.
        rate: Learning rate.
        watch: Function that is called with each step and its loss.

    Raises:
        ValueError: If there are no samples or no steps.
    """
    if not samples or steps < 1:
        raise ValueError(f"{len(samples)} samples, steps={steps}: must be at least 1 each")
    start = (weights.weight, weights.bias, weights.gate)
    parts = [each.detach().clone().requires_grad_() for each in start]
    optimizer = torch.optim.Adam(parts, lr=rate)
    merge = ConvolutionMerge(MixWeights(*parts), recent)
    for step in range(steps):
        found = loss(merge, samples[step % len(samples)])
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        if watch is not None:
            watch(step, float(found.detach()))
    return MixWeights(*(each.detach() for each in parts))
