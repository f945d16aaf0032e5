"""Keeping what was read: the same bits as reading anew, less work, and bytes that are counted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv.codec.base import nbytes
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.layer import KVLayer
from diffcache.kv.positions import BlockRelativistic, Slot
from diffcache.kv.rotary import Rotary
from diffcache.kv.segment import Coded, Dense, Traits

B, H, D = 2, 2, 8
ROTARY = Rotary.default(10000.0, D)


def drawn(count: int, seed: int) -> tuple[Tensor, Tensor]:
    k, v = torch.randn(2, B, H, count, D, generator=torch.Generator().manual_seed(seed))
    return k, v


def seen(layer: KVLayer) -> list[Any]:
    """Return keys, values and positions that queries meet, as one."""
    views = layer.views()
    found = [torch.cat([getattr(view.slots, name) for view in views], 2) for name in ("k", "v")]
    return [*found, torch.cat([view.slots.pos.expand(B, H, -1) for view in views], 2)]


def coded(layer: KVLayer) -> None:
    """Hold the first eight slots in codes."""
    slots, codec = layer.tail.split(8), GroupQuant(4, "tokens", 8)
    meta = {name: value.clone() for name, value in slots.meta.items()}
    layer.segments.append(Coded(codec.encode(slots.k), codec.encode(slots.v), meta, 8))


def dropped(layer: KVLayer) -> None:
    keep = torch.rand(B, H, layer.held, generator=torch.Generator().manual_seed(2)) < 0.7
    layer.keep(keep)


STEPS: dict[str, Callable[[KVLayer], object]] = {
    "write": lambda layer: layer.write(*drawn(6, 1)),
    "overwrite a run": lambda layer: layer.overwrite(range(layer.held - 4, layer.held), *drawn(4, 2)),
    "overwrite slots": lambda layer: layer.overwrite(torch.tensor([layer.held - 3, layer.held - 1]), *drawn(2, 3)),
    "overwrite early": lambda layer: layer.overwrite(
        range(layer.held - layer.tail.length, layer.held - layer.tail.length + 1), *drawn(1, 4)
    ),
    "take back": lambda layer: layer.rollback(2),
    "take back and write": lambda layer: (layer.rollback(2), layer.write(*drawn(2, 5))),
    "rows": lambda layer: layer.rows(torch.tensor([1, 0])),
    "settle": lambda layer: layer.settle_tail(),
    "code": coded,
    "drop": dropped,
    "a token": lambda layer: layer.write(*drawn(1, 6)),
    "a fork": lambda layer: layer.fork().overwrite(range(layer.held - 1, layer.held), *drawn(1, 7)),
    "tokens of some rows": lambda layer: layer.write(*drawn(2, 8), valid=torch.tensor([[True, True], [False, True]])),
}


@pytest.mark.parametrize("positions", [None, Slot(), BlockRelativistic(9)])
@pytest.mark.parametrize("rotary", [None, ROTARY])
def test_what_was_kept_is_what_would_be_read(rotary: Rotary | None, positions: Any) -> None:
    if rotary is None:
        positions = None
    generator = torch.Generator().manual_seed(3)
    names = list(STEPS)
    for _ in range(6):
        one = KVLayer(rotary=rotary, positions=positions, read_once=True)
        two = KVLayer(rotary=rotary, positions=positions)
        order = ["write", "write", "write"]
        order += [names[i] for i in torch.randint(len(names), (14,), generator=generator).tolist()]
        for step in order:
            for layer in (one, two):
                enough = layer.tail.loose >= 6 and layer.tail.length >= 12
                STEPS[step if enough else "write"](layer)
            for a, b in zip(seen(one), seen(two), strict=True):
                assert torch.equal(a, b), (step, order)
            whole = all(view.below is not None for view in two.views())
            (view,) = one.views() if rotary or one.segments else [two.views()[0]]
            assert (view.below is not None) == whole
            assert torch.equal(one.met().k, two.met().k)


def test_a_chunk_that_is_denoised_five_times_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    turned: list[int] = []
    decoded: list[int] = []
    rotate, read, read_into = Rotary.rotate, Coded.read, Coded.read_into
    monkeypatch.setattr(Rotary, "rotate", lambda self, x, pos: (turned.append(x.shape[2]), rotate(self, x, pos))[1])
    monkeypatch.setattr(Coded, "read", lambda self: (decoded.append(1), read(self))[1])
    monkeypatch.setattr(Coded, "read_into", lambda self, *to: (decoded.append(1), read_into(self, *to))[1])
    layer = KVLayer(rotary=ROTARY, positions=Slot(), read_once=True)
    layer.write(*drawn(24, 1))
    coded(layer)
    layer.keep(torch.tensor([0, 1, 2, *range(10, 24)]))
    decoded.clear()
    for chunk in range(2):
        layer.write(*drawn(4, chunk))
        for _ in range(5):
            layer.overwrite(range(layer.held - 4, layer.held), *drawn(4, 9))
            layer.views()
        layer.views()
    whole = 17 + 4
    assert turned == [whole, 4, 4, 4, 4, whole + 4, 4, 4, 4, 4]
    assert len(decoded) == 2, "one segment, once a chunk"
    steady = KVLayer(rotary=ROTARY, read_once=True)
    steady.write(*drawn(24, 1))
    steady.views()
    turned.clear()
    steady.write(*drawn(4, 2))
    steady.views()
    assert turned == [4], "what is rotated by its own position is never rotated again"


def test_what_is_kept_is_counted_and_not_kept_unless_asked() -> None:
    slot = B * H * D * 4  # bytes of a slot's keys in all rows
    for read_once in (False, True):
        layer = KVLayer(rotary=ROTARY, read_once=read_once)
        layer.write(*drawn(16, 1))
        before = nbytes(layer.tensors())
        assert before == 2 * 16 * slot
        layer.views()
        places = (1 + B) * 16 * 4  # positions as they are counted, and as keys are rotated
        extra = 16 * slot + places if read_once else 0
        assert nbytes(layer.tensors()) == before + extra
        coded(layer)
        before = nbytes([layer.segments, layer.tail.tensors()])
        layer.views()
        both = nbytes(layer.tensors()) - before
        assert both == 0 if not read_once else both >= 2 * 16 * slot
        fork = layer.fork()
        assert nbytes(fork.tensors()) == nbytes([layer.segments, layer.tail.tensors()])
        layer.keep(torch.arange(12))
        assert nbytes(layer.tensors()) == nbytes([layer.segments, layer.tail.tensors()])
    layer = KVLayer(read_once=True)  # a segment of its own kind is read anew
    layer.write(*drawn(4, 1))
    layer.settle_tail(Dense(layer.read().clone(), Traits(apart=True)))
    layer.write(*drawn(2, 2))
    assert len(layer.views()) == 2 and not layer._reads.tensors()
