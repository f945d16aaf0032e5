"""Measurement of ERTACache's list, factors and maps: three passes over the prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diffcache.errors import AttachError
from diffcache.features.collect import Collector, RunInfo
from diffcache.features.combine import Combine
from diffcache.features.ertacache import READINGS, THRESHOLD, ERTACache
from diffcache.features.parts.correction import AffineSums, channels_last
from diffcache.features.parts.instead import Reuse
from diffcache.features.parts.when import Every
from diffcache.step import Site, Step


@dataclass
class Live:
    """One guidance branch of a run that is profiled."""

    residual: Tensor | None = None
    output: Tensor | None = None


@dataclass
class Profiled:
    """Measurements of a profiling run: rows of one prompt, and sums of the last pass."""

    row: Tensor
    sums: Tensor
    maps: dict[int, AffineSums] = field(default_factory=dict)


class Profile(Collector):
    """Makes ERTACache's tables: the plain runs, then reuse in a closed loop, then the list.

    Pass 0 notes the norms of the true residuals. Pass 1 reuses, prompt by prompt, wherever the error of the kept
    residual on the current latent, relative to that norm, is below the threshold; the mean of these errors over
    prompts makes the list. Pass 2 follows the list and gathers the factors and the maps.
    """

    passes = 3

    def __init__(self, method: ERTACache) -> None:
        self.threshold = THRESHOLD if method.threshold is None else method.threshold
        self._clear()

    def _clear(self) -> None:
        self.total = 0
        self._rows: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})  # norms, errors
        self._sums = torch.zeros(0)
        self._maps: dict[int, AffineSums] = {}

    def site(self) -> Combine:
        """Return the denoiser's output against its input."""
        return Combine(Every(1), Reuse(), Site.MODEL, feature="change")

    def begin(self, run: RunInfo) -> None:
        """Start a run with nothing kept."""
        run.check_length(self.total)
        if not self.total:
            self.total, self._sums = run.total, torch.zeros(3, run.total, dtype=torch.float64)
        self._run, self._live = run, dict[int, Live]()
        errors = torch.zeros(run.total, dtype=torch.float64)
        self._now = Profiled(errors, torch.zeros_like(self._sums))
        self._list, self._reuses = set(self.reused()) if run.number == 2 else set[int](), False

    def output(self, step: Step, given: Tensor, value: Tensor) -> Tensor | None:
        """Measure a step; return the stand-in where the closed loop reuses."""
        live = self._live.setdefault(step.branch, Live())
        value = value.detach().clone()  # which the pipeline may write to
        given = fitted(given, value)
        if self._run.number == 0:
            if step.branch == 0:
                self._now.row[step.index] = norm(value - given)
            return None
        guess = None if live.residual is None else given + live.residual
        ends = step.index in (0, self.total - 1)
        if step.branch == 0:
            self._reuses = not ends and guess is not None and self._judge(step, guess, value)
        if self._run.number == 2 and self._reuses and guess is not None:
            self._measure(step, guess, value, live)
        live.output = value
        if self._reuses:
            return guess
        live.residual = value - given
        return None

    def _judge(self, step: Step, guess: Tensor, value: Tensor) -> bool:
        """Return whether the first branch's step is reused."""
        if self._run.number == 2:
            return step.index in self._list
        scale = float(self._rows[0][self._run.prompt][step.index])
        error = norm(guess - value) / max(scale, torch.finfo(torch.float64).tiny)
        self._now.row[step.index] = error
        return error < self.threshold

    def _measure(self, step: Step, guess: Tensor, value: Tensor, live: Live) -> None:
        """Add a reused step to the factors and to the regression of its channels."""
        assert live.output is not None
        error = norm(guess - value)
        for row, scale in enumerate((norm(value - live.output), norm(value))):
            self._now.sums[row, step.index] += factor_of(error, scale)
        self._now.sums[2, step.index] += 1
        sums = self._now.maps.setdefault(step.index, AffineSums())
        sums.add(channels_last(guess), channels_last(value))

    def end(self) -> None:
        """Add the run to the sums; a run that breaks off leaves none."""
        if self._run.number < 2:
            self._rows[self._run.number][self._run.prompt] = self._now.row
            return
        self._sums += self._now.sums
        for index, sums in self._now.maps.items():
            self._maps.setdefault(index, AffineSums()).merge(sums)

    def errors(self) -> Tensor:
        """Return the mean error of every step over the prompts, `[T]`."""
        return torch.stack(list(self._rows[1].values())).mean(0)

    def reused(self) -> list[int]:
        """Return the global list of reused steps."""
        inner = enumerate(self.errors().tolist()[1:-1], start=1)
        return [index for index, error in inner if error < self.threshold]

    def state(self) -> dict[str, Tensor]:
        """Return rows, sums and moments so far."""
        kept = {f"rows.0.{prompt}": row for prompt, row in self._rows[0].items()}
        kept |= {f"rows.1.{prompt}": row for prompt, row in self._rows[1].items()}
        maps = {f"maps.{index}": sums.state() for index, sums in self._maps.items()}
        return {"sums": self._sums, **kept, **maps}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state that `state` returned."""
        self._clear()
        for name, tensor in state.items():
            kind, *place = name.split(".")
            if kind == "rows":
                self._rows[int(place[0])][int(place[1])] = tensor.clone()
            elif kind == "maps":
                self._maps[int(place[0])] = AffineSums(tensor)
            else:
                self._sums, self.total = tensor.clone(), tensor.shape[-1]

    def tables(self) -> dict[str, Tensor]:
        """Return the list, the factors of both readings, the maps and the errors."""
        count = self._sums[2]
        factors = torch.where(count > 0, self._sums[:2] / count.clamp(min=1), 1.0)
        solved = {index: sums.solve() for index, sums in self._maps.items()}
        channels = len(next(iter(solved.values()))[0]) if solved else 0
        scale = torch.ones(self.total, channels, dtype=torch.float64)
        shift = torch.zeros_like(scale)
        for index, (slope, offset) in solved.items():
            scale[index], shift[index] = slope, offset
        reused = torch.tensor(self.reused(), dtype=torch.int64)
        found = {"reuse": reused, READINGS["A"]: factors[0], READINGS["B"]: factors[1]}
        return found | {"scale": scale, "shift": shift, "errors": self.errors()}

    def settings(self) -> dict[str, Any]:
        """Return the threshold."""
        return {"threshold": self.threshold}


def fitted(given: Tensor, like: Tensor) -> Tensor:
    """Return the sample in the shape of the output, cut or with zeros added; refuse another number of axes."""
    if given.shape == like.shape:
        return given.to(like.dtype)
    if given.ndim != like.ndim:
        raise AttachError(
            f"the output {list(like.shape)} cannot be taken against the sample "
            f"{list(given.shape)}; use a method that keeps features of the blocks, as TeaCache"
        )
    shared = tuple(slice(min(a, b)) for a, b in zip(given.shape, like.shape, strict=True))
    out = torch.zeros_like(like)
    out[shared] = given[shared].to(like.dtype)
    return out


def norm(value: Tensor) -> float:
    """Return the L1 norm in float64."""
    return float(value.double().abs().sum())


def factor_of(error: float, scale: float) -> float:
    """Return `1 - error / scale`, kept within 0 and 1; a perfect stand-in gets 1."""
    if error == 0:
        return 1.0
    return max(0.0, 1 - error / scale) if scale > 0 else 0.0
