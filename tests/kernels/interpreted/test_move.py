"""Properties of moved slots by the kernels, and the library's slots through them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

import diffcache
from diffcache.dllm import DKVCache, Schedule
from diffcache.kernels import move
from diffcache.kv.layer import KVLayer
from diffcache.kv.slots import SlotIndex, Slots
from diffcache.pipelines.diffusion_lm import DiffusionLM
from tests.dllm.toys import LAYERS, bidirectional, prompts

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count launches by operator."""
    found: Counter[str] = Counter()
    for operator in (move.SCATTER, move.GATHER):
        launch = operator.launch

        def counted(*args, launch=launch, name=operator.name):
            found[name] += 1
            return launch(*args)

        monkeypatch.setattr(operator, "launch", counted)
    return found


@DTYPES
def test_what_is_written_is_what_is_gathered_and_nothing_else_changes(dtype: torch.dtype) -> None:
    k, v = (drawn(2, 3, 20, n, seed=n).to(dtype) for n in (8, 5))
    new_k, new_v = (drawn(2, 3, 4, n, seed=9 + n).to(dtype) for n in (8, 5))
    index = torch.tensor([[3, 19, 0, 7], [1, 2, 18, 5]])
    others = torch.stack([torch.tensor([s for s in range(20) if s not in row]) for row in index])
    before = move.kv_gather(k, v, others[:, None])
    move.kv_scatter(k, v, new_k, new_v, index)
    for found, wanted in zip(move.kv_gather(k, v, index[:, None]), (new_k, new_v), strict=True):
        assert torch.equal(found, wanted)
    for found, wanted in zip(move.kv_gather(k, v, others[:, None]), before, strict=True):
        assert torch.equal(found, wanted)


def test_slots_that_are_not_there_are_left_out_and_come_out_as_zeros() -> None:
    room = torch.full((1, 2, 12, 8), torch.nan)
    k, v = room[:, :, 2:8], room.clone()[:, :, 2:8]
    index = torch.tensor([[-1, 6, 2, 2**40]])
    ones = torch.ones(1, 2, 4, 8)
    move.kv_scatter(k, v, ones, ones, index)
    assert torch.equal(room.isnan().sum((0, 1, 3)), torch.tensor([16] * 4 + [0] + [16] * 7))
    for found in move.kv_gather(k, v, index[:, None]):
        assert torch.equal(found.sum(-1), torch.tensor([0.0, 0, 8, 0]).expand(1, 2, 4))


@pytest.mark.parametrize("index", [torch.zeros(2, 3, dtype=torch.long), torch.arange(2)])
def test_shapes_that_do_not_fit_are_refused(index: Tensor, launches: Counter[str]) -> None:
    k, v, fresh = torch.zeros(1, 2, 6, 8), torch.zeros(1, 2, 6, 8), torch.ones(1, 2, 3, 8)
    with pytest.raises((IndexError, RuntimeError)):
        move.kv_scatter(k, v, fresh, fresh, index)
    assert not launches


@pytest.mark.parametrize("wrong", ["channels", "slots", "heads"])
def test_values_that_do_not_fit_are_refused(wrong: str, launches: Counter[str]) -> None:
    heads, slots, size = 2 - (wrong == "heads"), 6 - (wrong == "slots"), 8 - (wrong == "channels")
    k, v, fresh = (
        torch.zeros(1, 2, 6, 8),
        torch.zeros(1, heads, slots, size),
        torch.ones(1, 2, 1, 8),
    )
    with pytest.raises((IndexError, RuntimeError)):
        move.kv_scatter(k, v, fresh, fresh, torch.tensor([5]))
    if wrong == "slots":
        with pytest.raises((IndexError, RuntimeError)):
            move.kv_gather(k, v, torch.tensor([[[5]]]))
    assert not launches


@pytest.mark.parametrize("shape", [(1, 2, 6, 8), (1, 2, 6, 0)])
def test_channels_that_lie_apart_or_are_not_there_are_moved(shape: tuple[int, ...]) -> None:
    """Keys have slots where others have channels."""
    k, v, index = drawn(1, 2, 8, 6).mT, drawn(*shape), torch.tensor([5, 2])
    new_k, new_v = drawn(1, 2, 2, 8, seed=1), drawn(*shape[:2], 2, shape[3], seed=2)
    move.kv_scatter(k, v, new_k, new_v, index)
    for found, wanted in zip(move.kv_gather(k, v, index[None, None]), (new_k, new_v), strict=True):
        assert torch.equal(found, wanted)


@DTYPES
@pytest.mark.parametrize("settled", [0, 3])
@pytest.mark.parametrize(
    "index", [torch.tensor([4, 8, 6]), torch.tensor([[4, 8, 6], [3, 7, 5]]),
              torch.tensor([[5, 4, 3]]).expand(2, -1)],
)  # fmt: skip
def test_a_layer_is_overwritten_in_one_launch(
    index: Tensor, settled: int, dtype: torch.dtype, launches: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found = []
    for kernels, checked in (("torch", False), ("triton", False), ("triton", True)):
        monkeypatch.setenv("DIFFCACHE_KERNELS", kernels)
        layer = KVLayer()
        if settled:
            first = drawn(2, 3, settled, 8, seed=1).to(dtype)
            layer.write(first, first)
            layer.settle_tail()
        k, v = (drawn(2, 3, 10, 8, seed=seed).to(dtype) for seed in (2, 3))
        layer.write(k, v, meta={"ver": torch.zeros(2, 1, 10, dtype=torch.int32)})
        fork = layer.fork()
        new = drawn(2, 3, 3, 8, seed=4).to(dtype)
        layer.overwrite(SlotIndex.of(index, 10, settled) if checked else index, new, -new, ver=7)
        assert torch.equal(fork.tail.read().k, k)
        slots = layer.read()
        found.append([slots.k, slots.v, slots.meta["ver"], layer.tail.clean])
    assert launches == {"kv_scatter": 2}
    for other in found[1:]:
        assert all(
            torch.equal(one, two) if isinstance(one, Tensor) else one == two
            for one, two in zip(found[0], other, strict=True)
        )


def test_slots_are_gathered_in_one_launch(
    launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pos = torch.arange(9, dtype=torch.int32).expand(2, 1, -1)
    slots = Slots(drawn(2, 3, 9, 8), drawn(2, 3, 9, 4, seed=1), {"pos": pos})
    index = torch.randint(9, (2, 3, 5), generator=torch.Generator().manual_seed(0))
    keep = index % 2 == 0
    found = slots.gather(index, keep)
    monkeypatch.setenv("DIFFCACHE_KERNELS", "torch")
    wanted = slots.gather(index, keep)
    assert launches == {"kv_gather": 1}
    assert torch.equal(found.k, wanted.k) and torch.equal(found.v, wanted.v)
    assert torch.equal(found.pos, wanted.pos)


def test_a_decoding_that_writes_rows_is_that_of_plain_pytorch(
    launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for backend in ("triton", "torch"):
        monkeypatch.setenv("DIFFCACHE_KERNELS", backend)
        model = bidirectional(torch.float32)
        with diffcache.wrapped(model, DKVCache(every=4)):
            found.append(DiffusionLM(model).generate(prompts(6, 4), Schedule(6, 3)).ids)
    assert torch.equal(*found)
    assert launches["kv_scatter"] >= LAYERS
