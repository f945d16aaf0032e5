"""Bounds of the loss, slots that stand for many, and bytes that follow the budget."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.merge import Compensation
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import adakv, criticalkv, snapkv
from diffcache.kv.recipes.streaming import duo_attention, razor_attention
from diffcache.kv.segment import Flat
from diffcache.kv.store import KVStore
from tests.kv.eviction.seen import feed, filled, observed


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
