"""Tiers: blocks on the device, in host memory and on disk, fetched before they are read."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from diffcache.kv.codec.base import nbytes, tensors
from diffcache.kv.life.save import read, write


class Tiers:
    """Blocks by name, the most recently used on the device, the others below it.

    A block is anything made of tensors: a segment, the slots of a layer, a piece of text. It is
    never written to. Blocks that the device has no room for go to host memory, those that it has no
    room for to files, and those without a folder are forgotten. The methods are to be called from
    one thread; a second one fetches.

    Reference: block-granular tiers and reuse of host copies as in FastSwitch, arXiv 2411.18424;
    pins with a time to live as in Continuum, arXiv 2511.02230.

    Args:
        device_bytes: Most bytes on the device; pinned blocks may exceed it.
        host_bytes: Most bytes in host memory; None for no bound.
        device: Device that blocks are read on.
        folder: Folder of the files; None for no files.
        clock: Function that returns the time in seconds.

    Attributes:
        hits: Reads that found the block on the device.
        misses: Reads that had to wait for it.

    Raises:
        ValueError: If a number is out of its range.
    """

    def __init__(
        self,
        device_bytes: int,
        host_bytes: int | None = None,
        *,
        device: str | torch.device = "cpu",
        folder: str | Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if device_bytes < 0 or (host_bytes is not None and host_bytes < 0):
            raise ValueError(f"device_bytes={device_bytes}, host_bytes={host_bytes}: must be at least 0")
        self.device = torch.device(device)
        self.hits = self.misses = 0
        self._room = {"device": device_bytes, "host": host_bytes}
        self._folder = None if folder is None else Path(folder)
        self._clock = clock
        self._tiers: dict[str, OrderedDict[Hashable, Any]]
        self._tiers = {"device": OrderedDict(), "host": OrderedDict()}
        self._sizes: dict[str, dict[Hashable, int]] = {"device": {}, "host": {}}
        self._held = {"device": 0, "host": 0}
        self._files: dict[Hashable, Path] = {}
        self._pins: dict[Hashable, float] = {}
        self._coming: dict[Hashable, Future[tuple[Any, Any]]] = {}
        self._worker = ThreadPoolExecutor(1, "diffcache-tiers")
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def __contains__(self, key: Hashable) -> bool:
        return any(key in tier for tier in (*self._tiers.values(), self._files))

    def where(self, key: Hashable) -> str | None:
        """Return the highest tier a block is in: `device`, `host`, `disk`, or None."""
        for name, tier in self._tiers.items():
            if key in tier:
                return name
        return "disk" if key in self._files else None

    def held(self, tier: str) -> int:
        """Return the bytes in `device` or `host`; what blocks share counts for each of them."""
        return self._held[tier]

    def put(self, key: Hashable, block: object) -> None:
        """Hold a block, on the device first.

        Args:
            key: Its name; a block of this name that is held is replaced.
            block: Tensors, dataclasses and sequences of them.
        """
        self.drop(key)
        self._add("device", key, moved(block, self.device))
        self._settle()

    def get(self, key: Hashable) -> Any:
        """Return a block on the device, fetching it if need be, or raise KeyError if it is not held."""
        hot = self._tiers["device"]
        if key in hot:
            self.hits += 1
            hot.move_to_end(key)
            return hot[key]
        if key not in self:
            raise KeyError(f"{key!r} is not held: it was never put, dropped, or had no tier to go")
        self.misses += key not in self._coming or not self._coming[key].done()
        self.prefetch([key])
        block, event = self._coming.pop(key).result()
        if event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            for tensor in tensors(block):
                tensor.record_stream(stream)
        self._add("device", key, block)
        self._take("host", key)
        self._settle(keep=key)
        return block

    def prefetch(self, keys: Iterable[Hashable]) -> None:
        """Begin to fetch blocks that will be read; those that are not held are passed over."""
        for key in keys:
            if key in self._tiers["device"] or key in self._coming or key not in self:
                continue
            source = self._tiers["host"].get(key)
            self._coming[key] = self._worker.submit(self._fetch, source, self._files.get(key))

    def pin(self, key: Hashable, seconds: float) -> None:
        """Keep a block on the device for some time, however much else comes.

        Args:
            key: Its name.
            seconds: Time to pin it, from now; 0 takes a pin away.

        Raises:
            KeyError: If it is not held.
            ValueError: If `seconds` is negative.
        """
        if not seconds >= 0:
            raise ValueError(f"seconds={seconds}: must be at least 0")
        self.get(key)
        self._pins[key] = self._clock() + seconds

    def drop(self, key: Hashable) -> None:
        """Forget a block, in all tiers."""
        coming = self._coming.pop(key, None)
        if coming is not None:
            coming.cancel()  # where it has begun, nobody asks what it brings
        for tier in self._tiers:
            self._take(tier, key)
        self._pins.pop(key, None)
        file = self._files.pop(key, None)
        if file is not None:
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop fetching and remove the files."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._coming.clear()
        for key in list(self._files):
            self._files.pop(key).unlink(missing_ok=True)

    # within --------------------------------------------------------------------------------

    def _fetch(self, block: Any, file: Path | None) -> tuple[Any, torch.cuda.Event | None]:
        """Return a block on the device, and what says that it has arrived."""
        if block is None:
            assert file is not None
            block = read(file)[0]
        if self._stream is None:
            return moved(block, self.device), None
        with torch.cuda.stream(self._stream):
            block = moved(moved(block, "cpu", pinned=True), self.device)
            return block, self._stream.record_event()

    def _settle(self, keep: Hashable = None) -> None:
        """Send blocks down until every tier has room, the least recently used first."""
        now = self._clock()
        hot, warm = self._tiers["device"], self._tiers["host"]
        while not self._fits("device"):
            cold = (key for key in tuple(hot) if key != keep and self._pins.get(key, now) <= now)
            key = next(cold, None)
            if key is None:
                break
            block = self._take("device", key)
            self._add("host", key, moved(block, "cpu", pinned=self._stream is not None))
        while warm and not self._fits("host"):
            key = next(iter(warm))
            self._to_disk(key, self._take("host", key))

    def _add(self, tier: str, key: Hashable, block: object) -> None:
        self._take(tier, key)
        self._tiers[tier][key] = block
        self._sizes[tier][key] = nbytes(block)
        self._held[tier] += self._sizes[tier][key]

    def _take(self, tier: str, key: Hashable) -> Any:
        """Take a block out of a tier; None if it is not there."""
        self._held[tier] -= self._sizes[tier].pop(key, 0)
        return self._tiers[tier].pop(key, None)

    def _fits(self, tier: str) -> bool:
        room = self._room[tier]
        return room is None or self.held(tier) <= room

    def _to_disk(self, key: Hashable, block: object) -> None:
        if self._folder is None or key in self._files:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        # Not named after its key: others may have the same in the same folder.
        file = self._folder / f"{uuid4().hex}.safetensors"
        write(file, block, {"key": repr(key)})
        self._files[key] = file


def moved(block: Any, device: str | torch.device, *, pinned: bool = False) -> Any:
    """Return a block with its tensors on a device, copied without waiting where that is possible.

    Args:
        block: Tensors, dataclasses, mappings and sequences of them, and plain values.
        device: Device to move to; tensors that are there stay the same objects.
        pinned: True copies into memory that a CUDA device can copy from without waiting.
    """
    if isinstance(block, Tensor):
        if pinned:
            return block.to("cpu").pin_memory() if not block.is_pinned() else block
        return block.to(device, non_blocking=block.is_pinned() if block.is_cpu else False)
    if is_dataclass(block) and not isinstance(block, type):
        changes = {field.name: moved(getattr(block, field.name), device, pinned=pinned) for field in fields(block)}
        return replace(block, **changes)
    if isinstance(block, Mapping):
        return {name: moved(value, device, pinned=pinned) for name, value in block.items()}
    if isinstance(block, (tuple, list)):
        parts = [moved(value, device, pinned=pinned) for value in block]
        return tuple(parts) if isinstance(block, tuple) else parts
    return block
