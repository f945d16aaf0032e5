"""Find which layers draft and which refine at each scale, and what each should hold."""

from __future__ import annotations

import torch
from torch import Tensor


def selectivity(probs: Tensor, current: int, best: int = 16) -> Tensor:
    """Return how selective a layer attends: to the current map, and to few slots before it.

    Args:
        probs: Attention of queries of the current map, [..., S].
        current: Last slots, which are those of the map.
        best: Number of slots before the map that count as few.

    Returns:
        Scalar, 0..1: the attention that the current map and the best slots before it get together.

    Raises:
        ValueError: If a number is out of range.

    Reference: ScaleKV, arXiv 2505.19602, section 3.3, equation 2 (attention selectivity index).
    Departure: its two parts, the current map and the best slots of the history, are added as
    shares of one attention, where the paper multiplies them; and not normalized over layers.
    """
    if not 1 <= current <= probs.shape[-1] or best < 1:
        raise ValueError(f"current={current}, best={best}: must be 1 to {probs.shape[-1]} slots, and at least 1")
    probs = probs.double()
    history = probs[..., : probs.shape[-1] - current]
    here = probs[..., probs.shape[-1] - current :].sum(-1)
    top = history.topk(min(best, history.shape[-1]), -1).values.sum(-1)
    return (here + top).mean()


def capacities(
    index: Tensor, size: int, *, drafters: int, reduction: float = 0.5, least: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Return the slots of every layer after every scale, for `Scheduled`.

    At each scale the layers of least selectivity draft and the others refine. Refiners hold less
    at every scale, linearly down to `1 - reduction` of the average; drafters share what that saves,
    so that every scale holds `size` slots a layer on average.

    Args:
        index: Selectivity of each layer and scale, [L, K].
        size: Slots of the average layer.
        drafters: Layers that draft at each scale, 0 to L.
        reduction: Share of the average that refiners save at the last scale, 0 to below 1.
        least: Slots of every layer at least.

    Raises:
        ValueError: If a number is out of range.

    Reference: ScaleKV, arXiv 2505.19602, section 3.3, equations 3 and 4. Departure: drafters are a
    fixed number of layers at each scale, those of least selectivity, where the paper ranks all
    pairs of layer and scale together.
    """
    if index.dim() != 2 or not 0 <= drafters <= len(index):
        raise ValueError(f"index={list(index.shape)}, drafters={drafters}: must be [L, K] and 0 to L layers")
    if size < 1 or not 0 <= reduction < 1 or not 1 <= least <= size:
        raise ValueError(
            f"size={size}, reduction={reduction}, least={least}: must be at least 1 slot, 0 to "
            "below 1, and 1 to size slots"
        )
    layers, scales = index.shape
    refiners = layers - drafters
    order = index.argsort(dim=0, stable=True)
    table = torch.full((layers, scales), size)
    for scale in range(scales):
        if not drafters or not refiners:
            continue
        saved = reduction * size * (scale + 1) / scales
        low = max(int(size - saved + 1e-9), least)
        extra = (size - low) * refiners
        each = torch.full((drafters,), size + extra // drafters)
        each[: extra % drafters] += 1
        table[order[:drafters, scale], scale] = each
        table[order[drafters:, scale], scale] = low
    return tuple(tuple(row) for row in table.tolist())
