"""Locret: scores fixed when a token is written, and heads that learn what queries will look at."""

from __future__ import annotations

import pytest
import torch

from diffcache.kv.attend import Query
from diffcache.kv.learn import locret
from diffcache.kv.recipes.merging import locret as recipe
from diffcache.kv.store import KVStore


def drawn(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return (
        torch.randn(2, 4, count, 3, generator=made),
        torch.randn(2, 2, count, 3, generator=made),
        torch.randn(2, 2, count, 5, generator=made),
    )


HEADS = locret.fresh(1, 4 * 3 + 2 * 3 + 2 * 5, 2, width=8)


def test_heads_are_a_network_of_two_layers() -> None:
    q, k, v = drawn(4)
    found = HEADS(q, k, v, 0)
    for b in range(2):
        for t in range(4):
            x = torch.cat([q[b, :, t].flatten(), k[b, :, t].flatten(), v[b, :, t].flatten()])
            hidden = x @ HEADS.first[0]
            wanted = (hidden * hidden.sigmoid()) @ HEADS.second[0]
            torch.testing.assert_close(found[b, :, t], wanted)


def test_scores_are_fixed_when_tokens_are_written_in_whatever_pieces() -> None:
    q, k, v = drawn(12)
    store = KVStore(1, recipe(HEADS, budget=5, stabilizers=2, chunk=4))
    wanted = HEADS(q, k, v, 0)
    for first, stop in ((0, 4), (4, 8), (8, 11), (11, 12)):
        store.begin(stop - first)
        store.layers[0].write(k[:, :, first:stop], v[:, :, first:stop])
        store.attend(0, Query(q[:, :, first:stop], first, 1.0))
        layer = store.layers[0]
        pos = layer.read().pos.expand(2, 2, -1).long()
        there = pos >= 0
        found = layer.stats["locret"]
        torch.testing.assert_close(found[there], wanted.gather(2, pos.clamp_min(0))[there])
    # After 8 tokens: the last two of them, and of the others the best three.
    kept = wanted[:, :, :8].clone()
    kept[..., 6:] = float("inf")
    store = KVStore(1, recipe(HEADS, budget=5, stabilizers=2, chunk=8))
    store.begin(8)
    store.layers[0].write(k[:, :, :8], v[:, :, :8])
    store.attend(0, Query(q[:, :, :8], 0, 1.0))
    store.begin(1)
    best = kept.topk(5).indices.sort(-1).values
    assert torch.equal(store.layers[0].read().pos.long(), best)


def test_tokens_that_are_taken_back_leave_no_score() -> None:
    q, k, v = drawn(8)
    store = KVStore(1, recipe(HEADS, budget=50))
    wanted = HEADS(q, k, v, 0)
    store.speculative = True
    for first, stop in ((0, 4), (4, 7)):
        store.begin(stop - first)
        store.layers[0].write(k[:, :, first:stop], v[:, :, first:stop])
        store.attend(0, Query(q[:, :, first:stop], first, 1.0))
    store.rollback(2)
    store.begin(1)
    torch.testing.assert_close(store.layers[0].stats["locret"], wanted[..., :5])


def test_targets_are_the_largest_logits_of_the_answer() -> None:
    q, k, v = drawn(7)
    found = locret.targets(locret.Sample(0, q, k, v, 4, 0.5))
    for h in range(2):
        for s in range(4):
            wanted = max(
                float(q[0, g, t] @ k[0, h, s]) * 0.5 for g in (2 * h, 2 * h + 1) for t in (4, 5, 6)
            )
            assert float(found[0, h, s]) == pytest.approx(wanted, rel=1e-5)


def test_loss_is_smooth_l1_and_the_differences_of_neighbors() -> None:
    q, k, v = drawn(7)
    sample = locret.Sample(0, q, k, v, 4, 0.5)
    scores = HEADS(q[:, :, :4], k[:, :, :4], v[:, :, :4], 0)
    off = (scores - locret.targets(sample)).abs()
    near = torch.where(off < 1, off.square() / 2, off - 0.5).mean()
    rough = (scores[..., 1:] - scores[..., :-1]).square().mean()
    torch.testing.assert_close(locret.loss(HEADS, sample, 0.1), near + 0.1 * rough)


def test_training_lowers_the_loss() -> None:
    samples = [locret.Sample(0, *drawn(10, seed), 6, 0.5) for seed in range(2)]
    trained = locret.train(HEADS, samples, steps=80, rate=0.02)
    for sample in samples:
        assert locret.loss(trained, sample) < 0.5 * locret.loss(HEADS, sample)
    assert not trained.first.requires_grad
