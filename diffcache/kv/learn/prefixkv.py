"""Find how much each layer should hold, as PrefixKV does: beforehand, on a few samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from diffcache.kv.budgets.layers import prefix_counts


def layer_shares(samples: Iterable[Sequence[Tensor]], share: float) -> tuple[float, ...]:
    """Return the share of its tokens that each layer keeps, the mean over samples.

    The mean over layers is `share`, give or take a slot; the numbers are the `weights` of
    `diffcache.kv.budgets.layers.LayerTable`.

    Args:
        samples: Scores of every layer, [B, H, S], none negative, for each sample.
        share: Share of the slots that all layers keep together, above 0 and at most 1.

    Raises:
        ValueError: If `share` is out of range, there are no samples, or their layers differ.

    Reference: PrefixKV, arXiv 2412.03409.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share={share}: must be above 0 and at most 1")
    found: list[Tensor] = []
    for scores in samples:
        stacked = torch.stack([score.double().mean(1) for score in scores])  # [L, B, S]
        if bool((stacked < 0).any()):
            raise ValueError("samples: scores must not be negative; give attention mass")
        width = stacked.shape[-1]
        held = torch.full(stacked.shape[:2], width, device=stacked.device)
        total = (held.sum(0) * share + 1e-9).floor().long()
        found.append((prefix_counts(stacked, held, total) / width).mean(1))
    if not found:
        raise ValueError("samples: there are none; give at least one")
    if len({len(each) for each in found}) > 1:
        raise ValueError("samples: have different numbers of layers; use one model")
    return tuple(torch.stack(found).mean(0).tolist())
