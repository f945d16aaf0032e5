"""Codebooks of keys: k-means that minds the directions in which queries look."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 4096  # keys whose distances are held at once


@dataclass(frozen=True, eq=False)
class Codebook:
    """Codebooks of the key-value heads of all layers, fitted beforehand.

    Args:
        vectors: [L, H, C, D], of keys before rotation.
        weight: [L, H, D, D], covariance of the queries they were fitted for.

    Raises:
        ValueError: If the shapes do not fit each other.
    """

    vectors: Tensor
    weight: Tensor

    def __post_init__(self) -> None:
        layers, heads, _, size = self.vectors.shape if self.vectors.dim() == 4 else (0, 0, 0, 0)
        if not layers or self.weight.shape != (layers, heads, size, size):
            raise ValueError(
                f"vectors {list(self.vectors.shape)} and weight {list(self.weight.shape)}: must be "
                "[L, H, C, D] and [L, H, D, D]"
            )

    def of_layer(self, index: int, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors [B, H, C, D] and weights [B, H, D, D] of a layer with keys [B, H, S, D].

        Raises:
            ValueError: If there are none for such a layer.
        """
        layers, heads, _, size = self.vectors.shape
        if index >= layers or (heads, size) != (keys.shape[1], keys.shape[3]):
            raise ValueError(
                f"the codebook is of {layers} layers, {heads} heads and {size} channels; layer "
                f"{index} has {keys.shape[1]} and {keys.shape[3]}: fit one to this model"
            )
        found = (one[index].to(keys.device).expand(len(keys), -1, -1, -1) for one in (self.vectors, self.weight))
        vectors, weight = found
        return vectors, weight


def covariance(queries: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the second moment of queries, E[q q^T].

    Args:
        queries: [B, H, N, D].
        valid: bool [B, N]; the others count for nothing.

    Returns:
        float32 [B, H, D, D], with a ten-thousandth of its mean diagonal added, so that directions
        in which no query looked still tell keys apart.
    """
    q = queries.float()
    there = q.new_ones(len(q), q.shape[2]) if valid is None else valid.float()
    there = there[:, None, :, None]
    found = (q * there).mT @ q / there.sum(2, keepdim=True).clamp_min(1)
    level = found.diagonal(0, -2, -1).mean(-1).clamp_min(1e-12)
    return found + 1e-4 * level[..., None, None] * torch.eye(q.shape[3], device=q.device)


def fit(keys: Tensor, valid: Tensor, weight: Tensor, codes: int, steps: int = 8) -> Tensor:
    """Return a codebook that keeps the products of queries with keys.

    The error of a logit, averaged over queries, is (k - c)^T E[q q^T] (k - c): k-means after a
    linear map. It starts from keys at even distances in the sequence, so that it is the same for
    a row alone and in a batch; as many codes as keys are the keys themselves.

    Args:
        keys: [B, H, S, D].
        valid: bool [B, H, S]; the others count for nothing.
        weight: [B, H, D, D], see `covariance`.
        codes: Vectors of the codebook.
        steps: Rounds of k-means.

    Returns:
        float32 [B, H, codes, D].

    Raises:
        ValueError: If a number is out of range.

    Reference: A2ATS, arXiv 2502.12665.
    """
    if codes < 1 or steps < 0:
        raise ValueError(f"codes={codes}, steps={steps}: must be at least 1 and 0")
    keys = keys.float()
    order = valid.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    count = valid.sum(-1, keepdim=True)
    start = torch.arange(codes, device=keys.device) * count // codes
    if codes >= int(count.max()):
        start = torch.arange(codes, device=keys.device).minimum((count - 1).clamp_min(0))
    start = order.gather(2, start.clamp_max(keys.shape[2] - 1))
    book = keys.gather(2, start[..., None].expand(-1, -1, -1, keys.shape[3]))
    spread = valid[..., None].float()
    for _ in range(steps if codes < int(count.max()) else 0):
        code = nearest(keys, book, weight).long()
        place = code[..., None].expand_as(keys)
        total = torch.zeros_like(book).scatter_add_(2, place, keys * spread)
        many = torch.zeros_like(book[..., :1]).scatter_add_(2, code[..., None], spread)
        book = torch.where(many > 0, total / many.clamp_min(1), book)
    return book


def nearest(keys: Tensor, book: Tensor, weight: Tensor) -> Tensor:
    """Return the nearest vector of each key, in the distance that a weight gives.

    Args:
        keys: [B, H, S, D].
        book: [B, H, C, D].
        weight: [B, H, D, D], positive definite.

    Returns:
        int16 or int32 [B, H, S]; of equals the first.
    """
    root = torch.linalg.cholesky(weight.double()).float()
    center = book.float() @ root
    size = center.square().sum(-1)[:, :, None]
    found = []
    for part in keys.float().split(_BLOCK, 2):
        away = size - 2 * (part @ root) @ center.mT
        found.append(away.argmin(-1))
    dtype = torch.int16 if book.shape[2] <= torch.iinfo(torch.int16).max else torch.int32
    return torch.cat(found, 2).to(dtype)
