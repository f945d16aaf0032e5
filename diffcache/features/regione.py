"""Compute only the edited region of an instruction edit, and let its velocity decay (RegionE)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar

import torch

from diffcache.errors import AttachError
from diffcache.features.base import Ability, check_int
from diffcache.features.collect import Calibrated
from diffcache.features.combine import Combine
from diffcache.features.parts.instead import Reuse
from diffcache.features.parts.region_mask import Planned, RegionPlan
from diffcache.features.schema import Entry, Schema
from diffcache.features.tables import Tables
from diffcache.presets.published import published_settings
from diffcache.ranges import Range, Whole
from diffcache.step import Site

STEPS = 28  # of the published ratios


@dataclass(frozen=True)
class PublishedRatios:
    """The published settings for one model: ratios of the velocity's norm, and two thresholds."""

    ratios: tuple[float, ...]  # ratios as printed, one for every step but the first
    threshold: float  # cosine similarity up to which a token is edited
    decay: float  # most decay through which steps are skipped
    denoiser: str = ""  # class of the model's denoiser; empty where diffusers has none

    @property
    def gamma(self) -> tuple[float, ...]:
        """The ratios as the official code holds them, rounded to float16."""
        return tuple(torch.tensor(self.ratios).half().tolist())


MODELS = {name: PublishedRatios(**entry) for name, entry in published_settings("regione").items()}


@dataclass(frozen=True)
class RegionE(Calibrated):
    """Compute the edited tokens alone while the rest moves on a straight line.

    Reference: RegionE, arXiv 2510.25590 (adaptive region partition, region-aware generation with
    the region-instruction KV cache, adaptive velocity decay cache), and its official code. A run
    has a stabilisation stage, which computes everything and ends with a choice of the edited
    tokens (by the similarity of the one-step clean estimate with the reference image); a region
    stage, whose steps compute the edited tokens against keys and values kept of all the others,
    with a refresh in the middle; and a smoothing stage, which computes everything again. In the
    region stage the rows that are not edited keep the velocity of the last full step, and whole
    steps are skipped while the norm of the velocity, `v_i = r_i * v_(i-1)` with
    `r_i = gamma_i * (1 - (t_(i-1) - t_i) / 1000)`, has decayed by no more than `decay`. The
    official code multiplies a skipped velocity by the current ratio only, however many were
    skipped before it (`official=True`); the paper's decay accumulates (`official=False`).

    It serves `FluxKontextPipeline`, `QwenImageEditPipeline` and `QwenImageEditPlusPipeline`, with
    one reference image of the result's size and steps of Euler's method.
    Departures:

    - Keys are kept after their norm and rotation, not before: both work on single rows with
      fixed positions, so that the attention is the same.
    - Guidance branches have stores of their own; the official code for FLUX.1-Kontext has one.
    - The official code serves one sample at a time; here every sample of a batch has its own
      edited tokens, and shorter lists are filled up with copies of a row.
    - Where nothing is edited, the region steps are skipped and every row moves straight.
    - Runs of other than 28 steps need ratios fitted to them (`diffcache.calibrate`); the stages
      are then scaled with the number of steps.

    Args:
        model: Model whose published settings are used: `flux-kontext`, `step1x-edit`,
            `step1x-edit-v1p2`, `qwen-image-edit` or `qwen-image-edit-2509`.
        threshold: Cosine similarity with the reference up to which a token counts as edited
            (the paper's eta); above 1 all do, below -1 none. None takes the published one.
        decay: Most decay of the velocity's norm through which steps are skipped (the paper's
            delta), as a part of 1; below 0 no step is skipped. None takes the published one.
        warmup: Steps of the stabilisation stage in a run of 28, at least 1.
        post: Steps of the smoothing stage in a run of 28.
        refresh: Steps of the region stage, from 0 and in a run of 28, that compute everything.
        morphology: Remove scattered tokens and widen the edited region.
        official: Decay as the official code does; False accumulates it.
        tables: Fitted ratios, or a file of them; they set the number of steps.

    Raises:
        ValueError: If there is no such model, or the stages leave no step.
        TablesError: If `tables` does not hold one ratio for every step but the first.
    """

    collected_by: ClassVar[str] = "diffcache.offline.regione_collect:VelocityRatios"
    schema: ClassVar[Schema] = Schema({"gamma": Entry(("steps-1",), low=0.01, high=100)})

    model: str = "flux-kontext"
    threshold: Annotated[float, Range(-math.inf, endless=True)] | None = None
    decay: Annotated[float, Range(-math.inf, endless=True)] | None = None
    warmup: Annotated[int, Range(1), " (the first step has no keys to attend to)"] = 6
    post: Whole = 2
    refresh: tuple[int, ...] = (15,)
    morphology: bool = True
    official: bool = True
    tables: Tables | str | None = None

    def check(self) -> None:
        """Raise unless the stages fit into a run, and tables are such."""
        if self.model not in MODELS:
            raise ValueError(f"model={self.model!r}: must be one of {', '.join(MODELS)}")
        object.__setattr__(self, "refresh", tuple(self.refresh))
        super().check()
        self.plan()

    @property
    def steps(self) -> int:
        """Number of steps of the runs that the ratios are for."""
        return self.tables.steps if isinstance(self.tables, Tables) else STEPS

    def plan(self) -> RegionPlan:
        """Return the plan of a run: the tokens that every step computes."""
        published = MODELS[self.model]
        total = self.steps
        warmup, post = (scaled(value, total) for value in (self.warmup, self.post))
        for index in self.refresh:
            check_int("refresh", index, 1)
        refresh = tuple(sorted({scaled(index, total) for index in self.refresh}))
        _check_refresh(refresh, warmup, post, total)
        return RegionPlan(
            total=total,
            warmup=warmup,
            post=post,
            refresh=refresh,
            threshold=published.threshold if self.threshold is None else self.threshold,
            morphology=self.morphology,
            gamma=self._gamma(),
            decay=published.decay if self.decay is None else self.decay,
            official=self.official,
        )

    def _gamma(self) -> tuple[float, ...]:
        if not isinstance(self.tables, Tables):
            return MODELS[self.model].gamma
        return tuple(self.tables["gamma"].tolist())

    def check_model(self, facts: Mapping[str, Any]) -> None:
        """Raise unless the ratios are of this model: TablesError for fitted ones, AttachError for published ones."""
        super().check_model(facts)
        if self.tables is None:
            _check_published(self.model, facts.get("model"))

    def parts(self) -> Combine:
        """Return the planned skips with the last velocity, which the plan lets decay."""
        return Combine(Planned(self.steps), Reuse(), Site.MODEL)

    def abilities(self) -> tuple[Ability, ...]:
        """Return feature reuse, and the plan that the attachment carries out on the tokens."""
        return (*super().abilities(), self.plan())


def scaled(value: int, total: int) -> int:
    """Return a number of steps in 28 as one in `total`; only 0 becomes 0."""
    return value and max(1, round(value * total / STEPS))


def _check_published(model: str, denoiser: object) -> None:
    """Raise AttachError if published settings of one model are asked for with another's denoiser.

    A denoiser of a class that no published settings are for may be a model's own, and is served.
    """
    fitting = [repr(name) for name, entry in MODELS.items() if entry.denoiser == denoiser]
    if fitting and MODELS[model].denoiser != denoiser:
        raise AttachError(
            f"model={model!r}: its published ratios are of another model than this {denoiser}; set "
            f"model={' or '.join(fitting)}, or fit ratios: diffcache.calibrate(pipe, RegionE(...), "
            "prompts=[...])"
        )


def _check_refresh(refresh: tuple[int, ...], warmup: int, post: int, total: int) -> None:
    first, last = warmup + 1, total - post - 2
    allowed = f"in runs of {total} steps with warmup={warmup} and post={post}"
    if warmup + post >= total:
        raise ValueError(f"warmup={warmup}, post={post}: leave no step {allowed}")
    for index in refresh:
        if not first <= index <= last:
            raise ValueError(f"refresh={refresh!r}: must be from {first} to {last} {allowed}")
    if any(b - a == 1 for a, b in pairwise(refresh)):
        raise ValueError(f"refresh={refresh!r}: no two may be neighbors {allowed}")
