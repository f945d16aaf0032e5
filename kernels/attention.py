"""Attend to keys and values as a store holds them, and add up the attention that keys get.

Keys and values are exact or coded, all of them or those of a list, and keys may be stored before
their rotation: nothing is decoded, gathered or turned in memory. `attn_forward` returns the
log-sum-exp of each query; `attn_mass` takes it in a second pass over the logits, as a weight is not
known before all logits of its query are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffcache.kernels.dispatch import define, turned_off
from diffcache.kernels.quantize import _restored

BLOCK = 256  # queries of a head whose logits plain PyTorch holds at once
LARGEST = 256  # channels of a head that the kernels take
BYTES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)  # codes that are numbers themselves
OLDEST = (8, 9)  # compute capability that knows float8_e4m3fn


class Codes(NamedTuple):
    """Keys or values as they are coded: a number is `code * scale + low`.

    Attributes:
        codes: uint8 [B, H, S, D * bits / 8], the first channel in the lowest bits, as
            `diffcache.kernels.quantize` has them; or int8 or float8 [B, H, S, D].
        grid: [B, H, T, 1 or 2, W]: scale and, unless that is `shift` scales, value of code 0.
        bits: Bits of a code, 2, 4 or 8.
        each: Consecutive slots that share a row of the grid.
        width: Consecutive channels that share a column of it; 1 where W is D.
        shift: Value of code 0 where the grid has none, in scales.
    """

    codes: Tensor
    grid: Tensor
    bits: int = 8
    each: int = 1
    width: int = 1
    shift: float = 0.0

    @property
    def size(self) -> int:
        """Channels."""
        return self.codes.shape[3] * 8 // self.bits

    @property
    def fits(self) -> bool:
        """Return whether the kernels know this layout."""
        whole = self.codes.dtype is torch.uint8 or (self.codes.dtype in BYTES and self.bits == 8)
        if self.codes.dtype is torch.float8_e4m3fn and self.codes.is_cuda:
            whole = whole and torch.cuda.get_device_capability(self.codes.device) >= OLDEST
        narrow = self.width < self.size and (self.width & (self.width - 1) or self.width < 2)
        return whole and self.bits in (2, 4, 8) and (self.width == 1 or not narrow)


Held = Tensor | Codes


def takes(
    q: Tensor,
    k: Held,
    v: Held | None,
    turns: Tensor | None = None,
    slots: Tensor | None = None,
    mask: Tensor | None = None,
    interleaved: bool = False,
) -> bool:
    """Return whether the kernels should run on these tensors of `attn_forward`.

    Log-sum-exps alone are half of `attn_mass`, which was measured with them and is asked.
    """
    parts = [*_apart(k)[:2], *_apart(v)[:2], turns, slots, mask]
    if not (MASS if v is None else FORWARD).takes(q, *parts):  # on a CPU this is the shortest way
        return False
    if FORWARD.off or FORWARD.name in turned_off():
        return False
    for held in (k, v):
        if held is None:
            continue
        size = held.size if isinstance(held, Codes) else held.shape[3]
        known = held.fits if isinstance(held, Codes) else held.dtype == q.dtype
        if not known or size > LARGEST or not _apart(held)[0].numel():
            return False
    size = q.shape[3]
    even = size % 2 == 0 if interleaved else size >= 16 and not size & (size - 1)
    return turns is None or (even and turns.shape[3] == size)


def attn_forward(
    q: Tensor,
    k: Held,
    v: Held | None,
    scale: float,
    *,
    slots: Tensor | None = None,
    mask: Tensor | None = None,
    turns: Tensor | None = None,
    interleaved: bool = False,
    offset: int | None = None,
    window: int = 0,
    sinks: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp.

    Keys have places 0 to N - 1, or those in the list `slots`, which is read on the device. Keys
    that no query sees may hold anything, NaN too.

    Args:
        q: Queries [B, Hq, n, D]. Heads h * G to h * G + G - 1 read key-value head h.
        k: Keys [B or 1, H, N, D], of the same dtype or coded.
        v: Values [B or 1, H, N, Dv], of the same dtype or coded; None for the log-sum-exp alone.
        scale: Factor of the logits.
        slots: Integers [B or 1, H or 1, P], the slot that is read for each place; none for one
            below 0 or from N on.
        mask: bool [B or 1, H or 1, n or 1, P], True at the places that are seen.
        turns: float32 [B or 1, H or 1, N, D], cosines and then sines of the angles that the keys
            are turned by when they are read; None where they are stored as queries meet them.
        interleaved: Channels that are turned together are neighbors, instead of half a head apart.
        offset: Query i sees places 0 to `offset + i`; None: all of them.
        window: Last places up to its own that a query sees; 0 for all of those.
        sinks: First places, which a window does not hide.

    Returns:
        The attention [B, Hq, n, Dv] in the dtype of `q`, 0 where nothing is seen, and float32
        [B, Hq, n], natural logarithms, -inf there.

    Raises:
        ValueError: If heads of the queries are no multiple of those of the keys, or there is a
            window and no offset.
    """
    _check(q, _apart(k)[0], offset, window, sinks)
    given = [*_apart(k)[:2], slots, mask, turns], (interleaved, offset, window, sinks)
    kernel = takes(q, k, v, turns, slots, mask, interleaved)
    shared = all(part is None or len(part) == 1 for part in (*given[0], _apart(v)[0]))
    if kernel and shared and len(q) > 1 and mask is None and offset is None:
        # Queries of all rows meet keys that these share in one product, as in Hydragen.
        rows = q.transpose(0, 1).reshape(1, q.shape[1], -1, q.shape[3])
        seen: Any = {"slots": slots, "turns": turns, "interleaved": interleaved}
        out, lse = attn_forward(rows, k, v, scale, **seen)
        out, lse = (x[0].unflatten(1, (len(q), -1)).transpose(0, 1) for x in (out, lse))
        return out, lse
    run: Any = FORWARD if kernel else forward_twin
    found: tuple[Tensor, Tensor] = run(q, *given[0], *_apart(v)[:2], scale, *given[1], *_apart(k)[2:], *_apart(v)[2:])
    return found


def attn_mass(
    q: Tensor,
    k: Held,
    lse: Tensor,
    scale: float,
    *,
    slots: Tensor | None = None,
    mask: Tensor | None = None,
    turns: Tensor | None = None,
    interleaved: bool = False,
    offset: int | None = None,
    window: int = 0,
    sinks: int = 0,
) -> Tensor:
    """Return the attention that every place gets, summed over queries and the heads that share it.

    The kernel goes over keys and adds up all queries of one in a fixed order. Arguments are those of
    `attn_forward`, and its log-sum-exp `lse`, float32 [B, Hq, n]: inf where a query does not count.

    Returns:
        float32 [B, H, P]. The sum over P is G times the number of queries, without those that do
        not count or see no key.

    Raises:
        ValueError: If heads of the queries are no multiple of those of the keys, or there is a
            window and no offset.
    """
    _check(q, _apart(k)[0], offset, window, sinks)
    given = [*_apart(k)[:2], slots, mask, turns], (interleaved, offset, window, sinks)
    fits = MASS.takes(q, lse) and takes(q, k, None, turns, slots, mask, interleaved)
    run: Any = MASS if fits else mass_twin
    found: Tensor = run(q, *given[0], lse, scale, *given[1], *_apart(k)[2:])
    return found


def forward_twin(
    q: Tensor, k: Tensor, key_grid: Tensor | None, slots: Tensor | None, mask: Tensor | None,
    turns: Tensor | None, v: Tensor | None, value_grid: Tensor | None, scale: float,
    interleaved: bool, offset: int | None, window: int, sinks: int, key_form: list[int],
    key_shift: float, value_form: list[int], value_shift: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `attn_forward` in plain PyTorch and float32."""
    keys = _keys(q, k, key_grid, slots, turns, interleaved, key_form, key_shift)
    values = None if v is None else _numbers(q, v, value_grid, slots, value_form, value_shift)
    outs, lses = [], []
    for start in range(0, q.shape[2], BLOCK):
        logits = _logits(q, keys, k, slots, mask, scale, offset, window, sinks, start)
        lse = logits.logsumexp(-1)
        lses.append(lse)
        if values is None:
            continue
        weights = (logits - lse.where(lse.isfinite(), 0)[..., None]).exp()
        seen = (logits != -torch.inf).any(3).any(2)  # NaN behind what no query sees stays there
        out = weights.flatten(2, 3) @ values.masked_fill(~seen[..., None], 0)
        outs.append(out.unflatten(2, weights.shape[2:4]))
    out = torch.cat(outs, 3) if outs else q.new_zeros(*lses[0].shape[:3], q.shape[2], 0)
    return out.to(q.dtype).flatten(1, 2), torch.cat(lses, 3).flatten(1, 2)


def mass_twin(
    q: Tensor, k: Tensor, key_grid: Tensor | None, slots: Tensor | None, mask: Tensor | None,
    turns: Tensor | None, lse: Tensor, scale: float, interleaved: bool, offset: int | None,
    window: int, sinks: int, key_form: list[int], key_shift: float,
) -> Tensor:  # fmt: skip
    """Compute `attn_mass` in plain PyTorch."""
    keys = _keys(q, k, key_grid, slots, turns, interleaved, key_form, key_shift)
    total = q.new_zeros(keys.shape[:3], dtype=torch.float32)
    seeing = lse.masked_fill(lse == -torch.inf, torch.inf).unflatten(1, (k.shape[1], -1))
    for start in range(0, q.shape[2], BLOCK):
        logits = _logits(q, keys, k, slots, mask, scale, offset, window, sinks, start)
        total += (logits - seeing[:, :, :, start : start + BLOCK, None]).exp().sum((2, 3))
    return total


def _keys(
    q: Tensor,
    k: Tensor,
    grid: Tensor | None,
    slots: Tensor | None,
    turns: Tensor | None,
    interleaved: bool,
    form: list[int],
    shift: float,
) -> Tensor:
    """Return keys by place, in float32 and turned, [B, H, P, D]."""
    found = _numbers(q, k, grid, slots, form, shift)
    if turns is None:
        return found
    turns = turns.expand(-1, k.shape[1], -1, -1)
    turns = turns.expand(len(found), -1, -1, -1) if slots is None else _listed(turns, slots, len(q))
    cos, sin = turns.chunk(2, -1)
    one, two = found.unflatten(3, (-1, 2)).unbind(4) if interleaved else found.chunk(2, 3)
    both = one * cos - two * sin, two * cos + one * sin
    return torch.stack(both, 4).flatten(3) if interleaved else torch.cat(both, 3)


def _numbers(q: Tensor, x: Tensor, grid: Tensor | None, slots: Tensor | None, form: list[int], shift: float) -> Tensor:
    """Return keys or values by place, in float32, [B, H, P, D]."""
    if grid is not None:
        like = q.new_empty(0, x.shape[3] * 8 // form[0], dtype=torch.float32)
        x = _restored(x, grid, like, form[0], form[1], form[2], shift)
    if slots is not None:
        x = _listed(x, slots, len(q))
    return x.expand(len(q), -1, -1, -1).float()


def _listed(x: Tensor, slots: Tensor, batch: int) -> Tensor:
    """Return the slots of a list, [B, H, P, D]."""
    index = slots.long().clamp(0, x.shape[2] - 1).expand(batch, x.shape[1], -1)
    wide = index[..., None].expand(-1, -1, -1, x.shape[3])
    return x.expand(batch, -1, -1, -1).gather(2, wide)


def _logits(
    q: Tensor,
    keys: Tensor,
    k: Tensor,
    slots: Tensor | None,
    mask: Tensor | None,
    scale: float,
    offset: int | None,
    window: int,
    sinks: int,
    start: int,
) -> Tensor:
    """Return the logits of a block of queries in float32, [B, H, G, n, P], -inf where unseen."""
    part = q[:, :, start : start + BLOCK].float()
    batch, _, count, size = part.shape
    place = torch.arange(keys.shape[2], device=q.device)
    own = torch.arange(start, start + count, device=q.device)[:, None] + (offset or 0)
    seen = torch.ones(count, len(place), dtype=torch.bool, device=q.device)
    if offset is not None:
        seen = place <= own
    if window:
        seen = seen & ((place > own - window) | (place < sinks))
    seen = seen[None, None]
    if slots is not None:
        seen = seen & ((slots >= 0) & (slots < k.shape[2]))[:, :, None]
    if mask is not None:
        seen = seen & (mask[:, :, start : start + BLOCK] if mask.shape[2] > 1 else mask)
    rows = part.reshape(batch, keys.shape[1], -1, size)
    logits: Tensor = (rows @ keys.mT).unflatten(2, (-1, count)) * scale
    return logits.masked_fill(~seen[:, :, None], -torch.inf)


def _apart(held: Held | None) -> tuple[Tensor | Any, Tensor | None, list[int], float]:
    """Return numbers or codes, the grid, bits and lengths of groups, and the shift."""
    if not isinstance(held, Codes):
        return held, None, [], 0.0
    return held.codes, held.grid, [held.bits, held.each, held.width], held.shift


def _check(q: Tensor, k: Tensor, offset: int | None, window: int, sinks: int) -> None:
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q: has {q.shape[1]} heads, must have a multiple of the {k.shape[1]} heads of k")
    if window and offset is None:
        raise ValueError(f"window={window}: takes an offset, which says where the queries are")
    if sinks and not window:
        raise ValueError(f"sinks={sinks}: are seen beside a window, give one")


def _channels(x: Any, form: list[int]) -> int:
    """Return the channels of numbers or codes, whose shape stands for them in a formula."""
    shape = x if isinstance(x, (list, torch.Size)) else x.shape
    return int(shape[3]) * 8 // form[0] if form else int(shape[3])


def _no_forward(
    q: Tensor, k: Tensor, key_grid: Any, slots: Any, mask: Any, turns: Any, v: Tensor | None,
    value_grid: Any, scale: float, interleaved: bool, offset: Any, window: int, sinks: int,
    key_form: list[int], key_shift: float, value_form: list[int], value_shift: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    last = 0 if v is None else _channels(v, value_form)
    return q.new_empty((*q.shape[:3], last)), q.new_empty(q.shape[:3], dtype=torch.float32)


def _no_mass(q: Tensor, k: Tensor, key_grid: Any, slots: Tensor | None, *_: object) -> Tensor:
    width = k.shape[2] if slots is None else slots.shape[2]
    return q.new_empty((q.shape[0], k.shape[1], width), dtype=torch.float32)


def _forward_flops(
    q: list[int], k: list[int], key_grid: Any, slots: list[int] | None, mask: Any, turns: Any,
    v: list[int] | None, value_grid: Any, scale: float, interleaved: bool, offset: Any, window: Any,
    sinks: Any, key_form: list[int], key_shift: float, value_form: list[int], *_: object,
    **__: object,
) -> int:  # fmt: skip
    width = k[2] if slots is None else slots[2]
    last = 0 if v is None else _channels(v, value_form)
    return 2 * q[0] * q[1] * q[2] * width * (q[3] + last)


def _mass_flops(q: list[int], k: list[int], key_grid: Any, slots: list[int] | None, *_: object, **__: object) -> int:
    return 2 * q[0] * q[1] * q[2] * q[3] * (k[2] if slots is None else slots[2])


_SEEN = "bool interleaved, SymInt? offset, SymInt window, SymInt sinks, int[] key_form, float key_shift"
_KEYS = "Tensor q, Tensor k, Tensor? key_grid, Tensor? slots, Tensor? mask, Tensor? turns, "
FORWARD = define(
    f"attn_forward({_KEYS}Tensor? v, Tensor? value_grid, float scale, {_SEEN}, int[] value_form, "
    "float value_shift) -> (Tensor, Tensor)",
    forward_twin,
    _no_forward,
    "attention:attn_forward",
    _forward_flops,
)
MASS = define(
    f"attn_mass({_KEYS}Tensor lse, float scale, {_SEEN}) -> Tensor",
    mass_twin,
    _no_mass,
    "attention:attn_mass",
    _mass_flops,
)
