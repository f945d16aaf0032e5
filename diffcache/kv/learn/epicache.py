"""Find how sensitive layers are to reading block by block with eviction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def sensitivity(full: Sequence[Tensor], blockwise: Sequence[Tensor]) -> Tensor:
    """Return how far the keys of each layer turn: 1 - cosine, mean over rows, heads and tokens.

    Args:
        full: Keys of every layer when all is held, [B, H, S, D].
        blockwise: Keys of the same tokens when slots were evicted after every block.

    Returns:
        float64 [L], 0..2.

    Raises:
        ValueError: If the layers or shapes differ.

    Reference: EpiCache, arXiv 2509.17396.
    """
    if len(full) != len(blockwise) or any(one.shape != two.shape for one, two in zip(full, blockwise, strict=False)):
        raise ValueError("full, blockwise: must be keys of the same tokens in the same layers")
    return torch.stack(
        [
            # Rounding can leave a cosine above 1.
            (1 - functional.cosine_similarity(one.double(), two.double(), dim=-1)).mean().clamp_min(0)
            for one, two in zip(full, blockwise, strict=True)
        ]
    )


def layer_weights(sensitivity: Tensor, sharpness: float = 1.0) -> tuple[float, ...]:
    """Return the weights of layers for `LayerTable`: sensitivity to the power of `sharpness`.

    Args:
        sensitivity: [L], none negative, not all 0.
        sharpness: 0 has all layers get the same; dimensionless.

    Raises:
        ValueError: If a number is out of range.
    """
    if sharpness < 0 or bool((sensitivity < 0).any()) or not float(sensitivity.sum()) > 0:
        raise ValueError(
            f"sensitivity={sensitivity.tolist()}, sharpness={sharpness}: must not be negative, and "
            "sensitivity not all 0"
        )
    weights = sensitivity.double() ** sharpness
    return tuple((weights / weights.sum()).tolist())
