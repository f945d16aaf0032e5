"""Blocks below the device: the same numbers come back, and only those that are read."""

import gc
from typing import Any

import pytest
import torch

from diffcache.kv.hf.cache import cache_for, detach
from diffcache.kv.life.tiers import Tiers
from diffcache.kv.recipes import retrieval as recipes
from diffcache.kv.retrieval.offload import InTiers
from tests.kv.retrieval.setting import noise
from tests.kv.tiny import SHORT, llama, prompts, same


@pytest.fixture
def tiers() -> Any:
    torch.set_num_threads(1)
    found = Tiers(2 * 2 * 4 * 8 * 4)  # one block of [2, 2, 4, 8] float32
    yield found
    found.close()


def test_what_is_taken_is_what_was_given(tiers: Tiers) -> None:
    x, codec = noise(2, 2, 24, 8), InTiers(tiers, 4)
    one = codec.encode(x[:, :, :16])
    assert torch.equal(one.decode(), x[:, :, :16])
    swapped = one.rows(torch.tensor([1, 1]))
    whole = codec.join([swapped, codec.encode(x[:, :, 16:])])
    want = torch.cat([x[[1, 1], :, :16], x[:, :, 16:]], 2)
    assert torch.equal(whole.decode(), want)
    index = torch.tensor([[[17, 3, 3], [0, 1, 2]], [[23, 22, 4], [4, 5, 6]]])
    taken = whole.take(index)
    assert torch.equal(taken.decode(), want.gather(2, index[..., None].expand(-1, -1, -1, 8)))
    again = codec.join([taken, taken]).take(index[..., :1] % 6)
    both = torch.cat([taken.decode()] * 2, 2)
    place = (index[..., :1] % 6)[..., None].expand(-1, -1, -1, 8)
    assert torch.equal(again.decode(), both.gather(2, place))
    assert taken.take(index[..., :0]).decode().shape == (2, 2, 0, 8)
    assert codec.encode(x[:, :, :0]).decode().shape == (2, 2, 0, 8)


def test_only_blocks_that_are_read_are_fetched_and_hot_ones_stay(tiers: Tiers) -> None:
    payload = InTiers(tiers, 4).encode(noise(2, 2, 40, 8))
    some = payload.take(torch.tensor([[[12, 15]]]).expand(2, 2, -1))
    for _ in range(2):
        some.decode()
        assert [tiers.where(key) for key in payload.keys] == ["host"] * 3 + ["device"] + ["host"] * 6
    assert tiers.hits == 1


def test_blocks_go_with_what_refers_to_them(tiers: Tiers) -> None:
    payload = InTiers(tiers, 4).encode(noise(2, 2, 40, 8))
    keys, other = payload.keys, payload.rows(torch.tensor([0]))
    del payload
    gc.collect()
    assert all(key in tiers for key in keys)
    del other
    gc.collect()
    assert not any(key in tiers for key in keys)


@pytest.mark.parametrize("name", ["rekv", "shadowkv"])
@pytest.mark.parametrize("way", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_a_model_runs_with_tiers_as_without(name: str, way: dict[str, Any], tiers: Tiers) -> None:
    model = llama()
    settings: dict[str, Any] = {"rank": 32, "outliers": 1, "block": 8}
    if name == "rekv":
        settings = {"recent": 8, "sinks": 2, "block": 4}
    inputs = prompts(2, 120)
    found = []
    for where in (None, tiers):
        recipe = getattr(recipes, name)(48, tiers=where, **settings)
        cache = cache_for(model, recipe)
        found.append(model.generate(**inputs, past_key_values=cache, **SHORT, **way))
    detach(model)
    same(found[0], found[1], 1e-4)
    assert tiers.held("host") > 0
