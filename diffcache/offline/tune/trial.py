"""Trials: the cost of a method on a pipeline, and its closeness to the uncached output."""

from __future__ import annotations

import inspect
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diffcache.api import report, wrapped
from diffcache.attach.flop_counter import counted
from diffcache.digest import digest
from diffcache.errors import CacheWarning, TablesError
from diffcache.features.base import Method
from diffcache.features.tables import Tables
from diffcache.files import write_file
from diffcache.offline.tracing import call_pipeline
from diffcache.psnr import psnr
from diffcache.targets import denoisers_of

Score = Callable[[Tensor, Tensor, Sequence[Any]], Sequence[float]]
RESAMPLES = 1000  # of the samples, for the interval of a mean


@dataclass(frozen=True)
class Trial:
    """Outcome of one method on some prompts."""

    method: str  # repr of the method
    cost: float  # floating-point operations of the denoiser, as a share of the uncached run's
    # PSNR to the uncached output, in dB, mean over samples; of 8-bit pictures where the pipeline draws any
    psnr_db: float
    low_db: float  # lower end of the 95 % bootstrap interval of that mean over samples
    high_db: float  # upper end
    seconds: float  # median of the runs of a batch
    samples: int  # number of samples that it drew
    each: Sequence[float] = ()  # PSNR of every sample, in dB
    # score of every sample where another measure than the PSNR is the goal, higher for the better
    scores: Sequence[float] = ()

    @property
    def scored(self) -> Sequence[float]:
        """Scores that the goal looks at: the PSNR of every sample where there are no others."""
        return self.scores or self.each

    def reached(self, share: float) -> float:
        """Return the score that at least this share of the samples reach."""
        return sorted(self.scored)[int((1 - share) * len(self.scored) + 1e-9)]


def joined(parts: Sequence[Trial]) -> Trial:
    """Return the trial of a method on several batches, of its trials on each."""
    if len(parts) == 1:
        return parts[0]
    each = [value for part in parts for value in part.each]
    cost = sum(part.cost for part in parts) / len(parts)
    seconds, samples = median(part.seconds for part in parts), sum(part.samples for part in parts)
    scores = [value for part in parts for value in part.scores]
    interval = mean_interval(torch.tensor(each, dtype=torch.float64))
    return Trial(parts[0].method, cost, *interval, seconds, samples, each, scores)


class Trials:
    """Runs methods on the same prompts and noise as the uncached pipeline.

    Args:
        pipe: Not wrapped.
        batches: Prompts in batches.
        seed: Seed of the noise; batch i is drawn with `seed + i`.
        call: Further arguments of the call.
        log: File of finished trials, from which an interrupted search goes on; or None.
        score: Returns the scores of outputs, given them, the uncached ones and their prompts; None
            where the PSNR is enough.
    """

    def __init__(
        self,
        pipe: Any,
        batches: Sequence[list[Any]],
        seed: int,
        call: Mapping[str, Any],
        log: Path | None = None,
        score: Score | None = None,
    ) -> None:
        self.score = score
        self.pipe, self.batches, self.seed, self.call = pipe, list(batches), seed, dict(call)
        self.log = log
        self.total = 0
        self.uncached_seconds = 0.0
        self._references: dict[int, Tensor] = {}
        # batch -> operations of one uncached call of every denoiser; batches differ in size
        self._flops: dict[int, dict[str, float | None]] = {}
        self._known: dict[str, Trial] = {}

    def open_log(self, about: Any) -> None:
        """Read the trials of an interrupted search, or start a new file.

        A file that was cut off keeps its whole lines; without its first it is started anew.

        Args:
            about: Facts that two searches must have alike to be one, for `content`.

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
        write_file(self.log, "".join(json.dumps(row) + "\n" for row in (first, *rows)))

    def measure(self, method: Method, batches: Sequence[int]) -> Trial:
        """Return the trial of a method on some of the batches; none of them is run twice."""
        about = [method, [tables.digest for tables in _tables_in(method)]]
        parts = []
        for number in batches:
            key = digest([*about, number])
            if key not in self._known:
                self._known[key] = self._measure(method, number)
                if self.log is not None:
                    with self.log.open("a", encoding="utf-8") as file:
                        row = {"key": key, "trial": asdict(self._known[key])}
                        file.write(json.dumps(row) + "\n")
            parts.append(self._known[key])
        return joined(parts)

    def _measure(self, method: Method, number: int) -> Trial:
        reference = self.reference(number)
        with wrapped(self.pipe, method), warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)  # one that skips nothing costs 1
            start = time.perf_counter()
            drawn = self._draw(number)
            seconds = time.perf_counter() - start
            cost = self._cost(number)
        each = closeness(drawn, reference)
        scores = [] if self.score is None else self.score(drawn, reference, self.batches[number])
        interval = mean_interval(each)
        return Trial(repr(method), cost, *interval, seconds, len(each), each.tolist(), scores)

    def reference(self, number: int) -> Tensor:
        """Return the uncached output of a batch."""
        if number not in self._references:
            if not self._flops:
                self._draw(number)  # the first run takes longer than others
            self._references[number] = self._count(number)
        return self._references[number]

    def _draw(self, number: int) -> Tensor:
        has_decoder = "output_type" in inspect.signature(type(self.pipe).__call__).parameters
        call = {"output_type": "pt", **self.call} if has_decoder else self.call
        drawn = call_pipeline(self.pipe, self.batches[number], self.seed + number, call)
        return outputs(drawn, call.get("output_type", "latent") != "latent")

    def _count(self, number: int) -> Tensor:
        """Return the uncached output of a batch; note its time, its steps and the operations of a call."""
        seen: dict[str, tuple[Any, Any]] = {}
        hooks = []
        found: dict[str, nn.Module] = denoisers_of(self.pipe)
        for name, model in found.items():

            def note(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
                seen.setdefault(name, (args, kwargs))

            hooks.append(model.register_forward_pre_hook(note, with_kwargs=True))
        try:
            start = time.perf_counter()
            drawn = self._draw(number)
            seconds = time.perf_counter() - start
        finally:
            for hook in hooks:
                hook.remove()
        self.uncached_seconds = min(self.uncached_seconds or seconds, seconds)
        scheduler = getattr(self.pipe, "scheduler", None)
        timesteps, first = (getattr(scheduler, name, None) for name in ("timesteps", "begin_index"))
        if not self._flops:
            self.total = 0 if timesteps is None else len(timesteps) - (first or 0)
        with torch.no_grad():
            self._flops[number] = {name: counted(found[name], args, kw)[1] for name, (args, kw) in seen.items()}
        return drawn

    def _cost(self, number: int) -> float:
        """Return the cost of the last run, of this batch, as a share of the uncached run's."""
        done, flops = report(self.pipe), self._flops[number]
        if done.flops_saved is None or None in flops.values():
            return done.computed / max(done.computed + done.skipped, 1)
        full = sum(flops.get(call.denoiser) or 0.0 for call in done.calls)
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
    """Yield the tables of a method and of its parts; its `repr` may name but a file."""
    if isinstance(part, Tables):
        yield part
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tables_in(getattr(part, field.name))


def closeness(output: Tensor, reference: Tensor) -> Tensor:
    """Return the PSNR in dB of every sample, float64 [B]; of a film the mean over its frames.

    Outputs are uint8 pictures [B, C, H, W] or films [B, F, C, H, W], or floats [B, ...], whose full range is
    that of the uncached run.
    """
    if output.ndim == 5 and output.dtype == torch.uint8:
        return psnr(output.flatten(0, 1), reference.flatten(0, 1)).view(output.shape[:2]).mean(1)
    span = None if output.dtype == torch.uint8 else float(reference.max() - reference.min()) or 1.0
    return psnr(output, reference, span=span).nan_to_num(0.0)  # of numbers that overflowed


def mean_interval(values: Tensor) -> tuple[float, float, float]:
    """Return the mean of values [N], and the ends of its 95 % bootstrap interval."""
    sample = values.double().numpy()
    picks = np.random.default_rng(0).integers(len(sample), size=(RESAMPLES, len(sample)))
    low, high = np.percentile(sample[picks].mean(1), (2.5, 97.5))
    return float(sample.mean()), float(low), float(high)


def outputs(result: Any, are_pictures: bool) -> Tensor:
    """Return a pipeline's outputs, [B, ...] on the CPU: uint8 for pictures in [0, 1], else floats.

    `are_pictures` says whether it was asked for pictures or films, not for latents.
    """
    first = result[0]
    if isinstance(first, (list, tuple)):
        first = np.stack([np.asarray(item) for item in first])
    tensor = torch.as_tensor(first).detach().cpu()
    if tensor.dtype == torch.uint8:
        return tensor
    tensor = tensor.float()
    if not are_pictures or (tensor < 0).any() or (tensor > 1).any():
        return tensor
    return (tensor.nan_to_num() * 255).round().to(torch.uint8)  # as pictures are saved
