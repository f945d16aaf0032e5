"""Measurements of features for CacheQuant: distances and regressions between steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor

from diffcache.features.base import Ability
from diffcache.features.cachequant import CacheQuant
from diffcache.features.collect import Collector, RunInfo
from diffcache.features.combine import Combine
from diffcache.features.parts.correction import ROWS, AffineSums, channels_last
from diffcache.features.parts.dynamic import anchor_costs, best_starts
from diffcache.features.parts.quantize import LayerWatcher, WatchLayers
from diffcache.quant.plan import WEIGHT_BITS, Bits, LayerPlan, QuantPlan
from diffcache.quant.scales import InputRanges, weight_grid
from diffcache.step import Step

Stage = Literal["ranges", "errors", "done"]
Map = tuple[Tensor, Tensor]


class LayerCalibration(LayerWatcher):
    """Measures how layers are to be quantized, in stages.

    In `ranges` layers are dense and what they are given is noted; in `errors` they are quantized
    and compared with the dense ones; when `done` they are quantized and their errors mapped.

    Args:
        bits: `w8a8` or `w4a8`.
        exempt: Patterns of layers that stay dense.
        corrected: Patterns of layers whose errors are mapped.
        official: Fit maps as the released code of CacheQuant does.
    """

    def __init__(self, bits: Bits, exempt: tuple[str, ...], corrected: tuple[str, ...], official: bool) -> None:
        self.bits, self.exempt, self.corrected, self.official = bits, exempt, corrected, official
        self.stage: Stage = "ranges"
        self.total = 0
        self.dense = False
        self.ranges: dict[str, InputRanges] = {}
        self.errors: dict[str, list[AffineSums]] = {}
        self._grids: dict[str, tuple[Tensor, Tensor]] = {}
        self._biases: dict[str, Tensor | None] = {}
        self._plans: dict[Stage, QuantPlan] = {}

    def enter(self, stage: Stage, total: int) -> None:
        """Go on to a stage, for runs of `total` steps."""
        if stage != self.stage:
            self._plans.pop(stage, None)  # what it is made from may have grown
        self.stage, self.total = stage, total

    def excludes(self, layer: str) -> bool:
        """Return whether a layer is exempt."""
        return _any(self.exempt, layer)

    def layer(self, layer: str, weight: Tensor, bias: Tensor | None) -> None:
        """Choose the codes of a layer's weight."""
        if layer not in self._grids:
            scale, zero = weight_grid(weight, WEIGHT_BITS[self.bits])
            self._grids[layer] = scale.cpu(), zero.cpu()
        self._biases[layer] = None if bias is None else bias.detach().cpu().double()

    def compares(self, layer: str) -> bool:
        """Return whether a layer's errors are measured now."""
        return self.stage == "errors" and _any(self.corrected, layer)

    def given(self, layer: str, step: int, value: Tensor) -> None:
        """Widen the range of a layer's inputs at a step."""
        if layer not in self.ranges:
            self.ranges[layer] = InputRanges(self.total)
        self.ranges[layer].add(step, value)

    def compare(self, layer: str, step: int, exact: Tensor, rounded: Tensor) -> None:
        """Add to the regression of a layer's dense output on its quantized one."""
        sums = self.errors.setdefault(layer, [AffineSums() for _ in range(self.total)])
        sums[step].add(rounded, exact)

    @property
    def wants_dense(self) -> bool:
        """Return whether dense features are to be seen beside the quantized ones."""
        return self.stage == "done"

    def dense_again(self, begins: bool) -> None:
        """Note whose features are seen now."""
        self.dense = begins

    def plan(self) -> QuantPlan | None:
        """Return how layers are quantized in this stage."""
        if self.stage == "ranges":
            return None
        if self.stage not in self._plans:
            self._plans[self.stage] = QuantPlan(self.bits, self._layers(self.stage == "done"))
        return self._plans[self.stage]

    def _layers(self, mapped: bool) -> dict[str, LayerPlan]:
        """Return the layers that ran at every step; the others stay dense."""
        layers: dict[str, LayerPlan] = {}
        for name, ranges in self.ranges.items():
            if ranges.complete and name in self._grids:
                maps = self._maps(name) if mapped else None
                gain, shift = (None, None) if maps is None else maps
                layers[name] = LayerPlan(*self._grids[name], *ranges.grid(), gain, shift)
        if not layers:
            raise ValueError(
                f"exempt={self.exempt!r}: no other layer inside the blocks ran at every step on "
                "finite numbers; exempt fewer"
            )
        return layers

    def _maps(self, name: str) -> Map | None:
        """Return a layer's maps, `gain` and `shift`, each `[T, O]` float32."""
        sums = self.errors.get(name)
        if sums is None or not all(part.count for part in sums):
            return None
        gain, shift = map(torch.stack, zip(*(p.solve(self.official) for p in sums), strict=True))
        bias = self._biases.get(name)
        if self.official and bias is not None:  # regressed with the bias, applied to what has none
            shift = shift + (1 - gain) * bias
        return gain.float(), shift.float()

    def state(self) -> dict[str, Tensor]:
        """Return all sums so far."""
        state = {f"ranges/{name}": ranges.low_high for name, ranges in self.ranges.items()}
        for name, sums in self.errors.items():
            parts = [part.state() for part in sums]
            width = max(part.shape[1] for part in parts)
            empty = torch.zeros(ROWS, width, dtype=torch.float64)
            state[f"errors/{name}"] = torch.stack([p if p.shape[1] else empty for p in parts])
        for name, (scale, zero) in self._grids.items():  # no layer is shown after the last run
            state |= {f"scale/{name}": scale, f"zero/{name}": zero}
        state |= {f"bias/{name}": b for name, b in self._biases.items() if b is not None}
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the sums that `state` returned."""
        self._plans.clear()
        for key, tensor in state.items():
            kind, _, name = key.partition("/")
            if kind == "ranges":
                self.ranges[name] = InputRanges(tensor.shape[1])
                self.ranges[name].low_high = tensor.clone()
            elif kind == "errors":
                self.errors[name] = [AffineSums(part if bool(part[0].any()) else None) for part in tensor]
            elif kind == "scale":
                self._grids[name] = tensor.clone(), state[f"zero/{name}"].clone()
            elif kind == "bias":
                self._biases[name] = tensor.clone()


def _any(patterns: tuple[str, ...], layer: str) -> bool:
    return any(fnmatchcase(layer, pattern) for pattern in patterns)


def segment_bounds(total: int, every: int) -> tuple[int, int, int]:
    """Return the number of segments, and the least and greatest length of one, in steps.

    Any length is allowed where no split has lengths from `ceil(every / 2)` to `2 * every`.
    """
    count = math.ceil(total / every)
    shortest, longest = math.ceil(every / 2), min(2 * every, total)
    if not count * shortest <= total <= count * longest:
        shortest, longest = 1, total
    return count, shortest, longest


class StepPairs:
    """Distances and affine sums between held features and those wanted at later steps.

    From a distance of `reach` steps on no map is needed.
    """

    def __init__(self, total: int, reach: int) -> None:
        self.total, self.reach = total, reach
        self.distances = torch.zeros(total, total, dtype=torch.float64)
        self.sums: dict[tuple[str, int, int], AffineSums] = {}

    def add(self, key: str, held: list[Tensor], wanted: list[Tensor]) -> None:
        """Add a feature of one run, of the name `<site>/<index>`.

        Given are what is held at every step, and what a stand-in should give there, which is the same in a
        float model: T tensors of one shape each.
        """
        wide = torch.promote_types(held[0].dtype, torch.float32)
        targets = [channels_last(value) for value in wanted]
        for start in range(self.total):
            first, later = channels_last(held[start]), range(start, self.total)
            apart = [(targets[t].to(wide) - first).abs_().sum(dtype=torch.float64) for t in later]
            self.distances[start, start:] += torch.stack(apart).cpu()
            for step in later[1 : self.reach]:
                sums = self.sums.setdefault((key, start, step), AffineSums())
                sums.add(first, targets[step])

    def features(self) -> list[str]:
        """Return the names of the features seen."""
        return list(dict.fromkeys(key for key, _, _ in self.sums))

    def maps(self, key: str, starts: list[int], official: bool) -> tuple[Tensor, Tensor]:
        """Return `a` and `b` of a feature under a schedule, `[T, C]` float64 each; 1 and 0 at the schedule's steps."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for step in range(self.total):
            start = max(s for s in starts if s <= step)
            if start != step:
                found[step] = self.sums[key, start, step].solve(official)
        width = len(next(iter(found.values()))[0])
        a = torch.ones(self.total, width, dtype=torch.float64)
        b = torch.zeros_like(a)
        for step, (slope, shift) in found.items():
            a[step], b[step] = slope, shift
        return a, b

    def state(self) -> dict[str, Tensor]:
        """Return all sums so far."""
        state = {"distances": self.distances}
        for key in self.features():
            pairs = {(i, t): sums for (k, i, t), sums in self.sums.items() if k == key}
            state[f"at/{key}"] = torch.tensor(list(pairs))
            state[f"sums/{key}"] = torch.stack([sums.state() for sums in pairs.values()])
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the sums that `state` returned."""
        self.distances = state["distances"].clone()
        for name, places in state.items():
            kind, _, key = name.partition("/")
            if kind == "at":
                parts = state[f"sums/{key}"]
                for (start, step), part in zip(places.tolist(), parts, strict=True):
                    self.sums[key, start, step] = AffineSums(part)


class CacheQuantCollector(Collector):
    """Measures features; with `bits` after the layers, in quantized runs, beside dense features."""

    def __init__(self, method: CacheQuant) -> None:
        self._where, settings = method.plain(), method.settings()
        self._settings: dict[str, Any] = dict(settings)
        self.layers: LayerCalibration | None = None
        self.stages: tuple[str, ...] = ("float",)
        if settings["bits"] is not None:
            exempt, corrected = tuple(settings["exempt"]), tuple(settings["corrected"])
            self.layers = LayerCalibration(settings["bits"], exempt, corrected, settings["official"])
            self.stages = ("ranges", "errors", "done") if corrected else ("ranges", "done")
        self.passes = len(self.stages)
        self.pairs: StepPairs | None = None
        self._stage = self.stages[0]
        self._seen: dict[tuple[int, str, int], dict[int, Tensor]] = {}
        self._dense: dict[tuple[int, str, int], dict[int, Tensor]] = {}

    def site(self) -> Combine:
        """Return the method's site and, with `bits`, its layers."""
        return self._where

    def abilities(self) -> tuple[Ability, ...]:
        """Return the watcher of the layers, in joint mode."""
        return () if self.layers is None else (WatchLayers(self.layers),)

    def begin(self, run: RunInfo) -> None:
        """Start a run of as many steps as those before."""
        pairs = self._pairs(run.total)
        if pairs.total != run.total:
            raise ValueError(f"steps={run.total}: the runs before had {pairs.total}; calibrate with one number")
        self._stage = self.stages[run.number]
        self._seen, self._dense = {}, {}
        if self.layers is not None:
            self.layers.enter(self._stage, run.total)  # type: ignore[arg-type]

    def _pairs(self, total: int) -> StepPairs:
        if self.pairs is None:
            self.pairs = StepPairs(total, segment_bounds(total, self._settings["every"])[2])
        return self.pairs

    def feature(self, step: Step, site: str, index: int, value: Tensor) -> None:
        """Keep a feature until the run ends."""
        if self._settings["every"] == 1 or self._stage != self.stages[-1]:
            return
        again = self.layers is not None and self.layers.dense
        seen = self._dense if again else self._seen
        seen.setdefault((step.branch, site, index), {})[step.index] = value.detach()

    def end(self) -> None:
        """Add the run's features, which must have been seen at every step, to the sums."""
        assert self.pairs is not None
        for (branch, site, index), seen in self._seen.items():
            if len(seen) != self.pairs.total:
                raise ValueError(
                    f"{site}: seen at {len(seen)} of {self.pairs.total} steps in branch {branch}; "
                    "every step has to be one call of the denoiser in each branch"
                )
            held = [seen[step] for step in range(self.pairs.total)]
            dense = self._dense.get((branch, site, index), {})
            wanted = [dense.get(step, seen[step]) for step in range(self.pairs.total)]
            self.pairs.add(f"{site}/{index}", held, wanted)
        self._seen, self._dense = {}, {}

    def starts(self) -> list[int]:
        """Return the steps to compute."""
        if self.pairs is None:
            raise ValueError("no run was seen; calibrate with at least one prompt")
        total, every = self.pairs.total, self._settings["every"]
        if every == 1 or self._settings["schedule"] == "uniform":
            return list(range(0, total, every))
        count, shortest, longest = segment_bounds(total, every)
        cost = anchor_costs(self.pairs.distances)
        return best_starts(cost, count, shortest=shortest, longest=longest)[0]

    def tables(self) -> dict[str, Tensor]:
        """Return the schedule, the maps of the features and the plan of the layers."""
        starts = self.starts()
        assert self.pairs is not None
        tables = {"starts": torch.tensor(starts)}
        for key in self.pairs.features():
            a, b = self.pairs.maps(key, starts, self._settings["official"])
            tables |= {f"cache/{key}/a": a, f"cache/{key}/b": b}
        if self.layers is not None:
            self.layers.enter("done", self.pairs.total)
            plan = self.layers.plan()
            assert plan is not None
            tables |= {f"quant/{name}": tensor for name, tensor in plan.tensors().items()}
        return tables

    def settings(self) -> dict[str, Any]:
        """Return the settings of the method."""
        return dict(self._settings)

    def state(self) -> dict[str, Tensor]:
        """Return all sums so far."""
        state: dict[str, Tensor] = {}
        if self.pairs is not None:
            state |= {f"pairs/{name}": tensor for name, tensor in self.pairs.state().items()}
        if self.layers is not None:
            state |= {f"layers/{name}": tensor for name, tensor in self.layers.state().items()}
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the sums that `state` returned."""
        parts: dict[str, dict[str, Tensor]] = {"pairs": {}, "layers": {}}
        for name, tensor in state.items():
            kind, _, rest = name.partition("/")
            parts[kind][rest] = tensor
        if parts["pairs"]:
            self._pairs(len(parts["pairs"]["distances"])).load(parts["pairs"])
        if self.layers is not None:
            self.layers.load(parts["layers"])
