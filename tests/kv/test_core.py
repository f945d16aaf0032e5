"""The store: slots stay with what is known of them, going back leaves no trace; attention, and sums of its columns."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv import attended
from diffcache.kv.attend import Query, attend, probabilities, visible
from diffcache.kv.attended import Attended
from diffcache.kv.codec.base import nbytes
from diffcache.kv.layer import KVLayer
from diffcache.kv.segment import Dense, Flat, Traits
from diffcache.kv.slots import Slots, chosen, span
from diffcache.kv.view import View

B, H, D = 2, 2, 8


def drawn(count: int, seed: int = 0, heads: int = H) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(B, heads, count, D, generator=generator, dtype=torch.float64) for _ in "kv")
    return k, v


def filled(count: int, **given: Any) -> KVLayer:
    layer = KVLayer()
    layer.write(*drawn(count), **given)
    return layer


def asked(count: int, start: int, seed: int = 7, **settings: Any) -> Query:
    return Query(drawn(count, seed, 2 * H)[0], start, D**-0.5, **settings)


def plain(query: Query, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention written out, `seen` of each slot [B, H, S], or of each query [B, H, n, S]."""
    seen = (seen if seen.dim() == 4 else seen[:, :, None]).expand(*k.shape[:2], -1, -1)
    k, v, seen = (x.repeat_interleave(2, 1) for x in (k, v, seen))
    logits = (query.q @ k.mT * query.scale).masked_fill(~seen, float("-inf"))
    return logits.softmax(-1) @ v


def test_padding_that_is_taken_back_was_none() -> None:
    layer = filled(20)
    real = torch.tensor([[True] * 4, [True] + [False] * 3])
    layer.write(*drawn(4, seed=1), valid=real)
    layer.write(*drawn(4, seed=2), valid=real)
    layer.rollback(6)
    assert layer.padding is not None and layer.padding.tolist() == [0, 1]
    layer.rollback(2)
    assert layer.padding.tolist() == [0, 0]


def test_overwriting_changes_chosen_slots_only() -> None:
    layer = filled(10)
    before = layer.read().clone()
    k, v = drawn(2, seed=3)
    layer.overwrite(torch.tensor([[1, 4], [0, 9]]), k, v)
    slots = layer.read()
    assert torch.equal(slots.k[0, :, [1, 4]], k[0]) and torch.equal(slots.v[1, :, [0, 9]], v[1])
    assert torch.equal(slots.k[0, :, 5:], before.k[0, :, 5:])
    assert torch.equal(slots.pos, before.pos)
    layer.settle_tail()
    with pytest.raises(ValueError, match="what is before them is settled"):
        layer.overwrite(torch.tensor([1]), *drawn(1))


def test_flat_slots_are_the_padded_ones_and_hold_no_padding() -> None:
    k, v = drawn(30)
    keep = torch.rand(B, H, 30, generator=torch.Generator().manual_seed(1)) < 0.3
    index, there = chosen(keep)
    padded = Slots(k, v, {"pos": span(0, 30, B, k.device)}).gather(index, there)
    flat = Flat.of(padded)
    again = flat.read()
    assert torch.equal(again.pos, padded.pos.expand_as(again.pos))
    assert torch.equal(again.k, padded.k * padded.valid[..., None])
    kept = int(keep.sum())
    assert flat.k.shape == (kept, D) and nbytes([flat.k, flat.v]) == kept * 2 * D * 8
    assert flat.offsets.tolist() == [0, *keep.sum(-1).flatten().cumsum(0).tolist()]
    query = asked(1, 29)
    seen = keep[:, :, None]
    assert torch.allclose(attend(query, [View(again)]), plain(query, k, v, seen), atol=1e-14)


@pytest.mark.parametrize("cut", [0, 1, 13, 29])
def test_parts_merge_to_the_whole(cut: int) -> None:
    k, v = drawn(30)
    slots = Slots(k, v, {"pos": span(0, 30, B, k.device)})
    query = asked(5, 25)
    apart = Traits(apart=True)
    parts = [View(slots.narrow(0, cut), None, apart), View(slots.narrow(cut, 30))]
    seen = torch.arange(30) <= torch.arange(25, 30)[:, None]
    whole = plain(query, k, v, seen.expand(B, H, 5, 30))
    assert torch.allclose(attend(query, parts if cut else parts[1:]), whole, atol=1e-14)


def test_one_slot_may_stand_for_many() -> None:
    k, v = drawn(10)
    wide = [torch.cat([x, x[:, :, :1].expand(-1, -1, 6, -1)], 2) for x in (k, v)]
    logn = torch.zeros(B, 1, 10)
    logn[..., 0] = torch.tensor(7.0).log()
    one = Slots(k, v, {"pos": span(0, 10, B, k.device), "logn": logn})
    query = asked(2, 20)
    expected = attend(query, [View(Slots(*wide, {"pos": span(0, 16, B, k.device)}))])
    for view in (View(one), View(one, None, Traits(apart=True))):
        assert torch.allclose(attend(query, [view]), expected, atol=1e-7)


def test_a_shared_segment_is_one_row_in_memory() -> None:
    k, v = drawn(10)
    shared = Slots(k[:1], v[:1], {"pos": span(0, 10, 1, k.device)})
    own_k, own_v = drawn(4, seed=2)
    layer = KVLayer()
    layer.seen, layer.tail.start = 10, 10
    layer.segments = [Dense(shared, Traits(apart=True))]
    layer.write(own_k, own_v)
    query = asked(2, 12)
    whole_k, whole_v = (torch.cat([x[:1].expand(B, -1, -1, -1), own], 2) for x, own in ((k, own_k), (v, own_v)))
    seen = (torch.arange(14) <= torch.arange(12, 14)[:, None]).expand(B, H, 2, 14)
    assert torch.allclose(attend(query, layer.views()), plain(query, whole_k, whole_v, seen))
    layer.rows(torch.tensor([1, 1, 0]))
    assert len(layer.segments[0].read().k) == 1 and len(layer.tail.read().k) == 3


def test_windows_softcaps_and_sinks() -> None:
    k, v = drawn(12)
    slots = Slots(k, v, {"pos": span(0, 12, B, k.device)})
    place, at = torch.arange(12), torch.arange(8, 12)[:, None]
    seen = ((place <= at) & (place > at - 5)).expand(B, H, 4, 12)
    query = asked(4, 8, window=5)
    assert torch.allclose(attend(query, [View(slots, 0)]), plain(query, k, v, seen))
    sinks = torch.randn(2 * H, dtype=torch.float64)
    capped = asked(4, 8, window=5, softcap=2.0, sinks=sinks)
    logits = 2 * (capped.q @ k.repeat_interleave(2, 1).mT * capped.scale / 2).tanh()
    logits = logits.masked_fill(~seen.repeat_interleave(2, 1), float("-inf"))
    extra = sinks.view(1, -1, 1, 1).expand(B, -1, 4, 1)
    weights = torch.cat([logits, extra], -1).softmax(-1)[..., :-1]
    expected = weights @ v.repeat_interleave(2, 1)
    assert torch.allclose(attend(capped, [View(slots, 0)]), expected)
    half = [View(slots.narrow(0, 5), None, Traits(apart=True)), View(slots.narrow(5, 12))]
    assert torch.allclose(attend(capped, half), expected), "a sink counts once, not once a part"


def test_a_query_sees_its_own_slot_the_window_before_it_and_no_position_beyond_its_mask() -> None:
    def shown(**settings: Any) -> list[list[int]]:
        found = visible(asked(2, 3, **settings), torch.tensor([[[4, -1, 0, 3, 2, 5, 1]]]))
        return found[0, 0].int().tolist()

    assert shown() == [[0, 0, 1, 1, 1, 0, 1], [1, 0, 1, 1, 1, 0, 1]]
    assert shown(window=2) == [[0, 0, 0, 1, 1, 0, 0], [1, 0, 0, 1, 0, 0, 0]]
    assert shown(window=2, causal=False) == [[1, 0, 0, 1, 1, 1, 0], [1, 0, 0, 1, 0, 1, 0]]
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]).bool()[None, None]
    assert shown(mask=mask) == [[0, 0, 1, 1, 1, 0, 1], [1, 0, 0, 1, 1, 0, 1]]


BATCH, HEADS, GROUPS, TOKENS, SIZE = 2, 3, 2, 50, 4


def prompt(count: int = TOKENS) -> tuple[Query, Slots]:
    fixed = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, HEADS * GROUPS, count, SIZE, generator=fixed)
    k = torch.randn(BATCH, HEADS, TOKENS, SIZE, generator=fixed)
    pos = span(0, TOKENS, BATCH, k.device)
    return Query(3 * q, TOKENS - count, 0.5), Slots(k, k, {"pos": pos})


def whole(query: Query, slots: Slots, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return column sums and counts from one matrix."""
    exact = replace(query, q=query.q.double())
    ((_, _, probs),) = probabilities(exact, slots, query.count)
    seen = visible(query, slots.pos)
    if valid is not None:
        probs = probs * valid[:, None, None, :, None]
        seen = seen & valid[:, None, :, None]
    return probs.sum(3).mean(2).float(), seen.sum(2).float()


@pytest.mark.parametrize("room", [1 << 10, 1 << 13])  # one head at a time, some
@pytest.mark.parametrize("case", ["plain", "last", "alone", "padded", "windowed", "unordered"])
def test_sums_and_counts_are_those_of_the_whole_matrix(case: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attended, "_CPU_BYTES", room)
    query, slots = prompt({"last": 20, "alone": 1}.get(case, TOKENS))
    known = {"start": 0, "below": TOKENS}
    valid = None
    if case == "padded":
        valid = torch.ones(BATCH, TOKENS, dtype=torch.bool)
        valid[0, :7] = False
        pos = slots.pos.where(valid[:, None], -1)
        slots, known = replace(slots, meta={"pos": pos, "logn": pos.float() / 30}), {}
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() & valid[:, None]
        query = replace(query, mask=mask[:, None], softcap=2.0)
    elif case == "windowed":
        query = replace(query, window=9)
    elif case == "unordered":
        order = torch.rand(BATCH, HEADS, TOKENS).argsort(-1)
        slots, known = slots.gather(order), {"below": TOKENS}
    asked = Attended(query, View(slots, **known), valid)
    sums, counts = whole(query, slots, valid)
    torch.testing.assert_close(asked.sums(), sums, rtol=1e-5, atol=1e-5)
    assert torch.equal(asked.counts().expand_as(counts), counts)
    noise = torch.linspace(0, 3, TOKENS).expand(HEADS, TOKENS) + torch.arange(HEADS)[:, None]
    changed = asked.sums(lambda x, heads, part: x + noise[heads.start : heads.stop, None, None, : x.shape[-1]])
    biased = replace(slots, meta={**slots.meta, "logn": slots.meta.get("logn", 0) + noise[None]})
    torch.testing.assert_close(changed, whole(query, biased, valid)[0], rtol=1e-5, atol=1e-5)
