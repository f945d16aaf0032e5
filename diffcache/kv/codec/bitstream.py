"""CacheGen: keys and values of a text as chunks of bits, entropy-coded to be sent."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from diffcache.errors import DiffcacheError
from diffcache.kv.codec.base import work_dtype
from diffcache.kv.settings import Count, Mode, Settings, Several

_HEAD = struct.Struct("<4sBBIIIIQ")  # magic, dtype, level, L, H, S, D, bytes of the coded symbols
_MAGIC = b"DCG1"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_FINE = 127  # steps of an anchor to either side of zero, 8 bits
_RARE = 1 / 64  # how often a symbol is taken to have come that never came


class BitstreamError(DiffcacheError, ValueError):
    """A chunk of bits is truncated, altered, or of other settings."""


@dataclass(frozen=True, eq=False)
class Symbols:
    """Keys and values of one chunk, quantized; what is entropy-coded, and what is sent as it is.

    Attributes:
        codes: int32 [2, L, S', C], of keys and values, from 0; C is H * D; anchors left out.
        scales: float16 [2, L, S], largest magnitude of each token.
        anchors: uint8 [2, L, A, C].
    """

    codes: Tensor
    scales: Tensor
    anchors: Tensor


@dataclass(frozen=True, eq=False)
class Tables:
    """Frequencies of the symbols, by which they are coded.

    Attributes:
        weights: Frequencies at each level, float64 [2, L, C, N], above 0; N is the most symbols of
            any layer.
    """

    weights: tuple[Tensor, ...]

    def bits(self, symbols: Symbols, level: int) -> float:
        """Return the entropy of symbols under the tables, which no coder can go below, in bits."""
        weights = self.weights[level]
        share = weights / weights.sum(-1, keepdim=True)
        index = symbols.codes.transpose(2, 3).long()  # [2, L, C, S']
        return float(-share.gather(3, index).log2().sum())


@dataclass(frozen=True)
class CacheGen(Settings):
    """Code keys and values of a text in chunks that can be sent and decoded one by one.

    Neighboring tokens are alike: the first token of each group is an anchor with 8 bits a
    number, of the others the difference from it is quantized, coarser in deeper layers, and coded
    by how often each symbol comes in that layer and channel. Levels above 0 have fewer bins still,
    for when there is no time for more.

    Reference: CacheGen, arXiv 2310.07240. `mode="official"` leaves anchors and
    differences out, as the published code does. Departure: anchors are not entropy-coded.

    Args:
        key_bins: Bins of keys and the layers they are for: `((32, 10), (16, 20), (16, None))` is 32
            for the first 10 layers and 16 for the next 10, and so on.
        value_bins: Bins of values likewise.
        group: Tokens of a group, the anchor among them.
        chunk: Tokens of a chunk.
        levels: Factor of the number of bins at each level, falling, above 0 and at most 1.
        mode: `"paper"`, or `"official"` without anchors and differences.
    """

    key_bins: tuple[tuple[int, int | None], ...] = ((32, 10), (16, 20), (16, None))
    value_bins: tuple[tuple[int, int | None], ...] = ((32, 2), (16, None))
    group: Several = 10
    chunk: Count = 256
    levels: tuple[float, ...] = (1.0, 0.5, 0.25)
    mode: Mode = "paper"

    def check(self) -> None:
        """Raise ValueError unless settings go together."""
        if not self.levels or not all(0 < level <= 1 for level in self.levels):
            raise ValueError(f"levels={self.levels}: give at least one, above 0 and at most 1")
        for name, bins in (("key_bins", self.key_bins), ("value_bins", self.value_bins)):
            if not bins or bins[-1][1] is not None or any(count < 4 for count, _ in bins):
                raise ValueError(
                    f"{name}={bins}: give pairs of bins, at least 4, and the layer they end "
                    "before; the last ends at None"
                )

    def steps(self, layers: int, level: int) -> Tensor:
        """Return the steps to either side of zero, int64 [2, L], of keys and values."""
        found = []
        for bins in (self.key_bins, self.value_bins):
            for layer in range(layers):
                count = next(count for count, end in bins if end is None or layer < end)
                found.append(max(int(count * self.levels[level]), 4) // 2 - 1)
        return torch.tensor(found).view(2, layers)

    def quantize(self, k: Tensor, v: Tensor, level: int = 0) -> Symbols:
        """Return the symbols of a chunk.

        Args:
            k: [L, H, S, D], a float dtype.
            v: [L, H, S, D].
            level: Index into `levels`.
        """
        x = torch.stack([k, v]).transpose(2, 3).flatten(3).to(work_dtype(k.dtype))  # [2, L, S, C]
        # Codes are 0 to 2 * steps, with zero in the middle, as coders take no negative symbols.
        steps = self.steps(len(k), level).to(x.device)[..., None, None]
        if self.mode == "official":
            scales = _scales(x)
            codes = (x / _safe(scales) * steps).round().clamp(-steps, steps) + steps
            return Symbols(codes.int(), scales[..., 0], x[:, :, :0].to(torch.uint8))
        first = x[:, :, :: self.group]
        fine = _scales(first)
        anchors = (first / _safe(fine) * _FINE).round().clamp(-_FINE, _FINE)
        known = anchors / _FINE * fine.to(x.dtype)  # as the receiver has them, so that no error is added
        rest = self._rest(x.shape[2], x.device)
        away = x[:, :, rest] - known[:, :, rest // self.group]
        coarse = _scales(away)
        codes = (away / _safe(coarse) * steps).round().clamp(-steps, steps) + steps
        scales = torch.empty(x.shape[:3], dtype=torch.float16, device=x.device)
        scales[:, :, :: self.group], scales[:, :, rest] = fine[..., 0], coarse[..., 0]
        return Symbols(codes.int(), scales, (anchors + _FINE).to(torch.uint8))

    def restore(self, symbols: Symbols, heads: int, dtype: torch.dtype, level: int = 0) -> tuple[Tensor, Tensor]:
        """Return the keys and values that symbols stand for, each [L, H, S, D]."""
        work = work_dtype(dtype)
        steps = self.steps(symbols.codes.shape[1], level).to(symbols.codes.device)[..., None, None]
        scales = symbols.scales[..., None].to(work)
        codes = (symbols.codes - steps).to(work) / steps
        if self.mode == "official":
            x = codes * scales
        else:
            rest = self._rest(scales.shape[2], codes.device)
            anchors = (symbols.anchors.to(work) - _FINE) / _FINE * scales[:, :, :: self.group]
            x = codes.new_empty(*scales.shape[:3], codes.shape[3])
            x[:, :, :: self.group] = anchors
            x[:, :, rest] = anchors[:, :, rest // self.group] + codes * scales[:, :, rest]
        k, v = x.unflatten(3, (heads, -1)).transpose(2, 3).to(dtype)
        return k, v

    def measure(self, texts: Sequence[tuple[Tensor, Tensor]]) -> Tables:
        """Return the tables of some texts, for each level; to be kept by sender and receiver.

        Args:
            texts: Keys and values of each, [L, H, S, D].

        Raises:
            ValueError: If there are none.
        """
        if not texts:
            raise ValueError("texts=[]: tables are measured on at least one text")
        layers, heads, _, size = texts[0][0].shape
        found = []
        for level in range(len(self.levels)):
            top = self.steps(layers, level) * 2
            # Layers have different numbers of symbols; each that it has gets a small count, so that
            # a symbol which comes later, and never came here, can still be coded.
            there = torch.arange(int(top.max()) + 1) <= top[..., None, None]
            counts = (there * _RARE).expand(-1, -1, heads * size, -1).double().clone()
            for k, v in texts:
                for part in self._chunks(k.shape[2]):
                    codes = self.quantize(k[:, :, part], v[:, :, part], level).codes.cpu()
                    index = codes.transpose(2, 3).long()
                    counts.scatter_add_(3, index, torch.ones_like(index, dtype=torch.float64))
            found.append(counts)
        return Tables(tuple(found))

    def encode(self, k: Tensor, v: Tensor, tables: Tables, level: int = 0) -> list[bytes]:
        """Return a text as chunks of bits.

        Args:
            k: [L, H, S, D], a float dtype: those of all layers of one row, one after the other.
            v: [L, H, S, D].
            tables: Frequencies of the symbols, as `measure` returns them.
            level: Index into `levels`, the same for all chunks here; a sender may mix levels.

        Raises:
            ValueError: If shapes or the level are not as said.
            ImportError: If the coder is not installed; the message says how.
        """
        if k.dim() != 4 or k.shape != v.shape or k.dtype not in _DTYPES:
            raise ValueError(f"k={list(k.shape)}, v={list(v.shape)}: must be [L, H, S, D] floats")
        if not 0 <= level < len(self.levels):
            raise ValueError(f"level={level}: must be at least 0 and below {len(self.levels)}")
        shape = (2, k.shape[0], k.shape[1] * k.shape[3])
        if len(tables.weights) != len(self.levels) or tables.weights[0].shape[:3] != shape:
            raise ValueError(
                f"tables are of {list(tables.weights[0].shape[:3])}, k of {list(shape)} layers and "
                "channels: measure them on this model with these settings"
            )
        chunks = []
        for part in self._chunks(k.shape[2]):
            here = k[:, :, part], v[:, :, part]
            chunks.append(self._pack(self.quantize(*here, level), here[0], tables, level))
        return chunks

    def decode(self, chunks: Sequence[bytes], tables: Tables) -> tuple[Tensor, Tensor]:
        """Return keys and values, [L, H, S, D], exactly as they were after quantizing.

        Args:
            chunks: Chunks in order, at least one, each of any level.
            tables: Tables that they were encoded with.

        Raises:
            BitstreamError: If a chunk is truncated or altered, or there is none.
            ImportError: If the coder is not installed; the message says how.
        """
        if not chunks:
            raise BitstreamError("chunks=[]: there is nothing to decode")
        parts = [self._unpack(chunk, tables) for chunk in chunks]
        return torch.cat([k for k, _ in parts], 2), torch.cat([v for _, v in parts], 2)

    # within --------------------------------------------------------------------------------

    def _chunks(self, count: int) -> list[slice]:
        return [slice(start, start + self.chunk) for start in range(0, count, self.chunk)]

    def _rest(self, count: int, device: torch.device) -> Tensor:
        """Return the tokens that are no anchors, int64."""
        order = torch.arange(count, device=device)
        return order[order % self.group != 0]

    def _pack(self, symbols: Symbols, k: Tensor, tables: Tables, level: int) -> bytes:
        layers, heads, count, size = k.shape
        coded = _range_coded(symbols.codes.flatten(0, 1).cpu(), tables.weights[level].flatten(0, 1))
        head = _HEAD.pack(_MAGIC, _DTYPES.index(k.dtype), level, layers, heads, count, size, len(coded))
        raw = raw_bytes(symbols.scales) + raw_bytes(symbols.anchors)
        body = head + raw + coded
        return body + blake2b(body, digest_size=16).digest()

    def _unpack(self, chunk: bytes, tables: Tables) -> tuple[Tensor, Tensor]:
        body, digest = chunk[:-16], chunk[-16:]
        if len(body) < _HEAD.size or blake2b(body, digest_size=16).digest() != digest:
            raise BitstreamError(f"a chunk of {len(chunk)} bytes is truncated or altered")
        magic, kind, level, layers, heads, count, size, _ = _HEAD.unpack(body[: _HEAD.size])
        anchors = 0 if self.mode == "official" else -(-count // self.group)
        channels, rest = heads * size, count - anchors
        sizes = 2 * 2 * layers * count, 2 * layers * anchors * channels  # bytes: float16 scales, uint8 anchors
        raw = bytearray(body[_HEAD.size : _HEAD.size + sum(sizes)])
        if magic != _MAGIC or level >= len(self.levels) or len(raw) != sum(sizes):
            raise BitstreamError("a chunk is of other settings; decode as it was encoded")
        scales = torch.frombuffer(raw[: sizes[0]], dtype=torch.float16).view(2, layers, count)
        fine = torch.empty(0, dtype=torch.uint8)
        if anchors:
            fine = torch.frombuffer(raw[sizes[0] :], dtype=torch.uint8)
        coded = body[_HEAD.size + sum(sizes) :]
        codes = _range_decoded(coded, tables.weights[level].flatten(0, 1), rest)
        symbols = Symbols(codes.unflatten(0, (2, layers)), scales, fine.view(2, layers, anchors, channels))
        return self.restore(symbols, heads, _DTYPES[kind], level)


def _scales(x: Tensor) -> Tensor:
    """Return the largest magnitude over the last axis, float16 [..., 1]."""
    most = torch.finfo(torch.float16).max
    return x.abs().amax(-1, keepdim=True).clamp(max=most).to(torch.float16)


def _safe(scales: Tensor) -> Tensor:
    """Return scales by which to divide; where all is 0 or too small, everything becomes 0."""
    return torch.where(scales > 0, scales.float(), float("inf"))


def raw_bytes(x: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    raw: bytes = x.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return raw


def _library() -> Any:
    """Return the package `constriction`, or raise ImportError, which says how to install it."""
    try:
        return import_module("constriction")
    except ImportError as error:
        raise ImportError("bit streams need the package constriction: pip install 'diffcache[transport]'") from error


def _range_coded(codes: Tensor, weights: Tensor) -> bytes:
    """Return symbols as bits, each channel coded by how often its symbols come.

    Reference: range coding, Martin 1979, as in constriction, arXiv 2201.01741.

    Args:
        codes: int32 [M, S, C] on the CPU, each below N.
        weights: float64 [M, C, N] on the CPU, at least 0; they need not sum to one.
    """
    stream = _library().stream
    coder = stream.queue.RangeEncoder()  # a queue: decoded in the order of encoding
    symbols = codes.transpose(1, 2).contiguous().numpy()
    for row, table in zip(symbols, weights.numpy(), strict=True):
        for line, weight in zip(row, table, strict=True):
            coder.encode(line, stream.model.Categorical(weight, perfect=False))
    words: bytes = coder.get_compressed().astype("<u4").tobytes()
    return words


def _range_decoded(coded: bytes, weights: Tensor, count: int) -> Tensor:
    """Return the symbols that `_range_coded` coded, int32 [M, S, C].

    Args:
        coded: The bits.
        weights: Weights that were given to `_range_coded`, float64 [M, C, N] on the CPU.
        count: Number of symbols of each channel, S.
    """
    stream = _library().stream
    words = torch.frombuffer(bytearray(coded), dtype=torch.int32) if coded else torch.zeros(0).int()
    coder = stream.queue.RangeDecoder(words.numpy().view("<u4").astype("u4"))
    rows = [
        torch.stack(
            [
                torch.from_numpy(coder.decode(stream.model.Categorical(weight, perfect=False), count))
                for weight in table
            ],
            1,
        )
        for table in weights.numpy()
    ]
    return torch.stack(rows)
