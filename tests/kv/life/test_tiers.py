"""Forks, tiers and packs: apart, back as they were, and as if every prompt had been alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv import Recipe, cache_for, h2o, pack, snapkv
from diffcache.kv.attend import Query
from diffcache.kv.codec.held import Pair
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.life.tiers import Tiers, moved
from diffcache.kv.rotary import Rotary
from diffcache.kv.segment import Coded, Dense
from diffcache.kv.slots import Slots
from diffcache.kv.store import KVStore

_TWO = Pair(GroupQuant(2, "tokens", 4), GroupQuant(2, "channels", 8), block=4, slide=True)
RECIPES = {
    "plain": Recipe("plain"),
    "pre": Recipe("pre", space="pre"),
    "evicted": snapkv(8, window=2),
    "statistics": h2o(0.5),
    "coded": Recipe("coded", codec=_TWO),
    "both": snapkv(9, window=2) | Recipe("coded", codec=_TWO),
}


def step(store: KVStore, count: int, seed: int) -> list[Tensor]:
    """Run one forward of random queries, keys and values; return what attention gives."""
    drawn = torch.Generator().manual_seed(seed)
    store.begin(count)
    found = []
    for number, layer in enumerate(store.layers):
        q, k, v = (torch.randn(2, h, count, 8, generator=drawn) for h in (4, 2, 2))
        start = layer.seen
        layer.write(k, v)
        found.append(store.attend(number, Query(q, start, 8**-0.5)))
    return found


def fresh(name: str) -> KVStore:
    store = KVStore(2, RECIPES[name], rotary=[Rotary.default(1e4, 8)] * 2)
    step(store, 13, 0)
    step(store, 1, 1)
    return store


def shown(store: KVStore) -> list[Tensor]:
    """Return copies of everything that can be read."""
    found = []
    for layer in store.layers:
        slots = layer.read()
        found += [slots.k, slots.v, slots.pos, *layer.stats.values()]
        found.append(torch.tensor([layer.seen, layer.held]))
    return [tensor.clone() for tensor in found]


def alike(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def overwritten(store: KVStore) -> None:
    for layer in store.layers:
        layer.overwrite(torch.tensor([layer.held - 1]), torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, 8))


CHANGES: dict[str, Callable[[KVStore], object]] = {
    "write": lambda store: step(store, 3, 5),
    "overwrite": overwritten,
    "rollback-write": lambda store: (store.rollback(1), step(store, 1, 6)),
    "rows": lambda store: store.rows(torch.tensor([1, 1, 0])),
    "long": lambda store: [step(store, 1, seed) for seed in range(20)],
    "reset": lambda store: store.reset(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", RECIPES)
def test_a_fork_and_its_parent_do_not_see_each_other(name: str, change: str) -> None:
    for forked in (False, True):
        parent = fresh(name)
        child = parent.fork()
        changed, other = (child, parent) if forked else (parent, child)
        before = shown(other)
        CHANGES[change](changed)
        assert alike(before, shown(other))
        on, alone = step(other, 1, 9), step(fresh(name), 1, 9)
        assert alike(on, alone)  # and goes on as if there were no other


@pytest.mark.parametrize("name", RECIPES)
def test_taking_back_what_was_written_changes_nothing(name: str) -> None:
    store, other = fresh(name), fresh(name)
    store.speculative = other.speculative = True
    other.begin(4)  # what was due before is done in both
    before = shown(other)
    step(store, 4, 7)
    assert not alike(before, shown(store))
    store.rollback(4)
    assert alike(before, shown(store))
    assert alike(step(store, 1, 3), step(other, 1, 3))


def block(seed: int) -> Dense:
    drawn = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(1, 2, 5, 10, generator=drawn) for _ in "kv")  # 800 bytes together
    return Dense(Slots(k, v, {}))


def same(one: Dense, two: Dense) -> bool:
    return torch.equal(one.slots.k, two.slots.k) and torch.equal(one.slots.v, two.slots.v)


def test_the_least_recent_goes_down_and_comes_back(tmp_path: Path) -> None:
    tiers = Tiers(1600, 800, folder=tmp_path)
    for name in "abcd":
        tiers.put(name, block(ord(name)))
    assert [tiers.where(name) for name in "abcd"] == ["disk", "host", "device", "device"]
    assert tiers.held("device") == 1600 and tiers.held("host") == 800
    assert len(list(tmp_path.iterdir())) == 1
    assert same(tiers.get("a"), block(ord("a")))
    assert [tiers.where(name) for name in "abcd"] == ["device", "disk", "host", "device"]
    assert all(same(tiers.get(name), block(ord(name))) for name in "abcd")
    assert (tiers.hits, tiers.misses) == (1, 4)
    tiers.close()
    assert not list(tmp_path.iterdir())


def test_two_of_one_folder_do_not_write_over_each_other(tmp_path: Path) -> None:
    one, two = (Tiers(0, 0, folder=tmp_path) for _ in range(2))
    for number, tiers in enumerate((one, two)):
        tiers.put("a", block(number))
    two.drop("a")
    assert same(one.get("a"), block(0))


def test_a_use_makes_a_block_recent_and_what_has_no_tier_is_forgotten() -> None:
    tiers = Tiers(1600)
    tiers.put("a", block(0))
    tiers.put("b", block(1))
    first = tiers.get("a")
    assert tiers.get("a") is first  # no copy
    tiers.put("c", block(2))
    assert [tiers.where(name) for name in "abc"] == ["device", "host", "device"]
    tiers = Tiers(800, 0)
    tiers.put("a", block(0))
    tiers.put("b", block(1))
    assert "a" not in tiers and "b" in tiers
    with pytest.raises(KeyError, match="is not held"):
        tiers.get("a")
    tiers.put("b", block(7))
    assert same(tiers.get("b"), block(7))
    tiers.drop("b")
    assert tiers.where("b") is None


def test_what_was_prefetched_is_not_waited_for(tmp_path: Path) -> None:
    tiers = Tiers(800, 800, folder=tmp_path)
    for name in "abc":
        tiers.put(name, block(ord(name)))
    tiers.prefetch("abx")
    tiers._worker.submit(lambda: None).result()  # all before it are done
    assert tiers.where("a") == "disk"
    assert same(tiers.get("a"), block(ord("a"))) and same(tiers.get("b"), block(ord("b")))
    assert tiers.misses == 0
    tiers.prefetch("c")
    tiers.drop("c")
    assert "c" not in tiers
    tiers.close()


def test_a_pin_holds_until_its_time_has_come() -> None:
    now = [0.0]
    tiers = Tiers(800, clock=lambda: now[0])
    tiers.put("a", block(0))
    tiers.pin("a", 5.0)
    tiers.put("b", block(1))
    assert [tiers.where(name) for name in "ab"] == ["device", "host"]
    now[0] = 5.0
    tiers.put("c", block(2))
    assert [tiers.where(name) for name in "abc"] == ["host", "host", "device"]
    tiers.pin("a", 9.0)
    assert tiers.where("a") == "device"


def test_coded_blocks_keep_their_codes_and_moving_keeps_everything_else(tmp_path: Path) -> None:
    x = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
    codec = GroupQuant(2, "channels", 8)
    segment = Coded(codec.encode(x), codec.encode(x), {}, 8)
    tiers = Tiers(0, 0, folder=tmp_path)
    tiers.put("a", segment)
    assert tiers.where("a") == "disk"
    found = tiers.get("a")
    assert torch.equal(found.read().k, segment.read().k) and found.k.codes.dtype == torch.uint8
    tiers.close()
    tree = {"a": [block(0), (1, None)], "b": torch.ones(2)}
    found = moved(tree, "meta")
    assert found["a"][0].slots.k.is_meta and found["a"][1] == (1, None) and found["b"].is_meta
    assert moved(tree, "cpu")["b"] is tree["b"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_blocks_come_back_to_the_device() -> None:
    tiers = Tiers(800, device="cuda")
    for name in "ab":
        tiers.put(name, block(ord(name)))
    tiers.prefetch("a")
    found = tiers.get("a")
    assert found.slots.k.is_cuda and same(moved(found, "cpu"), block(ord("a")))
    assert tiers.where("b") == "host" and tiers._tiers["host"]["b"].slots.k.is_pinned()


LENGTHS = (5, 12, 3, 9, 7, 12)


def prompts() -> list[Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(3, 256, (n,), generator=drawn) for n in LENGTHS]


def test_rows_are_few_and_hold_every_prompt_once() -> None:
    found = pack(prompts(), 16)
    assert found.ids.shape == (4, 16)  # 12 + 3, 12, 9 + 7, 5
    rows, last = found.last
    for number, prompt in enumerate(prompts()):
        here = found.tags == number
        assert torch.equal(found.ids[here], prompt)
        assert found.position_ids[here].tolist() == list(range(len(prompt)))
        assert found.ids[rows[number], last[number]] == prompt[-1]
    assert pack([torch.arange(4)], pad=7).ids.tolist() == [[0, 1, 2, 3]]
    assert pack([torch.arange(4), torch.arange(2)], pad=7).ids.tolist() == [[0, 1, 2, 3], [0, 1, 7, 7]]


@pytest.mark.parametrize("space", ["post", "pre"])
def test_packed_and_unpacked_is_each_prompt_alone(model: Any, space: str) -> None:
    found = pack(prompts(), 16)
    cache = cache_for(model, Recipe(space=space), mode="native")
    with torch.no_grad():
        given = dict(input_ids=found.ids, position_ids=found.position_ids, attention_mask=found.mask)
        out = model(**given, past_key_values=cache)
    rows, last = found.last
    apart = found.unpack(cache.store)
    for number, prompt in enumerate(prompts()):
        alone = cache_for(model, Recipe(space=space), mode="native")
        with torch.no_grad():
            logits = model(input_ids=prompt[None], past_key_values=alone).logits
        packed = out.logits[rows[number], last[number]]
        torch.testing.assert_close(packed, logits[0, -1], atol=2e-5, rtol=1e-5)
        for slots, layer in zip(apart[number], alone.store.layers, strict=True):
            wanted = layer.read()
            assert torch.equal(slots.pos, wanted.pos)
            torch.testing.assert_close(slots.k, wanted.k, atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(slots.v, wanted.v, atol=2e-5, rtol=1e-5)
