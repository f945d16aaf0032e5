"""Reuse on a profiled list of steps, with adjusted times and rectified outputs (ERTACache)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from diffcache.errors import AttachError, TablesError
from diffcache.features.base import Ability, Change, Instead
from diffcache.features.collect import Calibrated
from diffcache.features.combine import Combine
from diffcache.features.parts.correction import channel_axis, channels_last
from diffcache.features.parts.instead import Reuse
from diffcache.features.parts.when import Every, Listed
from diffcache.features.schema import Entry, Schema
from diffcache.features.tables import Tables
from diffcache.step import Site, Step

READINGS = {"A": "factors_change", "B": "factors_norm"}  # setting -> table
THRESHOLD = 0.3  # of a calibration that names none
EULER = "FlowMatchEulerDiscreteScheduler"  # the one whose steps may have other lengths
ADVICE = "set time=False"


def adjust(sigmas: Tensor, factors: tuple[float, ...]) -> Tensor:
    """Return a schedule whose steps are shortened by factors and which ends where it did.

    Step `i` takes `factors[i]` of its share of the time that is left, the share being that of the
    nominal schedule; the last step takes all that is left, so that the time of the whole is kept
    exactly. Steps before the first factor below 1 stay as they are, to the bit.

    Args:
        sigmas: `[T + 1]`, monotonic, any real dtype; the result has its dtype and device.
        factors: T numbers from 0 to 1; the last one is not used.

    Raises:
        ValueError: If the numbers of steps differ or a factor is not from 0 to 1.
    """
    if sigmas.ndim != 1 or len(sigmas) != len(factors) + 1:
        raise ValueError(f"sigmas {tuple(sigmas.shape)}: must be [{len(factors) + 1}]")
    if not all(0 <= factor <= 1 for factor in factors):
        raise ValueError(f"factors={factors!r}: must be numbers from 0 to 1")
    given = sigmas.double().cpu()
    made, moved = given.clone(), False
    for index, factor in enumerate(factors[:-1]):
        moved = moved or factor != 1
        if moved:
            left, nominal = given[-1] - made[index], given[-1] - given[index]
            share = (given[index + 1] - given[index]) / nominal if nominal else 0.0
            made[index + 1] = made[index] + factor * share * left
    return made.to(sigmas)


def check_scheduler(model: str, name: str | None, config: Mapping[str, Any], advice: str) -> None:
    """Raise AttachError unless a scheduler is a deterministic Euler scheduler; `advice` is how to get by without."""
    unfit = other_than_euler(name, config)
    if unfit:
        raise AttachError(
            f"{model}: the lengths of steps can be changed with {EULER} only, not with {unfit}; "
            f"{advice}, or replace the scheduler"
        )


def other_than_euler(name: str | None, config: Mapping[str, Any]) -> str:
    """Return what a scheduler is where it is no deterministic one of Euler's method; else nothing."""
    if name == EULER:
        return f"{name} with stochastic_sampling" if config.get("stochastic_sampling") else ""
    return str(name)


@dataclass(frozen=True)
class SigmaRule(Ability):
    """Give the steps of an Euler scheduler other lengths, and evaluate the model at their times.

    Args:
        factors: Fraction of its share of the remaining time that each step takes, 0 to 1.
        advice: Advice for the error: how a user gets by without such a scheduler.
    """

    factors: tuple[float, ...]
    advice: str = ADVICE

    def apply(self, sigmas: Tensor) -> Tensor:
        """Return the adjusted schedule of `sigmas`, [T + 1]."""
        return adjust(sigmas, self.factors)


@dataclass
class Kept:
    """The residual of the last computed step, and the maps on its device."""

    feature: Tensor | None = None
    maps: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Rectified(Instead):
    """Use the last residual again, and map the output it makes by `scale * output + shift`.

    Args:
        tables: Tables with `scale` and `shift`, each `[T, C]`; None leaves the output as it is.
    """

    state: ClassVar[type] = Kept

    tables: Tables | None = None

    def record(self, state: Kept, step: Step, feature: Tensor) -> None:
        """Keep the residual, forget the last."""
        state.feature = feature

    def estimate(self, state: Kept, step: Step) -> Tensor:
        """Return the kept residual itself."""
        assert state.feature is not None
        return state.feature

    def correct(self, state: Kept, step: Step, value: Tensor) -> Tensor:
        """Return the mapped output, computed in float32 at least."""
        if self.tables is None:
            return value
        if state.maps is None:
            kind = torch.promote_types(value.dtype, torch.float32)
            scale, shift = (self.tables[name].to(value.device, kind) for name in ("scale", "shift"))
            state.maps = scale, shift
        assert state.maps is not None
        scale, shift = state.maps
        last = channels_last(value)
        if last.shape[-1] != scale.shape[1]:
            raise TablesError(
                f"tables={self.tables!r}: made for {scale.shape[1]} channels (frames, where these come first), "
                f"the output {tuple(value.shape)} has {last.shape[-1]}; calibrate on such runs of this pipeline"
            )
        mapped = torch.addcmul(shift[step.index], last.to(scale), scale[step.index])
        return mapped.movedim(-1, channel_axis(value)).to(value)

    def held(self, state: Kept) -> list[Tensor]:
        """Return the residual and the maps."""
        return [] if state.feature is None else [state.feature, *(state.maps or ())]


@dataclass(frozen=True)
class ERTACache(Calibrated):
    """Reuse the residual of the whole denoiser at a fixed list of steps found by profiling.

    It keeps `r = v(x, t) - x`; at a listed step `x + r` stands for the output. Three parts:
    the list (steps whose residual differs from the kept one by less than `threshold`, relative
    L1, when the reuse before them is in force), shorter steps where reuse is poor (`time`), and an
    affine map of the reused output fitted to the true one (`rectify`). Reference: ERTACache, arXiv
    2508.21091, section 3 (offline policy calibration, trajectory-aware timestep adjustment,
    explicit error rectification), written from descriptions of the paper without its code.
    Choices where these leave room or disagree:

    - The time that shortened steps leave is shared among the later ones in proportion to the
      nominal schedule and the last step closes the trajectory, so that the total is kept exactly;
      the denoiser is evaluated at the adjusted times.
    - The paper linearises `sigmoid(K * v + B)`; fitted by least squares that is the ordinary
      affine regression, which is what is used, with one map a step and channel; a step and frame
      where frames come before channels (CogVideoX).
    - First and last steps are never in the list.
    - With guidance in separate calls the first branch makes the list; factors and maps are shared
      by the branches and measured on all of them; each branch keeps its own residual.
    - Factors and maps are measured on runs that follow the list without either correction.

    Args:
        threshold: Largest relative L1 error of a residual that is reused; dimensionless; 0 turns
            the cache off; None takes that of the tables, or 0.3 to calibrate. 0.08 (Wan2.1) to
            0.6 (FLUX) in the paper.
        time: Whether steps are shortened; only for `FlowMatchEulerDiscreteScheduler`.
        rectify: Whether reused outputs are mapped.
        reading: Divisor of the error of a reused output in the factor of its step,
            `1 - error / scale` kept within 0 and 1: `A` the change of the true output since the
            step before, `B` its norm. Accounts of the paper differ. `A` is 0, and leaves the step
            out, wherever reuse is no better than the true output of the step before.
        schedule: `list` is the method; `uniform` computes as many steps at even distances, without
            either correction, to see what the list is worth.
        tables: Tables of `diffcache.calibrate`, or a file it wrote.

    Raises:
        ValueError: If `uniform` is asked for with a correction.
        TablesError: If the tables are another method's, or of another threshold.

    Examples:
        >>> method = diffcache.calibrate(pipe, ERTACache(0.3), prompts=[...])  # doctest: +SKIP
        >>> pipe = diffcache.wrap(pipe, method)  # doctest: +SKIP
    """

    collected_by: ClassVar[str] = "diffcache.offline.ertacache_collect:Profile"
    schema: ClassVar[Schema] = Schema(
        {
            "reuse": Entry(("reused",), whole=True, low=1, high="steps-2", ascending=True),
            READINGS["A"]: Entry(("steps",), low=0, high=1),
            READINGS["B"]: Entry(("steps",), low=0, high=1),
            "scale": Entry(("steps", "channels"), low=-100, high=100),
            "shift": Entry(("steps", "channels"), low=-1e4, high=1e4),
            "errors": Entry(("steps",), low=0, high=1e4),
        },
        header={"threshold": "number"},
    )

    threshold: Change | None = None
    time: bool = True
    rectify: bool = True
    reading: Literal["A", "B"] = "B"
    schedule: Literal["list", "uniform"] = "list"
    tables: Tables | str | None = None

    def check(self) -> None:
        """Raise unless schedule, corrections and tables go together."""
        if self.schedule == "uniform" and (self.time or self.rectify):
            raise ValueError(
                "schedule='uniform': factors and maps are those of the list; pass time=False, rectify=False with it"
            )
        super().check()
        if isinstance(self.tables, Tables) and self.threshold:
            made = float(self.tables.header["threshold"])
            if made != self.threshold:
                raise TablesError(
                    f"tables={self.tables!r}: made with threshold={made}, not {self.threshold}; "
                    "leave threshold out, or calibrate again"
                )

    def parts(self) -> Combine:
        """Return the list of computed steps, and the rectified residual between them."""
        if self.threshold == 0:
            return Combine(Every(1), Reuse(), Site.MODEL, feature="change")
        tables = self.measured()
        reused = set(tables["reuse"].tolist())
        computed = [index for index in range(tables.steps) if index not in reused]
        if self.schedule == "uniform":
            count, total = len(computed), tables.steps
            computed = [index * total // count for index in range(count)]
        when = Listed(computed, tables.steps)
        instead = Rectified(tables if self.rectify and reused else None)
        return Combine(when, instead, Site.MODEL, feature="change")

    def abilities(self) -> tuple[Ability, ...]:
        """Return feature reuse, and the rule of the adjusted times if there is any to adjust."""
        if self.threshold == 0 or not self.time:
            return super().abilities()
        factors = self.measured()[READINGS[self.reading]].tolist()
        rules = (SigmaRule(tuple(factors)),) if min(factors) < 1 else ()
        return (*super().abilities(), *rules)

    def check_model(self, facts: Mapping[str, Any]) -> None:
        """Raise unless the tables fit the model, or may be measured with this scheduler."""
        super().check_model(facts)
        if self.time and self.threshold != 0 and not isinstance(self.tables, Tables):
            scheduler, config = facts["scheduler"], facts["scheduler_config"]
            check_scheduler(facts["model"], scheduler, config, ADVICE)
