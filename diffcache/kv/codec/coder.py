"""The entropy coder of bit streams: range coding of the package constriction."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def library() -> Any:
    """Return the package `constriction`.

    Raises:
        ImportError: If it is not installed; the message says how.
    """
    try:
        return import_module("constriction")
    except ImportError as error:
        raise ImportError(
            "bit streams need the package constriction: pip install 'diffcache[transport]'"
        ) from error


def encode(codes: Tensor, weights: Tensor) -> bytes:
    """Return symbols as bits, each channel coded by how often its symbols come.

    Reference: range coding, Martin 1979, as in constriction, arXiv 2201.01741.

    Args:
        codes: int32 [M, S, C] on the CPU, each below N.
        weights: float64 [M, C, N] on the CPU, at least 0; they need not sum to one.
    """
    stream = library().stream
    coder = stream.queue.RangeEncoder()
    symbols = codes.transpose(1, 2).contiguous().numpy()
    for row, table in zip(symbols, weights.numpy(), strict=True):
        for line, weight in zip(row, table, strict=True):
            coder.encode(line, stream.model.Categorical(weight, perfect=False))
    words: bytes = coder.get_compressed().astype("<u4").tobytes()
    return words


def decode(coded: bytes, weights: Tensor, count: int) -> Tensor:
    """Return the symbols that `encode` coded, int32 [M, S, C].

    Args:
        coded: The bits.
        weights: Weights that were given to `encode`, float64 [M, C, N] on the CPU.
        count: Number of symbols of each channel, S.
    """
    stream = library().stream
    words = torch.frombuffer(bytearray(coded), dtype=torch.int32) if coded else torch.zeros(0).int()
    coder = stream.queue.RangeDecoder(words.numpy().view("<u4").astype("u4"))
    rows = [
        torch.stack(
            [
                torch.from_numpy(
                    coder.decode(stream.model.Categorical(weight, perfect=False), count)
                )
                for weight in table
            ],
            1,
        )
        for table in weights.numpy()
    ]
    return torch.stack(rows)
