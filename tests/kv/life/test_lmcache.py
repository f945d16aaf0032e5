"""Blocks for engines: bit-equal round trips, forged blocks refused; and LMCache's own interface."""

import random
import sys
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.errors import MissingError
from diffcache.kv.codec.bitstream import CacheGen
from diffcache.kv.codec.blocks import _HEAD, BlockCodec, BlockError, CacheGenBlocks, KiviBlocks
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.life import lmcache

L, H, D = 3, 2, 16


def chunk(tokens: int = 37, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    """Return keys and values of all layers, [2, L, S, H * D]."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(2, L, tokens, H * D, generator=drawn).cumsum(2).mul(0.3).to(dtype)


def cachegen() -> CacheGenBlocks:
    pytest.importorskip("constriction", reason="needs the transport extra")
    codec = CacheGen(chunk=16)
    texts = [tuple(part[:, None] for part in chunk(64, torch.float32, 5))]
    return CacheGenBlocks(codec.measure(texts), codec)  # type: ignore[arg-type]


@pytest.fixture(params=["kivi", "cachegen"])
def blocks(request: pytest.FixtureRequest) -> BlockCodec:
    return KiviBlocks(4, 8) if request.param == "kivi" else cachegen()


@pytest.mark.parametrize(
    ("bits", "dtype"), [(1.58, torch.float32), (2, torch.float16), (3, torch.bfloat16), (8, torch.float32)]
)
def test_kivi_blocks_hold_what_its_codec_gives(bits: float, dtype: torch.dtype) -> None:
    x, made = chunk(37, dtype), KiviBlocks(bits, 8)
    block = made.encode(x)
    assert len(block) == made.most_bytes((L, 37, H * D), dtype)
    keys, values = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in x)  # [L, H, S, D]
    coded = GroupQuant(bits, "tokens", 8).encode(keys[:, :, :32].contiguous()).decode()
    wanted_k = torch.cat([coded, keys[:, :, 32:]], 2)
    wanted_v = GroupQuant(bits, "channels", 8).encode(values.contiguous()).decode()
    wanted = torch.stack([wanted_k, wanted_v]).transpose(2, 3).flatten(3)
    found = KiviBlocks().decode(block + b"padding")  # says itself what it was encoded with
    assert found.dtype == dtype and torch.equal(found, wanted)


def test_few_tokens_stay_exact_in_keys() -> None:
    x = chunk(5)
    found = KiviBlocks(2, 8).decode(KiviBlocks(2, 8).encode(x))
    assert torch.equal(found[0], x[0]) and not torch.equal(found[1], x[1])


@pytest.mark.parametrize("level", [0, 2])
def test_cachegen_blocks_hold_what_was_quantized(level: int) -> None:
    first = cachegen()
    made, x = CacheGenBlocks(first.tables, first.codec, level), chunk(37)
    block = made.encode(x)
    assert len(block) <= made.most_bytes((L, 37, H * D), x.dtype) and len(block) < x.nbytes / 2
    parts = []
    for start in range(0, 37, 16):
        k, v = (part[:, None, start : start + 16] for part in x)
        symbols = first.codec.quantize(k, v, level)
        parts.append(torch.stack(first.codec.restore(symbols, 1, x.dtype, level)))
    assert torch.equal(first.decode(block), torch.cat(parts, 3)[:, :, 0])


def test_blocks_that_are_cut_altered_or_forged_are_refused_with_one_error(blocks: BlockCodec) -> None:
    block, drawn, refused = blocks.encode(chunk(18)), random.Random(0), 0
    for size in (0, 3, _HEAD.size, len(block) // 2, len(block) - 1):
        with pytest.raises(BlockError, match="truncated"):
            blocks.decode(block[:size])
    for place in range(0, len(block), 23):
        with pytest.raises(BlockError):
            blocks.decode(block[:place] + bytes([block[place] ^ 1]) + block[place + 1 :])
    for _ in range(60):
        content = bytearray(block[:-16])
        place = drawn.randrange(_HEAD.size - 8)  # a length that lies is truncated, see above
        content[place] = drawn.randrange(256)
        forged = bytes(content) + blake2b(content, digest_size=16).digest()
        try:
            assert blocks.decode(forged).shape[0] == 2
        except BlockError:
            refused += 1
    assert refused > 30


def test_without_lmcache_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmcache.v1.distributed.serde", None)
    with pytest.raises(MissingError, match="pip install lmcache"):
        lmcache.register()


@pytest.fixture
def theirs() -> Any:
    reason = "needs LMCache: pip install lmcache"
    return pytest.importorskip("lmcache.v1.distributed.serde", reason=reason)


def memory(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return a memory object of LMCache that holds zeros."""
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    size = torch.Size(shape)
    raw = torch.zeros(size.numel() * dtype.itemsize, dtype=torch.uint8)
    about = MemoryObjMetadata(size, dtype, 0, len(raw), 1, 0, MemoryFormat.KV_2LTD)
    return TensorMemoryObj(raw, about, None)


def finished(query: Any, task: int) -> bool:
    while True:
        found: bool | None = query(task)
        if found is not None:
            return found


def test_a_chunk_goes_through_the_processor_of_lmcache(theirs: Any, blocks: BlockCodec, tmp_path: Path) -> None:
    assert lmcache.register() == lmcache.register() == ["diffcache-kivi", "diffcache-cachegen"]
    settings: dict[str, Any] = {"bits": 4, "group": 8}
    if isinstance(blocks, CacheGenBlocks):
        blocks = CacheGenBlocks(blocks.tables)  # of the chunks that the factory takes
        lmcache.save_tables(tmp_path / "tables", blocks.tables)
        settings = {"tables": str(tmp_path / "tables")}
    name = "diffcache-kivi" if isinstance(blocks, KiviBlocks) else "diffcache-cachegen"
    made = theirs.create_serde_processor(theirs.SerdeConfig(name, settings))
    try:
        x = chunk(37, torch.bfloat16)
        source, target = memory(tuple(x.shape), x.dtype), memory(tuple(x.shape), x.dtype)
        source.tensor.copy_(x)
        layout = SimpleNamespace(shapes=[x.shape], dtypes=[x.dtype])
        held = memory((made.estimate_serialized_size(layout),), torch.uint8)
        task = made.submit_serialize([source], [held], [None])
        assert finished(made.query_serialize_result, task)
        assert held.get_size() < 0.6 * x.nbytes  # the bytes that LMCache stores
        task = made.submit_deserialize([held], [target], [None])
        assert finished(made.query_deserialize_result, task)
        assert torch.equal(target.tensor, blocks.decode(blocks.encode(x)))
        other = memory((2, L, 36, H * D), x.dtype)  # of another length: counts as not found
        task = made.submit_deserialize([held], [other], [None])
        assert not finished(made.query_deserialize_result, task) and not other.tensor.any()
    finally:
        made.close()


def test_the_serializers_are_those_of_lmcache(theirs: Any) -> None:
    serializer, deserializer = lmcache.serde(KiviBlocks())
    assert isinstance(serializer, theirs.Serializer)
    assert isinstance(deserializer, theirs.Deserializer)
    two = SimpleNamespace(shapes=[torch.Size([2, 1, 1, 1])] * 2, dtypes=[torch.float16] * 2)
    with pytest.raises(BlockError, match="one is coded at a time"):
        serializer.estimate_serialized_size(two)
    latents = SimpleNamespace(shapes=[torch.Size([1, 1, 1, 1])], dtypes=[torch.float16])
    with pytest.raises(BlockError, match="must be KV_2LTD"):
        serializer.estimate_serialized_size(latents)
