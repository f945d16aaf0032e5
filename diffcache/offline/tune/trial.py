"""One trial: what a method costs on a pipeline and how close it stays to the uncached output."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.api import denoisers_of, report, wrapped
from diffcache.attach.flops import counted
from diffcache.digest import digest
from diffcache.errors import CacheWarning, TablesError
from diffcache.features.base import Method
from diffcache.features.tables import Tables
from diffcache.offline.tracing import call_pipeline
from diffcache.psnr import psnr as psnr_of


@dataclass(frozen=True)
class Trial:
    """What one method did on some prompts.

    Attributes:
        method: Its repr.
        cost: Floating-point operations of the denoiser, as a share of the uncached run's.
        psnr_db: To the uncached output, mean over samples.
        seconds: Median of the runs of a batch.
        batches: Number of batches it ran on.
    """

    method: str
    cost: float
    psnr_db: float
    seconds: float
    batches: int


class Bench:
    """Runs methods on the same prompts and noise as the uncached pipeline.

    Args:
        pipe: Not wrapped.
        batches: Prompts in batches.
        seed: Of the noise; batch i is drawn with `seed + i`.
        call: Further arguments of the call.
        log: File of finished trials, from which an interrupted search goes on; or None.
    """

    def __init__(
        self,
        pipe: Any,
        batches: Sequence[list[Any]],
        seed: int,
        call: Mapping[str, Any],
        log: Path | None = None,
    ) -> None:
        self.pipe, self.batches, self.seed, self.call = pipe, list(batches), seed, dict(call)
        self.log = log
        self.total = 0
        self.uncached_seconds = 0.0
        self._references: dict[int, Tensor] = {}
        self._flops: dict[str, float | None] = {}
        self._known: dict[str, Trial] = {}

    def open_log(self, about: Any) -> None:
        """Read the trials of an interrupted search, or start a new file.

        A file that was cut off keeps its whole lines; without its first it is started anew.

        Args:
            about: What two searches must have alike to be one, for `content`.

        Raises:
            TablesError: If the file is of another search.
        """
        if self.log is None:
            return
        first, rows = {"search": digest(about)}, []
        if self.log.exists():
            mine, *rows = _records(self.log) or [first]
            if mine.get("search") != first["search"]:
                raise TablesError(
                    f"{self.log} is of another search (other prompts, steps, seed, batch size, "
                    "goal or model); delete it, or pass resume=False"
                )
        self._known = {row["key"]: Trial(**row["trial"]) for row in rows}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        new = self.log.with_name(self.log.name + ".new")
        new.write_text("".join(json.dumps(row) + "\n" for row in (first, *rows)), "utf-8")
        os.replace(new, self.log)

    def measure(self, method: Method, batches: Sequence[int]) -> Trial:
        """Return what a method does on some of the batches."""
        key = digest([method, [tables.digest for tables in _tables_in(method)], batches])
        if key not in self._known:
            self._known[key] = self._measure(method, batches)
            if self.log is not None:
                with self.log.open("a", encoding="utf-8") as file:
                    row = {"key": key, "trial": asdict(self._known[key])}
                    file.write(json.dumps(row) + "\n")
        return self._known[key]

    def _measure(self, method: Method, batches: Sequence[int]) -> Trial:
        references = [self.reference(number) for number in batches]
        values: list[Tensor] = []
        costs, seconds = [], []
        for number, reference in zip(batches, references, strict=True):
            with wrapped(self.pipe, method), warnings.catch_warnings():
                warnings.simplefilter("ignore", CacheWarning)  # one that skips nothing costs 1
                start = time.perf_counter()
                drawn = self._draw(number)
                seconds.append(time.perf_counter() - start)
                costs.append(self._cost())
            values.append(psnr(drawn, reference))
        return Trial(
            repr(method), sum(costs) / len(costs), float(torch.cat(values).mean()),
            median(seconds), len(batches),
        )  # fmt: skip

    def reference(self, number: int) -> Tensor:
        """Return the uncached output of a batch."""
        if number not in self._references:
            if not self._flops:
                self._count(number)
            start = time.perf_counter()
            self._references[number] = self._draw(number)
            seconds = time.perf_counter() - start
            self.uncached_seconds = min(self.uncached_seconds or seconds, seconds)
        return self._references[number]

    def _draw(self, number: int) -> Tensor:
        given = {"output_type": "pt", **self.call}
        names = type(self.pipe).__call__.__code__.co_varnames
        if "output_type" not in names and not hasattr(type(self.pipe).__call__, "__wrapped__"):
            given.pop("output_type", None)
        return outputs(call_pipeline(self.pipe, self.batches[number], self.seed + number, given))

    def _count(self, number: int) -> None:
        """Count the operations of one uncached call of every denoiser, and the steps of a run."""
        seen: dict[str, tuple[Any, Any]] = {}
        hooks = []
        found: dict[str, nn.Module] = denoisers_of(self.pipe)
        for name, model in found.items():

            def note(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
                seen.setdefault(name, (args, kwargs))

            hooks.append(model.register_forward_pre_hook(note, with_kwargs=True))
        try:
            self._draw(number)
        finally:
            for hook in hooks:
                hook.remove()
        with torch.no_grad():
            self._flops = {
                name: counted(found[name], args, kwargs)[1] for name, (args, kwargs) in seen.items()
            }
        scheduler = getattr(self.pipe, "scheduler", None)
        timesteps, first = (getattr(scheduler, name, None) for name in ("timesteps", "begin_index"))
        self.total = 0 if timesteps is None else len(timesteps) - (first or 0)

    def _cost(self) -> float:
        """Return what the last run cost, as a share of the uncached run."""
        done = report(self.pipe)
        if done.flops_saved is None or None in self._flops.values():
            return done.computed / max(done.computed + done.skipped, 1)
        full = sum(self._flops.get(call.denoiser) or 0.0 for call in done.calls)
        return 1 - done.flops_saved / full if full else 1.0


def _records(log: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a log, up to the first that is cut off."""
    found: list[dict[str, Any]] = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            break
    return found


def _tables_in(part: Any) -> Iterator[Tables]:
    """Yield the tables of a method and of what it is made of; its `repr` may name but a file."""
    if isinstance(part, Tables):
        yield part
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tables_in(getattr(part, field.name))


def psnr(output: Tensor, reference: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in dB of every sample, [B], at most 100.

    The peak is 1 for pictures in [0, 1], and the range of the reference for anything else.
    """
    inside = bool(reference.min() >= 0) and bool(reference.max() <= 1)
    span = 1.0 if inside else float(reference.max() - reference.min())
    return psnr_of(output, reference, span=span or 1.0)


def outputs(result: Any) -> Tensor:
    """Return what a pipeline drew, as a float tensor [B, ...] on the CPU."""
    first = result[0]
    if isinstance(first, (list, tuple)):
        import numpy as np

        first = np.stack([np.asarray(item) for item in first])
    tensor = torch.as_tensor(first).detach().cpu()
    if tensor.dtype == torch.uint8:
        return tensor.float() / 255
    return tensor.float()
