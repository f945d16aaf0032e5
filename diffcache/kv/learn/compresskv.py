"""Find the heads that retrieve meaning, and how much layers suffer from eviction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def retrieval_score(probs: Tensor, start: int, stop: int) -> Tensor:
    """Return how much each head looks at an answer in the prompt while it is being said.

    The whole span counts, not only the very token that is said, so that heads score that look at
    its surroundings.

    Args:
        probs: Attention of the queries that say the answer, [Hq, n, S].
        start: First slot of the answer in the prompt.
        stop: Slot after the last.

    Returns:
        [Hq], 0..1: the attention on the span, mean over queries.

    Raises:
        ValueError: If the span is not within the slots.

    Reference: CompressKV, arXiv 2508.02401.
    """
    if not 0 <= start < stop <= probs.shape[-1]:
        raise ValueError(f"start={start}, stop={stop}: must be a span within {probs.shape[-1]} slots")
    return probs[..., start:stop].sum(-1).mean(-1)


def top_heads(scores: Tensor, count: int = 4) -> tuple[tuple[int, ...], ...]:
    """Return the heads of highest score of each layer, as `HeadVote` takes them.

    Args:
        scores: Score of each layer and query head, summed or averaged over samples, [L, Hq].
        count: Heads of a layer.

    Raises:
        ValueError: If there are fewer heads.
    """
    if scores.dim() != 2 or not 1 <= count <= scores.shape[1]:
        raise ValueError(f"scores={list(scores.shape)}, count={count}: must be [L, Hq] and 1 to Hq heads")
    order = scores.argsort(dim=-1, descending=True, stable=True)[:, :count].sort(-1).values
    return tuple(tuple(row) for row in order.tolist())


def eviction_error(full: Tensor, kept: Tensor) -> float:
    """Return by how much eviction changes the output of an attention layer, dimensionless.

    Args:
        full: Output with all slots, any shape.
        kept: Output with those that are kept.

    Returns:
        The Frobenius norm of the difference, divided by that of `full`.

    Raises:
        ValueError: If the shapes differ.

    Reference: CompressKV, arXiv 2508.02401.
    """
    if full.shape != kept.shape:
        raise ValueError(f"full={list(full.shape)}, kept={list(kept.shape)}: must be alike")
    norm = full.double().norm()
    return float((full.double() - kept.double()).norm() / norm.clamp_min(1e-12))


def layer_weights(errors: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """Return the weights of layers for `LayerTable`: their errors, mean over samples, sum 1.

    Args:
        errors: Error of every layer, for each sample.

    Raises:
        ValueError: If there are none, or they do not fit each other.
    """
    rows = [list(row) for row in errors]
    if not rows or len({len(row) for row in rows}) > 1 or not rows[0]:
        raise ValueError("errors: give at least one sample, each with as many layers")
    mean = torch.tensor(rows, dtype=torch.float64).mean(0)
    if bool((mean < 0).any()) or not float(mean.sum()) > 0:
        raise ValueError(f"errors={mean.tolist()}: must not be negative, and not all 0")
    return tuple((mean / mean.sum()).tolist())
