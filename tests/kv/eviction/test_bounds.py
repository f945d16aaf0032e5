"""Bounds of the loss, slots that stand for many, and bytes that follow the budget."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.merge import Compensation
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import (
    adakv,
    cake,
    criticalkv,
    h2o,
    keydiff,
    knorm,
    pyramidkv,
    random,
    snapkv,
    tova,
    value_norm,
)
from diffcache.kv.recipes.streaming import duo_attention, razor_attention, streaming_llm
from diffcache.kv.segment import Flat
from diffcache.kv.store import KVStore
from tests.kv.eviction.seen import feed, filled, observed

DROPPING = {
    "knorm": knorm(0.4),
    "keydiff": keydiff(0.4),
    "value_norm": value_norm(0.4),
    "random": random(0.4),
    "h2o": h2o(0.4),
    "tova": tova(30),
    "snapkv": snapkv(30, window=8),
    "pyramidkv": pyramidkv(30),
    "cake": cake(30, window=8),
    "adakv": adakv(base=snapkv(30, window=8)),
    "criticalkv": criticalkv(base=adakv(base=snapkv(30, window=8))),
    "streaming": streaming_llm(30, rotate=False),
    "duo": duo_attention(((True, False), (False, False)), 30, sinks=4),
}


@pytest.mark.parametrize("name", DROPPING)
def test_what_is_lost_is_at_most_twice_the_mass_that_went(name: str) -> None:
    store = filled(DROPPING[name], tokens=70, dtype=torch.float64, out=True)
    before = [layer.read().clone() for layer in store.layers]
    q = 2 * torch.randn(1, 4, 9, 16, dtype=torch.float64)
    query = Query(q, 70, 0.25)
    whole = [store.attend(index, query) for index in range(2)]
    store.compress()
    for index, (layer, slots) in enumerate(zip(store.layers, before, strict=True)):
        lost = (whole[index] - store.attend(index, query)).norm(dim=-1)
        probs = (q.view(1, 2, 2, 9, 16) @ slots.k[:, :, None].mT / 4).softmax(-1)
        pos = layer.read().pos.expand(1, 2, -1).long()
        kept = torch.zeros(1, 2, 71).scatter_(2, pos.where(pos >= 0, 70), 1.0)[..., :70] > 0
        gone = (probs * ~kept[:, :, None, None]).sum(-1).flatten(1, 2)
        assert (lost <= 2 * gone * slots.v.norm(dim=-1).max() + 1e-9).all()
        assert name == "duo" or lost.max() > 1e-3
        assert (gone > 0).any() or kept.all()


def bytes_of(recipe: Recipe, tokens: int) -> tuple[int, int]:
    """Return the bytes held after a prompt, and those of its keys and values in bfloat16."""
    store = filled(recipe, tokens=tokens, size=64, dtype=torch.bfloat16, layers=1, out=True)
    store.compress()
    return store.nbytes, 2 * 2 * 64 * 2 * tokens


@pytest.mark.parametrize("name", ["adakv", "snapkv", "critical"])
def test_ragged_rows_hold_the_bytes_of_the_budget(name: str) -> None:
    recipe = {"adakv": adakv(0.1), "snapkv": snapkv(0.1), "critical": criticalkv(base=adakv(0.1))}
    held, whole = bytes_of(recipe[name], 2048)
    assert 0.09 * whole < held <= 0.13 * whole


def test_padded_rows_hold_what_the_longest_needs() -> None:
    """The flat layout is what makes unequal heads small, so the padded one has to be larger."""
    table = ((True, False),)
    flat = duo_attention(table, 64, sinks=4)
    held, whole = bytes_of(flat, 1024)
    assert held < 0.6 * whole
    padded = Recipe(score=flat.score, budget=flat.budget, plan=flat.plan, layout="padded")
    assert bytes_of(padded, 1024)[0] > whole


# one slot for many ------------------------------------------------------------------------------

RAZOR = ((True, False),)


def attended(store: KVStore, q: Tensor) -> Tensor:
    return store.attend(0, Query(q, store.seen, q.shape[-1] ** -0.5))


def test_one_slot_stands_for_many_alike_exactly() -> None:
    store = KVStore(1, razor_attention(RAZOR, 10, least=0, sinks=4))
    k, v = torch.randn(2, 1, 2, 60, 8, dtype=torch.float64).unbind()
    k[:, 1, 4:50], v[:, 1, 4:50] = k[:, 1, 4:5], v[:, 1, 4:5]
    store.begin(60)
    store.layers[0].write(k, v)
    q = torch.randn(1, 4, 5, 8, dtype=torch.float64)
    wanted = attended(store, q)
    store.compress()
    slots = store.layers[0].read()
    assert slots.valid.sum(-1).tolist() == [[60, 4 + 1 + 10]]
    torch.testing.assert_close(attended(store, q), wanted, rtol=1e-6, atol=1e-6)
    logn = slots.meta["logn"][0, 1]
    assert math.isclose(float(logn.max()), math.log(46), rel_tol=1e-6)
    (segment,) = store.layers[0].segments
    assert isinstance(segment, Flat)
    segment.meta["logn"].zero_()
    assert (attended(store, q) - wanted).abs().max() > 1e-2  # the multiplicity is what does it


def test_one_slot_takes_in_what_goes_later() -> None:
    """Step by step it is the mean of all that ever went, as if they had gone at once."""
    store = KVStore(1, razor_attention(((False, False),), 10, least=0, sinks=4))
    store.begin(40)
    feed(store, 0, 40, 2, 1, 8, torch.float64)
    kept = store.layers[0].read().clone()
    k, v = [kept.k], [kept.v]
    for _ in range(7):
        store.begin(1)
        feed(store, 0, 1, 2, 1, 8, torch.float64)
        last = store.layers[0].read()
        newest = last.pos.expand(1, 2, -1).argmax(-1)[..., None, None].expand(-1, -1, -1, 8)
        k.append(last.k.gather(2, newest))
        v.append(last.v.gather(2, newest))
    store.begin(1)
    slots = store.layers[0].read()
    assert slots.valid.sum(-1).expand(1, 2).tolist() == [[15, 15]] and store.seen == 47
    every_k, every_v = torch.cat(k, 2), torch.cat(v, 2)
    for head in range(2):
        one = int(slots.meta["logn"].expand(1, 2, -1)[0, head].argmax())
        many = slots.meta["logn"].expand(1, 2, -1)[0, head, one].exp()
        torch.testing.assert_close(float(many), 33.0, rtol=1e-5, atol=0)
        for found, every in ((slots.k, every_k), (slots.v, every_v)):
            wanted = every[0, head, 4:37].mean(0)
            torch.testing.assert_close(found[0, head, one], wanted, rtol=0, atol=1e-5)
        held = sorted(slots.pos.expand(1, 2, -1)[0, head].tolist())
        assert held == [0, 1, 2, 3, *range(36, 47)]  # it stands where the last that went stood


def test_nothing_that_goes_changes_nothing() -> None:
    k = torch.randn(1, 2, 6, 4)
    seen = observed(k, k)
    plan = torch.zeros(1, 2, 6, dtype=torch.int8)
    slots, after = Compensation()(seen, torch.zeros(1, 2, 6), plan)
    assert slots is seen.slots and torch.equal(after, plan)
