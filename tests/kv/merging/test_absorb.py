"""Matches of slots, and that nothing is lost or made when they are absorbed."""

from __future__ import annotations

import pytest
import torch

from diffcache.kv.merging import absorb as module
from diffcache.kv.merging.absorb import Match, absorb, by_cosine, by_position, parted, total
from tests.kv.merging import rows


def pairs(match: Match, b: int, h: int) -> dict[int, int]:
    there = match.found[b, h]
    return dict(
        zip(match.source[b, h][there].tolist(), match.target[b, h][there].tolist(), strict=True)
    )


def test_cosine_finds_what_a_loop_finds() -> None:
    seen = rows.layer()
    plan = rows.plan(seen, rows.scores(seen), 4)
    goes, stays = parted(seen.slots, plan)
    match = by_cosine(seen.slots.k, goes, stays)
    for b in range(2):
        for h in range(2):
            k = seen.slots.k[b, h]
            kept = [s for s in range(14) if stays[b, h, s]]
            wanted = {
                s: max(kept, key=lambda t: float(torch.cosine_similarity(k[s], k[t], dim=0)))
                for s in range(14)
                if goes[b, h, s]
            }
            assert pairs(match, b, h) == wanted
            for place, s in enumerate(match.source[b, h].tolist()):
                if match.found[b, h, place]:
                    likeness = torch.cosine_similarity(k[s], k[wanted[s]], dim=0)
                    torch.testing.assert_close(match.likeness[b, h, place], likeness)


def test_cosine_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = rows.layer()
    goes, stays = parted(seen.slots, rows.plan(seen, rows.scores(seen), 4))
    whole = by_cosine(seen.slots.k, goes, stays)
    monkeypatch.setattr(module, "_BLOCK", 3)
    parts = by_cosine(seen.slots.k, goes, stays)
    assert torch.equal(whole.target, parts.target)
    torch.testing.assert_close(whole.likeness, parts.likeness)


def test_position_finds_the_nearest_and_of_two_the_earlier() -> None:
    seen = rows.layer(pads=(0, 2), width=12)
    seen.slots.meta["pos"][0, 0] = torch.tensor([0, 1, 2, 3, 4, 5, 9, 10, 11, 20, 21, 22])
    plan = torch.full((2, 2, 12), -1, dtype=torch.int8)
    plan[:, :, [2, 6, 10]] = 0
    goes, stays = parted(seen.slots, plan)
    match = by_position(seen.slots.pos, goes, stays)
    # Position 5 is 3 from 2 and 4 from 9; 11 is 2 from 9; 20 is 1 from 21.
    assert pairs(match, 0, 0) == {0: 2, 1: 2, 3: 2, 4: 2, 5: 2, 7: 6, 8: 6, 9: 10, 11: 10}
    assert pairs(match, 1, 1) == {3: 2, 4: 2, 5: 6, 7: 6, 8: 6, 9: 10, 11: 10}


def test_a_row_that_keeps_nothing_merges_nothing() -> None:
    seen = rows.layer(pads=(0, 0))
    plan = torch.full((2, 2, 14), -1, dtype=torch.int8)
    plan[0, :, 3] = 0
    goes, stays = parted(seen.slots, plan)
    for match in (by_cosine(seen.slots.k, goes, stays), by_position(seen.slots.pos, goes, stays)):
        assert match.found[0].all() or int(match.found[0].sum()) == 26
        assert not match.found[1].any()


def test_sums_are_conserved_and_the_rest_is_untouched() -> None:
    seen = rows.layer()
    plan = rows.plan(seen, rows.scores(seen), 4)
    goes, stays = parted(seen.slots, plan)
    match = by_cosine(seen.slots.k, goes, stays)
    ones = torch.ones_like(match.likeness)
    many = total(match, ones, 14)
    assert torch.equal(many.sum(-1), goes.sum(-1).double())
    slots = absorb(seen.slots, match, ones, ones.new_ones(()))
    for new, old in ((slots.k, seen.slots.k), (slots.v, seen.slots.v)):
        # Every kept slot counts as often as tokens it stands for: the sum over all is what it was.
        counted = (new * ((1 + many) * stays)[..., None]).sum(2)
        torch.testing.assert_close(counted, (old * (goes | stays)[..., None]).sum(2))
        assert torch.equal(new[many == 0], old[many == 0])


def test_halves_keep_their_dtype() -> None:
    seen = rows.of(torch.ones(1, 1, 3, 2, dtype=torch.bfloat16))
    goes, stays = parted(seen.slots, torch.tensor([[[0, -1, -1]]], dtype=torch.int8))
    match = by_cosine(seen.slots.k, goes, stays)
    slots = absorb(seen.slots, match, match.likeness, match.likeness.new_ones(()))
    assert slots.k.dtype == slots.v.dtype == torch.bfloat16
    assert torch.equal(slots.k, seen.slots.k)
