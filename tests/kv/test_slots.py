"""Layers known without reading them: runs of slots are copied, checked once, and no mask without need."""

from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv.attend import _seen, attend
from diffcache.kv.layer import KVLayer
from diffcache.kv.slots import SlotIndex, checked
from diffcache.kv.view import View
from tests.internals import HostReads
from tests.kv.test_core import B, H, asked, drawn, filled, plain


def gapped() -> KVLayer:
    """Twelve tokens, of which 0, 1 and 5 to 11 are held, and one more."""
    layer = filled(12)
    keep = torch.tensor([0, 1, *range(5, 12)])
    layer.replace(layer.read().gather(keep.expand(B, H, -1)))
    layer.write(*drawn(1, 3))
    return layer


def test_a_run_of_slots_is_written_like_single_slots_and_waits_for_nothing() -> None:
    k, v = drawn(3, 5)
    runs, slots, rows, shared = (gapped() for _ in range(4))
    with HostReads() as reads:
        runs.overwrite(range(6, 9), k, v)
    assert not reads.found
    slots.overwrite(torch.arange(6, 9), k, v)
    rows.overwrite(torch.arange(6, 9).repeat(B, 1), k, v)
    shared.overwrite(torch.arange(6, 9).expand(B, -1), k, v)
    fresh = gapped().read().clone()
    fresh.k[:, :, 6:9], fresh.v[:, :, 6:9] = k, v
    for layer in (runs, slots, rows, shared):
        assert torch.equal(layer.read().k, fresh.k) and torch.equal(layer.read().v, fresh.v)
        assert torch.equal(layer.read().pos, fresh.pos)
    runs.overwrite(range(4, 4), k[:, :, :0], v[:, :, :0])
    for bad, why in ((range(0, 6, 2), "step 1"), (range(2), "as many"), (range(8, 11), "8..10")):
        with pytest.raises(ValueError, match=why):
            runs.overwrite(bad, k, v)
    runs.settle_tail()
    with pytest.raises(ValueError, match="settled"):
        runs.overwrite(range(6, 9), k, v)
    assert torch.equal(runs.read().k, fresh.k)


def with_segment() -> KVLayer:
    layer = gapped()
    layer.settle_tail()
    layer.write(*drawn(1, 4))
    return layer


def padded() -> KVLayer:
    return filled(6, valid=torch.tensor([[True] * 6, [False] + [True] * 5]))


def ragged() -> KVLayer:
    layer = filled(6)
    slots = layer.read().gather(torch.arange(6).expand(B, H, -1))
    slots.meta["pos"][0, 1, 2] = -1
    layer.replace(slots, flat=True)
    layer.write(*drawn(1, 4))
    return layer


@pytest.mark.parametrize(
    ("made", "given", "free"),
    [
        (gapped, {}, True),
        (with_segment, {}, True),
        (gapped, {"window": 13}, True),
        (gapped, {"window": 12}, False),
        (gapped, {"causal": False, "pos": torch.tensor([4])}, True),
        (gapped, {"pos": torch.tensor([4])}, False),
        (gapped, {"start": 11}, False),
        (gapped, {"start": 11, "causal": False}, True),
        (padded, {}, False),
        (padded, {"causal": False}, False),
        (ragged, {"causal": False}, False),
    ],
)
def test_there_is_a_mask_exactly_where_something_is_hidden(made: Any, given: dict[str, Any], free: bool) -> None:
    layer = made()
    query = asked(1, given.pop("start", layer.seen - 1), **given)
    layer.views()  # what is known of a segment is read once
    with HostReads() as reads:
        view, *others = layer.views()
        out = attend(query, [view, *others])
    assert not reads.found
    whole = layer.read()
    if not others:
        assert (_seen(query, view) is None) is free
    torch.testing.assert_close(out, attend(query, [View(whole)]), atol=1e-14, rtol=0)
    last = int(query.positions().max())
    seen = (whole.pos >= 0) & ((whole.pos <= last) | (not query.causal))
    if query.window is not None:
        seen = seen & (whole.pos > last - query.window)
    torch.testing.assert_close(out, plain(query, whole.k, whole.v, seen), atol=1e-14, rtol=0)


def test_metadata_of_new_tokens_take_no_reading() -> None:
    layer = filled(4)
    with HostReads() as reads:
        layer.write(*drawn(2, 1), meta={"tag": torch.ones(B, 1, 2, dtype=torch.int32)})
        layer.write(*drawn(1, 2))
    assert not reads.found
    assert layer.read().meta["tag"][0, 0].tolist() == [0, 0, 0, 0, 1, 1, 0]
    assert layer.read().pos[0, 0].tolist() == list(range(7)) and layer.tail.start == 0


LAYERS, WIDTH = 4, 10
ROWS = [torch.tensor([2, 9, 0]), torch.tensor([[1, 5, 5], [3, 4, 9]]), torch.arange(0)]


def layers(settled: int = 0) -> list[KVLayer]:
    drawn = torch.Generator().manual_seed(0)
    found = [KVLayer(index) for index in range(LAYERS)]
    for layer in found:
        for count in (settled, WIDTH - settled):
            k, v = (torch.randn(2, 3, count, size, generator=drawn) for size in (8, 4))
            if count:
                layer.write(k, v)
            if count == settled:
                layer.settle_tail()
    return found


def fresh(index: Tensor) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    count = index.shape[-1]
    k, v = (torch.randn(2, 3, count, size, generator=drawn) for size in (8, 4))
    if count == 3 and index.dim() == 2:  # the slot that is named twice
        k[0, :, 2], v[0, :, 2] = k[0, :, 1], v[0, :, 1]
    return k, v


@pytest.mark.parametrize("index", ROWS, ids=lambda index: str(list(index.shape)))
def test_all_layers_are_written_to_and_the_slots_are_read_once(index: Tensor) -> None:
    one, other = layers(), layers()
    k, v = fresh(index)
    found: SlotIndex | range | None = None
    with HostReads() as reads:
        for layer in one:
            found = checked(index, layer.held, found)
            layer.overwrite(found, k, v)
    assert reads.found["_local_scalar_dense"] == (2 if index.numel() else 0)
    for layer, wanted in zip(one, other, strict=True):
        wanted.overwrite(index, k, v)
        before, after = wanted.read(), layer.read()
        assert torch.equal(after.k, before.k) and torch.equal(after.v, before.v)
        assert layer.tail.clean == wanted.tail.clean
    first = checked(torch.tensor([1, 2]), WIDTH)  # and other slots anew
    assert checked(torch.tensor([1, 2]), WIDTH, first) is not first
    assert checked(range(3), WIDTH, first) == range(3)


def test_a_layer_that_has_settled_some_refuses_them_without_a_look() -> None:
    index = SlotIndex.of(ROWS[0], WIDTH)
    last = SlotIndex.of(torch.tensor([5, 4]), WIDTH)
    with HostReads() as reads:
        for layer in layers(settled=4):
            with pytest.raises(ValueError, match=r"index=0\.\.9: slots 4 to 9 can be overwritten"):
                layer.overwrite(index, *fresh(ROWS[0]))
            layer.overwrite(last, *fresh(last.index))
    assert not reads.found
