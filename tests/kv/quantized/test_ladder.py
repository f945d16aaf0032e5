"""Tokens that are held in more bits: ladders of codes, probes and balanced channels."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kernels.pack import unpack
from diffcache.kv import Recipe, mikv, staircase, zipcache
from diffcache.kv.attend import Query
from diffcache.kv.budget import Uniform
from diffcache.kv.codec.held import Pair
from diffcache.kv.codec.quant import GroupQuant, Quantized
from diffcache.kv.codec.scaled import balancer
from diffcache.kv.codec.stairs import BalancedRung, Stair, shifted
from diffcache.kv.layer import KVLayer
from diffcache.kv.observe import Observation, observe
from diffcache.kv.plan import ByAge, Demote, Planner
from diffcache.kv.score.history import Salience
from diffcache.kv.score.recency import Recency
from diffcache.kv.segment import Coded
from diffcache.kv.store import KVStore
from diffcache.kv.trigger import EveryStep

SIZE = 8


def draw(count: int, seed: int, batch: int = 1) -> Tensor:
    return torch.randn(batch, 2, count, SIZE, generator=torch.Generator().manual_seed(seed))


def write(store: KVStore, k: Tensor, v: Tensor, q: Tensor | None = None, **more: Any) -> None:
    store.begin(k.shape[2])
    for layer in store.layers:
        start = layer.seen
        layer.write(k, v, **more)
        if q is not None:
            store.attend(layer.index, Query(q, start, SIZE**-0.5), more.get("valid"))


@pytest.mark.parametrize("along", ["tokens", "channels"])
def test_a_shift_drops_the_lowest_bits_and_means_the_middle(along: Any) -> None:
    eight = GroupQuant(8, along, 8, scale_dtype=torch.float32).encode(draw(16, 0))
    four = shifted(eight, 4)
    codes = unpack(eight.codes, 8, SIZE)
    assert torch.equal(unpack(four.codes, 4, SIZE), codes >> 4)
    assert four.codes.shape[3] == eight.codes.shape[3] // 2
    grid = eight.grid.lookup()
    scale = eight.decode() * 0 + (grid[:, :, :, 0] if along == "tokens" else grid[..., 0, :])
    middle = eight.decode() - scale * ((codes & 15).float() - 7.5)
    assert torch.allclose(four.decode(), middle, atol=1e-5)
    assert ((four.decode() - eight.decode()).abs() <= 7.5 * scale + 1e-5).all()


def test_the_staircase_steps_down_by_shifting_and_never_codes_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = GroupQuant.encode

    def spy(self: GroupQuant, x: Tensor) -> Quantized:
        assert self.bits == 8 and x.shape[2] == 8
        return encode(self, x)

    store = KVStore(1, staircase((8, 16, 32), group=8))
    k, v = draw(97, 1), draw(97, 2)  # what is due is done after 1, 9, ..., 97 tokens
    for at in range(97):
        write(store, k[:, :, at : at + 1], v[:, :, at : at + 1])
        if at == 40:  # from here on nothing but the first rung may encode
            monkeypatch.setattr(GroupQuant, "encode", spy)
    store.begin(1)
    layer = store.layers[0]
    levels = {segment.level: segment for segment in layer.segments}
    assert {level: s.width for level, s in levels.items()} == {1: 8, 2: 16, 3: 64}
    assert layer.tail.length == 9
    monkeypatch.undo()
    oldest = levels[3]
    assert isinstance(oldest, Coded) and isinstance(oldest.k, Quantized)
    codes = unpack(GroupQuant(8, "tokens", 8).encode(k[:, :, :64]).codes, 8, SIZE)
    assert torch.equal(unpack(oldest.k.codes, 2, SIZE), codes >> 6)
    assert torch.equal(oldest.read().pos[0, 0], torch.arange(64))


def test_a_prompt_comes_to_the_codes_that_single_tokens_come_to() -> None:
    for level, rung in enumerate(staircase((8, 16, 32, 64), group=8).ladder, 1):
        segment: Any = rung.hold(_slots(8), level)
        assert (segment.level, segment.k.codes.shape[3]) == (level, SIZE >> (level - 1))
    whole, single = (KVStore(1, staircase((8, 16, 32), group=8)) for _ in range(2))
    k, v = draw(57, 1), draw(57, 2)
    write(whole, k, v)
    for at in range(57):
        write(single, k[:, :, at : at + 1], v[:, :, at : at + 1])
    for store in (whole, single):
        store.begin(1)
    found = [{s.level: s for s in store.layers[0].segments} for store in (whole, single)]
    for level in (1, 2, 3):
        one, two = found[0][level], found[1][level]
        assert isinstance(one, Coded) and isinstance(two, Coded)
        assert torch.equal(one.k.codes, two.k.codes)  # type: ignore[attr-defined]
        assert torch.equal(one.v.codes, two.v.codes)  # type: ignore[attr-defined]


def _slots(count: int) -> Any:
    layer = KVLayer()
    layer.write(draw(count, 0), draw(count, 1))
    return layer.read()


def observed(count: int = 12, levels: list[int] | None = None, pad: int = 0) -> Observation:
    layer = KVLayer()
    valid = torch.arange(count)[None] >= pad
    layer.write(draw(count, 0), draw(count, 1), valid=valid)
    seen = observe(layer, 1)
    if levels is not None:
        seen.levels = torch.tensor(levels, dtype=torch.int8)[None, None]
    return seen


def plan(planner: Planner, score: list[float], seen: Observation, size: int) -> list[int]:
    worth = torch.tensor(score, dtype=torch.float32).expand(1, 2, -1).masked_fill(~seen.valid, -math.inf)
    return planner(worth, torch.full((1, 2), size), seen)[0, 0].tolist()


def test_the_best_stay_and_the_others_are_demoted() -> None:
    seen = observed(6, pad=1)
    assert plan(Demote(), [9, 5, 1, 4, 2, 3], seen, 2) == [0, 0, 1, 0, 1, 1]
    assert plan(Demote(recent=0.5), [9, 5, 1, 4, 2, 3], seen, 2) == [0, 0, 1, 1, 1, 0]
    assert plan(Demote(1, 2), [9, 5, 1, 4, 2, 3], seen, 2) == [0, 1, 2, 1, 2, 2]


def test_blocks_step_down_when_their_youngest_is_old_enough() -> None:
    planner = ByAge((2, 6), 4)
    assert plan(planner, [0.0] * 12, observed(12), 1) == [2] * 4 + [1] * 4 + [0] * 4
    assert plan(planner, [0.0] * 10, observed(10), 1) == [2] * 4 + [1] * 4 + [0] * 2
    assert plan(planner, [0.0] * 12, observed(12, pad=2), 1) == [0] * 2 + [2] * 4 + [1] * 4 + [0] * 2
    again = observed(10, [2] * 4 + [2] * 4 + [0] * 2)
    assert plan(planner, [0.0] * 10, again, 1) == [0] * 10


def test_statistics_follow_slots_through_levels_and_ragged_rows() -> None:
    recipe = Recipe("levels", Recency(), Uniform(5), Demote(), trigger=EveryStep(3), ladder=(Stair(8, 4),))
    store = KVStore(1, recipe)
    layer = store.layers[0]
    valid = torch.tensor([[True] * 11, [False] * 4 + [True] * 7])
    write(store, draw(11, 0, 2), draw(11, 0, 2), valid=valid)
    for at in range(11, 30):
        layer.stats = {"mass": layer.read().pos.float().expand(2, 2, -1).clone()}
        write(store, draw(1, at, 2), draw(1, at, 2))
        pos = layer.read().pos.expand(2, 2, -1)
        held = layer.stats["mass"]
        there = pos[..., : held.shape[2]] >= 0
        assert torch.equal(held.where(there, 0).long(), pos[..., : held.shape[2]].where(there, 0).long())
        kept = [sorted(p for p in pos[row, 0].tolist() if p >= 0) for row in range(2)]
        assert kept == [list(range(at + 1)), list(range(4, at + 1))]


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
    assert torch.equal(BalancedRung(plain).hold(_slots(8), 1).read().k, plain.hold(_slots(8), 1).read().k)
