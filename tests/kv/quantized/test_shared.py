"""Neighboring layers held together: shared codes, decoded numbers, and bytes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv.codec.base import Exact, nbytes
from diffcache.kv.codec.joined_layers import Single, Together
from diffcache.kv.codec.quant import GroupQuant, Quantized
from diffcache.kv.codec.remat import Deltas
from diffcache.kv.codec.shared import SharedBasis, SharedCodes, SharedDirection
from diffcache.kv.layer import KVLayer
from diffcache.kv.slots import Slots

QUANT = GroupQuant(4, "channels", 4)
CODECS: dict[str, Any] = {
    "single": Single(QUANT),
    "codes": SharedCodes(GroupQuant(2, "tokens", 4)),
    "basis": SharedBasis(6),
    "direction": SharedDirection(keep=0.25),
    "official": SharedDirection(keep=0.25, mode="official"),
    "coded direction": SharedDirection(keep=0.25, inner=QUANT),
    "deltas": Deltas(GroupQuant(8, "channels", 4), QUANT),
}


def draw(layers: int = 2, slots: int = 8, seed: int = 0, dtype: Any = torch.float32) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    base = torch.randn(2, 2, slots, 8, generator=drawn)
    return [(base + 0.3 * torch.randn(2, 2, slots, 8, generator=drawn)).to(dtype) for _ in range(layers)]


@pytest.mark.parametrize("name", CODECS)
def test_taking_rows_and_joining_never_change_what_is_decoded(name: str) -> None:
    codec = CODECS[name]
    one, two = codec.encode(draw()), codec.encode(draw(seed=1, slots=12))
    index = torch.tensor([[3, 0, 7], [1, 1, 5]]).expand(2, 2, 3)
    rows = torch.tensor([1, 1, 0])
    joined = codec.join([[a, b] for a, b in zip(one, two, strict=True)])
    for a, b, both in zip(one, two, joined, strict=True):
        assert torch.equal(both.decode(), torch.cat([a.decode(), b.decode()], 2))
        wide = index[..., None].expand(-1, -1, -1, 8)
        assert torch.equal(a.take(index).decode(), a.decode().gather(2, wide))
        assert torch.equal(a.rows(rows).decode(), a.decode()[rows])
    again = codec.join([[both.take(index), b] for both, b in zip(joined, two, strict=True)])
    for both, b, found in zip(joined, two, again, strict=True):
        wide = index[..., None].expand(-1, -1, -1, 8)
        want = torch.cat([both.decode().gather(2, wide), b.decode()], 2)
        assert torch.equal(found.decode(), want)


@pytest.mark.parametrize("name", ["codes", "basis", "direction", "deltas"])
def test_what_layers_share_counts_once_and_stays_shared_when_blocks_are_appended(name: str) -> None:
    codec = CODECS[name]
    pairs = [codec.encode(draw(slots=16, seed=seed)) for seed in (0, 1)]
    joined = codec.join([list(parts) for parts in zip(*pairs, strict=True)])
    apart = sum(nbytes(each) for each in joined)
    assert nbytes(joined) < apart
    assert nbytes(joined) <= sum(nbytes(pair) for pair in pairs)


def test_layers_use_the_first_ones_codes_with_their_own_grid() -> None:
    quant = GroupQuant(2, "tokens", 4)
    xs = draw()
    first, second = SharedCodes(quant).encode(xs)
    assert isinstance(first, Quantized) and isinstance(second, Quantized)
    assert second.codes is first.codes
    assert torch.equal(first.decode(), quant.encode(xs[0]).decode())
    groups = xs[1].unflatten(2, (-1, 4))
    low, high = groups.amin(3, keepdim=True), groups.amax(3, keepdim=True)
    scale = ((high - low) / 3).half().float()
    lows = xs[0].unflatten(2, (-1, 4)).amin(3, keepdim=True)
    spans = (xs[0].unflatten(2, (-1, 4)).amax(3, keepdim=True) - lows) / 3
    codes = ((xs[0].unflatten(2, (-1, 4)) - lows.half()) / spans.half().float()).round().clamp(0, 3)
    want = (codes * scale + low.half().float()).flatten(2, 3)
    assert torch.allclose(second.decode(), want, atol=1e-5)


def test_a_full_basis_is_exact_and_a_small_one_is_the_best_of_its_rank() -> None:
    xs = draw(3, 40, dtype=torch.float64)
    for x, payload in zip(xs, SharedBasis(1.0).encode(xs), strict=True):
        assert torch.allclose(payload.decode(), x, atol=1e-12)
    wide = torch.cat([x.transpose(1, 2).flatten(2) for x in xs], 2)
    for rank, slots in ((5, 40), (5, 7)):
        short = [x[:, :, :slots] for x in xs]
        found = SharedBasis(rank).encode(short)
        error = sum((p.decode() - x).square().sum((1, 2, 3)) for p, x in zip(found, short, strict=True))
        tail = torch.linalg.svdvals(wide[:, :slots])[:, rank:].square().sum(-1)
        assert torch.allclose(error, tail, rtol=1e-9)


def test_between_them_it_divides_their_angle() -> None:
    xs = draw(dtype=torch.float64)
    found = SharedDirection(0.6, 0.0).encode(xs)[0].decode()
    angle = torch.cosine_similarity(*xs, -1).acos()
    first = torch.cosine_similarity(found, xs[0], -1).acos()
    assert torch.allclose(first, 0.6 * angle, atol=1e-7)


@pytest.mark.parametrize("mode", ["paper", "official"])
def test_slots_that_are_not_merged_are_exact(mode: Any) -> None:
    xs = draw(slots=20, dtype=torch.bfloat16)
    angle = torch.cosine_similarity(xs[0].float(), xs[1].float(), -1).acos()
    found = SharedDirection(0.6, 0.2, mode=mode).encode(xs)
    kept = [
        (payload.decode() == x).all(-1) & (payload.norm == 0)  # type: ignore[attr-defined]
        for payload, x in zip(found, xs, strict=True)
    ]
    assert torch.equal(*kept)
    if mode == "paper":
        assert (kept[0].sum(-1) == 4).all()
        assert (angle.where(kept[0], 9).amin(-1) >= angle.where(~kept[0], 0).amax(-1) - 1e-3).all()
    else:
        low, high = angle.amin(-1, keepdim=True), angle.amax(-1, keepdim=True)
        assert torch.equal(kept[0], angle < low + 0.2 * (high - low))


def test_deltas_are_to_what_is_decoded_so_that_errors_do_not_add_up() -> None:
    xs = draw(5)
    found = Deltas(GroupQuant(3, "channels", 4), QUANT).encode(xs)
    for payload, x in zip(found[1:], xs[1:], strict=True):
        gap = x - payload.before.decode()  # type: ignore[attr-defined]
        bound = (gap.unflatten(-1, (-1, 4)).amax(-1) - gap.unflatten(-1, (-1, 4)).amin(-1)) / 15
        error = (payload.decode() - x).abs().unflatten(-1, (-1, 4)).amax(-1)
        assert (error <= bound * 0.51 + 2e-3).all()
    exact = Deltas(Exact(), Exact()).encode([x.double() for x in xs])
    assert all(torch.allclose(p.decode(), x.double()) for p, x in zip(exact, xs, strict=True))


def layers(count: int = 2, slots: int = 20) -> list[KVLayer]:
    found = [KVLayer(index) for index in range(count)]
    for layer, k, v in zip(found, draw(count, slots), draw(count, slots, 5), strict=True):
        layer.write(k, v)
    return found


def test_beams_part_what_layers_share_and_the_next_forward_joins_it() -> None:
    codec = Together(SharedDirection(0.6), SharedBasis(6), 2, 8)
    both = layers()
    codec.flush(both)
    shared = nbytes([layer.segments for layer in both])
    for layer in both:
        layer.rows(torch.tensor([0, 1, 1, 0]))
    parted = nbytes([layer.segments for layer in both])
    before = [layer.read() for layer in both]
    codec.flush(both)
    assert nbytes([layer.segments for layer in both]) == 2 * shared < parted
    for layer, slots in zip(both, before, strict=True):
        assert torch.equal(layer.read().k, slots.k) and torch.equal(layer.read().v, slots.v)


def test_layers_that_hold_other_positions_are_coded_alone() -> None:
    codec = Together(SharedDirection(0.6), SharedDirection(0.6), 2, 8)
    both = layers()
    slots = both[1].read()
    both[1].replace(slots.gather(torch.arange(4, 20).expand(2, 2, -1)))
    whole = [layer.read() for layer in both]
    codec.flush(both)
    assert [layer.segments[0].width for layer in both] == [16, 16]
    for layer, before in zip(both, whole, strict=True):
        assert torch.allclose(layer.read().k, before.k, atol=1e-5)  # its own direction


def test_one_layer_that_was_cut_short_can_still_grow() -> None:
    codec = Together(SharedCodes(QUANT), SharedCodes(QUANT), 2, 8)
    both = layers(slots=8)
    codec.flush(both)
    index = torch.tensor([1, 4, 6]).expand(2, 2, -1)
    both[0].segments = [both[0].segments[0].take(index, torch.ones_like(index, dtype=torch.bool))]
    for layer, k in zip(both, draw(2, 8, 7), strict=True):
        layer.write(k, k)
    before = [layer.read() for layer in both]
    codec.flush(both)
    for layer, slots in zip(both, before, strict=True):
        found = layer.read()
        assert torch.equal(found.pos, slots.pos)
        done = slots.width - 8
        assert torch.equal(found.k[:, :, :done], slots.k[:, :, :done])


def test_a_rung_holds_slots_of_one_layer() -> None:
    codec = Together(SharedBasis(1.0), Single(GroupQuant(8, "tokens", 4)), 2, 8)
    k, v = draw(2, 6)
    pos = torch.arange(6, dtype=torch.int32).expand(2, 1, -1)
    segment = codec.hold(Slots(k, v, {"pos": pos}), 2)
    slots = segment.read()
    assert segment.level == 2 and slots.pos.tolist()[0] == [[0, 1, 2, 3, 4, 5, -1, -1]]
    assert torch.allclose(slots.k[:, :, :6], k, atol=1e-5)
    both = codec.joined(segment, segment)
    assert both is not None and both.width == 16 and both.level == 2
