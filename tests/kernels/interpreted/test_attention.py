"""What holds of attention of whatever shape, of the kernels and of the library that calls them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kernels import decode, mass, merge
from diffcache.kernels.decode import attn_decode
from diffcache.kernels.mass import attn_lse, attn_mass
from diffcache.kernels.merge import lse_merge
from diffcache.kv.attend import Query, View, attend
from diffcache.kv.attended import Attended
from diffcache.kv.segment import Traits
from diffcache.kv.slots import Slots, span

B, HQ, H, N, D = 2, 4, 2, 140, 32
SCALE = D**-0.5
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}


def drawn(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    fixed = torch.Generator().manual_seed(seed)
    q = torch.randn(B, HQ, count, D, generator=fixed)
    k, v = torch.randn(2, B, H, N, D, generator=fixed).unbind()
    return 2 * q, k, v


def launched(monkeypatch: pytest.MonkeyPatch, *operators: Any) -> list[str]:
    """Return a list that the names of operators are put on when their kernels are launched."""
    names: list[str] = []
    for operator in operators:
        run = operator.launch
        monkeypatch.setattr(
            operator, "launch", lambda *a, r=run, n=operator.name: names.append(n) or r(*a)
        )
    return names


@pytest.mark.parametrize("cuts", [(0, 70, 140), (0, 1, 64, 139, 140)])
def test_parts_of_the_keys_merge_to_the_whole_in_any_order(cuts: tuple[int, ...]) -> None:
    q, k, v = drawn(2)
    whole = attn_decode(q, k, v, SCALE)
    parts = [attn_decode(q, k[:, :, a:b], v[:, :, a:b], SCALE) for a, b in pairwise(cuts)]
    for order in (parts, parts[::-1]):
        torch.testing.assert_close(lse_merge(*zip(*order, strict=True)), whole, **CLOSE)
    first = lse_merge(*zip(*parts[:2], strict=True))
    nested = lse_merge(*zip(first, *parts[2:], strict=True))
    torch.testing.assert_close(nested, whole, **CLOSE)


def test_a_part_that_sees_nothing_changes_nothing_and_two_of_them_are_nothing() -> None:
    q, k, v = drawn(1)
    out, lse = attn_decode(q, k, v, SCALE)
    none = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    torch.testing.assert_close(lse_merge([none[0], out], [none[1], lse]), (out, lse), **CLOSE)
    assert all(map(torch.equal, lse_merge([none[0]] * 2, [none[1]] * 2), none))


def test_a_wide_window_is_none_and_enough_sinks_are_all() -> None:
    q, k, v = drawn(3)
    whole = attn_decode(q, k, v, SCALE, causal=True)
    for limits in ({"window": N}, {"window": 5, "sinks": N}):
        found = attn_decode(q, k, v, SCALE, causal=True, **limits)
        torch.testing.assert_close(found, whole, **CLOSE)


def test_a_list_of_slots_is_what_is_gathered() -> None:
    q, k, v = drawn(1)
    order = torch.stack([torch.randperm(N)[:90] for _ in range(B * H)]).view(B, H, 90)
    wide = order[..., None].expand(-1, -1, -1, D)
    expected = attn_decode(q, k.gather(2, wide), v.gather(2, wide), SCALE)
    torch.testing.assert_close(attn_decode(q, k, v, SCALE, slots=order.int()), expected, **CLOSE)


@pytest.mark.parametrize("listed", [False, True])
def test_what_is_not_seen_may_be_nan(listed: bool) -> None:
    q, k, v = drawn(1)
    length = torch.tensor([100, 70], dtype=torch.int32)
    slots = torch.arange(N, dtype=torch.int32).expand(B, 1, N).clone() if listed else None
    limits: dict[str, Any] = {"causal": True, "sinks": 3, "window": 20}
    expected = attn_decode(q, k, v, SCALE, length, slots, **limits)
    for row, stop in enumerate(length.tolist()):
        for x in (k, v):
            x[row, :, stop:], x[row, :, 3 : stop - 20] = math.nan, math.nan
        if slots is not None:
            slots[row, :, stop:] = -7
    found = attn_decode(q, k, v, SCALE, length, slots, **limits)
    assert all(map(torch.equal, found, expected))


def test_mass_is_the_number_of_queries_and_goes_with_its_key() -> None:
    q, k, _ = drawn(40)
    lse = attn_lse(q, k, SCALE)
    found = attn_mass(q, k, lse, SCALE)
    torch.testing.assert_close(found.sum(-1), torch.full((B, H), 40.0 * HQ // H), **CLOSE)
    order = torch.randperm(N)
    turned = attn_mass(q, k[:, :, order], attn_lse(q, k[:, :, order], SCALE), SCALE)
    torch.testing.assert_close(turned, found[:, :, order], **CLOSE)


def test_a_constant_in_all_logits_moves_only_the_log_sum_exp() -> None:
    q, k, _ = drawn(20)
    move = torch.randn(B, H, 1, D, generator=torch.Generator().manual_seed(4))
    lse, moved = attn_lse(q, k, SCALE), attn_lse(q, k + move, SCALE)
    by = SCALE * (q * move.repeat_interleave(HQ // H, 1)).sum(-1)
    torch.testing.assert_close(moved, lse + by, **CLOSE)
    masses = attn_mass(q, k, lse, SCALE), attn_mass(q, k + move, moved, SCALE)
    torch.testing.assert_close(*masses, **CLOSE)


def test_groups_are_heads_that_are_repeated() -> None:
    q, k, v = drawn(4)
    wide_k, wide_v = (x.repeat_interleave(HQ // H, 1) for x in (k, v))
    many = attn_decode(q, wide_k, wide_v, SCALE, causal=True)
    torch.testing.assert_close(attn_decode(q, k, v, SCALE, causal=True), many, **CLOSE)
    lse = attn_lse(q, wide_k, SCALE, N - 4)
    torch.testing.assert_close(attn_lse(q, k, SCALE, N - 4), lse, **CLOSE)
    heads = attn_mass(q, wide_k, lse, SCALE, N - 4).unflatten(1, (H, -1)).sum(2)
    torch.testing.assert_close(attn_mass(q, k, lse, SCALE, N - 4), heads, **CLOSE)


@pytest.mark.parametrize("case", ["plain", "last", "all", "padded"])
def test_sums_of_a_layer_are_those_of_plain_pytorch(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = {"last": 30, "all": 1}.get(case, N)
    q, k, v = drawn(count)
    slots = Slots(k, v, {"pos": span(5, N + 5, B, k.device)})
    valid = torch.rand(B, count) > 0.3 if case == "padded" else None
    query = Query(q, N + 5 - count, SCALE, causal=case != "plain")
    asked = Attended(query, slots, valid, 5, N + 5)
    names = launched(monkeypatch, mass.LSE, mass.MASS)
    found = asked.sums()
    assert names == ["attn_lse", "attn_mass"]
    softly = asked.sums(lambda logits, heads, part: logits)  # not for the kernels
    assert len(names) == 2
    torch.testing.assert_close(found, softly, **CLOSE)


def test_queries_that_see_all_are_given_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(1)
    slots = Slots(k, v, {"pos": span(0, N, B, k.device)})
    names = launched(monkeypatch, decode.DECODE, merge.MERGE)
    found = attend(Query(q, N - 1, SCALE), [View(slots, 0)])
    parts = [View(slots.narrow(0, 50), None, Traits(apart=True)), View(slots.narrow(50, N))]
    apart = attend(Query(q, N - 1, SCALE), parts)
    assert names == ["attn_decode", "lse_merge"]
    attend(Query(q, N - 20, SCALE), [View(slots, 0)])  # a query that sees some of them
    assert len(names) == 2
    monkeypatch.setenv("DIFFCACHE_KERNELS", "torch")
    expected = attend(Query(q, N - 1, SCALE), [View(slots, 0)])
    assert len(names) == 2
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(apart, expected, **CLOSE)
