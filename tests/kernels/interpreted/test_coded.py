"""Attention over codes with kernels on: which calls take them, and that parts make up a whole."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from diffcache.kernels import coded
from diffcache.kernels.attention import FORWARD
from diffcache.kernels.gpu import coded as launched
from diffcache.kv.attend import attend
from diffcache.kv.codec.held import Pair
from diffcache.kv.codec.quant import Quantized
from diffcache.kv.rotary import Rotary
from diffcache.kv.view import View
from tests.kernels.attended import layer, pair, query
from tests.kernels.cases import copied
from tests.kernels.families.coded import attention
from tests.kernels.families.quantize import numbers

LIMITS = {torch.float32: 5e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}


@pytest.fixture(name="calls")
def _calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List calls of the kernels: of one query, of many over codes, and over the rest."""
    made: list[str] = []
    launch, forward = coded.ATTEND.launch, FORWARD.launch

    def forwarded(*args: Any) -> Any:
        made.append("many" if args[2] is not None else "rest")
        return forward(*args)

    monkeypatch.setattr(coded.ATTEND, "launch", lambda *a: made.append("one") or launch(*a))
    monkeypatch.setattr(FORWARD, "launch", forwarded)
    return made


SEVERAL: dict[str, Any] = {"count": 5}  # queries, the last of which is the newest token
TURNED = {"rotary": Rotary.default(1e4, 64)}


@pytest.mark.parametrize(
    ("codec", "dtype", "made", "settings"),
    [
        (pair(), torch.float32, "one", {}),
        (pair(bits=4), torch.float16, "one", {"batch": 2}),
        (pair(bits=4, slide=False), torch.bfloat16, "one", {}),
        (pair(sinks=4), torch.float32, "one", {}),
        (pair(bits=8), torch.float32, "one", {}),
        (pair(bits=3), torch.float32, "", {}),
        (pair(), torch.float32, "many", {"window": 50}),
        (pair(bits=4), torch.float16, "many", SEVERAL),
        (pair(bits=8), torch.float32, "many", TURNED),
        (pair(), torch.float32, "many", SEVERAL | {"window": 50}),
        (pair(sinks=4), torch.bfloat16, "many", SEVERAL | TURNED | {"causal": False}),
        (pair(slide=False), torch.float32, "many", SEVERAL | {"mask": 0.7, "batch": 2}),
    ],
)
def test_a_layer_is_attended_to_in_its_codes(
    codec: Pair, dtype, made: str, settings: Any, calls: list[str], monkeypatch
):
    more = {"batch": 1} | settings
    held = layer(codec, 103, dtype, more.pop("batch"), rotary=more.pop("rotary", None))
    if "mask" in more:
        random = torch.Generator().manual_seed(3)
        more["mask"] = torch.rand(2, 1, 5, 103, generator=random) < more["mask"]
    asked = query(held, **more)
    if made:
        decode = Quantized.decode_into

        def few(self: Quantized, out: torch.Tensor) -> None:  # keys of values that are not coded
            assert self.codes.shape[2] < 32
            decode(self, out)

        monkeypatch.setattr(Quantized, "decode_into", few)
    found = attend(asked, held.views())
    monkeypatch.undo()
    assert set(calls) - {"rest"} == ({made} if made else set())
    monkeypatch.setenv("DIFFCACHE_KERNELS", "torch")
    (view,) = held.views()
    wide = replace(asked, q=asked.q.double())
    slots = replace(view.slots, k=view.slots.k.double(), v=view.slots.v.double())
    exact = attend(wide, [View(slots, view.start, below=view.below)])
    assert found.dtype == dtype
    assert float((found.double() - exact).norm() / exact.norm()) < LIMITS[dtype]


def test_heads_that_are_no_multiple_are_refused(calls: list[str]) -> None:
    q, *rest = next(attention(torch.float32)).args
    keys, key_grid, values, value_grid, *settings = rest
    twice = [x.repeat(1, 2, *[1] * (x.dim() - 2)) for x in (keys, key_grid, values, value_grid)]
    with pytest.raises(RuntimeError, match="unflatten"):
        coded.attn_decode_kivi(q.repeat(1, 3, 1), *twice, *settings)
    assert not calls


def test_codes_are_decoded_where_logits_are_no_products(calls: list[str]) -> None:
    held = layer(pair(), 103, torch.float32, 1)
    for settings in ({"softcap": 5.0}, {"softcap": 5.0, "sinks": torch.zeros(6)}):
        attend(query(held, **settings), held.views())
    held = layer(pair(slide=False), 103, torch.float32, 1)
    held.keep(torch.arange(103) % 3 > 0)  # rows of the grid are listed then
    attend(query(held), held.views())
    assert not calls


def test_parts_of_any_size_make_up_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in attention(torch.float32) if "192" in c.name)
    whole = launched.attn_decode_kivi(*copied(case.args))
    for chunk in (64, 512):
        parts: Any = -(-180 // chunk), chunk
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


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_assembly_leaves_every_code_times_a_power_of_two(bits: int) -> None:
    low, high = np.divmod(np.arange(65536, dtype=np.uint32), 256)  # all pairs of bytes
    units = (low | high << 8).astype(np.uint32)
    known = np.stack([numbers(each[:, None].astype(np.uint8), bits) for each in (low, high)], 1)
    text = {2: launched.TWO, 4: launched.FOUR, 8: launched.EIGHT}[bits].value
    count = 16 // bits
    # Two units to a register, the second in the upper half.
    register = {f"${count}": units | np.roll(units, 1) << 16}
    for name, to, one, other in re.findall(r"(shr|and)\.b32 (\S+), (\S+), (\S+);", text):
        value = np.uint32(int(other, 0))
        register[to] = register[one] >> value if name == "shr" else register[one] & value
    assert text.count(";") == len(register)  # a declaration, and no line is left out
    for place, codes in enumerate(known.reshape(65536, count).T):
        halves = register[f"${place}"].view(np.float16).astype(np.float64).reshape(-1, 2) * 2**24
        lifted = codes * 2.0 ** (place * bits % 8)
        assert (halves == np.stack([lifted, np.roll(lifted, 1)], 1)).all()


def test_a_kernel_is_not_asked_for_more_sums_than_registers_hold() -> None:
    q, codes = torch.zeros(1, 16, 128), torch.zeros(1, 1, 32, 64, dtype=torch.uint8)
    assert coded.can_attend(q, codes, codes, 4, 4, 32, 32, (128, 128))
    assert not coded.can_attend(q, codes, codes, 4, 4, 32, 8, (128, 128))
