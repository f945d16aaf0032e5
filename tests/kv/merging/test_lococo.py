"""LoCoCo: mixing weights, and that training lowers what the memory loses."""

from __future__ import annotations

import pytest
import torch

from diffcache.kv.attend import Query
from diffcache.kv.learn import lococo
from diffcache.kv.merging.lococo import ConvolutionMerge, MixWeights
from diffcache.kv.plan import TopK
from tests.kv.merging import rows


def weights(memory: int = 6, gate: float = 0.3, taps: int = 3, seed: int = 0) -> MixWeights:
    drawn = torch.Generator().manual_seed(seed)
    return MixWeights(
        torch.randn(2, memory, 9, taps, generator=drawn),
        torch.randn(2, memory, generator=drawn),
        torch.full((2,), gate),
    )


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
                    found[t - pad] = mix.bias[0, m] + sum(
                        x[t + tap - 1] @ mix.weight[0, m, :, tap].double()
                        for tap in range(3)
                        if pad <= t + tap - 1 < 11
                    )
                wanted = own * x[s] + (1 - own) * found.softmax(0) @ x[pad:11]
                new = torch.cat([slots.k[b, h, s], slots.v[b, h, s]])
                torch.testing.assert_close(new, wanted, rtol=1e-6, atol=1e-7)
    assert torch.equal(slots.k[:, :, 11:], seen.slots.k[:, :, 11:])  # the latest stay
    assert torch.equal(same, plan)
    rows.check(ConvolutionMerge(mix, recent=3), seen, score, plan)


def test_with_the_gate_open_tokens_stay_as_they_are() -> None:
    seen = rows.layer()
    score = rows.scores(seen)
    slots, _ = ConvolutionMerge(weights(gate=1e3))(seen, score, rows.plan(seen, score, 6))
    assert torch.equal(slots.k, seen.slots.k) and torch.equal(slots.v, seen.slots.v)


def test_training_lowers_what_the_memory_loses() -> None:
    samples = []
    for seed in range(2):
        seen = rows.layer(pads=(0,), width=16, seed=seed)
        plan = TopK(recent=2)(rows.scores(seen, seed), torch.full((1, 2), 6), seen)
        drawn = torch.Generator().manual_seed(seed)
        later = Query(torch.randn(1, 4, 8, 4, generator=drawn, dtype=torch.float64), 16, 0.5)
        samples.append(lococo.Sample(seen, plan, later))
    start = lococo.fresh(1, 4, 9, taps=3)
    before = [float(lococo.loss(ConvolutionMerge(start, 2), each)) for each in samples]
    seen_losses: list[float] = []
    trained = lococo.train(
        start, samples, recent=2, steps=60, rate=0.03,
        watch=lambda step, found: seen_losses.append(found),
    )  # fmt: skip
    after = [float(lococo.loss(ConvolutionMerge(trained, 2), each)) for each in samples]
    assert len(seen_losses) == 60 and seen_losses[0] == pytest.approx(before[0])
    assert all(new < 0.7 * old for new, old in zip(after, before, strict=True)), (before, after)
    assert not start.weight.any() and not trained.weight.requires_grad


def test_what_does_not_fit_is_refused() -> None:
    seen = rows.layer()
    score = rows.scores(seen)
    with pytest.raises(ValueError, match="8 memory slots: 6 were trained"):
        ConvolutionMerge(weights())(seen, score, rows.plan(seen, score, 8))
    seen.layer = 5
    with pytest.raises(ValueError, match="layer 5 with 9 channels"):
        ConvolutionMerge(weights())(seen, score, rows.plan(seen, score, 4))
