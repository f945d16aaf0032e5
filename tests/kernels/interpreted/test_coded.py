"""Attention over codes with kernels on: which calls take them, and that parts make up a whole."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from diffcache.kernels import coded
from diffcache.kernels.gpu import coded as launched
from diffcache.kv.attend import View, attend
from diffcache.kv.codec.held import Pair
from tests.kernels.attended import layer, pair, query
from tests.kernels.cases import copied
from tests.kernels.families.coded import attention

LIMITS = {torch.float32: 5e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}


@pytest.fixture(name="calls")
def _calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the calls of the kernel."""
    made: list[int] = []
    launch = coded.ATTEND.launch
    monkeypatch.setattr(coded.ATTEND, "launch", lambda *a: made.append(1) or launch(*a))
    return made


@pytest.mark.parametrize(
    ("codec", "dtype", "calls_made"),
    [
        (pair(), torch.float32, 1), (pair(bits=4), torch.float16, 1),
        (pair(bits=4, slide=False), torch.bfloat16, 1), (pair(sinks=4), torch.float32, 1),
        (pair(bits=8), torch.float32, 0), (pair(bits=3), torch.float32, 0),
    ],
)  # fmt: skip
def test_a_layer_is_attended_to_in_its_codes(
    codec: Pair, dtype: torch.dtype, calls_made: int, calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    held = layer(codec, 103, dtype)
    found = attend(query(held), held.views())
    assert len(calls) == calls_made
    monkeypatch.setenv("DIFFCACHE_KERNELS", "torch")
    (view,) = held.views()
    wide = replace(query(held), q=query(held).q.double())
    slots = replace(view.slots, k=view.slots.k.double(), v=view.slots.v.double())
    exact = attend(wide, [View(slots, view.start, below=view.below)])
    assert found.dtype == dtype
    assert float((found.double() - exact).norm() / exact.norm()) < LIMITS[dtype]


def test_codes_are_decoded_where_a_query_does_not_see_all_of_them_alike(calls: list[int]) -> None:
    held = layer(pair(), 103, torch.float32)
    mask = torch.ones(2, 1, 1, 103, dtype=torch.bool)
    for settings in ({"mask": mask}, {"window": 50}, {"softcap": 5.0}, {"sinks": torch.zeros(6)}):
        attend(query(held, **settings), held.views())
    attend(replace(query(held), start=60), held.views())  # later slots are not seen
    held = layer(pair(slide=False), 103, torch.float32)
    held.keep(torch.arange(103) % 3 > 0)  # rows of the grid are listed then
    attend(query(held), held.views())
    assert not calls


def test_parts_of_any_size_make_up_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in attention(torch.float32) if "320" in c.name)
    whole = launched.attn_decode_kivi(*copied(case.args))
    for chunk in (32, 64, 512):
        parts: Any = -(-300 // chunk), chunk
        monkeypatch.setattr(launched, "split", lambda *_, parts=parts: parts)
        for one, other in zip(launched.attn_decode_kivi(*copied(case.args)), whole, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_what_lies_behind_the_coded_values_does_not_leak() -> None:
    case = next(c for c in attention(torch.float32) if "96-70" in c.name)
    q, keys, key_grid, *rest = copied(case.args)
    found = coded.ATTEND(q, keys, key_grid, *rest)
    keys[:, :, 70:] = 255
    key_grid[:, :, 3:] = float("nan")
    for one, other in zip(coded.ATTEND(q, keys, key_grid, *rest), found, strict=True):
        assert torch.equal(one, other)
