"""Calibrate quantized layers: ranges of their inputs, then maps of their errors."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from diffcache.features.parts.correction import ROWS, AffineSums
from diffcache.features.parts.quantize import LayerWatcher
from diffcache.quant.calibrate import InputRanges, weight_grid
from diffcache.quant.plan import WEIGHT_BITS, Bits, LayerPlan, QuantPlan

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
