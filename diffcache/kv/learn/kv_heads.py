"""Fit fewer key and value heads to what a model's heads hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from diffcache.kv.learn.cskv import Bases, outputs_of


def group_bases(outputs: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor]:
    """Return the bases of fewer heads, each made of the outputs of neighboring heads.

    Args:
        outputs: Outputs of a key or value projection, [N, H * D].
        heads: Number of key-value heads, H.
        groups: Heads that are left, a divisor of H.

    Returns:
        [H * D, groups * D] and [groups * D, H * D], zero between heads of different groups.

    Raises:
        ValueError: If `groups` does not divide H.

    Reference: Effectively Compress KV Heads for LLM, arXiv 2406.07056: the truncated
    SVD of what the heads of a group hold, side by side.
    """
    if not 1 <= groups <= heads or heads % groups:
        raise ValueError(f"groups={groups}: must divide the {heads} heads")
    size = outputs.shape[1] // heads
    parts = []
    for part in outputs.double().chunk(groups, 1):
        vectors = torch.linalg.eigh(part.T @ part).eigenvectors
        parts.append(vectors[:, -size:].flip(1))
    down = torch.block_diag(*parts).to(outputs.dtype)
    return down, down.T.contiguous()


def fit(
    projections: Sequence[tuple[nn.Linear, nn.Linear]], inputs: Sequence[Sequence[Tensor]], heads: int, groups: int
) -> list[Bases]:
    """Fit the bases of all layers for the recipe `kv_heads`.

    Args:
        projections: Key and value projection of each layer.
        inputs: Inputs of the projections of each layer, as `diffcache.kv.learn.cskv.inputs_of`
            collects them.
        heads: Key-value heads of the model.
        groups: Heads that are left.

    Raises:
        ValueError: If `groups` does not divide `heads`, or a layer was given nothing.
    """
    if len(inputs) != len(projections) or not all(len(each) for each in inputs):
        raise ValueError("inputs: each layer needs some; run the model inside `inputs_of`")
    found = []
    for pair, given in zip(projections, inputs, strict=True):
        x = torch.cat(list(given))
        parts: list[Tensor] = []
        for module in pair:
            parts += group_bases(outputs_of(module, x), heads, groups)
        found.append(Bases(*parts))
    return found
