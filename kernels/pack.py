"""Small whole numbers packed into bytes along the last axis."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# bits: (numbers, bytes they share, values a number can have). The numbers of a chunk are the digits
# of one whole number, lowest first, which is stored as its bytes, lowest first.
CHUNKS: dict[float, tuple[int, int, int]] = {
    1: (8, 1, 2),
    1.58: (5, 1, 3),
    2: (4, 1, 4),
    3: (8, 3, 8),
    4: (2, 1, 16),
    8: (1, 1, 256),
}
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # a byte for each number of a byte


def chunk_of(bits: float) -> tuple[int, int, int]:
    """Return (numbers in a chunk, bytes of a chunk, values of a number), or raise ValueError if there is none."""
    if bits not in CHUNKS:
        raise ValueError(f"bits={bits!r}: must be one of {', '.join(map(str, CHUNKS))}")
    return CHUNKS[bits]


def packed_size(size: int, bits: float) -> int:
    """Return the bytes that `size` numbers of `bits` bits take; ValueError if there is no packing of `bits`."""
    count, width, _ = chunk_of(bits)
    return -(-size // count) * width


def pack(codes: Tensor, bits: float) -> Tensor:
    """Pack numbers along the last axis, so that the numbers of one token are bytes of their own.

    Args:
        codes: `[..., D]`, an integer dtype, 0 to the number of values less one.
        bits: 1, 1.58, 2, 3, 4 or 8. 1.58 is three values, five to a byte (1.6 bits); 3 is eight
            numbers in three bytes.

    Returns:
        `[..., packed_size(D, bits)]` uint8; where D fills no whole chunk, the rest is zeros.

    Raises:
        ValueError: If there is no packing of `bits`.
    """
    count, width, base = chunk_of(bits)
    if width == count == 1:
        return codes.to(torch.uint8).contiguous()
    if codes.shape[-1] % count:
        codes = functional.pad(codes, (0, -codes.shape[-1] % count))
    numbers = codes.unflatten(-1, (-1, count)).unbind(-1)
    # The widest chunk has 24 bits.
    whole: Tensor = numbers[-1].to(torch.uint8 if width == 1 else torch.int32)
    for number in reversed(numbers[:-1]):
        whole = (whole * base).add_(number)
    if width == 1:
        return whole
    parts = [(whole >> 8 * place & 255).to(torch.uint8) for place in range(width)]
    return torch.stack(parts, -1).flatten(-2)


def unpack(packed: Tensor, bits: float, size: int) -> Tensor:
    """Return the numbers that `pack` packed.

    Args:
        packed: `[..., packed_size(size, bits)]` uint8.
        bits: Bits of a number, as given to `pack`.
        size: Numbers in the last axis, `D`.

    Returns:
        `[..., D]` uint8.

    Raises:
        ValueError: If there is no packing of `bits`, or the bytes are not as many as `size` takes.
    """
    count, width, base = chunk_of(bits)
    if packed.shape[-1] != packed_size(size, bits):
        raise ValueError(
            f"packed has {packed.shape[-1]} bytes in its last axis: {size} numbers of {bits} bits"
            f" take {packed_size(size, bits)}"
        )
    if width == count == 1:
        return packed
    if base**count == 256:
        return spread(packed, count)[..., :size]
    if width == 1:
        return digits(packed, base, count)[..., :size]
    whole = torch.zeros((*packed.shape[:-1], packed.shape[-1] // width), dtype=torch.int32)
    whole = whole.to(packed.device)
    for place in range(width):
        whole |= packed[..., place::width].to(torch.int32) << 8 * place
    return digits(whole, base, count)[..., :size].to(torch.uint8)


def spread(packed: Tensor, count: int) -> Tensor:
    """Return the numbers of bytes that hold `count` of them each, `[..., N]` as `[..., N * count]`.

    Each byte becomes a word of `count` bytes, whose halves are moved apart until every byte of it
    holds one number: whole words at a time, where looking at one digit after another would copy
    each of them to its place.

    Args:
        packed: uint8.
        count: 2, 4 or 8 numbers of a byte, each a power of two wide.
    """
    words = packed.to(_WORDS[count], memory_format=torch.contiguous_format)
    apart = count * 8  # bits that a run of numbers stands in
    held = 8  # bits of a run
    while held > 8 // count:
        apart, held = apart // 2, held // 2
        mask = sum((1 << held) - 1 << place for place in range(0, count * 8, apart))
        words = words.bitwise_or_(words << apart - held).bitwise_and_(mask)
    return words.view(torch.uint8)  # the lowest byte comes first


def digits(whole: Tensor, base: int, count: int) -> Tensor:
    """Return the lowest `count` digits of whole numbers `[..., N]`, as `[..., N * count]`."""
    if base & (base - 1):
        found = [whole // base**place % base for place in range(count)]
    else:
        step = base.bit_length() - 1
        found = [whole >> step * place & (base - 1) for place in range(count)]
    return torch.stack(found, -1).flatten(-2)
