"""Refresh: which tokens are computed anew, against plain loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffcache.kv.refresh import (
    All,
    CosineChange,
    EditScript,
    Either,
    Interval,
    OfTag,
    Stale,
    TopDeviation,
    align,
    slots_of,
)

PAD = 3  # tokens of padding in row 1


def numbers(seed: int) -> Tensor:
    return torch.randn(2, 2, 10, 4, generator=torch.Generator().manual_seed(seed))


def stale(**more: object) -> Stale:
    pos = torch.arange(10, dtype=torch.int32).expand(2, -1).clone()
    pos[1, :PAD] = -1
    return Stale(pos, old=numbers(0), new=numbers(1), **more)


def best(worth: list[float], allowed: list[int], count: int) -> list[int]:
    return sorted(sorted(allowed, key=lambda i: -worth[i])[:count])


def chosen(mask: Tensor) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in mask]


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 1.0])
def test_deviation_and_cosine_choose_as_loops_do(share: float) -> None:
    seen = stale()
    assert seen.old is not None and seen.new is not None
    for refresh in (TopDeviation(share), CosineChange(share)):
        wanted = []
        for row, allowed in ((0, list(range(10))), (1, list(range(PAD, 10)))):
            worth = []
            for i in range(10):
                a, b = seen.old[row, :, i].flatten(), seen.new[row, :, i].flatten()
                near = float(a @ b / a.norm() / b.norm())
                deviates = float((a - b).square().sum())
                worth.append(deviates if isinstance(refresh, TopDeviation) else -near)
            count = -(-round(share * len(allowed) * 1000) // 1000)
            wanted.append(best(worth, allowed, count))
        assert chosen(refresh.select(seen)) == wanted


def test_equal_tokens_are_chosen_from_the_first() -> None:
    same = torch.ones(1, 1, 6, 2)
    seen = Stale(torch.arange(6)[None], old=same, new=same)
    assert chosen(TopDeviation(0.5).select(seen)) == [[0, 1, 2]]
    assert chosen(CosineChange(0.5).select(seen)) == [[0, 1, 2]]


def test_all_interval_and_unions() -> None:
    assert chosen(All().select(stale())) == [list(range(10)), list(range(PAD, 10))]
    assert [bool(Interval(3).select(stale(step=step)).any()) for step in range(5)] == [
        True, False, False, True, False,
    ]  # fmt: skip
    tag = (torch.arange(10) >= 6).int().expand(2, -1)
    both = OfTag(0, Interval(4)) | OfTag(1, Interval(2) | CosineChange(0.25))
    assert isinstance(both, Either)
    assert chosen(both.select(stale(tag=tag, step=0)))[0] == list(range(10))
    assert chosen(both.select(stale(tag=tag, step=2)))[0] == [6, 7, 8, 9]
    late = chosen(both.select(stale(tag=tag, step=1)))
    assert [len(row) for row in late] == [1, 1] and late[0][0] >= 6
    assert eval(repr(both)) == both


def test_edits_are_what_is_not_in_the_text_before() -> None:
    assert align([1, 2, 3, 4], [1, 9, 3, 4]).tolist() == [0, -1, 2, 3]
    assert align([1, 2, 3, 4], [3, 4]).tolist() == [2, 3]
    assert align([], [5]).tolist() == [-1]
    drawn = torch.Generator().manual_seed(0)
    before = torch.randint(0, 9, (2, 8), generator=drawn)
    after = torch.randint(0, 9, (2, 10), generator=drawn)
    mask = EditScript().select(stale(ids=after, before=before))
    for row in range(2):
        source = align(before[row], after[row])
        kept = source[source >= 0]
        assert bool((kept[1:] > kept[:-1]).all())  # in order
        assert torch.equal(before[row][kept], after[row][source >= 0])
        first = PAD if row else 0
        assert torch.equal(mask[row, first:], source[first:] < 0) and not mask[row, :first].any()


def test_slots_fill_up_rows_with_their_last_one() -> None:
    mask = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
    assert slots_of(mask).tolist() == [[0, 2, 3], [1, 1, 1], [3, 3, 3]]
    assert slots_of(torch.zeros(2, 4, dtype=torch.bool)).shape == (2, 0)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="every=0"):
        Interval(0)
    plain = Stale(torch.arange(4)[None])
    with pytest.raises(ValueError, match="give both"):
        TopDeviation().select(plain)
    with pytest.raises(ValueError, match="no tags"):
        OfTag(1, All()).select(plain)
    with pytest.raises(ValueError, match="between two texts"):
        EditScript().select(plain)
    with pytest.raises(TypeError):
        All() | 3
