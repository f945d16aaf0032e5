"""Scores against loops over queries and slots, alone, in a padded batch, and in chunks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from diffcache.kv.attend import Query
from diffcache.kv.attended import Attended
from diffcache.kv.score.attention import LastQuery, Mass, Window, WindowVariance
from diffcache.kv.score.heads import HeadVote
from diffcache.kv.score.history import LowCount, NoisyMass, Recurrence
from diffcache.kv.score.probe import MaxAttention
from diffcache.kv.score.recency import Recency
from diffcache.kv.score.revised import Shared
from diffcache.kv.score.vectors import KeyDifference, KeyNorm, Lag, ValueNorm
from diffcache.kv.slots import Slots, span
from diffcache.kv.store import KVStore
from diffcache.kv.view import View
from tests.kv.eviction_more.plain import GROUPS, HEADS, Text, observed, recipe, scores

PROMPT = [14, 1, 1, 1]  # tokens of each forward
TOKENS = sum(PROMPT)
EVERY = [
    LowCount(6), NoisyMass(seed=3), Recurrence(0.1), MaxAttention(), HeadVote(((0, 3),), 4, 3),
    Window(4, 3), Window(4, 3, "max", "max"), Lag(4, 2), Shared(Mass(), heads=True), KeyNorm(),
    KeyDifference(), ValueNorm(), LastQuery(), WindowVariance(4), Recency(),
]  # fmt: skip


@pytest.mark.parametrize("score", EVERY, ids=lambda score: type(score).__name__)
def test_a_row_alone_is_the_row_in_a_padded_batch(score: Any) -> None:
    text = Text(TOKENS, pad=(0, 5, 3))
    together = scores(score, text, PROMPT)[0]
    for row, pad in enumerate(text.pad):
        alone = scores(score, text.row(row), [PROMPT[0] - pad, 1, 1, 1])[0]
        torch.testing.assert_close(together[row : row + 1, :, pad:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("score", EVERY, ids=lambda score: type(score).__name__)
def test_a_prompt_in_chunks_is_the_prompt_at_once(score: Any) -> None:
    text = Text(TOKENS, pad=(0, 2))
    whole = scores(score, text, [TOKENS])[0]
    parts = scores(score, text, [6, 4, TOKENS - 10])[0]
    for row, pad in enumerate(text.pad):
        torch.testing.assert_close(parts[row, :, pad:], whole[row, :, pad:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("score", EVERY, ids=lambda score: type(score).__name__)
def test_tokens_taken_back_leave_no_trace(score: Any) -> None:
    text, other = Text(TOKENS), Text(TOKENS, seed=1)
    store = KVStore(1, recipe(score))
    text.feed(store, 0, 14)
    store.speculative = True
    other.feed(store, 14, 17)  # three drafts
    store.rollback(3)
    text.feed(store, 14, 15)
    other.feed(store, 15, 17)
    store.rollback(2)
    text.feed(store, 15, 16)
    text.feed(store, 16, 17)
    store._commit()
    seen = store._observation(store.layers[0], store._rings[0])
    expected = scores(score, text, PROMPT)[0]
    torch.testing.assert_close(score(seen).expand_as(expected), expected, rtol=1e-4, atol=1e-5)


def test_low_counts_are_counted_by_hand() -> None:
    text = Text(TOKENS, pad=(0, 4))
    found = scores(LowCount(6), text, PROMPT)[0]
    for row, pad in enumerate(text.pad):
        attention = text.attention(row)
        count = TOKENS - pad
        for head in range(HEADS):
            for slot in range(count):
                low = 0
                for query in range(max(count - 6, slot), count):
                    for group in range(GROUPS):
                        low += bool(attention[head, group, query, slot] < 1 / (query + 1))
                assert found[row, head, pad + slot] == -low


def _mixed(x: int) -> int:
    x &= 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _noise(head: int, query: int, slot: int, seed: int) -> float:
    first = _mixed(_mixed(head + seed * 65537) + query)
    draw = _mixed(_mixed((first + slot) % (1 << 20)) + seed)
    return -math.log(-math.log(((draw >> 8) + 0.5) / (1 << 24)))


def test_noisy_mass_is_a_sum_of_noisy_softmaxes() -> None:
    text = Text(TOKENS)
    found = scores(NoisyMass(1.5, 0.25, seed=3), text, PROMPT)[0][0]
    q = text.q[0, 0].view(HEADS, GROUPS, TOKENS, -1).double()
    logits = torch.einsum("hgnd,hsd->hgns", q, text.k[0, 0].double()) * q.shape[-1] ** -0.5
    expected = torch.zeros(HEADS, TOKENS, dtype=torch.float64)
    for head in range(HEADS):
        for group in range(GROUPS):
            for query in range(TOKENS):
                step = max(query - 13, 0)
                row = [
                    float(logits[head, group, query, slot])
                    + _noise(head * GROUPS + group, query, slot, 3)
                    for slot in range(query + 1)
                ]
                weights = (torch.tensor(row).double() / (1.5 + 0.25 * step)).softmax(0)
                expected[head, : query + 1] += weights / GROUPS
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_without_noise_and_heat_it_is_the_mass_of_attention() -> None:
    text = Text(TOKENS, pad=(0, 3))
    plain = scores(NoisyMass(increment=0, noise=0), text, PROMPT)[0]
    torch.testing.assert_close(plain, scores(Mass(), text, PROMPT)[0])
    assert not torch.equal(plain, scores(NoisyMass(), text, PROMPT)[0])


def test_noise_is_gumbel_and_no_two_queries_draw_the_same() -> None:
    q, k = torch.zeros(1, 4, 64, 2), torch.zeros(1, 2, 64, 2)
    slots = Slots(k, k, {"pos": span(0, 64, 1, k.device)})
    drawn = NoisyMass(seed=1)._drawn(Attended(Query(q, 0, 1.0), View(slots)))(
        range(2), range(64), 64
    )
    assert drawn.shape == (1, 2, 2, 64, 64)
    assert abs(float(drawn.mean()) - 0.5772) < 0.05  # Euler's constant
    assert abs(float(drawn.var()) - math.pi**2 / 6) < 0.1
    assert len(drawn.unique()) > 0.98 * drawn.numel()


def test_the_temperature_rises_with_every_query_that_comes_alone() -> None:
    text = Text(257)
    for chunks, steps in ([257], 0), ([255, 1, 1], 2):
        seen = observed(NoisyMass(increment=1.0), text, chunks)[0]
        assert bool((seen.stats["keyformer.steps"] == steps).all())


def test_recurrence_follows_every_slot_through_time() -> None:
    text, threshold = Text(TOKENS), 0.12
    found = scores(Recurrence(threshold), text, PROMPT)[0][0]
    attention = text.attention()
    waits = set()
    for head in range(HEADS):
        for slot in range(TOKENS):
            last, interval = slot, 0
            for query in range(slot + 1, TOKENS):
                if any(float(attention[head, g, query, slot]) >= threshold for g in range(GROUPS)):
                    interval = max(interval, query - last)
                    last = query
            expected = -(TOKENS - 1 - last) / max(interval, 1)
            waits.add(interval)
            assert float(found[head, slot]) == pytest.approx(expected)
    assert len(waits) > 3  # the case is not trivial


@pytest.mark.parametrize("heads", [(), ((0, 3), (1,))])
def test_chosen_heads_vote(heads: Any) -> None:
    text = Text(TOKENS, layers=2)
    found = scores(HeadVote(heads, 4, 3), text, PROMPT)
    for layer in range(2):
        voters = heads[layer] if heads else range(HEADS * GROUPS)
        attention = text.attention(layer=layer).flatten(0, 1)
        before = TOKENS - 4
        mean = [
            sum(float(attention[h, q, s]) for h in voters for q in range(before, TOKENS))
            / len(voters) / 4
            for s in range(before)
        ]  # fmt: skip
        for slot in range(before):
            near = [mean[s] for s in range(slot - 1, slot + 2) if 0 <= s < before]
            assert found[layer][0, 0, slot] == pytest.approx(sum(near) / 3, rel=1e-4)
        assert torch.equal(found[layer][:, 0], found[layer][:, 1])
        assert bool((found[layer][..., before:] == float("inf")).all())
