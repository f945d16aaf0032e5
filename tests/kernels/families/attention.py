"""Calls of the operators of diffcache.kernels.attention: every layout, codec and mask there is."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from diffcache.kernels import attention
from tests.kernels.cases import Case, guarded
from tests.kernels.families.merge import apart
from tests.kernels.families.quantize import numbers

# Rows, query heads, key heads, queries, keys, channels, channels of values; offset, window, sinks.
SHAPES: tuple[tuple[int, ...], ...] = (
    (1, 2, 2, 1, 1, 64, 64), (2, 4, 1, 1, 31, 64, 64), (1, 7, 1, 3, 200, 64, 64),
    (1, 3, 1, 16, 63, 16, 16), (1, 8, 1, 5, 70, 32, 48), (1, 3, 1, 2, 300, 24, 24),
    (1, 2, 1, 1, 330, 128, 128), (1, 4, 2, 17, 133, 64, 64, 116), (2, 2, 2, 33, 33, 32, 32, 0),
    (1, 1, 1, 65, 64, 128, 16), (1, 3, 1, 31, 40, 24, 24, -20), (1, 1, 1, 7, 600, 16, 16, 590),
    (1, 1, 1, 3, 200, 32, 32, 197, 48), (1, 1, 1, 3, 200, 32, 32, 64, 20), (1, 1, 1, 3, 9, 32, 32, 5, 30),
    (1, 1, 1, 3, 200, 32, 32, 190, 1), (1, 1, 1, 3, 200, 32, 32, 230, 20), (1, 2, 1, 20, 200, 16, 16, 140, 9, 40),
)  # fmt: skip
CODECS = ("exact", "2", "4", "8", "int8", "fp8")
MASKS = ("all", "causal", "window", "mask")
QUERIES, KEYS, SIZE = 5, 48, 32  # of the calls that combine layouts, codecs and masks


def decoded(codes: Tensor, grid: Tensor | None, form: list[int], shift: float) -> Tensor:
    """Return keys or values in float64 by the definition of their codes."""
    if grid is None:
        return codes
    bits, each, width = form
    if codes.dtype is torch.uint8:
        codes = torch.from_numpy(numbers(codes.numpy(), bits)).double()
    rows = grid.repeat_interleave(each, 2)[:, :, : codes.shape[2]]
    rows = rows.repeat_interleave(width, 4)[..., : codes.shape[3]]
    low = rows[:, :, :, 1] if grid.shape[3] == 2 else rows[:, :, :, 0] * shift
    return codes * rows[:, :, :, 0] + low


def by_place(
    q: Tensor, k: Tensor, slots: Any, mask: Any, turns: Any, scale: float, interleaved: bool, *limits: Any
) -> Tensor:
    """Return the logits by place, [B, Hq, n, P], -inf where unseen.

    Angles are recovered from their cosines, to turn pairs as complex numbers.
    """
    (batch, asking, count, _), (heads, held) = q.shape, k.shape[1:3]
    offset, window, sinks = limits
    if turns is not None:
        cos, sin = turns.expand(len(k), heads, -1, -1).chunk(2, -1)
        pairs = k.unflatten(3, (-1, 2)) if interleaved else k.unflatten(3, (2, -1)).mT
        spun = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin))
        k = spun.flatten(3) if interleaved else spun.mT.flatten(3)
    same = k.expand(batch, -1, -1, -1).repeat_interleave(asking // heads, 1)
    logits = scale * (q[:, :, :, None] * same[:, :, None]).sum(-1)
    width = held if slots is None else slots.shape[2]
    listed = torch.arange(width) if slots is None else slots
    listed = listed.expand(batch, heads, -1).tolist()
    shown = torch.ones(1, dtype=torch.bool) if mask is None else mask
    shown = shown.expand(batch, heads, count, width).tolist()
    seen = torch.zeros(batch, heads, count, width, dtype=torch.bool)
    for row, head, query in product(*map(range, seen.shape[:3])):
        own = width if offset is None else offset + query
        for place, slot in enumerate(listed[row][head]):
            near = not window or place > own - window or place < sinks
            known = shown[row][head][query][place] and 0 <= slot < held
            seen[row, head, query, place] = place <= own and near and known
    if slots is not None:
        index = slots.long().clamp(0, held - 1).expand(batch, heads, -1)
        index = index.repeat_interleave(asking // heads, 1)[:, :, None].expand(-1, -1, count, -1)
        logits = logits.gather(3, index)
    return logits.masked_fill(~seen.repeat_interleave(asking // heads, 1), -math.inf)


def exact_forward(
    q: Tensor, k: Tensor, key_grid: Any, slots: Any, mask: Any, turns: Any, v: Any, value_grid: Any,
    scale: float, interleaved: bool, offset: int | None, window: int, sinks: int,
    key_form: list[int], key_shift: float, value_form: list[int], value_shift: float,
) -> list[Tensor]:  # fmt: skip
    """Return attention over the keys that each query sees."""
    k = decoded(k, key_grid, key_form, key_shift)
    logits = by_place(q, k, slots, mask, turns, scale, interleaved, offset, window, sinks)
    lse = logits.logsumexp(-1)
    if v is None:
        return apart(q.new_zeros(*q.shape[:3], 0), lse)
    v = decoded(v, value_grid, value_form, value_shift).expand(len(q), -1, -1, -1)
    if slots is not None:
        index = slots.long().clamp(0, v.shape[2] - 1).expand(*v.shape[:2], -1)
        v = v.gather(2, index[..., None].expand(-1, -1, -1, v.shape[3]))
    weights = (logits - lse.where(lse > -math.inf, 0)[..., None]).exp()
    return apart(weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), lse)


def exact_mass(
    q: Tensor, k: Tensor, key_grid: Any, slots: Any, mask: Any, turns: Any, lse: Tensor,
    scale: float, interleaved: bool, offset: int | None, window: int, sinks: int,
    key_form: list[int], key_shift: float,
) -> list[Tensor]:  # fmt: skip
    """Return the sums of the weights of places."""
    k = decoded(k, key_grid, key_form, key_shift)
    logits = by_place(q, k, slots, mask, turns, scale, interleaved, offset, window, sinks)
    seeing = lse.where(lse > -math.inf, math.inf)
    part = (logits - seeing[..., None]).exp().sum(2)
    return [part.unflatten(1, (k.shape[1], -1)).sum(2)]


def held(codec: str, dtype: torch.dtype, batch: int, heads: int, tokens: bool) -> attention.Codes:
    """Return random codes of KEYS slots; groups run along tokens or channels, or are whole slots."""
    random = torch.Generator().manual_seed(int(tokens))
    if codec in ("int8", "fp8"):
        room = torch.randn(batch, heads, KEYS, SIZE, generator=random)
        codes = room.to(torch.float8_e5m2) if codec == "fp8" else (40 * room).to(torch.int8)
        grid = guarded((batch, heads, KEYS, 1 + tokens, 1), torch.float16, 3 + tokens)
        grid[:, :, :, 0] = 1.0 if codec == "fp8" else 0.03
        return attention.Codes(codes, grid, 8, 1, SIZE)
    bits = int(codec)
    codes = torch.randint(256, (batch, heads, KEYS, SIZE * bits // 8), generator=random, dtype=torch.uint8)
    shape = (KEYS // 16, 2, SIZE) if tokens else (KEYS, 1, SIZE // 16)
    grid = guarded((batch, heads, *shape), torch.float16, 5 + tokens)
    grid[:, :, :, 0] = grid[:, :, :, 0].abs() / 2**bits
    grid[0, 0, 0, 0] = 0  # groups of one value
    each, width = (16, 1) if tokens else (1, 16)
    return attention.Codes(codes, grid, bits, each, width, -(2**bits - 2) / 2)


Call = tuple[str, Tensor, Any, Any, float, dict[str, Any]]


def calls(dtype: torch.dtype) -> Iterator[Call]:
    """Yield queries, keys, values, scales and what is seen: of shapes, then of combinations."""
    for rows, asking, heads, count, width, size, last, *limits in SHAPES:
        shapes = (asking, count, size), (heads, width, size), (heads, width, last)
        q, k, v = (guarded((rows, *shape), dtype, seed) for seed, shape in enumerate(shapes))
        name = "-".join(map(str, (rows, asking, heads, count, width, size, last, *limits)))
        seen = dict(zip(("offset", "window", "sinks"), limits, strict=False))
        yield name, q, k, v, 1.5 * size**-0.5, seen
    turned = guarded((2, 3, 4, 32), dtype, 7).transpose(1, 2)
    swapped = guarded((1, 200, 2, 32), dtype, 8).transpose(1, 2)
    listed = torch.stack([torch.randperm(200)[:60] for _ in range(4)]).view(2, 2, 60).int()
    listed[1, 1] = -1
    yield "strides", turned, swapped, swapped, 0.2, {"slots": listed[:1, :1].long()}
    yield "rows", turned, swapped, swapped, 0.2, {"slots": listed, "offset": 30, "window": 20}
    q, k = guarded((1, 2, 3, 24), dtype, 3), guarded((1, 1, 40, 24), dtype, 4)
    angles = 6 * torch.rand(1, 1, 40, 12, generator=torch.Generator().manual_seed(2))
    turns = torch.cat([angles.cos(), angles.sin()], -1)
    yield "turned", q, k, k, 0.2, {"turns": turns, "interleaved": True}
    columns = guarded((2, 2, 32, 40), dtype, 5).mT
    yield "columns", turned, columns, columns, 0.3, {}
    random = torch.Generator().manual_seed(1)
    few = torch.randperm(KEYS, generator=random)[None, None, :30].int().expand(1, 1, -1).clone()
    few[..., 4], few[..., 5] = -1, KEYS
    for number, (codec, mask) in enumerate(product(CODECS, MASKS)):
        layout = ("dense", "listed")[(number + number // 4) % 2]
        q = guarded((1, 2, QUERIES, SIZE), dtype, number)
        k, v = (guarded((1, 1, KEYS, SIZE), dtype, 99 + seed) for seed in range(2))
        pair: Any = (k, v) if codec == "exact" else (held(codec, dtype, 1, 1, t) for t in (True, False))
        width = KEYS if layout == "dense" else few.shape[2]
        seen = {
            "all": {},
            "causal": {"offset": width - QUERIES},
            "window": {"offset": width - QUERIES, "window": 9, "sinks": 3},
            "mask": {"mask": torch.rand(1, 1, QUERIES, width, generator=random) > 0.4},
        }[mask]
        if layout == "listed":
            seen |= {"slots": few}
        if number % 3:
            angles = 6 * torch.rand(1, 1, KEYS, SIZE // 2, generator=random)
            seen |= {"turns": torch.cat([angles.cos(), angles.sin()], -1), "interleaved": number % 3 > 1}
        yield f"{codec}-{mask}-{layout}-{number % 3}", q, *pair, 0.3, seen


def given(k: Any, v: Any, scale: float, seen: dict[str, Any], lse: Any = None) -> tuple[Any, ...]:
    """Return the arguments of an operator behind its queries; of masses, with log-sum-exps."""
    keys, grid, *form = attention._apart(k)
    tensors = [keys, grid, *(seen.get(name) for name in ("slots", "mask", "turns"))]
    limits = [seen.get("interleaved", False), *(seen.get(*one) for one in (("offset",), ("window", 0), ("sinks", 0)))]
    if lse is not None:
        return (*tensors, lse, scale, *limits, *form)
    values, value_grid, *value_form = attention._apart(v)
    return (*tensors, values, value_grid, scale, *limits, *form, *value_form)


def forwards(dtype: torch.dtype) -> Iterator[Case]:
    """Yield attention."""

    def found(args: Any, out: tuple[Tensor, Tensor]) -> list[Tensor]:
        return apart(out[0], out[1].to(dtype))  # one tolerance is of both

    for number, (name, q, k, v, scale, seen) in enumerate(calls(dtype)):
        coded = not isinstance(k, Tensor)
        # The kernel rounds decoded numbers, and the weights of values, to the dtype of queries.
        tolerance = 20 if dtype == torch.float32 else 6 if coded or "turns" in seen else 2
        args = q, *given(k, None if number % 7 == 6 else v, scale, seen)
        yield Case(f"attention-{name}", attention.FORWARD, args, exact_forward, found, tolerance)


def masses(dtype: torch.dtype) -> Iterator[Case]:
    """Yield masses, also of queries that do not count."""
    for name, q, k, _, scale, seen in calls(dtype):
        args = given(k, None, scale, seen)
        lse = attention.forward_twin(q, *args)[1]
        if lse.shape[2] > 1:
            lse[0, :, ::5] = math.inf
        exact = isinstance(k, Tensor) and "turns" not in seen
        rounded = dtype if not exact and dtype != torch.float32 else torch.float32
        case_of = Case(f"mass-{name}", attention.MASS, (q, *given(k, None, scale, seen, lse)), exact_mass)
        case_of.results = lambda args, out, to=rounded: [out.to(to)]
        case_of.tolerance = 40 if rounded == torch.float32 else 6
        yield case_of


FAMILIES = (forwards, masses)
