"""Recipes that merge, inside `generate`: padded batches, decoding, a second turn, other codecs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from diffcache.eval.workshop.kv import oracle
from diffcache.kv.budget import Uniform
from diffcache.kv.codec.base import Exact, Payload, TensorCodec
from diffcache.kv.codec.held import Pair
from diffcache.kv.hf.cache import KVCache, cache_for, detach
from diffcache.kv.merging.look_m import NearestMerge
from diffcache.kv.plan import TopK
from diffcache.kv.recipe import Recipe
from diffcache.kv.rotary import Rotary
from diffcache.kv.score.recency import Recency
from diffcache.kv.store import KVStore
from tests.kv.examples import examples, variants
from tests.kv.tiny import GREEDY, prompts, same, second_turn


@dataclass(frozen=True)
class Counted(TensorCodec):
    """Codes nothing, and writes down how many slots it was given."""

    encoded: list[int] = field(default_factory=list)

    def encode(self, x: torch.Tensor) -> Payload:
        self.encoded.append(x.shape[2])
        return Exact().encode(x)

    def join(self, parts: Sequence[Payload]) -> Payload:
        return Exact().join(parts)


EVERY = {**examples(), **variants()}
# Slots of a row, averaged over so many layers or heads, after a turn of six new tokens, of which
# five are written.
HELD = {
    "d2o": (13, 4), "d2o, pre": (13, 4), "ems": (21, 2), "ems, pre": (21, 2),
    "elastic_cache": (13, 1), "elastic_cache, official": (13, 1), "look_m": (17, 1),
    "look_m, weighted": (17, 1), "kvmerger": (17, 1), "kvmerger, pre": (17, 1), "chelsea": (16, 1),
    "chelsea, pre": (16, 1), "lococo": (16, 1), "kvcrush": (17, 1), "kvcrush, official": (29, 1),
    "locret": (16, 1),
}  # fmt: skip


def held(cache: KVCache) -> torch.Tensor:
    """Return slots in use, [L, B, H]."""
    return torch.stack([layer.read().valid.expand(-1, 2, -1).sum(-1) for layer in cache.store.layers])


# The official code of D2O leaves whole layers, and so does this.
@pytest.mark.parametrize("name", HELD)
def test_two_turns_hold_what_the_budget_says(exact: Any, name: str) -> None:
    (most, over), inputs = HELD[name], prompts()
    cache = cache_for(exact, EVERY[name](), mode="native")
    first = exact.generate(**inputs, past_key_values=cache, **GREEDY)
    again = second_turn(inputs, first.sequences)
    for turn in (None, again):
        if turn is not None:
            second = exact.generate(**turn, past_key_values=cache, **GREEDY)
            assert all(logits.isfinite().all() for logits in second.logits)
        found = held(cache)
        if over > 1:
            found = found.double().mean(0 if over == 4 else 2)
        assert (found <= most).all(), found
        assert name == "kvcrush, official" or (found >= most - 3).all(), found
    assert all((layer.seen, layer.held < 40) == (64, True) for layer in cache.store.layers)
    detach(exact)


@pytest.mark.parametrize("name", ["chelsea", "lococo", "kvcrush"])
def test_an_exact_codec_changes_nothing(exact: Any, name: str) -> None:
    codec = Recipe("exact", codec=Pair(Exact(), Exact(), block=4))
    inputs = prompts()
    out, _, _ = oracle.run(exact, EVERY[name](), inputs, **GREEDY)
    coded, cache, _ = oracle.run(exact, EVERY[name]() | codec, inputs, **GREEDY)
    assert cache.store.recipe.name.endswith("| exact")
    same(coded, out, 1e-5)


def test_slots_that_take_over_nothing_keep_their_codes() -> None:
    """However often slots are merged, those that nothing joins are coded once."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 24, 8, generator=drawn)
    counted = Counted()
    pair = Pair(counted, counted, block=8)
    recipe = Recipe("few", Recency(), Uniform(20), TopK(), NearestMerge("averaged"), codec=pair)
    store = KVStore(1, recipe)
    layer = store.layers[0]
    layer.write(x, x)
    store._flush()
    assert counted.encoded == [24, 24] and layer.tail.length == 0
    store.compress()
    kept = layer.read()
    assert (kept.valid.sum(-1) == 20).all() and kept.valid.shape[1] == 2
    same_value = torch.zeros(1, 2, kept.width, dtype=torch.bool)
    for h in range(2):
        for s in range(kept.width):
            if kept.pos[0, h, s] >= 0:
                same_value[0, h, s] = torch.equal(kept.k[0, h, s], x[0, h, int(kept.pos[0, h, s])])
    assert (same_value.sum(-1) >= 16).all() and (same_value.sum(-1) < 20).all()
    exact = layer.segments[-1].read() if layer.tail.length == 0 else layer.tail.read()
    assert exact is not None
    assert (exact.valid.sum(-1) == 20 - same_value.sum(-1)).all()  # only what changed is exact
    assert counted.encoded == [24, 24]  # and nothing was coded again


ROTARY = Rotary.default(10000.0, 64)


def turned(distance: int, merge: Any) -> float:
    """Return the norm of two equal keys so far apart, once merged, over what it was."""
    key = torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(1)).double()
    pre = merge.space == "pre"
    recipe = Recipe("two", Recency(), Uniform(0.5), TopK(), merge, space="pre")
    store = KVStore(1, recipe, rotary=[ROTARY])
    layer = store.layers[0]
    rpos = torch.tensor([[[0, distance]]], dtype=torch.int32)
    layer.write(key.expand(-1, -1, 2, -1), key.expand(-1, -1, 2, -1), meta={"rpos": rpos})
    store.compress()
    slots = layer.read()
    assert slots.width == 1 and pre in (True, False)
    torch.testing.assert_close(slots.v, key)
    return float(slots.k.norm() / key.norm())


@pytest.mark.parametrize("space", ["pre", "post"])
def test_rotated_keys_lose_norm_when_merged_and_unrotated_do_not(space: Any) -> None:
    found = [turned(distance, NearestMerge("averaged", space)) for distance in (16, 64, 256)]
    if space == "pre":
        assert found == pytest.approx([1, 1, 1], abs=1e-12)
        return
    for distance, ratio in zip((16, 64, 256), found, strict=True):
        # Each pair of channels turned by half an angle: |1 + e^ia| / 2 = |cos(a / 2)|.
        key = torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(1)).double()
        pairs = key.view(2, 32).square().sum(0)
        angles = ROTARY.inv_freq.double() * distance / 2
        wanted = ((pairs * angles.cos().square()).sum() / pairs.sum()).sqrt()
        assert ratio == pytest.approx(float(wanted), abs=1e-6)
    assert found[0] > found[1] > found[2] and found[0] < 0.95


def test_slots_that_took_over_nothing_are_not_turned_to_and_fro() -> None:
    """In half precision that would round them."""
    drawn = torch.Generator().manual_seed(0)
    k = torch.randn(1, 2, 12, 64, generator=drawn).bfloat16()
    recipe = Recipe("few", Recency(), Uniform(6), TopK(), space="pre", merge=NearestMerge("averaged"))
    store = KVStore(1, recipe, rotary=[ROTARY])
    layer = store.layers[0]
    layer.write(k, k)
    store.compress()
    kept = layer.read()
    same_value = (kept.v == k[:, :, 6:]).all(-1)
    assert same_value.any() and not same_value.all()
    assert torch.equal(kept.k[same_value], k[:, :, 6:][same_value])
