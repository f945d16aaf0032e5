"""Calls of the operators of diffcache.kernels.coded."""

from collections.abc import Iterator

import torch
from torch import Tensor

from diffcache.kernels import coded
from tests.kernels.cases import Case, guarded
from tests.kernels.families.quantize import numbers

# batch, heads, query heads, slots of keys, slots of values, D, Dv, slots and channels of a group,
# bits of keys and of values, whether grids are symmetric
CALLS = (
    (1, 1, 1, 16, 1, 64, 64, 16, 64, 8, 4, False),
    (2, 1, 2, 96, 70, 64, 128, 32, 32, 2, 2, False),
    (1, 1, 4, 192, 180, 128, 64, 64, 32, 4, 2, False),
    (1, 2, 6, 64, 64, 64, 64, 16, 16, 4, 8, True),
)


def attention(dtype: torch.dtype) -> Iterator[Case]:
    """Yield queries over coded slots: one slot, split slots, several groups and constant ones."""

    def exact(
        q: Tensor,
        keys,
        key_grid,
        values,
        value_grid,
        scale,
        key_bits: int,
        value_bits: int,
        each: int,
        width: int,
        *shifts,
    ) -> list[Tensor]:
        held = []
        wide = key_grid.repeat_interleave(each, 2), value_grid.repeat_interleave(width, 4)
        for codes, bits, grid, shift in zip((keys, values), (key_bits, value_bits), wide, shifts, strict=True):
            known = torch.from_numpy(numbers(codes.numpy(), bits)).double()
            gap = grid[:, :, :, 0]
            low = grid[:, :, :, 1] if grid.shape[3] == 2 else gap * shift
            held.append((known * gap + low).repeat_interleave(q.shape[1] // codes.shape[1], 1))
        k, v = held
        logits = torch.einsum("bhd,bhsd->bhs", q, k[:, :, : v.shape[2]]) * scale
        out = torch.einsum("bhs,bhsd->bhd", logits.softmax(-1), v)
        return [out, logits.logsumexp(-1)]

    for number, (batch, heads, asked, slots, count, size, wide, each, width, key_bits, value_bits,
                 symmetric) in enumerate(CALLS):  # fmt: skip
        random = torch.Generator().manual_seed(number)

        def codes(*shape: int, random: torch.Generator = random) -> Tensor:
            return torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)

        keys = codes(batch, heads, slots, size * key_bits // 8)
        values = codes(batch, heads, count, wide * value_bits // 8)
        lines = 2 - symmetric
        key_grid = guarded((batch, heads, slots // each, lines, size), torch.float16, 3)
        key_grid[:, :, :, 0] = key_grid[:, :, :, 0].abs() / 2**key_bits
        key_grid[0, 0, 0, 0] = 0  # groups of one value
        value_grid = guarded((batch, heads, count, lines, wide // width), torch.float16, 4)
        value_grid[:, :, :, 0] = value_grid[:, :, :, 0].abs() / 2**value_bits
        q = guarded((batch, asked, size), dtype, 5)
        shifts = -(2**key_bits - 2) / 2, -(2**value_bits - 2) / 2
        yield Case(
            f"kivi{key_bits}-{value_bits}-{slots}-{count}-{size}-{wide}",
            coded.ATTEND,
            (q, keys, key_grid, values, value_grid, size**-0.5, key_bits, value_bits, each, width, *shifts),
            exact,
            lambda args, out: [each.to(args[0].dtype) for each in out],
            {torch.float32: 60.0, torch.float16: 6.0, torch.bfloat16: 6.0}[dtype],
        )


FAMILIES = (attention,)
