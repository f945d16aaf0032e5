"""Laws of attention of whatever shape, of the kernels and of the library that calls them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kernels import merge, move
from diffcache.kernels.attention import FORWARD, MASS, attn_forward, attn_mass
from diffcache.kernels.merge import lse_merge
from diffcache.kv.attend import Query, attend
from diffcache.kv.attended import Attended
from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.quest import Quest
from diffcache.kv.retrieval.select import Selecting
from diffcache.kv.retrieval.tidal import LayerReuse
from diffcache.kv.segment import Traits
from diffcache.kv.slots import Slots, span
from diffcache.kv.view import View

HQ, H, N, D = 4, 2, 140, 32
SCALE = D**-0.5
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}


def drawn(count: int, rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    fixed = torch.Generator().manual_seed(0)
    q = torch.randn(rows, HQ, count, D, generator=fixed)
    k, v = torch.randn(2, rows, H, N, D, generator=fixed).unbind()
    return 2 * q, k, v


def launched(monkeypatch: pytest.MonkeyPatch, *operators: Any) -> list[str]:
    """Return a list that the names of operators are put on when their kernels are launched."""
    names: list[str] = []
    for operator in operators:
        run = operator.launch
        monkeypatch.setattr(operator, "launch", lambda *a, r=run, n=operator.name: names.append(n) or r(*a))
    return names


@pytest.mark.parametrize("wrong", ["a query", "a key"])
def test_numbers_that_are_none_are_not_hidden(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(2)
    (q if wrong == "a query" else k)[0, 0, 1, 3] = math.nan
    found = [*attn_forward(q, k, v, SCALE), attn_forward(q, k, None, SCALE)[1]]
    outs, lses = [torch.ones(1, HQ, 2, D)] * 2, [torch.zeros(1, HQ, 2), found[1]]
    assert torch.equal(lse_merge(outs, lses)[1].isnan(), found[1].isnan())
    monkeypatch.setenv("DIFFCACHE_KERNELS", "torch")
    out, lse = attn_forward(q, k, v, SCALE)
    assert lse.isnan().any()
    for one, other in zip(found, (out, lse, lse), strict=True):
        assert torch.equal(one.isnan(), other.isnan())


def test_a_key_that_no_query_attends_to_gets_no_mass() -> None:
    q, k = torch.ones(1, 1, 5, D), torch.ones(1, 1, 40, D)
    k[:, :, 3] = -math.inf
    found = attn_mass(q, k, attn_forward(q, k, None, SCALE)[1], SCALE)
    torch.testing.assert_close(found[0, 0], torch.full((40,), 5 / 39).index_fill(0, torch.tensor(3), 0))


@pytest.mark.parametrize("way", ["window", "listed", "mask"])
def test_what_is_not_seen_may_be_nan(way: str) -> None:
    q, k, v = drawn(1)
    slots = torch.arange(N, dtype=torch.int32).expand(1, 1, N).clone() if way == "listed" else None
    limits: dict[str, Any] = {"offset": 100, "window": 20, "slots": slots}
    if way == "mask":
        place = torch.arange(N)
        limits = {"mask": ((place > 80) & (place < 101)).expand(1, 1, 1, N)}
    expected = attn_forward(q, k, v, SCALE, **limits)
    for x in (k, v):
        x[:, :, 101:], x[:, :, :81] = math.nan, math.nan
    if slots is not None:
        slots[:, :, 101:] = N + 7
    found = attn_forward(q, k, v, SCALE, **limits)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(attn_mass(q, k, found[1], SCALE, **limits).isnan(), torch.zeros(1, H, N) > 0)


@pytest.mark.parametrize("case", ["plain", "last", "all", "padded"])
def test_sums_of_a_layer_are_those_of_plain_pytorch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    width = 40
    count = {"last": 9, "all": 1}.get(case, width)
    q, k, v = (x[:, :, :width] for x in drawn(count, 2))
    slots = Slots(k, v, {"pos": span(5, width + 5, 2, k.device)})
    valid = torch.rand(2, count) > 0.3 if case == "padded" else None
    query = Query(q, width + 5 - count, SCALE, causal=case != "plain")
    asked = Attended(query, View(slots, 5, below=width + 5), valid)
    names = launched(monkeypatch, FORWARD, MASS)
    found = asked.sums()
    assert names == ["attn_forward", "attn_mass"]
    softly = asked.sums(lambda logits, heads, part: logits)  # not for the kernels
    assert len(names) == 2
    torch.testing.assert_close(found, softly, **CLOSE)


def test_kernels_attend_where_something_is_spared_or_parts_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(3)
    slots = Slots(k, v, {"pos": span(7, N + 7, 1, k.device)})
    last, whole = N + 4, View(slots, 7)  # position of the first query, and all slots
    parts = [View(slots.narrow(0, 50), None, Traits(apart=True)), View(slots.narrow(50, N))]
    calls = [
        (Query(q, last, SCALE), [whole]),
        (Query(q, 60, SCALE), [whole]),  # as where rows in the middle are computed anew
        (Query(q, last, SCALE, window=20), [whole]),
        (Query(q, N + 30, SCALE, window=30), [whole]),  # beyond what is held
        (Query(q[:, :, :1], N + 6, SCALE), parts),
    ]
    names = launched(monkeypatch, FORWARD, merge.MERGE)
    found = [attend(query, views) for query, views in calls]
    assert names == ["attn_forward"] * 6 + ["lse_merge"]
    mask = torch.rand(1, 1, 3, N + 7) > 0.3
    others = [
        (Query(q, last, SCALE, causal=False), whole),
        (Query(q, last, SCALE, mask=mask), whole),
        (Query(q, last, SCALE), View(slots)),
        (Query(q, last, SCALE, window=20, causal=False), whole),
        (Query(q, 5, SCALE), whole),
        (Query(q, N + 30, SCALE, window=20), whole),  # the last query sees nothing
    ]
    for query, view in others:  # torch's own attention
        attend(query, [view])
    assert len(names) == 7
    monkeypatch.setenv("DIFFCACHE_KERNELS", "torch")
    for one, (query, views) in zip(found, calls, strict=True):
        torch.testing.assert_close(one, attend(query, views), **CLOSE)
    assert len(names) == 7


@pytest.mark.parametrize("kind", ["runs", "rows", "tidal"])
def test_chosen_slots_are_attended_to_where_they_are(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(1, 2)
    layers = [KVLayer(number) for number in range(2)]
    valid = torch.ones(2, N, dtype=torch.bool)
    valid[1, :9] = kind != "rows"  # rows with gaps choose by mask
    for layer in layers:
        layer.write(k, v, valid=valid if kind == "rows" else None)
    chooser: Selecting = Quest(50, sinks=2, recent=20)
    query = Query(q, N - 1, SCALE)
    if kind == "tidal":
        chooser = LayerReuse(50, sinks=2, recent=20, select=(0,))
        chooser.views(query, layers[0], layers)
    names = launched(monkeypatch, FORWARD, move.GATHER)
    (view,) = chooser.views(query, layers[1], layers)
    found = attend(query, [view])
    assert view.width < N and names == ["attn_forward"]
    monkeypatch.setenv("DIFFCACHE_KERNELS", "torch")
    torch.testing.assert_close(found, attend(query, [view]), **CLOSE)
