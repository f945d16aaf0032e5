"""Compare inputs by their content, as plain data and as a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def content(value: Any) -> Any:
    """Return plain data that is the same for two inputs that hold the same, in any process.

    Args:
        value: A prompt or argument of a call: tensors, arrays and pictures count by their bytes, generators by their
            state, mappings and sequences by what is in them, anything else by its `repr`.
    """
    if isinstance(value, Tensor):
        held = bits_of(value.cpu()).numpy().tobytes()
        return _hashed("tensor", list(value.shape), value.dtype, held)
    if isinstance(value, torch.Generator):
        return _hashed("generator", value.device, "", value.get_state().numpy().tobytes())
    if isinstance(value, Mapping):
        return {repr(name): content(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [content(one) for one in value]
    if hasattr(value, "tobytes") and hasattr(value, "dtype") and hasattr(value, "shape"):
        return _hashed("array", list(value.shape), value.dtype, value.tobytes())
    if hasattr(value, "tobytes") and hasattr(value, "mode") and hasattr(value, "size"):
        return _hashed("picture", list(value.size), value.mode, value.tobytes())
    return repr(value)


def bits_of(tensor: Tensor) -> Tensor:
    """Return a tensor's memory, uint8 [n], in the order of its places."""
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # of one number, which may be a repeated one
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.contiguous().view(torch.uint8)


def _hashed(kind: str, shape: Any, dtype: Any, held: bytes) -> str:
    return f"{kind} {shape} {dtype} {hashlib.sha256(held).hexdigest()}"


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits that differ where `content` does."""
    text = json.dumps(content(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def weights_digest(weights: Iterable[Tensor]) -> str:
    """Return 16 hexadecimal digits that tell the weights of one model from another's.

    Eight numbers of each weight, of any device, stand for all of them; those without memory are passed over.
    """
    few = []
    for weight in weights:
        if weight.numel() and not weight.is_meta:
            flat = weight.detach().reshape(-1)
            few.append(flat[:: -(-len(flat) // 8)])
    return digest(few)
