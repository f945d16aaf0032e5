"""Keys and values of a chunk of tokens as one block of bytes, for engines that move them about.

All heads of a layer are coded alike, and a chunk alone, as engines hold and send them. A block is

| bytes | what |
|---|---|
| 4 | `DCKV` |
| 1, 1, 1 | version 1, codec (0 KIVI, 1 CacheGen), dtype (0 float32, 1 float16, 2 bfloat16) |
| 1 | level of CacheGen, 0 for KIVI |
| 4, 4 | bits of a code times 100, group of KIVI; 0 for CacheGen |
| 4, 4, 4 | layers L, tokens S, channels C of all heads |
| 8 | bytes of the body |
| ... | the body |
| 16 | BLAKE2b of all before it |

little-endian. KIVI's body has the packed codes of keys `[L, S', ...]`, their scales and minima in
float16 `[L, S' / group, 2, C]`, the last `S - S'` keys exact, then the codes of values
`[L, S, ...]` and their scales and minima `[L, S, 2, groups]`; `S'` is the multiple of the group.
CacheGen's body has the chunks of `diffcache.kv.codec.bitstream`, each behind its length (4 bytes).
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from math import ceil, prod

import torch
from torch import Tensor

from diffcache.errors import DiffcacheError
from diffcache.kernels.pack import packed_size
from diffcache.kv.codec.bitstream import CacheGen, Tables, raw_bytes
from diffcache.kv.codec.quant import GroupQuant, Quantized
from diffcache.kv.codec.table import SlotTable
from diffcache.kv.settings import Bits, Count, Settings

VERSION = 1
_MAGIC, _HEAD, _DIGEST_BYTES = b"DCKV", struct.Struct("<4sBBBBIIIIIQ"), 16
_LENGTH = struct.Struct("<I")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SLACK_BYTES = 256  # of an entropy coder above the entropy, and the head, of each chunk


class BlockError(DiffcacheError, ValueError):
    """A block is truncated, altered, forged, or of other settings."""


@dataclass(frozen=True)
class Head:
    """Header at the beginning of a block.

    Attributes:
        kind: Number of the codec.
        dtype: Dtype of keys and values.
        level: Level of CacheGen.
        bits: Bits of a code of KIVI.
        group: Group of KIVI.
        shape: Layers, tokens and channels.
    """

    kind: int
    dtype: torch.dtype
    level: int
    bits: float
    group: int
    shape: tuple[int, int, int]


class BlockCodec(Settings, ABC):
    """A codec of blocks; a frozen dataclass of settings."""

    kind: int

    @abstractmethod
    def encode(self, x: Tensor) -> bytes:
        """Return a block.

        Args:
            x: Keys and values of all layers, [2, L, S, C], float32, float16 or bfloat16.

        Raises:
            ValueError: If the shape or dtype is another.
        """

    @abstractmethod
    def decode(self, block: bytes) -> Tensor:
        """Return keys and values, [2, L, S, C], in the dtype that they were encoded from.

        Args:
            block: Bytes that `encode` returned; bytes behind its end are not looked at.

        Raises:
            BlockError: If it is truncated, altered, forged, or of other settings.
        """

    @abstractmethod
    def most_bytes(self, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
        """Return how long a block of L layers, S tokens and C channels can be."""


@dataclass(frozen=True)
class KiviBlocks(BlockCodec):
    """Code keys by channel in groups of tokens, and values by token in groups of channels.

    Reference: KIVI, arXiv 2402.02750, section 3.3. As in a cache, keys that fill no group stay
    exact. Channels of all heads stand side by side, so that a group that divides the channels of
    a head is the same here and in the recipe `kivi`.

    Args:
        bits: Bits of a code: 1, 1.58, 2, 3, 4 or 8.
        group: Tokens of a group of keys, channels of a group of values.
    """

    kind = 0
    bits: Bits = 4
    group: Count = 32

    def encode(self, x: Tensor) -> bytes:
        """Return a block."""
        _check(x)
        keys, values = (part.detach().cpu()[:, None] for part in x)  # [L, 1, S, C]
        whole = keys.shape[2] - keys.shape[2] % self.group
        parts = [keys[:, :, whole:]]
        if whole:
            coded = GroupQuant(self.bits, "tokens", self.group).encode(keys[:, :, :whole])
            parts = [coded.codes, coded.grid.values, *parts]
        held = GroupQuant(self.bits, "channels", self.group).encode(values)
        body = b"".join(map(raw_bytes, [*parts, held.codes, held.grid.values]))
        shape = x.shape[1], x.shape[2], x.shape[3]
        return _sealed(Head(self.kind, x.dtype, 0, self.bits, self.group, shape), body)

    def decode(self, block: bytes) -> Tensor:
        """Return keys and values; bits and group are those of the block."""
        head, body = opened(block, self.kind)
        with _refusing():
            codec = KiviBlocks(head.bits, head.group)
            layers, tokens, channels = head.shape
            sizes = codec._sizes(head.shape, head.dtype)
            if len(body) != sum(sizes):
                raise BlockError(f"{len(body)} bytes of codes, and {sum(sizes)} are needed")
            raw = iter(_cut(body, sizes))
            whole = tokens - tokens % codec.group
            by_token = GroupQuant(codec.bits, "tokens", codec.group)
            by_channel = GroupQuant(codec.bits, "channels", codec.group)
            width = codec._width(channels)
            groups = ceil(channels / by_channel.width(channels))

            def held(quant: GroupQuant, count: int, rows: int, wide: int) -> Tensor:
                codes = _tensor(next(raw), torch.uint8, (layers, 1, count, width))
                grid = _tensor(next(raw), torch.float16, (layers, 1, rows, 2, wide))
                table = SlotTable(grid, count // rows if rows else 1)
                return Quantized(codes, table, quant, channels, head.dtype).decode()

            keys = held(by_token, whole, whole // codec.group, channels)
            rest = _tensor(next(raw), head.dtype, (layers, 1, tokens - whole, channels))
            values = held(by_channel, tokens, tokens, groups)
            return torch.stack([torch.cat([keys, rest], 2), values])[:, :, 0]

    def most_bytes(self, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
        """Return how long a block is, exactly."""
        return _HEAD.size + sum(self._sizes(shape, dtype)) + _DIGEST_BYTES

    def _width(self, channels: int) -> int:
        """Return the bytes of the codes of one token."""
        return packed_size(channels, self.bits)

    def _sizes(self, shape: tuple[int, int, int], dtype: torch.dtype) -> list[int]:
        """Return the bytes of each part of the body."""
        layers, tokens, channels = shape
        whole = tokens - tokens % self.group
        groups = ceil(channels / min(self.group, channels))
        width = self._width(channels)
        return [
            layers * whole * width,
            layers * (whole // self.group) * 2 * channels * 2,
            layers * (tokens - whole) * channels * dtype.itemsize,
            layers * tokens * width,
            layers * tokens * 2 * groups * 2,
        ]


@dataclass(frozen=True)
class CacheGenBlocks(BlockCodec):
    """Code differences between neighboring tokens, by how often each comes.

    Reference: CacheGen, arXiv 2310.07240; see `diffcache.kv.codec.bitstream`.

    Args:
        tables: Result of `CacheGen.measure` with one head of C channels; both sides have the same.
        codec: Bins, anchors and levels.
        level: The level that is encoded; any is decoded.
    """

    kind = 1
    tables: Tables
    codec: CacheGen = field(default_factory=CacheGen)
    level: int = 0

    def check(self) -> None:
        """Raise ValueError if there is no such level."""
        if not 0 <= self.level < len(self.tables.weights):
            raise ValueError(f"level={self.level}: must be 0 to {len(self.tables.weights) - 1}, a level of the tables")

    def encode(self, x: Tensor) -> bytes:
        """Return a block."""
        _check(x)
        keys, values = (part.detach().cpu()[:, None] for part in x)
        chunks = self.codec.encode(keys, values, self.tables, self.level)
        body = b"".join(_LENGTH.pack(len(chunk)) + chunk for chunk in chunks)
        shape = x.shape[1], x.shape[2], x.shape[3]
        return _sealed(Head(self.kind, x.dtype, self.level, 0, 0, shape), body)

    def decode(self, block: bytes) -> Tensor:
        """Return keys and values, exactly as they were after quantizing."""
        head, body = opened(block, self.kind)
        with _refusing():
            known = (2, head.shape[0], head.shape[2])
            if self.tables.weights[0].shape[:3] != known:
                raise BlockError(f"the tables are not of {known[1]} layers of {known[2]} channels")
            found = torch.stack(self.codec.decode(list(_chunks(body)), self.tables))[:, :, 0]
            if found.shape[1:] != head.shape or found.dtype != head.dtype:
                raise BlockError(f"{list(found.shape)} came out, and {list(head.shape)} was said")
            return found

    def most_bytes(self, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
        """Return how long a block is if the rarest symbol comes every time."""
        layers, tokens, channels = shape
        weights = self.tables.weights[self.level]
        if weights.shape[:3] != (2, layers, channels):
            raise ValueError(
                f"the tables are of {list(weights.shape[:3])}, and a block of [2, L, C]="
                f"{[2, layers, channels]}: measure them on this model"
            )
        share = weights / weights.sum(-1, keepdim=True)
        rarest = share.where(weights > 0, 1).amin(-1)
        bits = float(-rarest.log2().sum()) * tokens
        anchors = 0 if self.codec.mode == "official" else ceil(tokens / self.codec.group)
        chunks = ceil(tokens / self.codec.chunk)
        exact = 4 * layers * tokens + 2 * layers * (anchors + chunks) * channels
        return _HEAD.size + ceil(1.01 * bits / 8) + exact + _SLACK_BYTES * (chunks + 1)


def opened(block: bytes, kind: int) -> tuple[Head, bytes]:
    """Return the head and the body of a block, which must be of the codec of a number.

    Raises:
        BlockError: If it is truncated, altered, or of another version or codec.
    """
    if len(block) < _HEAD.size:
        raise BlockError(f"a block of {len(block)} bytes is truncated; encode it again")
    magic, version, found, number, level, bits, group, *shape, length = _HEAD.unpack_from(block)
    end = _HEAD.size + length
    digest = blake2b(block[:end], digest_size=_DIGEST_BYTES).digest()
    if magic != _MAGIC or block[end : end + _DIGEST_BYTES] != digest:
        raise BlockError(f"a block of {len(block)} bytes is truncated or altered; encode it again")
    if version != VERSION or found != kind:
        raise BlockError(
            f"a block of version {version} and codec {found}: this reads version {VERSION} and "
            f"codec {kind}; decode it with the codec that it was encoded with"
        )
    if number >= len(_DTYPES) or not all(shape):
        raise BlockError(f"a block of shape {shape} and dtype {number} was forged")
    layers, tokens, channels = shape
    head = Head(kind, _DTYPES[number], level, bits / 100, group, (layers, tokens, channels))
    return head, block[_HEAD.size : end]


def _sealed(head: Head, body: bytes) -> bytes:
    number, bits = _DTYPES.index(head.dtype), round(100 * head.bits)
    form = head.kind, number, head.level, bits, head.group, *head.shape
    start = _HEAD.pack(_MAGIC, VERSION, *form, len(body))
    return start + body + blake2b(start + body, digest_size=_DIGEST_BYTES).digest()


def _check(x: Tensor) -> None:
    if x.dim() != 4 or len(x) != 2 or x.dtype not in _DTYPES or not x.numel():
        raise ValueError(
            f"{list(x.shape)} in {x.dtype}: must be keys and values [2, L, S, C] in float32, "
            "float16 or bfloat16, at least one of each"
        )


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn whatever goes wrong with the content of a block into one error."""
    try:
        yield
    except BlockError:
        raise
    except Exception as error:
        raise BlockError(
            f"a block holds what no block holds ({type(error).__name__}: {error}); encode it again"
        ) from error


def _chunks(body: bytes) -> Iterator[bytes]:
    """Yield the chunks of a body, each behind its length."""
    at = 0
    while at < len(body):
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if not 0 < length <= len(body) - at:
            raise BlockError(f"a chunk of {length} bytes where {len(body) - at} are left")
        yield body[at : at + length]
        at += length


def _cut(body: bytes, sizes: list[int]) -> Iterator[bytes]:
    at = 0
    for size in sizes:
        yield body[at : at + size]
        at += size


def _tensor(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)
