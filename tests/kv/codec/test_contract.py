"""Codecs: every one keeps shape, dtype, slots and honest bytes; nested payloads, and packing of every width."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from diffcache.kernels.pack import CHUNKS, pack, packed_size, unpack
from diffcache.kv.codec.base import Exact, TensorCodec, nbytes, tensors
from diffcache.kv.codec.fourier import FourierSigns, RangeSplit
from diffcache.kv.codec.joined_heads import JoinHeads
from diffcache.kv.codec.lowrank import LowRank, StaticLowRank
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.codec.residual import Gear
from diffcache.kv.codec.rotate import ChannelPermute, Hadamard, rotatekv
from diffcache.kv.codec.scaled import Balanced, ChannelSeparable
from diffcache.kv.codec.sparse import BitmapSparse, Outliers
from diffcache.kv.codec.table import SlotTable, join_tables

B, H, D = 2, 4, 16
ROW = GroupQuant(2, "channels", 8)
COL = GroupQuant(2, "tokens", 4)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


CODECS: dict[str, TensorCodec] = {
    "exact": Exact(),
    "exact-bf16": Exact(torch.bfloat16),
    "channels": ROW,
    "tokens": COL,
    "tokens-ragged-group": GroupQuant(3, "channels", 5),
    "all-tokens": GroupQuant(3, "tokens", None),
    "ternary": GroupQuant(1.58, "channels", None, symmetric=True),
    "one-bit": GroupQuant(1, "tokens", 4, relax=0.25),
    "separable": ChannelSeparable(ROW),
    "separable-tokens": ChannelSeparable(COL),
    "balanced": Balanced(ROW, numbers(H, D).abs() + 0.5),
    "balanced-rows": Balanced(COL, numbers(B, H, D).abs() + 0.5),
    "hadamard": Hadamard(ROW),
    "hadamard-heads": Hadamard(COL, heads=2),
    "hadamard-block": Hadamard(Exact(), heads=4, block=8),
    "permute": ChannelPermute(ROW),
    "permute-fixed": ChannelPermute(Hadamard(COL), numbers(H, D).argsort(-1)),
    "rotatekv": rotatekv(3, 8, heads=2, mode="official"),
    "joined-heads": JoinHeads(COL),
    "low-rank": LowRank(3),
    "low-rank-full": LowRank(99),
    "low-rank-joint": LowRank(5, joint=True),
    "low-rank-joint-wide": LowRank(12, joint=True),
    "low-rank-quantized": LowRank(8, COL, joint=True),
    "static": StaticLowRank(numbers(H * D, 7), numbers(7, H * D)),
    "static-head": StaticLowRank(numbers(D, 7), numbers(7, D), ROW),
    "bitmap": BitmapSparse(),
    "bitmap-quantized": BitmapSparse(0.5, ROW, mode="official"),
    "outliers": Outliers(0.2),
    "outliers-tokens": Outliers(0.4, "tokens"),
    "gear": Gear(group=8),
    "gear-tokens": Gear(2, "tokens", 4, outliers=0.2, rank=2),
    "fourier": FourierSigns(4),
    "range-split": RangeSplit(0.25, COL, FourierSigns(8)),
    "range-split-all": RangeSplit(1, COL, FourierSigns(4)),
    "nested": Hadamard(RangeSplit(0.5, COL, FourierSigns(4)), heads=2),
}
SHARED = {"static", "static-head", "balanced", "balanced-rows"}  # hold a tensor of the codec


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Gather slots of each row and head, as `take` must."""
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3]))


def same(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> TensorCodec:
    return CODECS[request.param]


@pytest.mark.parametrize(("dtype", "slots"), [(torch.float16, 16), (torch.bfloat16, 8), (torch.float64, 0)])
def test_shape_and_dtype_are_kept_and_constants_give_no_nan(
    codec: TensorCodec, dtype: torch.dtype, slots: int
) -> None:
    for x in (torch.randn(B, H, slots, D).to(dtype), *(torch.full((B, H, slots, D), n) for n in (0.0, 3.7, -1e-7))):
        x, before = x.to(dtype), x.to(dtype).clone()
        found = codec.encode(x).decode()
        assert found.shape == x.shape and found.dtype == dtype and found.isfinite().all()
        same(x, before)


def test_a_row_and_half_of_the_slots_stand_alone(codec: TensorCodec) -> None:
    payload = codec.encode(torch.randn(B, H, 64, D))
    same(payload.rows(torch.tensor([1])).decode(), payload.decode()[1:])
    assert nbytes(payload.take(torch.arange(16, 48).expand(B, H, -1))) < nbytes(payload)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_take_join_and_rows_are_bit_for_bit(codec: TensorCodec, dtype: torch.dtype) -> None:
    blocks = [torch.randn(B, H, slots, D).to(dtype) for slots in (8, 0, 16)]
    parts = [codec.encode(block) for block in blocks]
    whole = codec.join([*parts, parts[0]])
    plain = torch.cat([part.decode() for part in [*parts, parts[0]]], 2)
    same(whole.decode(), plain)
    room = torch.full((B, H, 2 + plain.shape[2], D), torch.nan, dtype=dtype)
    whole.decode_into(room[:, :, 1:-1])
    same(room[:, :, 1:-1], plain)
    assert room[:, :, [0, -1]].isnan().all()
    rows = torch.tensor([1, 0, 1])
    apart = torch.randint(0, 16, (B, H, 5))
    same(parts[2].decode_at(apart), gathered(parts[2].decode(), apart))
    q, weights = torch.randn(B, H, 3, D), torch.randn(B, H, 3, plain.shape[2])
    near, rest = plain.float(), {"atol": 1e-5 if dtype == torch.float32 else 0.02, "rtol": 0.001}
    torch.testing.assert_close(whole.near().float(), near, **rest)
    torch.testing.assert_close(whole.dot(q), q @ near.mT, atol=4 * rest["atol"], rtol=0.001)
    torch.testing.assert_close(whole.mix(weights), weights @ near, atol=4 * rest["atol"], rtol=0.001)
    indices = [
        torch.randint(0, 32, (B, H, 5)),
        torch.arange(8, 24).expand(B, H, -1),
        torch.arange(3, 19).expand(B, H, -1),  # across groups
        torch.tensor([31, 3, 3, 30]).expand(B, H, -1),
        torch.zeros(B, H, 0, dtype=torch.int64),
    ]
    for index in indices if dtype == torch.float32 else indices[:1]:
        taken, wanted = whole.take(index), gathered(plain, index)
        same(taken.decode(), wanted)
        same(whole.decode_at(index), wanted)
        same(taken.rows(rows).decode(), wanted[rows])
        again = codec.join([taken, parts[0], taken])
        known = torch.cat([wanted, parts[0].decode(), wanted], 2)
        same(again.decode(), known)
        second = torch.randint(0, known.shape[2], (B, H, 6))
        same(again.take(second).decode(), gathered(known, second))
    same(whole.decode(), plain)


@pytest.mark.parametrize("name", CODECS)
def test_no_payload_keeps_more_than_it_uses(name: str) -> None:
    codec = CODECS[name]
    parts = [codec.encode(torch.randn(B, H, 32, D)[:, :, :16]) for _ in range(2)]
    whole = codec.join(parts)
    for payload in (parts[0], whole, whole.take(torch.randint(0, 32, (B, H, 6)))):
        used = sum(t.numel() * t.element_size() for t in tensors(payload))
        if name in SHARED:
            assert nbytes(payload) <= used
        else:
            assert nbytes(payload) == used


def test_bad_tensors_are_refused(codec: TensorCodec) -> None:
    for x, said in (
        (torch.randn(B, H, D), r"shape \[2, 4, 16\]: a codec takes \[B, H, S, D\]"),
        (torch.zeros(B, H, 8, D, dtype=torch.int64), "dtype torch.int64: a codec takes a float dtype"),
        (torch.randn(B, H, 8, 0), "no channels"),
        (torch.randn(B, H, 9, D), f"9 slots: this codec codes {codec.multiple} at a"),
    ):
        if not said.startswith("9") or codec.multiple > 1:
            with pytest.raises(ValueError, match=said):
                codec.encode(x)
    with pytest.raises(ValueError, match="parts is empty"):
        codec.join([])
    if not isinstance(codec, Exact):
        with pytest.raises(TypeError, match="this codec joins"):
            codec.join([Exact().encode(torch.randn(B, H, 8, D))])


@dataclass(frozen=True)
class Box:
    left: object
    right: object = None
    count: int = 3


def test_every_tensor_is_walked_once_and_a_storage_counts_once_and_whole() -> None:
    a, b, c = torch.zeros(2), torch.ones(3), torch.ones(4)
    found = list(tensors(Box((a, [b, a]), {"x": Box(c, b), "y": 1.5, "z": None})))
    assert [id(t) for t in found] == [id(a), id(b), id(c)] and list(tensors("nothing")) == []
    big = torch.zeros(100, dtype=torch.float32)
    assert nbytes([big, big[:3], big.view(10, 10)]) == nbytes([big[:3]]) == 400
    assert nbytes([big, torch.zeros(5, dtype=torch.uint8)]) == 405
    assert nbytes([torch.zeros(0), torch.zeros(0)]) == 0


def test_row_numbers_grow_wider_only_where_they_must() -> None:
    for rows, dtype in ((256, torch.uint8), (257, torch.int16), (32769, torch.int32)):
        table = SlotTable(torch.arange(float(rows)).reshape(1, 1, rows, 1), 2)
        every = torch.arange(2 * rows).flip(0).roll(1)[None, None]
        found = table.take(every)
        assert found.of is not None and found.of.dtype == dtype
        assert torch.equal(found.lookup()[0, 0, :, 0].long(), every[0, 0] // 2)


def test_one_row_for_all_stays_one_row_however_often_it_is_taken() -> None:
    row = torch.randn(2, 3, 5)
    joined = join_tables([SlotTable.single(row, 4), SlotTable.single(row.clone(), 3)])
    assert joined.values.shape[2] == 1 and joined.each == 7
    apart = join_tables([SlotTable.single(row, 4), SlotTable.single(row + 1, 3)])
    wanted = torch.cat([row[:, :, None].expand(2, 3, n, 5) + i for i, n in enumerate((4, 3))], 2)
    assert torch.equal(apart.lookup(), wanted)
    table = SlotTable.single(torch.randn(1, 2, 3), 4)
    twice = table.take(torch.arange(4).repeat(2).expand(1, 2, -1))
    assert twice.values.shape[2] == 1 and twice.each == 8 and twice.of is None
    mixed = join_tables([SlotTable.single(torch.randn(1, 2, 3), 1), table])
    some = mixed.take(torch.tensor([[[0, 2, 3, 1], [1, 1, 0, 4]]]))
    assert some.values.shape[2] == 2  # a row for each slot would be four


@pytest.mark.parametrize("bits", CHUNKS)
def test_packing_is_exact_and_bytes_are_the_digits_of_a_number(bits: float) -> None:
    count, width, base = CHUNKS[bits]
    for size in (1, 2, 3, 5, 7, 8, 9, 16, 33, 64, 100):
        codes = torch.randint(0, base, (2, 3, 5, size), dtype=torch.uint8)
        codes[0, 0, 0] = base - 1
        packed = pack(codes, bits)
        assert packed.dtype == torch.uint8 and packed.shape == (2, 3, 5, packed_size(size, bits))
        assert torch.equal(unpack(packed, bits, size), codes)
    assert unpack(pack(torch.zeros(2, 0, 7, dtype=torch.uint8), bits), bits, 7).shape == (2, 0, 7)
    codes = torch.randint(0, base, (4, count * 3), dtype=torch.uint8)
    for row, packed in zip(codes.tolist(), pack(codes, bits).tolist(), strict=True):
        for chunk in range(3):
            whole = sum(row[chunk * count + i] * base**i for i in range(count))
            assert packed[chunk * width : (chunk + 1) * width] == list(whole.to_bytes(width, "little"))
            assert base**count <= 256**width
