"""Packing: exact for every width and every size, bytes as promised, tokens apart."""

import math

import pytest
import torch

from diffcache.kv.codec.pack import CHUNKS, pack, packed_size, unpack


@pytest.mark.parametrize("bits", CHUNKS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 9, 16, 33, 64, 100])
def test_round_trip_is_exact(bits: float, size: int) -> None:
    values = CHUNKS[bits][2]
    codes = torch.randint(0, values, (2, 3, 5, size), dtype=torch.uint8)
    codes[0, 0, 0] = values - 1
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, 5, packed_size(size, bits))
    assert torch.equal(unpack(packed, bits, size), codes)


@pytest.mark.parametrize("bits", CHUNKS)
def test_no_tokens(bits: float) -> None:
    packed = pack(torch.zeros(2, 0, 7, dtype=torch.uint8), bits)
    assert unpack(packed, bits, 7).shape == (2, 0, 7)


@pytest.mark.parametrize(
    ("bits", "wanted"), [(1, 16), (1.58, 26), (2, 32), (3, 48), (4, 64), (8, 128)]
)
def test_bytes_of_128_numbers(bits: float, wanted: int) -> None:
    assert packed_size(128, bits) == wanted


@pytest.mark.parametrize("bits", CHUNKS)
def test_bytes_are_the_digits_of_a_number(bits: float) -> None:
    count, width, base = CHUNKS[bits]
    codes = torch.randint(0, base, (4, count * 3), dtype=torch.uint8)
    for row, packed in zip(codes.tolist(), pack(codes, bits).tolist(), strict=True):
        for chunk in range(3):
            whole = sum(row[chunk * count + i] * base**i for i in range(count))
            assert packed[chunk * width : (chunk + 1) * width] == list(
                whole.to_bytes(width, "little")
            )
            assert base**count <= 256**width


def test_every_byte_of_three_values() -> None:
    every = torch.arange(243).unsqueeze(1).to(torch.uint8)
    codes = unpack(every, 1.58, 5)
    assert int(codes.max()) == 2 and torch.equal(pack(codes, 1.58), every)
    assert 8 / 5 - math.log2(3) < 0.016  # what five to a byte wastes, in bits
