"""Ladders: codes that lose bits by shifts, salience, and what is demoted when."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv.budget import Uniform
from diffcache.kv.codec.pack import unpack
from diffcache.kv.codec.quant import GroupQuant, Quantized
from diffcache.kv.codec.stairs import Stair, shifted
from diffcache.kv.layer import KVLayer
from diffcache.kv.observe import Observation, observe
from diffcache.kv.plan import ByAge, Demote, Planner
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.quantized import staircase
from diffcache.kv.score.recency import Recency
from diffcache.kv.segment import Coded
from diffcache.kv.store import KVStore
from diffcache.kv.trigger import EveryStep
from tests.kv.quantized.drawn import SIZE, draw, write

# shifts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("along", ["tokens", "channels"])
def test_a_shift_drops_the_lowest_bits_and_means_the_middle(along: Any) -> None:
    eight = GroupQuant(8, along, 8, scale_dtype=torch.float32).encode(draw(16, 0))
    four = shifted(eight, 4)
    codes = unpack(eight.codes, 8, SIZE)
    assert torch.equal(unpack(four.codes, 4, SIZE), codes >> 4)
    assert four.codes.shape[3] == eight.codes.shape[3] // 2
    scale = eight.decode() * 0 + (eight.grid.lookup()[:, :, :, 0] if along == "tokens"
                                  else eight.grid.lookup()[..., 0, :])  # fmt: skip
    middle = eight.decode() - scale * ((codes & 15).float() - 7.5)
    assert torch.allclose(four.decode(), middle, atol=1e-5)
    assert ((four.decode() - eight.decode()).abs() <= 7.5 * scale + 1e-5).all()


def test_shift_after_shift_is_one_shift() -> None:
    eight = GroupQuant(8, "tokens", 8, scale_dtype=torch.float32).encode(draw(16, 0))
    one, two = shifted(eight, 2), shifted(shifted(eight, 4), 2)
    assert torch.equal(one.codes, two.codes)
    assert torch.allclose(one.decode(), two.decode(), atol=1e-6)
    assert shifted(eight, 8) is eight


def test_the_staircase_steps_down_by_shifting_and_never_codes_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_rungs_have_the_bits_they_say() -> None:
    for level, rung in enumerate(staircase((8, 16, 32, 64), group=8).ladder, 1):
        slots = _slots(8)
        segment = rung.hold(slots, level)
        assert isinstance(segment, Coded)
        assert segment.k.codes.shape[3] == SIZE >> (level - 1)  # type: ignore[attr-defined]
        assert segment.level == level


def _slots(count: int) -> Any:
    layer = KVLayer()
    layer.write(draw(count, 0), draw(count, 1))
    return layer.read()


# plans -----------------------------------------------------------------------------------------


def observed(count: int = 12, levels: list[int] | None = None, pad: int = 0) -> Observation:
    layer = KVLayer()
    valid = torch.arange(count)[None] >= pad
    layer.write(draw(count, 0), draw(count, 1), valid=valid)
    seen = observe(layer, 1)
    if levels is not None:
        seen.levels = torch.tensor(levels, dtype=torch.int8)[None, None]
    return seen


def plan(planner: Planner, score: list[float], seen: Observation, size: int) -> list[int]:
    worth = (
        torch.tensor(score, dtype=torch.float32)
        .expand(1, 2, -1)
        .masked_fill(~seen.valid, -math.inf)
    )
    return planner(worth, torch.full((1, 2), size), seen)[0, 0].tolist()


def test_the_best_stay_and_the_others_are_demoted() -> None:
    seen = observed(6, pad=1)
    assert plan(Demote(), [9, 5, 1, 4, 2, 3], seen, 2) == [0, 0, 1, 0, 1, 1]
    assert plan(Demote(recent=0.5), [9, 5, 1, 4, 2, 3], seen, 2) == [0, 0, 1, 1, 1, 0]
    assert plan(Demote(1, 2), [9, 5, 1, 4, 2, 3], seen, 2) == [0, 1, 2, 1, 2, 2]


def test_what_is_coded_stays_and_takes_nothing_of_the_budget() -> None:
    seen = observed(6, [1, 2, 0, 0, 0, 0])
    assert plan(Demote(), [9, 8, 1, 4, 2, 3], seen, 2) == [0, 0, 1, 0, 1, 0]
    assert plan(Demote(1, 2, fresh=True), [9, 8, 1, 4, 2, 3], seen, 3) == [0, 0, 2, 1, 2, 1]


def test_blocks_step_down_when_their_youngest_is_old_enough() -> None:
    planner = ByAge((2, 6), 4)
    assert plan(planner, [0.0] * 12, observed(12), 1) == [2] * 4 + [1] * 4 + [0] * 4
    assert plan(planner, [0.0] * 10, observed(10), 1) == [2] * 4 + [1] * 4 + [0] * 2
    assert (
        plan(planner, [0.0] * 12, observed(12, pad=2), 1) == [0] * 2 + [2] * 4 + [1] * 4 + [0] * 2
    )
    again = observed(10, [2] * 4 + [2] * 4 + [0] * 2)
    assert plan(planner, [0.0] * 10, again, 1) == [0] * 10


# statistics follow -----------------------------------------------------------------------------


def test_statistics_follow_slots_through_levels_and_ragged_rows() -> None:
    recipe = Recipe(
        "levels", score=Recency(), budget=Uniform(5), plan=Demote(), trigger=EveryStep(3),
        ladder=(Stair(8, 4),),
    )  # fmt: skip
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
        assert torch.equal(
            held.where(there, 0).long(), pos[..., : held.shape[2]].where(there, 0).long()
        )
        kept = [sorted(p for p in pos[row, 0].tolist() if p >= 0) for row in range(2)]
        assert kept == [list(range(at + 1)), list(range(4, at + 1))]
