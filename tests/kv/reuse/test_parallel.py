"""Segments beside one another: shared prefixes, parallel contexts, and merging by log-sum-exp."""

from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv import Piece, Recipe, ape, cut, hydragen
from diffcache.kv.attend import Query, attend
from diffcache.kv.hf.cache import KVCache, cache_for
from diffcache.kv.segment import Traits
from diffcache.kv.slots import Slots
from diffcache.kv.view import View


def text(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 256, shape, generator=torch.Generator().manual_seed(seed))


def slots(count: int, seed: int = 0, batch: int = 2, start: int = 0) -> Slots:
    drawn = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(batch, 2, count, 8, generator=drawn, dtype=torch.float64) for _ in "kv")
    pos = torch.arange(start, start + count, dtype=torch.int32).expand(batch, 1, -1)
    return Slots(k, v, {"pos": pos})


def query(count: int, start: int, batch: int = 2) -> Query:
    drawn = torch.Generator().manual_seed(99)
    q = torch.randn(batch, 4, count, 8, generator=drawn, dtype=torch.float64) * 3
    return Query(q, start, 8**-0.5)


def run(model: Any, cache: KVCache, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, past_key_values=cache).logits
    return logits


@pytest.mark.parametrize("space", ["post", "pre"])
def test_a_shared_prefix_is_batched_attention(model: Any, space: str) -> None:
    prefix, first, second = text(20), text(3, 6, seed=1), text(3, 1, seed=2)
    cache = cache_for(model, Recipe(space=space), mode="native")
    run(model, cache, prefix[None])
    hydragen(cache.store)
    plain = cache_for(model, Recipe(), mode="stock")
    run(model, plain, prefix.expand(3, -1))
    for ids in (first, second):
        found, wanted = run(model, cache, ids), run(model, plain, ids)
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)
    assert len(cache.store.layers[0].segments[0].read().k) == 1  # held once
    cache.batch_select_indices(torch.tensor([2, 0]))
    plain.batch_select_indices(torch.tensor([2, 0]))
    found, wanted = run(model, cache, second[:2]), run(model, plain, second[:2])
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)


def read(model: Any, prefix: Tensor, contexts: list[Tensor], space: str = "post") -> list[Piece]:
    """Return a prefix, and contexts that were each read behind it."""
    found = []
    for context in contexts:
        cache = cache_for(model, Recipe(space=space), mode="native")
        run(model, cache, torch.cat([prefix, context])[None])
        found.append(cut(cache.store, context, len(prefix)))
    return [cut(cache.store, prefix), *found]


@pytest.mark.parametrize("space", ["post", "pre"])
def test_one_context_without_temperature_is_plain_attention(model: Any, space: str) -> None:
    prefix, context, question = text(6), text(20, seed=1), text(5, seed=2)
    cache = cache_for(model, Recipe(space=space), mode="native")
    first, *rest = read(model, prefix, [context], space)
    start = ape(cache, first, rest, temperature=1.0, scale=1.0)
    assert start == 26 == cache.get_seq_length()
    with torch.no_grad():
        wanted = model(input_ids=torch.cat([prefix, context, question])[None]).logits[:, 26:]
    found = run(model, cache, question[None])
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)
    sharper = cache_for(model, Recipe(space=space), mode="native")
    ape(sharper, first, rest)
    assert not torch.allclose(run(model, sharper, question[None]), wanted, atol=1e-2)


def test_temperature_and_scale_follow_the_formula() -> None:
    prefix, context, own = slots(4), slots(6, 1, start=4), slots(1, 2, start=10)
    asked = query(1, 10)
    t, s = 0.7, 0.8
    views = [View(prefix), View(context, None, Traits(t, s * t, True)), View(own)]
    found = attend(asked, views)
    q = asked.q.view(2, 2, 2, 8)

    def part(x: Slots, heat: float) -> tuple[Tensor, Tensor]:
        logit = torch.einsum("bhgd,bhsd->bhgs", q, x.k) * 8**-0.5 / heat
        return logit.softmax(-1) @ x.v, logit.logsumexp(-1)

    outs, lses = zip(part(prefix, 1), part(context, t), part(own, 1), strict=True)
    weight = torch.stack([lses[0], lses[1] * s * t, lses[2]], -1).softmax(-1)
    wanted = sum(out * weight[..., i, None] for i, out in enumerate(outs))
    torch.testing.assert_close(found[:, :, 0].view(2, 2, 2, 8), wanted, atol=1e-13, rtol=0)
