"""Tiers: hot blocks stay, cold ones come back as they were, and pins hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.life.tiers import Tiers, moved
from diffcache.kv.segment import Coded, Dense
from diffcache.kv.slots import Slots

torch.set_num_threads(1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


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


def test_a_use_makes_a_block_recent() -> None:
    tiers = Tiers(1600)
    tiers.put("a", block(0))
    tiers.put("b", block(1))
    first = tiers.get("a")
    assert tiers.get("a") is first  # no copy
    tiers.put("c", block(2))
    assert [tiers.where(name) for name in "abc"] == ["device", "host", "device"]


def test_what_has_no_tier_to_go_to_is_forgotten() -> None:
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
    clock = Clock()
    tiers = Tiers(800, clock=clock)
    tiers.put("a", block(0))
    tiers.pin("a", 5.0)
    tiers.put("b", block(1))
    assert [tiers.where(name) for name in "ab"] == ["device", "host"]
    clock.now = 5.0
    tiers.put("c", block(2))
    assert [tiers.where(name) for name in "abc"] == ["host", "host", "device"]
    tiers.pin("a", 9.0)
    assert tiers.where("a") == "device"


def test_coded_blocks_keep_their_codes(tmp_path: Path) -> None:
    x = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
    codec = GroupQuant(2, "channels", 8)
    segment = Coded(codec.encode(x), codec.encode(x), {}, 8)
    tiers = Tiers(0, 0, folder=tmp_path)
    tiers.put("a", segment)
    assert tiers.where("a") == "disk"
    found = tiers.get("a")
    assert torch.equal(found.read().k, segment.read().k) and found.k.codes.dtype == torch.uint8
    tiers.close()


def test_moving_keeps_everything_else() -> None:
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
