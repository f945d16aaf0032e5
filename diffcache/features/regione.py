"""Compute only the edited region of an instruction edit, and let its velocity decay (RegionE)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch

from diffcache.errors import AttachError
from diffcache.features.base import Ability, check_int, is_number
from diffcache.features.collect import Calibrated
from diffcache.features.combine import Combine
from diffcache.features.parts.instead import Reuse
from diffcache.features.parts.region_mask import Planned, RegionPlan
from diffcache.features.schema import Entry, Schema
from diffcache.features.tables import Tables
from diffcache.step import Site

STEPS = 28  # of the published ratios
_KONTEXT = (
    ".8352 .9986 1.0090 1.0097 1.0161 1.0152 1.0160 1.0173 1.0177 1.0199 1.0213 1.0203 1.0257 "
    "1.0236 1.0235 1.0278 1.0302 1.0311 1.0352 1.0371 1.0391 1.0459 1.0498 1.0581 1.0693 1.0866 "
    "1.1090"
)
_STEP1X = (
    ".9746 .9593 1.0036 1.0084 1.0106 1.0114 1.0138 1.0163 1.0152 1.0163 1.0197 1.0186 1.0219 "
    "1.0218 1.0223 1.0266 1.0272 1.0305 1.0311 1.0362 1.0385 1.0423 1.0500 1.0536 1.0671 1.0866 "
    "1.1015"
)
_STEP1X_V1P2 = (
    ".7936 .9807 1.0063 1.0205 .9946 1.0125 1.0116 1.0125 1.0172 1.0171 1.0183 1.0170 1.0170 "
    "1.0236 1.0263 1.0264 1.0277 1.0321 1.0338 1.0361 1.0396 1.0454 1.0492 1.0566 1.0696 1.0879 "
    "1.1179"
)
_QWEN = (
    "1.0195 1.0233 1.0243 1.0185 1.0321 1.0208 1.0260 1.0233 1.0258 1.0292 1.0316 1.0306 1.0289 "
    "1.0347 1.0329 1.0402 1.0378 1.0384 1.0413 1.0444 1.0526 1.0400 1.0555 1.0439 1.0357 1.0118 "
    ".7603"
)
_QWEN_2509 = (
    "1.0186 1.0241 1.0236 1.0205 1.0298 1.0221 1.0248 1.0246 1.0269 1.0275 1.0323 1.0311 1.0298 "
    "1.0353 1.0343 1.0397 1.0387 1.0393 1.0404 1.0458 1.0507 1.0418 1.0518 1.0426 1.0311 1.0068 "
    ".7628"
)


@dataclass(frozen=True)
class PublishedRatios:
    """The published settings for one model: ratios of the velocity's norm, and two thresholds.

    Attributes:
        ratios: Ratios as printed, separated by spaces, one for every step but the first.
        threshold: Cosine similarity up to which a token is edited.
        decay: Most decay through which steps are skipped.
        denoiser: Class of the model's denoiser; empty where diffusers has none.
    """

    ratios: str
    threshold: float
    decay: float
    denoiser: str = ""

    @property
    def gamma(self) -> tuple[float, ...]:
        """The ratios as the official code holds them, rounded to float16."""
        return tuple(torch.tensor([float(x) for x in self.ratios.split()]).half().tolist())


MODELS = {
    "flux-kontext": PublishedRatios(_KONTEXT, 0.93, 0.04, "FluxTransformer2DModel"),
    "step1x-edit": PublishedRatios(_STEP1X, 0.88, 0.02),
    "step1x-edit-v1p2": PublishedRatios(_STEP1X_V1P2, 0.88, 0.02),
    "qwen-image-edit": PublishedRatios(_QWEN, 0.80, 0.03, "QwenImageTransformer2DModel"),
    "qwen-image-edit-2509": PublishedRatios(_QWEN_2509, 0.80, 0.03, "QwenImageTransformer2DModel"),
}


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
        ValueError: If a setting is out of its range.
        TablesError: If `tables` does not hold one ratio for every step but the first.

    Example:
        >>> pipe = diffcache.wrap(pipe, RegionE("qwen-image-edit"))  # doctest: +SKIP
    """

    name: ClassVar[str] = "regione"

    collected_by: ClassVar[str] = "diffcache.offline.regione_collect:VelocityRatios"
    schema: ClassVar[Schema] = Schema({"gamma": Entry(("steps-1",), low=0.01, high=100)})

    model: str = "flux-kontext"
    threshold: float | None = None
    decay: float | None = None
    warmup: int = 6
    post: int = 2
    refresh: tuple[int, ...] = (15,)
    morphology: bool = True
    official: bool = True
    tables: Tables | str | None = None

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"model={self.model!r}: must be one of {', '.join(MODELS)}")
        _check_number("threshold", self.threshold)
        _check_number("decay", self.decay)
        check_int("warmup", self.warmup, 1, " (the first step has no keys to attend to)")
        check_int("post", self.post, 0)
        for name in ("morphology", "official"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be True or False")
        if not isinstance(self.refresh, (tuple, list)):
            raise ValueError(f"refresh={self.refresh!r}: must be a tuple of steps such as (15,)")
        object.__setattr__(self, "refresh", tuple(self.refresh))
        self.load_tables()
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
        """Raise unless the ratios, fitted or published, are of this model.

        Raises:
            TablesError: If they were fitted to another model or scheduler.
            AttachError: If they were published for another model.
        """
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


def _check_number(name: str, value: object) -> None:
    if value is not None and (not is_number(value) or value != value):
        raise ValueError(f"{name}={value!r}: must be a number, or None for the published one")


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
