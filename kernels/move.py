"""Move the keys and values of slots: write some anew in place, and gather some in another order."""

from __future__ import annotations

import torch
from torch import Tensor

from diffcache.kernels.dispatch import define, no_products, nothing


def kv_scatter(k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor, index: Tensor) -> None:
    """Write keys and values over those of some slots, in place.

    The kernel takes one launch for both. It leaves out slots that are not there, where plain
    PyTorch raises an error, or counts from the end; an error is raised where shapes do not fit.

    Args:
        k: `[B, H, S, D]`, is written to.
        v: `[B, H, S, Dv]`, is written to.
        new_k: `[B, H, n, D]` in the dtype of `k`.
        new_v: `[B, H, n, Dv]` in the dtype of `v`.
        index: Slots of all rows, int64 `[n]`, or of each row, `[B, n]`, from 0 to S - 1. Where a
            slot is named twice, either is written.
    """
    alike = k.dtype == new_k.dtype and v.dtype == new_v.dtype
    fits = new_k.shape[:3] == new_v.shape[:3] == (*k.shape[:2], index.shape[-1])
    fits = fits and len(index) == (len(k) if index.dim() == 2 else index.shape[-1])
    fits = fits and k.shape[:3] == v.shape[:3] and k.stride(3) == v.stride(3) == 1
    fits = fits and (k.shape[3], v.shape[3]) == (new_k.shape[3], new_v.shape[3]) and v.numel() > 0
    if alike and fits and SCATTER.takes(k, v, new_k, new_v, index):
        SCATTER(k, v, new_k, new_v, index)
    else:
        write_slots(index, (k, new_k), (v, new_v))


def scatter_twin(k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor, index: Tensor) -> None:
    """Do the writes of `kv_scatter` in plain PyTorch."""
    write_slots(index, (k, new_k), (v, new_v))


def write_slots(index: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
    """Write over some slots of tensors.

    Args:
        index: int64 `[n]` or `[B, n]`.
        pairs: Buffers, `[B, H, S, ...]`, with what is written, `[B, H, n, ...]` in the
            same dtype.

    Raises:
        IndexError: If a slot is not there; one below 0 counts from the end in a list for each row.
    """
    rows: Tensor | None = None
    if index.dim() == 2:
        rows = torch.arange(len(index), device=index.device)[:, None]
    for buffer, fresh in pairs:
        # Both copy whole vectors; `scatter_` would look up every channel, ten times slower.
        if rows is None:
            buffer.index_copy_(2, index, fresh)
        else:
            buffer.transpose(1, 2)[rows, index] = fresh.transpose(1, 2)


def kv_gather(k: Tensor, v: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of some slots, in the order they are named in.

    The kernel takes one launch for both. It gives zeros for slots that are not there, where plain
    PyTorch raises an error, or reads the slot of another head; an error is raised where shapes do
    not fit.

    Args:
        k: `[B, H, S, D]`.
        v: `[B, H, S, Dv]`.
        index: Slots, int64 `[B, 1 or H, n]`, from 0 to S - 1.

    Returns:
        `[B, H, n, D]` and `[B, H, n, Dv]`, copies.
    """
    fits = len(index) == len(k) and index.shape[1] in (1, k.shape[1])
    fits = fits and k.shape[:3] == v.shape[:3] and v.numel() > 0
    run = GATHER if fits and GATHER.takes(k, v, index) else gather_twin
    found: tuple[Tensor, Tensor] = run(k, v, index)
    return found


def gather_twin(k: Tensor, v: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `kv_gather` in plain PyTorch."""
    wide = index.expand(-1, k.shape[1], -1)
    return gather_slots(k, wide), gather_slots(v, wide)


def _gather_twin(k: Tensor, v: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `gather_twin` with the strides that compilers were told."""
    found_k, found_v = gather_twin(k, v, index)
    return found_k.contiguous(), found_v.contiguous()


def gather_slots(x: Tensor, index: Tensor) -> Tensor:
    """Return the slots at `index`.

    Args:
        x: `[B, H or 1, S, ...]`, any dtype.
        index: `[B, H, n]` int64.

    Returns:
        `[B, H, n, ...]`, a copy.
    """
    batch, heads, count = index.shape
    x = x.expand(batch, heads, *x.shape[2:])
    if x.dim() == 3:
        return x.gather(2, index)
    size = x[0, 0, 0].numel() if x.numel() else 0
    steps = [step // size for step in x.stride()[:3]] if size else []
    whole = bool(size) and x[0, 0, 0].is_contiguous()
    if not whole or any(step % size for step in x.stride()[:3]):
        rows = torch.arange(batch, device=index.device)[:, None, None]
        return x[rows, torch.arange(heads, device=index.device)[:, None], index]
    # One list of vectors, each copied whole: indexing goes over single numbers, five times slower.
    last = sum((n - 1) * step for n, step in zip(x.shape[:3], steps, strict=True))
    vectors = x.as_strided((last + 1, size), (size, 1))
    place = index * steps[2] if steps[2] != 1 else index
    for axis, n in enumerate((batch, heads)):
        if n > 1 and steps[axis]:
            begin = torch.arange(0, n * steps[axis], steps[axis], device=index.device)
            place = place + begin.view(-1, *[1] * (2 - axis))
    return vectors.index_select(0, place.flatten()).view(batch, heads, count, *x.shape[3:])


def _gathered(k: Tensor, v: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    shape = len(index), k.shape[1], index.shape[2]
    return k.new_empty(*shape, k.shape[3]), v.new_empty(*shape, v.shape[3])


SCATTER = define(
    "kv_scatter(Tensor(a!) k, Tensor(b!) v, Tensor new_k, Tensor new_v, Tensor index) -> ()",
    scatter_twin,
    nothing,
    "move:kv_scatter",
    no_products,
)
GATHER = define(
    "kv_gather(Tensor k, Tensor v, Tensor index) -> (Tensor, Tensor)",
    _gather_twin,
    _gathered,
    "move:kv_gather",
    no_products,
)
