"""Codecs of ours behind the serde interface of LMCache, which moves caches of serving engines.

    import diffcache.kv.life.lmcache as serde

    serde.register()  # before LMCache reads its configuration
    # {"type": "fs", "base_path": "/cache", "serde": {"type": "diffcache-kivi", "bits": 4}}

LMCache is not needed to import this, and not by anything else here.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch

from diffcache.errors import MissingError
from diffcache.kv.codec.bitstream import CacheGen, Tables
from diffcache.kv.codec.blocks import BlockCodec, BlockError, CacheGenBlocks, KiviBlocks
from diffcache.kv.life.save import read, write

KIVI, CACHEGEN = "diffcache-kivi", "diffcache-cachegen"


def save_tables(path: str | os.PathLike[str], tables: Tables) -> None:
    """Write tables of CacheGen for `{"type": "diffcache-cachegen", "tables": path}`.

    Args:
        path: File to write.
        tables: Result of `CacheGen.measure` on keys and values [L, 1, S, C].
    """
    write(path, list(tables.weights))


def load_tables(path: str | os.PathLike[str]) -> Tables:
    """Return the tables that `save_tables` wrote.

    Raises:
        FileNotFoundError: If there is no such file.
        SavedCacheError: If it is truncated or altered.
    """
    found, _ = read(path)
    return Tables(tuple(found))


def serde(blocks: BlockCodec) -> tuple[Any, Any]:
    """Return a serializer and a deserializer of LMCache.

    They take chunks of its format `KV_2LTD`, [2, layers, tokens, channels of all heads], and write
    a block of `diffcache.kv.codec.blocks`. A block that was altered, or is of another shape or
    dtype than what LMCache asks for, raises and so counts as not found.

    Args:
        blocks: The codec.

    Raises:
        MissingError: If LMCache is not installed, or has no such interface.
    """
    base = _lmcache()

    class BlockSerializer(base.Serializer):  # type: ignore[misc,name-defined]
        """Encode keys and values of a chunk."""

        def serialize(self, src: Any, dst: Any, key: Any) -> int:
            """Write a block into `dst` and return its bytes."""
            block, room = blocks.encode(_tensor(src)), _tensor(dst).view(torch.uint8).flatten()
            if len(block) > len(room):
                raise BlockError(f"a block of {len(block)} bytes, and there is room for {len(room)}")
            room[: len(block)].copy_(torch.frombuffer(bytearray(block), dtype=torch.uint8))
            return len(block)

        def estimate_serialized_size(self, layout_desc: Any) -> int:
            """Return the most bytes of a block."""
            (shape,), (dtype,) = _single(layout_desc.shapes), _single(layout_desc.dtypes)
            if len(shape) != 4 or shape[0] != 2:
                raise BlockError(f"chunks of {list(shape)}: must be KV_2LTD, [2, L, T, C]")
            return blocks.most_bytes((shape[1], shape[2], shape[3]), dtype)

    class BlockDeserializer(base.Deserializer):  # type: ignore[misc,name-defined]
        """Decode keys and values of a chunk."""

        def deserialize(self, src: Any, dst: Any, key: Any) -> None:
            """Fill `dst` with what a block holds."""
            raw = _tensor(src).view(torch.uint8).flatten().cpu().numpy().tobytes()
            found, place = blocks.decode(raw), _tensor(dst)
            if found.shape != place.shape or found.dtype != place.dtype:
                raise BlockError(
                    f"a block of {list(found.shape)} in {found.dtype}, asked for as "
                    f"{list(place.shape)} in {place.dtype}"
                )
            place.copy_(found)

    return BlockSerializer(), BlockDeserializer()


def register() -> list[str]:
    """Make our codecs known to LMCache, and return their names; doing so again changes nothing.

    `diffcache-kivi` takes `bits` and `group`, `diffcache-cachegen` takes `tables`, a file of
    `save_tables`, and `level`; both take `max_workers`.

    Raises:
        MissingError: If LMCache is not installed, or has no such interface.
    """
    base = _lmcache()
    makers = {KIVI: KiviBlocks, CACHEGEN: _cachegen}
    for name, make in makers.items():
        if name not in base.get_registered_serde_types():
            base.register_serde_factory(name, _factory(base, make))
    return list(makers)


def _factory(base: Any, make: Any) -> Any:
    def factory(settings: Mapping[str, Any]) -> Any:
        given = dict(settings)
        workers = int(given.pop("max_workers", 1))
        return base.AsyncSerdeProcessor(*serde(make(**given)), max_workers=workers)

    return factory


def _cachegen(tables: str, level: int = 0) -> BlockCodec:
    return CacheGenBlocks(load_tables(tables), CacheGen(), level)


def _lmcache() -> Any:
    try:
        return importlib.import_module("lmcache.v1.distributed.serde")
    except ImportError as error:
        raise MissingError(f"LMCache with its serde interface is missing ({error}): pip install lmcache") from error


def _tensor(holder: Any) -> torch.Tensor:
    """Return the tensor of a memory object of LMCache."""
    found: torch.Tensor | None = holder.tensor
    if found is None:
        raise BlockError("a memory object of LMCache holds no tensor any more")
    return found


def _single(values: Any) -> list[Any]:
    if len(values) != 1:
        raise BlockError(f"{len(values)} groups of layers in one chunk: one is coded at a time")
    return list(values)
