"""Verbs of a session: keep named slots, compress one layer, observe once, choose together."""

from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv import Recipe, h2o, kivi, snapkv
from diffcache.kv.attend import Query, attend, over_groups
from diffcache.kv.budget import Uniform
from diffcache.kv.layer import KVLayer
from diffcache.kv.plan import TopK
from diffcache.kv.retrieval.quest import Quest
from diffcache.kv.retrieval.select import asked as worth
from diffcache.kv.score.attention import Window
from diffcache.kv.segment import Coded, Dense, Flat
from diffcache.kv.slots import Slots, span
from diffcache.kv.store import KVStore
from diffcache.kv.tail import Tail
from diffcache.kv.trigger import Overflow
from tests.kv.test_core import B, H, asked, drawn, plain


def query(count: int, start: int, seed: int = 5, **given: Any) -> Query:
    return asked(count, start, seed, causal=False, **given)


def step(store: KVStore, count: int, seed: int, **given: Any) -> list[Tensor]:
    store.begin(count)
    outs = []
    for layer in store.layers:
        layer.write(*drawn(count, seed + layer.index))
        outs.append(store.attend(layer.index, query(count, layer.seen - count, seed), **given))
    return outs


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("way", ["mask", "index", "of each head"])
def test_named_slots_are_what_is_seen_and_the_last_can_be_written(way: str, flat: bool) -> None:
    layer, (k, v) = KVLayer(), drawn(20, 1)
    layer.write(k, v)
    layer.stats["mass"] = torch.arange(B * H * 20.0).view(B, H, 20)
    seen = torch.zeros(B, H, 20, dtype=torch.bool)
    seen[..., [0, 1, 7, 12]] = True
    if way == "of each head":
        seen[0, 1, 3:7] = True
    which = torch.tensor([12, 7, 0, 1]) if way == "index" else seen
    layer.keep(which[0, 0] if way == "mask" else which, last=4, flat=flat)
    seen[..., 16:] = True
    assert layer.seen == 20 and layer.tail.loose == 4
    assert any(isinstance(x, Flat) for x in layer.segments) is (flat and way == "of each head")
    ask = query(4, 16)
    torch.testing.assert_close(attend(ask, layer.views()), plain(ask, k, v, seen), atol=1e-14, rtol=0)
    pos = layer.meta()["pos"].expand(B, H, -1)
    mass = torch.arange(B * H * 20.0).view(B, H, 20).gather(2, pos.clamp_min(0).long()) * (pos >= 0)
    assert torch.equal(layer.stats["mass"], mass)
    fresh = drawn(4, 2)
    layer.overwrite(range(layer.held - 4, layer.held), *fresh)
    k[:, :, 16:], v[:, :, 16:] = fresh
    torch.testing.assert_close(attend(ask, layer.views()), plain(ask, k, v, seen), atol=1e-14, rtol=0)
    layer.rollback(4)
    assert layer.seen == 16
    said = ["which=", "which=", "of torch.float32"]
    for which, why in zip((torch.ones(3).bool(), torch.ones(2, 3), torch.zeros(1, layer.held)), said, strict=True):
        with pytest.raises(ValueError, match=why):
            layer.keep(which)
    with pytest.raises(ValueError, match="last=1: only 0"):
        layer.keep(torch.tensor([0]), last=1)


def test_a_flush_keeps_first_and_last_frames_of_codes_too() -> None:
    frame = 4
    for recipe in (Recipe("full"), kivi(8, group=4, residual=8)):
        store = KVStore(2, recipe)
        for seed in range(6):
            step(store, frame, seed)
        store.begin(frame)
        codes = [segment for segment in store.layers[0].segments if isinstance(segment, Coded)]
        if recipe.codec is not None:  # values that wait to be coded are coded before
            [recipe.codec.align(layer) for layer in store.layers]
        before = [layer.read() for layer in store.layers]
        for _ in range(2):  # and a second flush changes nothing
            store.keep(lambda layer: (layer.meta()["pos"] < frame) | (layer.meta()["pos"] >= layer.seen - 2 * frame))
            for layer, slots in zip(store.layers, before, strict=True):
                assert layer.read().pos[0, 0].tolist() == [*range(4), *range(16, 24)]
                assert torch.equal(layer.read().k[:, :, :4], slots.k[:, :, :4])
                assert torch.equal(layer.read().v[:, :, 4:], slots.v[:, :, 16:])
        assert bool(codes) is (recipe.codec is not None)
        assert any(isinstance(x, Coded) for x in store.layers[0].segments) is bool(codes)
        assert all(out.isfinite().all() for out in step(store, frame, 9))


def compressing(window: int = 4) -> KVStore:
    score, late = Window(window, kernel=1), Overflow(10**6)
    recipe = Recipe("now", score=score, budget=Uniform(10), plan=TopK(recent=4), trigger=late)
    return KVStore(2, recipe)


def test_a_layer_is_compressed_by_the_queries_of_the_block_that_is_computed() -> None:
    store = compressing()
    step(store, 24, 1)
    store.begin(4)
    for layer in store.layers:
        k, v = drawn(4, 7)
        layer.write(k, v)
        ask = query(4, 24, 8)
        slots = layer.read().clone()
        store.compress_layer(layer.index, ask, last=4)
        logit = ask.grouped(H).float() @ slots.k.float()[:, :, None].mT * ask.scale
        mass = logit.softmax(-1)[..., :24].mean((2, 3))
        for row in range(B):
            for head in range(H):
                best = sorted(mass[row, head].topk(6).indices.tolist())
                pos = layer.read().pos.expand(B, H, -1)[row, head].tolist()
                assert pos == [*best, *range(24, 28)]
        for _ in range(5):
            run = range(layer.held - 4, layer.held)
            layer.overwrite(run, *drawn(4, 9))
            store.attend(layer.index, ask, observe=False)
        assert store._rings[layer.index].kept().positions().tolist() == [[24, 25, 26, 27]] * B
    store.begin(4)
    whole, one = compressing(), compressing()
    for each in (whole, one):
        step(each, 24, 1)
    whole.compress()
    for index in range(2):
        one.compress_layer(index)
        a, b = whole.layers[index].read(), one.layers[index].read()
        assert torch.equal(a.k, b.k) and torch.equal(a.pos, b.pos)


def test_what_is_not_to_be_observed_leaves_no_trace() -> None:
    once, often = KVStore(1, h2o(64)), KVStore(1, h2o(64))
    for store, times in ((once, 0), (often, 5)):
        step(store, 8, 1)
        store.begin(3)
        (layer,) = store.layers
        layer.write(*drawn(3, 2))
        for time in range(times):
            store.attend(0, query(3, 8, time), observe=False)
        layer.overwrite(range(8, 11), *drawn(3, 2))
        store.attend(0, query(3, 8, 3))
    for name, value in once.layers[0].stats.items():
        assert torch.equal(value, often.layers[0].stats[name])
    often.begin(2)
    often.layers[0].write(*drawn(2, 4))
    often.attend(0, query(2, 11), observe=False)
    often.compress()  # tokens that were never observed weigh nothing
    assert often.layers[0].held == 13
    ring = KVStore(1, snapkv(8, window=2))
    step(ring, 6, 1, observe=False)
    assert ring._rings[0].kept() is None


def test_queries_that_choose_together_read_what_their_mean_chooses() -> None:
    chooser = Quest(12, sinks=2, recent=4, page=1)
    layer, (k, v) = KVLayer(), drawn(40, 1)
    layer.write(k, v)
    chunk = 10
    alone, together = (query(chunk, 30, together=flag) for flag in (False, True))
    dense = plain(alone, k, v, torch.ones(B, H, 40, dtype=torch.bool))
    torch.testing.assert_close(attend(alone, chooser.views(alone, layer, [layer])), dense, atol=1e-14, rtol=0)
    views = chooser.views(together, layer, [layer])
    always = torch.tensor([0, 1, *range(27, 40)])
    mean = Query(together.q.mean(2, keepdim=True), 30, together.scale)
    score = over_groups(worth(mean, k), "max")[:, :, 0]
    score[..., always] = float("-inf")
    seen = torch.zeros(B, H, 40, dtype=torch.bool)
    seen[..., always] = True
    seen.scatter_(2, score.topk(12 - (len(always) - chunk + 1)).indices, True)
    assert sum(view.slots.width for view in views) == int(seen.sum(-1).amax()) == 21
    out = attend(together, views)
    torch.testing.assert_close(out, plain(together, k, v, seen), atol=1e-14, rtol=0)


def test_a_segment_that_rows_share_is_kept_by_each_row() -> None:
    layer, (k, v) = KVLayer(), drawn(6, 1)
    shared = Slots(k[:1], v[:1], {"pos": span(0, 6, 1, k.device)})
    layer.seen, layer.tail, layer.segments = 6, Tail(6), [Dense(shared)]
    layer.write(*drawn(2, 2))
    seen = torch.ones(B, H, 8, dtype=torch.bool)
    seen[0, :, 1:4], seen[1, :, 2:5] = False, False
    layer.keep(seen)
    for row, kept in enumerate(([0, 4, 5], [0, 1, 5])):
        assert torch.equal(layer.read().k[row, :, :3], k[0, :, kept])
        assert layer.read().pos[row, 0].tolist() == [*kept, 6, 7]
