"""Tokens that are held in more bits: by probes, and by channels balanced against queries."""

from __future__ import annotations

import math
from typing import Any

import torch

from diffcache.kv.attend import Query
from diffcache.kv.budget import Uniform
from diffcache.kv.codec.held import Pair
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.codec.scaled import balancer
from diffcache.kv.codec.stairs import BalancedRung
from diffcache.kv.layer import KVLayer
from diffcache.kv.observe import observe
from diffcache.kv.plan import TopK
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.quantized import mikv, zipcache
from diffcache.kv.score.salience import Salience, WithQueries
from diffcache.kv.segment import Coded
from diffcache.kv.store import KVStore
from tests.kv.quantized.drawn import SIZE, draw, write


def _slots(count: int) -> Any:
    layer = KVLayer()
    layer.write(draw(count, 0), draw(count, 1))
    return layer.read()


def test_salience_is_the_mean_attention_of_the_probes_that_could_see() -> None:
    recipe = zipcache(0.5, every=1000)
    store = KVStore(1, recipe)
    count = 40
    k, q = 3 * draw(count, 0), torch.cat([draw(count, 1), draw(count, 2)], 1)
    write(store, k, k, q)
    layer = store.layers[0]
    found = Salience()(observe(layer, 1))
    probes = [n for n in range(count) if n * 0.6180339887498949 % 1 < 0.05 or n >= 38]
    assert 3 <= len(probes) <= 5
    want = torch.zeros(2, count)
    for head in range(2):
        for query in (2 * head, 2 * head + 1):
            logits = q[0, query] @ k[0, head].T * SIZE**-0.5
            mask = torch.ones(count, count).tril().bool()
            probs = logits.masked_fill(~mask, -math.inf).softmax(-1)
            want[head] += probs[probes].sum(0) / 2
        want[head] /= torch.tensor([sum(n >= at for n in probes) for at in range(count)])
    assert torch.allclose(found[0], want, atol=1e-6)


def test_a_tenth_of_single_tokens_are_probes() -> None:
    score, q = Salience(0.1), torch.zeros(1, 4, 1, SIZE)
    asked = [bool(score.probes(Query(q, at, 1.0), at + 1).any()) for at in range(1000)]
    assert 95 <= sum(asked) <= 105


def test_as_many_are_probes_where_slots_were_dropped() -> None:
    chosen = []

    class Noting(Salience):
        def probes(self, asked: Query, total: int) -> torch.Tensor:
            chosen.append(found := super().probes(asked, total))
            return found

    store = KVStore(1, Recipe("s", score=Noting(0.2), budget=Uniform(12), plan=TopK()))
    write(store, draw(40, 0), draw(40, 0), torch.zeros(1, 4, 40, SIZE))
    store.settle()
    write(store, draw(20, 1), draw(20, 1), torch.zeros(1, 4, 20, SIZE))
    drawn = (torch.arange(40, 60).double() * 0.6180339887498949).frac() < 0.1
    assert store.layers[0].held == 32
    assert torch.equal(chosen[-1][0], drawn | (torch.arange(40, 60) >= 54))


def test_slots_that_no_probe_saw_are_worth_most() -> None:
    layer = KVLayer()
    layer.write(draw(3, 0), draw(3, 0))
    layer.stats = {"mass": torch.tensor([0.5, 2, 0]).expand(1, 2, 3),
                   "asked": torch.tensor([1.0, 4, 0]).expand(1, 2, 3)}  # fmt: skip
    assert Salience()(observe(layer, 1))[0, 0].tolist() == [0.5, 0.5, math.inf]


def test_zipcache_holds_the_salient_in_more_bits() -> None:
    store = KVStore(1, zipcache(0.5, every=8))
    k = draw(16, 0)
    q = torch.zeros(1, 4, 16, SIZE)
    k[:, :, 1::2] *= 0.1
    q[:] = k[:, :1, 2::2].sum(2, keepdim=True)
    write(store, k, k, q)
    mass = Salience()(observe(store.layers[0], 1))
    store.begin(1)
    levels = {s.level: s.read().pos for s in store.layers[0].segments}
    for head in range(2):
        best = mass[0, head].topk(8).indices.sort().values
        assert torch.equal(levels[1][0, head].long(), best)
        assert len(levels[2][0, head]) == 8
    assert not store.layers[0].tail.length
    write(store, draw(1, 3), draw(1, 3), torch.zeros(1, 4, 1, SIZE))
    store.compress()
    assert [s.level for s in store.layers[0].segments] == [1, 2]
    assert store.layers[0].held == 17


# balancing -------------------------------------------------------------------------------------


def test_mikv_balances_keys_against_the_last_queries() -> None:
    store = KVStore(1, mikv(budget=4, bits=8, every=4, queries=6, group=8))
    k, v = draw(16, 0), draw(16, 1)
    k[..., 3] *= 50
    q = torch.cat([draw(16, 2), draw(16, 3)], 1)
    q[..., 3] *= 0.01
    write(store, k, v, q)
    store.begin(1)
    layer = store.layers[0]
    low = next(s for s in layer.segments if s.level == 1)
    assert isinstance(low, Coded) and low.width == 12
    factor = balancer(q.view(1, 2, 2, 16, SIZE)[:, :, :, -6:], k)
    assert torch.allclose(1 / low.k.factor.values[:, :, 0].float(), factor, rtol=2e-3)  # type: ignore[attr-defined]
    slots = low.read()
    index = slots.pos.long()[..., None].expand(-1, 2, -1, SIZE)
    assert (slots.k - k.gather(2, index))[..., :3].abs().max() < 0.05
    plain = Pair(GroupQuant(8, "channels", 8), GroupQuant(8, "channels", 8), 1)
    assert torch.equal(
        BalancedRung(plain).hold(_slots(8), 1).read().k, plain.hold(_slots(8), 1).read().k
    )


def test_scores_pass_through_what_keeps_queries() -> None:
    inner = Salience(0.5)
    score = WithQueries(7, inner)
    assert score.window == 7 and score.statistics == inner.statistics
    assert score.attends and not score.wants_out
    layer = KVLayer()
    layer.write(draw(3, 0), draw(3, 0))
    layer.stats = {"mass": torch.ones(1, 2, 3), "asked": torch.full((1, 2, 3), 2.0)}
    assert torch.equal(score(observe(layer, 1)), inner(observe(layer, 1)))
