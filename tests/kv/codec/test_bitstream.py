"""CacheGen: bins from its tables, exact after quantizing, and as small as entropy allows."""

import sys

import pytest
import torch
from torch import Tensor

from diffcache.kv.codec.bitstream import BitstreamError, CacheGen

L, H, D = 3, 2, 8
SMALL = {"key_bins": ((32, 1), (16, None)), "value_bins": ((32, 2), (16, None))}


def text(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return keys and values that move slowly, each channel at its own size."""
    drawn = torch.Generator().manual_seed(seed)
    size = torch.rand(2, L, H, 1, D, generator=drawn) * 3
    steps = torch.randn(2, L, H, count, D, generator=drawn)
    k, v = ((steps + 0.2 * steps.cumsum(3)) * size).to(dtype)
    return k, v


@pytest.fixture
def coder() -> None:
    pytest.importorskip("constriction", reason="needs the transport extra")


@pytest.fixture(params=["paper", "official"])
def codec(request: pytest.FixtureRequest) -> CacheGen:
    return CacheGen(**SMALL, chunk=64, mode=request.param)


def test_bins_are_those_of_the_published_table() -> None:
    steps = CacheGen().steps(32, 0)
    assert steps[0].tolist() == [15] * 10 + [7] * 22
    assert steps[1].tolist() == [15] * 2 + [7] * 30
    assert CacheGen().steps(3, 1)[0].tolist() == [7] * 3
    assert CacheGen(key_bins=((8, 2), (4, None))).steps(4, 2)[0].tolist() == [1] * 4


def test_errors_are_at_most_half_a_bin(codec: CacheGen) -> None:
    k, v = text(37)
    symbols = codec.quantize(k, v)
    x = torch.stack([k, v])
    found = torch.stack(codec.restore(symbols, H, k.dtype))
    error = (x - found).abs().amax((2, 4))  # [2, L, S]
    steps = codec.steps(L, 0)[..., None].expand_as(error).clone().float()
    if codec.mode == "paper":
        steps[..., ::10] = 127
    scales = symbols.scales.float()
    assert bool((error <= scales * (0.5 / steps + 1e-3)).all())  # float16 rounds a scale by 5e-4
    assert int(symbols.codes.min()) >= 0
    assert bool((symbols.codes.amax((2, 3)) <= 2 * codec.steps(L, 0)).all())


def test_differences_are_to_the_anchor_of_the_group() -> None:
    codec = CacheGen(**SMALL)
    k, v = text(23)
    symbols = codec.quantize(k, v)
    assert symbols.anchors.shape == (2, L, 3, H * D) and symbols.codes.shape[2] == 20
    x = torch.stack([k, v]).transpose(2, 3).flatten(3)
    fine = symbols.scales[..., ::10, None].float()
    known = (symbols.anchors.float() - 127) / 127 * fine
    torch.testing.assert_close(known, x[:, :, ::10], atol=0.2, rtol=0)
    away = x[:, :, 11] - known[:, :, 1]
    torch.testing.assert_close(symbols.scales[:, :, 11].float(), away.abs().amax(-1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_arrives_is_exactly_what_was_quantized(codec: CacheGen, coder: None, dtype: torch.dtype) -> None:
    tables = codec.measure([text(100, 1)])
    k, v = text(150, 2, dtype)
    for level in range(3):
        chunks = codec.encode(k, v, tables, level)
        assert len(chunks) == 3
        found = codec.decode(chunks, tables)
        parts = []
        for start in (0, 64, 128):
            part = slice(start, start + 64)
            symbols = codec.quantize(k[:, :, part], v[:, :, part], level)
            parts.append(codec.restore(symbols, H, dtype, level))
        for index in (0, 1):
            wanted = torch.cat([part[index] for part in parts], 2)
            assert found[index].dtype == dtype and torch.equal(found[index], wanted)


def test_the_size_is_the_entropy(codec: CacheGen, coder: None) -> None:
    k, v = text(640)
    tables = codec.measure([(k, v)])
    whole = 0
    for level in range(3):
        chunks = codec.encode(k, v, tables, level)
        bound, coded, besides = 0.0, 0.0, 0
        for number, chunk in enumerate(chunks):
            part = slice(64 * number, 64 * (number + 1))
            symbols = codec.quantize(k[:, :, part], v[:, :, part], level)
            bound += tables.bits(symbols, level)
            raw = symbols.scales.nbytes + symbols.anchors.nbytes
            coded += 8 * (len(chunk) - raw - 30 - 16)  # head and digest
            besides += raw
        assert bound <= coded + 1
        assert coded <= 1.02 * bound
        size = sum(map(len, chunks))
        assert not whole or size < whole  # a coarser level is smaller
        whole = size
    plain = 2 * 2 * k.numel()  # 16 bits
    assert whole < plain / 4


def test_chunks_of_any_level_go_together_and_constant_channels_are_served(codec: CacheGen, coder: None) -> None:
    k, v = text(128)
    tables = codec.measure([(k, v)])
    found = codec.decode([codec.encode(k, v, tables, 2)[0], codec.encode(k, v, tables, 0)[1]], tables)
    assert found[0].shape == k.shape
    coarse, fine = ((found[0] - k)[:, :, part].norm() for part in (slice(64), slice(64, None)))
    assert coarse > 2 * fine
    k, v = torch.zeros(L, H, 21, D), torch.full((L, H, 21, D), 3.0)
    tables = codec.measure([(k, v)])
    found = codec.decode(codec.encode(k, v, tables), tables)
    assert torch.equal(found[0], k)
    torch.testing.assert_close(found[1], v, atol=2e-3, rtol=1e-3)
    one = codec.decode(codec.encode(k[:, :, :1], v[:, :, :1], tables), tables)
    assert one[0].shape == (L, H, 1, D)


def test_damaged_chunks_are_refused(codec: CacheGen, coder: None) -> None:
    k, v = text(40)
    tables = codec.measure([(k, v)])
    (chunk,) = codec.encode(k, v, tables)
    flipped = [chunk[:n] + bytes([chunk[n] ^ 4]) + chunk[n + 1 :] for n in range(0, len(chunk), 61)]
    for wrong in (*flipped, *(chunk[:size] for size in (0, 10, len(chunk) - 1))):
        with pytest.raises(BitstreamError, match="truncated or altered"):
            codec.decode([wrong], tables)
    with pytest.raises(BitstreamError, match="nothing to decode"):
        codec.decode([], tables)


def test_a_missing_coder_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, texts = CacheGen(), text(8)
    monkeypatch.setitem(sys.modules, "constriction", None)
    with pytest.raises(ImportError, match=r"diffcache\[transport\]"):
        codec.encode(*texts, codec.measure([texts]))
