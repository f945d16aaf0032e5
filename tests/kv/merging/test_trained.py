"""LoCoCo and Locret: mixing weights and retaining heads, and that training them helps."""

import pytest
import torch

from diffcache.kv.attend import Query
from diffcache.kv.learn import lococo, locret
from diffcache.kv.merging.lococo import ConvolutionMerge, MixWeights
from diffcache.kv.plan import TopK
from diffcache.kv.recipes.merging import locret as recipe
from diffcache.kv.store import KVStore
from tests.kv.merging import rows


def weights(memory: int = 6, gate: float = 0.3, taps: int = 3, seed: int = 0) -> MixWeights:
    drawn = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(2, memory, 9, taps, generator=drawn), torch.randn(2, memory, generator=drawn)
    return MixWeights(weight, bias, torch.full((2,), gate))


def test_it_is_what_loops_give() -> None:
    seen = rows.layer()
    score = rows.scores(seen)
    plan = TopK(recent=3)(score, torch.full((2, 2), 7), seen)
    mix = weights()
    slots, same = ConvolutionMerge(mix, recent=3)(seen, score, plan)
    own = float(mix.gate[0].sigmoid())
    for b, pad in enumerate((0, 3)):
        for h in range(2):
            x = torch.cat([seen.slots.k[b, h], seen.slots.v[b, h]], -1)
            memory = [s for s in range(11) if plan[b, h, s] >= 0]
            assert len(memory) == 4
            for m, s in enumerate(memory):
                found = torch.empty(11 - pad, dtype=torch.float64)
                for t in range(pad, 11):
                    near = [tap for tap in range(3) if pad <= t + tap - 1 < 11]
                    mixed = sum(x[t + tap - 1] @ mix.weight[0, m, :, tap].double() for tap in near)
                    found[t - pad] = mix.bias[0, m] + mixed
                wanted = own * x[s] + (1 - own) * found.softmax(0) @ x[pad:11]
                new = torch.cat([slots.k[b, h, s], slots.v[b, h, s]])
                torch.testing.assert_close(new, wanted, rtol=1e-6, atol=1e-7)
    assert torch.equal(slots.k[:, :, 11:], seen.slots.k[:, :, 11:])  # the latest stay
    assert torch.equal(same, plan)
    rows.check(ConvolutionMerge(mix, recent=3), seen, score, plan)


def test_training_lowers_what_the_memory_loses() -> None:
    samples = []
    for seed in range(2):
        seen = rows.layer(pads=(0,), width=16, seed=seed)
        plan = TopK(recent=2)(rows.scores(seen, seed), torch.full((1, 2), 6), seen)
        drawn = torch.Generator().manual_seed(seed)
        later = Query(torch.randn(1, 4, 8, 4, generator=drawn, dtype=torch.float64), 16, 0.5)
        samples.append(lococo.MixSample(seen, plan, later))
    start = lococo.fresh(1, 4, 9, taps=3)
    before = [float(lococo.loss(ConvolutionMerge(start, 2), each)) for each in samples]
    seen_losses: list[float] = []
    watch = lambda step, found: seen_losses.append(found)  # noqa: E731
    trained = torch.no_grad()(lococo.train)(start, samples, recent=2, steps=60, rate=0.03, watch=watch)
    after = [float(lococo.loss(ConvolutionMerge(trained, 2), each)) for each in samples]
    assert len(seen_losses) == 60 and seen_losses[0] == pytest.approx(before[0])
    assert all(new < 0.7 * old for new, old in zip(after, before, strict=True)), (before, after)
    assert not start.weight.any() and not trained.weight.requires_grad


def drawn(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, *shape, generator=made) for shape in ((4, count, 3), (2, count, 3), (2, count, 5)))
    return q, k, v


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


def test_targets_are_the_largest_logits_of_the_answer() -> None:
    q, k, v = drawn(7)
    found = locret.targets(locret.RetainCase(0, q, k, v, 4, 0.5))
    for h in range(2):
        for s in range(4):
            wanted = max(float(q[0, g, t] @ k[0, h, s]) * 0.5 for g in (2 * h, 2 * h + 1) for t in (4, 5, 6))
            assert float(found[0, h, s]) == pytest.approx(wanted, rel=1e-5)


def test_loss_is_smooth_l1_and_the_differences_of_neighbors() -> None:
    q, k, v = drawn(7)
    sample = locret.RetainCase(0, q, k, v, 4, 0.5)
    scores = HEADS(q[:, :, :4], k[:, :, :4], v[:, :, :4], 0)
    off = (scores - locret.targets(sample)).abs()
    near = torch.where(off < 1, off.square() / 2, off - 0.5).mean()
    rough = (scores[..., 1:] - scores[..., :-1]).square().mean()
    torch.testing.assert_close(locret.loss(HEADS, sample, 0.1), near + 0.1 * rough)


def test_training_lowers_the_loss() -> None:
    samples = [locret.RetainCase(0, *drawn(10, seed), 6, 0.5) for seed in range(2)]
    trained = torch.no_grad()(locret.train)(HEADS, samples, steps=80, rate=0.02)
    for sample in samples:
        assert locret.loss(trained, sample) < 0.5 * locret.loss(HEADS, sample)
    assert not trained.first.requires_grad
