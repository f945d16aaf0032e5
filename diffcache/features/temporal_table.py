"""Look up outputs of modules that depend on the timestep and the condition alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from diffcache.features.base import Ability, Method
from diffcache.ranges import Count, Settings, one_of

BITS = {4: torch.int8, 8: torch.int8, 16: torch.int16}


@dataclass(frozen=True)
class TemporalTable(Settings, Method, Ability):
    """Keep outputs of time embeddings and modulation layers, and look them up in later runs.

    Reference: TFMQ-DM, arXiv 2311.16503, section 3, whose temporal information block is the
    modules that depend on the timestep alone. In float (`bits=None`) nothing is approximated: the
    key of an entry is the content of every argument that the module's input depends on, bit for
    bit, and an unknown key is computed, never interpolated. So it also holds for modules that mix
    the timestep with a class, a prompt or a guidance scale (adaptive layer norms of transformers);
    their entries serve runs with the same prompt, timesteps and shapes. A denoiser's tables last
    until it is unwrapped or its weights change. It goes with any other method: skipped steps look
    up what they still need.

    `bits` rounds the tables ("cache-based maintenance") and `keep="closer"` takes, where that is
    closer to the float feature, a layer with rounded weights instead ("disturbance-aware
    selection"). Both are reconstructed from the abstract of arXiv 2407.19547: its granularity is
    not known to us. The measure is the paper's, the cosine. The first run with a condition is
    computed in float; at its end its tables are rounded.

    Weights are rounded to the nearest, per output channel. With `reconstruct` they are rounded so
    that the features of the first run's steps change least, which is the objective of the paper's
    reconstruction (TIAR). Departures: the paper learns the roundings of the time embedding and all
    projections together, by gradient (AdaRound); here each module is rounded on its own, column
    by column, with GPTQ's update (arXiv 2210.17323). `activations` rounds what enters such a layer,
    with a scale of its own at each timestep, as the paper's finite set calibration (FSC) does. The
    scale is the largest of the present input, as a timestep has but one. None of it is compared
    with official code. The model keeps its float weights: memory is not what this saves.

    Args:
        method: The feature cache to go with it, None for none.
        entries: Most condition vectors to keep, per denoiser; a run needs one for each of its
            steps and branches, more where some modules see the timestep alone. Beyond it,
            those that the current run has not used go, oldest first; if it uses all, new ones are
            computed and not kept.
        bits: 4, 8 or 16, or None for the model's own numbers. Four bits take a byte as well.
        scale: With `bits`: one scale for each `entry`, or for each `site` over a run's steps.
        keep: With `bits`: the `table`, the `layer`, or whichever is `closer`.
        by: With `keep="closer"`: choose for each `step` or for a `site` over a run's steps.
        reconstruct: Whether to round layers for the features of the first run; with a `keep` other
            than `table`.
        activations: Bits of what enters a rounded layer, 8 or 16, or None for the model's own
            numbers; with a `keep` other than `table`.
    """

    method: Method | None = None
    entries: Count = 512
    bits: Annotated[int, one_of(*BITS)] | None = None
    scale: Literal["entry", "site"] = "entry"
    keep: Literal["table", "layer", "closer"] = "table"
    by: Literal["step", "site"] = "step"
    reconstruct: bool = False
    activations: Annotated[int, one_of(8, 16)] | None = None

    def check(self) -> None:
        """Raise ValueError unless settings go together."""
        if any(isinstance(ability, TemporalTable) for ability in self._inner_abilities()):
            raise ValueError(f"method={self.method!r}: has temporal tables already")
        for each in fields(self)[3:]:  # all but how many bits
            if self.bits is None and (value := getattr(self, each.name)) != each.default:
                raise ValueError(f"{each.name}={value!r} with bits=None: set bits=8 or bits=16")
        for name in ("reconstruct", "activations"):
            if self.keep == "table" and (value := getattr(self, name)):
                raise ValueError(f"{name}={value!r} with keep='table': set keep='layer'")
        if self.by == "site" and self.keep != "closer":
            raise ValueError(f"by='site' with keep={self.keep!r}: set keep='closer'")

    @property
    def total(self) -> int | None:
        """Length in steps of the runs that the method that goes with it is made for."""
        return None if self.method is None else self.method.total

    def abilities(self) -> tuple[Ability, ...]:
        """Return the inner method's abilities, then the tables, which see the changes of those."""
        return (*self._inner_abilities(), self)

    def check_model(self, facts: Mapping[str, Any]) -> None:
        """Ask the inner method."""
        if self.method is not None:
            self.method.check_model(facts)

    def _inner_abilities(self) -> tuple[Ability, ...]:
        return () if self.method is None else self.method.abilities()


@dataclass(frozen=True)
class Rounded:
    """A tensor in whole numbers and one scale; at most half a step from the original."""

    codes: Tensor
    step: Tensor
    dtype: torch.dtype

    def value(self) -> Tensor:
        """Return the numbers, in the dtype that they had."""
        return (self.codes * self.step).to(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scale."""
        return self.codes.nbytes + self.step.nbytes


def step_of(values: list[Tensor], bits: int, dim: int | None = None) -> Tensor:
    """Return the width of one step of symmetric rounding to 4, 8 or 16 bits that no value overflows.

    Values, floats of any shapes, share the scale, float32 or float64: one number, or of one tensor
    one for each place of the axes but `dim`.
    """
    if dim is None:
        most = torch.stack([value.detach().abs().max() for value in values]).max()
    else:
        most = values[0].detach().abs().amax(dim, keepdim=True)
    most = most if most.dtype == torch.float64 else most.float()
    return torch.where(most > 0, most / (2 ** (bits - 1) - 1), torch.ones_like(most))


def rounded(value: Tensor, bits: int, step: Tensor) -> Rounded:
    """Round a tensor to whole multiples of `step`."""
    most = 2 ** (bits - 1) - 1
    codes = (value.detach() / step).round().clamp(-most, most).to(BITS[bits])
    return Rounded(codes, step, value.dtype)


def disturbance(exact: list[Tensor], found: list[Tensor]) -> float:
    """Return 1 minus the cosine of a feature's tensors and their stand-ins, 0 where alike; waits for the device."""
    one = torch.cat([tensor.detach().double().flatten() for tensor in exact])
    two = torch.cat([tensor.detach().double().flatten() for tensor in found])
    if torch.equal(one, two):
        return 0.0
    size = one.norm() * two.norm()
    return float(1 - one @ two / size) if float(size) > 0 else 1.0


def keeps_table(layer: Tensor, table: Tensor, by: str) -> Tensor:
    """Return where a rounded table disturbs a site's features no more than a rounded layer, bool [S].

    Disturbances are float [S], of each step; by `step` each is compared, by `site` their means.
    """
    if by == "site":
        return (table.mean() <= layer.mean()).expand(table.shape)
    return table <= layer
