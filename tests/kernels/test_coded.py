"""Codes and the views that hold them: the twins are the codecs, and views decode once, when looked at."""

from itertools import cycle

import pytest
import torch

from diffcache.kernels import coded
from diffcache.kernels.quantize import dequant_twin
from diffcache.kv.attend import Query, attend
from diffcache.kv.codec.quant import GroupQuant, Quantized
from diffcache.kv.view import Unread, View
from tests.kernels.attended import layer, pair, query
from tests.kernels.quantized import CODECS, DTYPES, by_twin, tensor


@pytest.mark.parametrize(("sinks", "dtype"), [(0, torch.float64), (4, torch.float32), (0, torch.bfloat16)])
def test_attention_is_that_over_decoded_slots(sinks: int, dtype: torch.dtype) -> None:
    held = layer(pair(sinks=sinks), 103, dtype)
    (view,) = held.views()
    assert isinstance(view.source, Unread)
    assert view.width == held.held
    decoded = View(held.read(), view.start, below=view.below)
    asked = query(held)
    assert torch.equal(attend(asked, [view]), attend(asked, [decoded]))
    several = Query(asked.q.expand(-1, -1, 3, -1), held.seen - 3, asked.scale, softcap=5.0)
    assert torch.equal(attend(several, held.views()), attend(several, [decoded]))


def test_codes_are_decoded_when_they_are_looked_at_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held = layer(pair(), 103, torch.float32)
    decoded, count = Quantized.decode_into, []
    monkeypatch.setattr(Quantized, "decode_into", lambda self, out: count.append(1) or decoded(self, out))
    (view,) = held.views()
    assert view.width == 103
    assert not count
    attend(query(held), [view])
    attend(query(held), [view])
    assert len(count) == 2  # keys and values


def test_a_view_shows_what_was_there_when_it_was_made() -> None:
    held = layer(pair(), 103, torch.float32)
    (view,) = held.views()
    before = held.read()
    held.write(*torch.randn(2, 2, 2, 40, 64))
    pair().flush([held])
    assert torch.equal(view.slots.k, before.k)
    assert torch.equal(view.slots.v, before.v)


def test_a_kernel_is_not_asked_where_it_could_not_run() -> None:
    held = layer(pair(), 103, torch.float32)
    segment = held.segments[0]
    q = query(held).q[:, :, 0]
    settings = segment.k.codes, segment.v.codes, 2, 2, 32, 32
    assert not coded.can_attend(q, *settings, (64, 64))  # on a CPU


@pytest.mark.parametrize(("codec", "dtype"), list(zip(CODECS, cycle([*DTYPES, torch.float64]), strict=False)), ids=str)
def test_twins_are_the_codec(codec: GroupQuant, dtype: torch.dtype) -> None:
    x = tensor(dtype)
    made = codec.encode(x)
    codes, grid = by_twin(codec, x)
    assert torch.equal(codes, made.codes)
    assert torch.equal(grid, made.grid.values)
    index = torch.randint(64, (2, 2, 40), generator=torch.Generator().manual_seed(2))
    for held in (made, made.take(index), made.take(index[..., :1].expand(-1, -1, 3))):
        out = torch.empty_like(held.decode())
        width = 1 if codec.along == "tokens" else codec.width(x.shape[3])
        form = int(codec.bits), max(held.grid.each, 1), width, -codec.intervals / 2
        dequant_twin(held.codes, held.grid.values, out, *form, held.grid.of)
        assert torch.equal(out, held.decode())
