"""Column sums of attention, block by block, against the whole matrix in float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from diffcache.kv import attended
from diffcache.kv.attend import Query, probabilities, visible
from diffcache.kv.attended import Attended
from diffcache.kv.slots import Slots, span
from diffcache.kv.view import View

BATCH, HEADS, GROUPS, TOKENS, SIZE = 2, 3, 2, 50, 4


def drawn(count: int = TOKENS) -> tuple[Query, Slots]:
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
    query, slots = drawn({"last": 20, "alone": 1}.get(case, TOKENS))
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
