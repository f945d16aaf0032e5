"""Refresh: which tokens are computed anew, against plain loops."""

from __future__ import annotations

import pytest
import torch

from diffcache.kv.refresh import align, most_changed, slots_of

PAD = 3  # tokens of padding in row 1


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 1.0])
def test_tokens_that_changed_most_are_those_of_loops(share: float) -> None:
    old, new = torch.randn(2, 2, 2, 10, 4, generator=torch.Generator().manual_seed(0))
    valid = torch.arange(10) >= torch.tensor([[0], [PAD]])
    found = most_changed(old, new, valid, share)
    for row, allowed in enumerate((range(10), range(PAD, 10))):
        worth = [float((old[row, :, i] - new[row, :, i]).square().sum()) for i in range(10)]
        count = -(-round(share * len(allowed) * 1000) // 1000)
        wanted = sorted(sorted(allowed, key=lambda i: -worth[i])[:count])
        assert found[row].nonzero()[:, 0].tolist() == wanted


def test_equal_tokens_are_chosen_from_the_first() -> None:
    same, valid = torch.ones(1, 1, 6, 2), torch.ones(1, 6, dtype=torch.bool)
    assert most_changed(same, same, valid, 0.5).tolist() == [[True] * 3 + [False] * 3]


def test_edits_are_what_is_not_in_the_text_before() -> None:
    assert align([1, 2, 3, 4], [1, 9, 3, 4]).tolist() == [0, -1, 2, 3]
    assert align([1, 2, 3, 4], [3, 4]).tolist() == [2, 3]
    assert align([], [5]).tolist() == [-1]
    before, after = torch.randint(0, 9, (2, 10), generator=torch.Generator().manual_seed(0))
    source = align(before[:8], after)
    kept = source[source >= 0]
    assert bool((kept[1:] > kept[:-1]).all())  # in order
    assert torch.equal(before[kept], after[source >= 0])


def test_slots_fill_up_rows_with_their_last_one() -> None:
    mask = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
    assert slots_of(mask).tolist() == [[0, 2, 3], [1, 1, 1], [3, 3, 3]]
    assert slots_of(torch.zeros(2, 4, dtype=torch.bool)).shape == (2, 0)
