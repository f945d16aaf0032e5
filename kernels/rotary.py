"""Rotate pairs of channels by angles."""

from __future__ import annotations

import torch
from torch import Tensor

from diffcache.kernels.dispatch import define, no_products


def rotate(
    x: Tensor, angles: Tensor, *, scale: float = 1.0, back: bool = False, start: int = 0, interleaved: bool = False
) -> Tensor:
    """Rotate pairs of channels by angles, in float32 (float64 for float64), and round once.

    A pair `(a, b)` becomes `scale * (a cos - b sin, b cos + a sin)`. The kernel takes cosines and
    sines itself, to within 1e-7 up to angles of 1e8 radians, and passes over memory once.

    Args:
        x: `[B, H, S, D]` floats.
        angles: Radians of the `P` pairs, float32 or float64; broadcasts to `[B, H, S, P]`.
        scale: Multiplies what is rotated, dimensionless, above 0.
        back: Undo the rotation, its scale too.
        start: First of the `2 * P` channels that are rotated; those outside pass through bit for
            bit.
        interleaved: Pairs are channels `(2i, 2i + 1)` instead of `(i, i + P)`.

    Returns:
        A fresh contiguous tensor like `x`.

    Raises:
        ValueError: If `x` has no `2 * P` channels from `start` on.
    """
    end = start + 2 * angles.shape[-1]
    if x.dim() != 4 or start < 0 or end > x.shape[-1]:
        raise ValueError(f"start={start}: x must be [B, H, S, D] with channels up to {end}, got {list(x.shape)}")
    run = ROTATE if angles.numel() and ROTATE.takes(x, angles) else rotate_twin
    found: Tensor = run(x, angles, scale, back, start, interleaved)
    return found


def rotate_twin(x: Tensor, angles: Tensor, scale: float, back: bool, start: int, interleaved: bool) -> Tensor:
    """Compute `rotate` in plain PyTorch."""
    cos, sin = _factors(angles, scale, back)
    work = torch.float64 if x.dtype is torch.float64 else torch.float32
    cos, sin = cos.to(work), sin.to(work)
    end = start + 2 * angles.shape[-1]
    wide = x[..., start:end].to(work)
    if interleaved:  # adjacent pairs are complex numbers: one pass over memory
        wide = wide.contiguous()
        if any(step % 2 for step in (wide.storage_offset(), *wide.stride()[:-1])):
            wide = wide.clone(memory_format=torch.contiguous_format)  # complex ones begin at pairs
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
        parts = [turned.to(x.dtype)]
    else:
        a, b = wide.chunk(2, dim=-1)
        # In place of the fresh products: new memory costs as much as the arithmetic.
        first = (a * cos).addcmul_(b, sin, value=-1)
        parts = [first.to(x.dtype), (b * cos).addcmul_(a, sin).to(x.dtype)]
    if start:
        parts.insert(0, x[..., :start])
    if end < x.shape[-1]:
        parts.append(x[..., end:])
    # Parts whose heads lie innermost, as channels of pictures may, are joined so.
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1).contiguous()


def _factors(angles: Tensor, scale: float, back: bool) -> tuple[Tensor, Tensor]:
    """Return the factors of the channels of a pair, [..., S, P]."""
    cos, sin = angles.cos(), angles.sin()
    if back:
        return (cos, -sin) if scale == 1 else (cos / scale, -sin / scale)
    return (cos, sin) if scale == 1 else (cos * scale, sin * scale)


def _like(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


ROTATE = define(
    "rotate(Tensor x, Tensor angles, float scale, bool back, int start, bool interleaved) -> Tensor",
    rotate_twin,
    _like,
    "rotary:rotate",
    no_products,
)
