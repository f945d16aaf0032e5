"""Slots that are checked once: layers are written to without another look at them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffcache.kv.layer import KVLayer
from diffcache.kv.slots import SlotIndex, checked
from tests.kv.test_in_place import HostReads

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


def test_other_slots_are_checked_anew() -> None:
    first = checked(torch.tensor([1, 2]), WIDTH)
    assert checked(torch.tensor([1, 2]), WIDTH, first) is not first
    assert checked(range(3), WIDTH, first) == range(3)


@pytest.mark.parametrize("index", [[-1, 3], [[0, 1], [3, 10]]])
def test_slots_that_are_not_there_are_refused(index: list[object]) -> None:
    with pytest.raises(ValueError, match=r"index=.*: slots 0 to 9 can be overwritten"):
        SlotIndex.of(torch.tensor(index), WIDTH)


def test_a_layer_that_has_settled_some_refuses_them_without_a_look() -> None:
    index = SlotIndex.of(ROWS[0], WIDTH)
    last = SlotIndex.of(torch.tensor([5, 4]), WIDTH)
    with HostReads() as reads:
        for layer in layers(settled=4):
            with pytest.raises(ValueError, match=r"index=0\.\.9: slots 4 to 9 can be overwritten"):
                layer.overwrite(index, *fresh(ROWS[0]))
            layer.overwrite(last, *fresh(last.index))
    assert not reads.found
