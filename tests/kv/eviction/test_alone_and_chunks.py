"""Scores and plans against kvpress and loops over queries and slots, alone, in a padded batch, and in chunks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv.plan import FixedSlot, Windows
from diffcache.kv.score.attention import HeadVote, LastQuery, Mass, PatchCenters, Window, WindowVariance
from diffcache.kv.score.compactor import Compactor, leverage, standard
from diffcache.kv.score.history import LowCount, NoisyMass, Recurrence
from diffcache.kv.score.most_attention import Asked, MaxAttention
from diffcache.kv.score.recency import Recency
from diffcache.kv.score.revised import Shared
from diffcache.kv.score.vectors import KeyDifference, KeyNorm, Lag, NormProduct, ValueNorm
from diffcache.kv.store import KVStore
from tests.kv.eviction.plain import GROUPS, HEADS, Text, recipe, scores
from tests.kv.eviction.seen import held, stored
from tests.kv.kvpress_golden import golden
from tests.kv.merging import rows

PROMPT = [14, 1, 1, 1]  # tokens of each forward
TOKENS = sum(PROMPT)
EVERY = [
    LowCount(6), NoisyMass(seed=3), Recurrence(0.1), MaxAttention(), HeadVote(((0, 3),), 4, 3),
    Window(4, 3), Window(4, 3, "max", "max"), Lag(4, 2), Shared(Mass(), heads=True), KeyNorm(),
    KeyDifference(), ValueNorm(), LastQuery(), WindowVariance(4), Recency(),
]  # fmt: skip


@pytest.mark.parametrize("score", EVERY, ids=lambda score: type(score).__name__)
def test_a_prompt_in_chunks_is_the_prompt_at_once(score: Any) -> None:
    text = Text(TOKENS, pad=(0, 2))
    whole = scores(score, text, [TOKENS])[0]
    parts = scores(score, text, [6, 4, TOKENS - 10])[0]
    for row, pad in enumerate(text.pad):
        torch.testing.assert_close(parts[row, :, pad:], whole[row, :, pad:], rtol=1e-4, atol=1e-5)


def test_low_counts_are_counted_by_hand() -> None:
    text = Text(TOKENS, pad=(0, 4))
    found = scores(LowCount(6), text, PROMPT)[0]
    for row, pad in enumerate(text.pad):
        attention, count = text.attention(row), TOKENS - pad
        fair = 1 / torch.arange(1, count + 1)[:, None]
        low = (attention < fair).tril()[:, :, -6:].sum((1, 2))
        assert torch.equal(found[row, :, pad:], -low.to(found.dtype))


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
                drawn = [_noise(head * GROUPS + group, query, slot, 3) for slot in range(query + 1)]
                row = [float(one) + noise for one, noise in zip(logits[head, group, query], drawn, strict=False)]
                weights = (torch.tensor(row).double() / (1.5 + 0.25 * step)).softmax(0)
                expected[head, : query + 1] += weights / GROUPS
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


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
        mean = (attention[list(voters), before:, :before].sum((0, 1)) / len(voters) / 4).tolist()
        for slot in range(before):
            near = [mean[s] for s in range(slot - 1, slot + 2) if 0 <= s < before]
            assert found[layer][0, 0, slot] == pytest.approx(sum(near) / 3, rel=1e-4)
        assert torch.equal(found[layer][:, 0], found[layer][:, 1])
        assert bool((found[layer][..., before:] == float("inf")).all())


LAYERS, WHOLE = range(2), 79  # of the golden file, and its tokens


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Assert that scores are alike where they are no decree to keep."""
    free = found.isfinite()
    assert bool(free.any())
    torch.testing.assert_close(found[free], expected[free], rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize("layer", LAYERS)
def test_norm_product_is_what_kvpress_computes(layer: int) -> None:
    found = NormProduct()(stored(layer, window=WHOLE))
    assert bool((found[..., :4] == float("inf")).all()) and bool(found[..., 4:].isfinite().all())
    close(found, golden()[0]["score.cur"][layer], 1e-8)


@pytest.mark.parametrize("layer", LAYERS)
def test_leverage_and_chunks_are_what_kvpress_computes(layer: int) -> None:
    tensors, seen = golden()[0], stored(layer, window=WHOLE)
    assert seen.rotary is not None
    k = seen.rotary.unrotate(seen.slots.k, seen.slots.rpos)
    every = torch.ones(k.shape[:3], dtype=torch.bool)
    found = standard(leverage(k, every, tensors["sketch"]), every)
    close(found, tensors["score.leverage"][layer], 1e-3)
    chunks = Compactor(blend=0, chunk=32, first=0, last=0, mode="official")(seen)
    close(chunks, tensors["score.non_causal"][layer])
    inner = every.clone()
    inner[..., :8], inner[..., -4:] = False, False
    only = Compactor(blend=0, chunk=32, mode="official")(seen)
    blend = only + 0.5 * standard(leverage(k, inner, tensors["sketch"]), inner)
    close(blend, tensors["score.compactor"][layer], 1e-3)


def test_leverage_is_the_diagonal_of_the_projection() -> None:
    keys = torch.randn(1, 1, 12, 4, generator=torch.Generator().manual_seed(0)).double()
    every = torch.ones(1, 1, 12, dtype=torch.bool)
    x = (keys - keys.mean(2, keepdim=True))[0, 0]
    expected = (x @ (x.T @ x + 0.01 * torch.eye(4).double()).inverse() @ x.T).diagonal()
    torch.testing.assert_close(leverage(keys, every)[0, 0], expected)
    odd = torch.zeros(1, 1, 6, 3)
    odd[0, 0, 4] = torch.tensor([0.0, 0.0, 5.0])
    assert int(leverage(odd, every[..., :6]).argmax()) == 4


@pytest.mark.parametrize("layer", LAYERS)
def test_what_a_chunk_lacks_counts_for_nothing(layer: int) -> None:
    tensors, seen = golden()[0], stored(layer, window=WHOLE)
    found = Compactor(blend=0, chunk=32, first=0, last=0)(seen)
    q, k, v = (tensors[name][layer] for name in "qkv")
    mass = torch.zeros(v.shape[:3])
    for start in range(0, k.shape[2], 32):
        part = slice(start, start + 32)
        keys = k[:, :, part].repeat_interleave(2, 1)
        probs = (q[:, :, part] @ keys.mT).softmax(-1).sum(-2)
        mass[..., part] = probs.unflatten(1, (2, 2)).mean(2)
    mass = torch.nn.functional.avg_pool1d(mass * v.norm(dim=-1), 3, 1, 1)
    expected = torch.stack([(row - row.mean()) / row.std() for row in mass])
    close(found, expected)
    # A chunk that is cut short differs, and only then.
    official = Compactor(blend=0, chunk=79, first=0, last=0, mode="official")(seen)
    close(Compactor(blend=0, chunk=79, first=0, last=0)(seen), official)


def test_middles_of_a_map_ask_all_of_it_whatever_the_order() -> None:
    text = Text(2 + 16)
    score = PatchCenters(((4, 4),), prompt=2, grid=2, kernel=3)
    asked = [2 + row * 4 + column for row in (0, 2) for column in (0, 2)]
    q = text.q[0, 0].view(HEADS, GROUPS, 18, -1)[:, :, asked]
    mean = (q @ text.k[0, 0][:, None].mT * q.shape[-1] ** -0.5).softmax(-1).mean((1, 2))
    around = torch.nn.functional.pad(mean, (1, 1)).unfold(-1, 3, 1).mean(-1)
    around[:, asked] = float("inf")
    torch.testing.assert_close(scores(score, text, [18])[0][0], around)
    score = PatchCenters(((1, 1), (2, 3)), prompt=2)
    with pytest.raises(ValueError, match=r"tokens=\[10\]"):
        scores(score, Text(10), [10])


def test_probing_is_what_kvpress_computes() -> None:
    tensors, _ = golden()
    q, k, v = (tensors[name] for name in "qkv")
    context = tensors["score.kvzip"].shape[-1]
    for layer in range(len(q)):
        text = Text(k.shape[3], pad=(0,) * k.shape[1])
        text.q, text.k, text.v = q[layer : layer + 1], k[layer : layer + 1], v[layer : layer + 1]
        expected = tensors["score.kvzip"][layer]
        store = KVStore(1, recipe(Asked()))
        text.feed(store, 0, context)
        asked = store.fork()
        asked.recipe = recipe(MaxAttention())
        text.feed(asked, context, text.tokens)
        found = asked.layers[0].stats["probe"][..., :context]
        inner = slice(4, None)  # kvpress gives the first four the largest score
        torch.testing.assert_close(found[..., inner], expected[..., inner], rtol=1e-4, atol=1e-6)


def test_lag_is_what_kvpress_computes() -> None:
    tensors, about = golden()
    settings = about["presses"]["lagkv"]["settings"]
    score = Lag(settings["lag_size"], settings["n_sink"])
    for layer in range(len(tensors["k"])):
        text = Text(tensors["k"].shape[3], pad=(0,) * tensors["k"].shape[1])
        text.q, text.k, text.v = (tensors[name][layer : layer + 1] for name in "qkv")
        found: Tensor = scores(score, text, [text.tokens])[0]
        torch.testing.assert_close(found, tensors["score.lagkv"][layer], rtol=1e-5, atol=1e-6)


def test_the_projection_follows_its_seed() -> None:
    seen = stored(0, window=WHOLE)
    one, same, other = (Compactor(attention=0, seed=seed)(seen) for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert Compactor(attention=0).window == 0 and Compactor(queries=7).window == 7


def by_hand(plan: Windows, score: list[float], budget: int) -> list[bool]:
    """Say which slots of one row without padding are kept."""
    count = len(score)
    if budget >= count:
        return [True] * count
    if plan.recent > budget:
        return [slot >= count - budget for slot in range(count)]
    inner = max(count - plan.recent, 0)
    windows = [list(range(first, min(first + plan.size, inner))) for first in range(0, inner, plan.size)]

    def worth(window: list[int]) -> float:
        values = sorted((score[slot] for slot in window), reverse=True)
        values = values if plan.best is None else values[: plan.best]
        return sum(values) / len(values)

    best = sorted(windows, key=worth, reverse=True)
    room = (budget - min(plan.recent, count)) // plan.size
    kept = {slot for window in best[:room] for slot in window}
    return [slot >= inner or slot in kept for slot in range(count)]


@pytest.mark.parametrize("best", [None, 1, 2])
@pytest.mark.parametrize("budget", [2, 5, 9, 14, 16, 22, 23])
def test_windows_are_kept_whole(budget: int, best: int | None) -> None:
    (seen,) = held([23, 16, 4], 23)
    score, plan = rows.scores(seen), Windows(4, 5, best)
    budgets = torch.full((3, HEADS), budget).minimum(seen.lengths)
    keep = plan(score, budgets, seen) == 0
    for row, length in enumerate([23, 16, 4]):
        for head in range(HEADS):
            alone = score[row, head, 23 - length :].tolist()
            expected = by_hand(plan, alone, min(budget, length))
            assert keep[row, head, 23 - length :].tolist() == expected
            assert not bool(keep[row, head, : 23 - length].any())
            assert sum(expected) <= budget


@pytest.mark.parametrize(("distance", "gone"), [(1, 11), (4, 8), (12, 0), (25, 0)])
def test_the_slot_at_a_distance_goes(distance: int, gone: int) -> None:
    (seen,) = held([12], 20)
    score = rows.scores(seen)
    plan = FixedSlot(distance, 2, 1)(score, torch.full((1, HEADS), 11), seen)
    assert plan[0].eq(-1).nonzero()[:, 1].tolist() == [gone] * HEADS
