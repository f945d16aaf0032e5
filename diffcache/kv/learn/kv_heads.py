"""Fit fewer key and value heads to what a model's heads hold, and fuse them into its weights."""

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
    projections: Sequence[tuple[nn.Linear, nn.Linear]],
    inputs: Sequence[Sequence[Tensor]],
    heads: int,
    groups: int,
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


def turned_scale(keys: Tensor, heads: int, groups: int) -> Tensor:
    """Return by how much, and by what angle, each pair of channels of a head follows its group.

    A scale and a turn of a pair commute with rotary position embedding, other matrices do not.

    Args:
        keys: Keys before rotation, [N, H * D], with pairs `(i, i + D / 2)`.
        heads: Number of key-value heads, H.
        groups: Heads that are left.

    Returns:
        complex128 [H, D / 2], of norm 1 over the heads of a group: the best approximation of rank
        one of what a pair of channels is in all heads of a group.
    """
    n, size = len(keys), keys.shape[1] // heads
    half: Tensor = keys.double().view(n, heads, 2, size // 2)
    pairs = torch.complex(half[:, :, 0], half[:, :, 1])  # [N, H, D / 2]
    grouped = pairs.view(n, groups, heads // groups, size // 2).permute(1, 3, 2, 0)
    gram = grouped @ grouped.mH  # [groups, D / 2, g, g]
    vectors: Tensor = torch.linalg.eigh(gram).eigenvectors[..., -1]
    return vectors.permute(0, 2, 1).reshape(heads, size // 2)


def fuse(
    weights: dict[str, Tensor], keys: Tensor, values: Tensor, heads: int, groups: int
) -> dict[str, Tensor]:
    """Return the weights of an attention layer with fewer key-value heads.

    Values take the bases of `group_bases`, whose other half goes into the output projection.
    Keys of a model with rotary position embedding can only take what commutes with it, a scale and
    a turn of each pair of channels: exact where the heads of a group differ by no more than that,
    and otherwise a rougher fit than the recipe `kv_heads`, which makes keys again in every forward.

    Args:
        weights: `q`, `k`, `v` and `o`, [out, in], of a layer without biases, its rotary pairs
            `(i, i + D / 2)`.
        keys: Outputs of the key projection on calibration prompts, [N, H * D].
        values: Outputs of the value projection, [N, H * D].
        heads: Number of key-value heads, H.
        groups: Heads that are left.

    Returns:
        The same four, for `groups` key-value heads and as many query heads as before.

    Raises:
        ValueError: If `groups` does not divide `heads`.

    Reference: Effectively Compress KV Heads for LLM, arXiv 2406.07056. Departure: the
    paper leaves rotary keys to the forward.
    """
    down, up = (part.double() for part in group_bases(values, heads, groups))
    size = values.shape[1] // heads
    each, per = heads // groups, weights["q"].shape[0] // keys.shape[1]
    o = weights["o"].double().view(-1, heads, per, size)
    ups = up.view(groups, size, groups, each, size)
    mine = torch.stack([ups[g, :, g, e] for g in range(groups) for e in range(each)])
    turns = turned_scale(keys, heads, groups)
    k, q = _pairs(weights["k"], heads), _pairs(weights["q"], heads * per)
    joint = (turns.conj()[..., None] * k).view(groups, each, *k.shape[1:]).sum(1)
    turned = turns.conj().repeat_interleave(per, 0)[..., None] * q
    found = {
        "q": _flat(turned),
        "k": _flat(joint),
        "v": down.T @ weights["v"].double(),
        "o": torch.einsum("ohpd,hcd->ohpc", o, mine).flatten(1),
    }
    return {name: value.to(weights[name].dtype) for name, value in found.items()}


def _pairs(weight: Tensor, heads: int) -> Tensor:
    """Return a projection [heads * D, in] as complex rows, [heads, D / 2, in]."""
    half: Tensor = weight.double().view(heads, 2, -1, weight.shape[1])
    return torch.complex(half[:, 0], half[:, 1])


def _flat(rows: Tensor) -> Tensor:
    """Return complex rows as a projection."""
    return torch.stack([rows.real, rows.imag], 1).flatten(0, 2)
