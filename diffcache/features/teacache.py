"""Skip while the rescaled changes of the input or of the time add up to little (TeaCache)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from diffcache.errors import AttachError, TablesError
from diffcache.features.base import Change
from diffcache.features.collect import Calibrated
from diffcache.features.combine import Combine
from diffcache.features.parts.accumulated import Accumulated, Rescaled
from diffcache.features.parts.instead import Reuse
from diffcache.features.parts.when import Every
from diffcache.features.schema import Entry, Schema
from diffcache.features.tables import Tables
from diffcache.presets.published import published_settings
from diffcache.ranges import Range

Input = Literal["modulated", "time", "time-projection"]
Degree = Annotated[int, Range(1, 8)]
INPUTS: tuple[Input, ...] = get_args(Input)
CHANGE = (1.0, 0.0)  # the polynomial that is the change itself
_EMBEDDING = "the time embedding (input='time')"
# Classes of the families whose official scripts feed the polynomial the time: what they look at.
BY_TIME = {
    "WanTransformer3DModel": "the time embedding (input='time'), or with use_ret_steps its "
    "projection (input='time-projection', warmup=5, last=False)",
    "CogVideoXTransformer3DModel": _EMBEDDING,
    "ConsisIDTransformer3DModel": _EMBEDDING,
    "HiDreamImageTransformer2DModel": _EMBEDDING,
}


@dataclass(frozen=True)
class TeaCache(Calibrated):
    """Reuse the stack's residual until the rescaled change of its modulated input adds up.

    At every step the first block's normed and modulated input, or the time embedding, is compared
    with that of the step before, `mean|new - old| / mean|old|`; a polynomial turns the change into
    an estimate of the change of the output, and the estimates are summed since the last computed
    step. Below `threshold` all blocks are skipped and the residual of every list is used again.
    Reference: TeaCache, arXiv 2411.19108, section 3 (equations 5 to 7 and the polynomial fit).
    Differs: the first guidance branch decides for all unless `by_branch` is set; the comparison is
    in float32; each list of blocks keeps its own residual; outside of the changes seen at
    calibration the polynomial stays at its value at the nearer end, where published `coefficients`
    are used as they are.

    The official scripts for Wan2.1 look at the time embedding (`input="time"`), or with
    `use_ret_steps` at its projection (`input="time-projection", warmup=5, last=False`), those for
    CogVideoX and ConsisID at the time embedding, that for HiDream at it with a tenth of the steps
    as `warmup` and `last=False`; all others at the modulated input. Guidance branches share the
    time, so that their separate sums in the script for Wan2.1 always agree. `published` has the
    settings of the scripts; those of Wan2.1 with `-ret` after the name are for `use_ret_steps`.

    Args:
        threshold: Smallest sum that is computed; dimensionless; 0 turns the cache off. 0.1 to 0.6.
        coefficients: A published polynomial, highest power first, for a model of the same family
            and the same `input`; (1, 0) is the change itself; None takes that of the tables.
        degree: Degree of the polynomial that a calibration fits, 1 to 8; 4 in the paper.
        tables: Tables of `diffcache.calibrate`, or a file it wrote.
        input: Compared tensor: the `modulated` input of the first attention, the `time`
            embedding, or the `time-projection` that modulates the blocks of Wan. None takes that
            of the tables or `modulated`, and is refused with `coefficients` on the families whose
            published ones are for the time embedding.
        warmup: First steps that are always computed, at least 1, or a share of the run below 1.
        last: Whether the last step of the run is always computed.
        by_branch: Whether every guidance branch adds up its own changes and decides for itself.
        model: Model that the coefficients were published for, as `published` names it; others
            are refused. Empty for any.

    Raises:
        ValueError: If coefficients and tables are given, or coefficients are no finite numbers.
        TablesError: If the tables are another method's, or were measured with another `input`.
        AttachError: If the model shows no such `input`, it must be named, or the coefficients
            are for other models.

    Examples:
        >>> method = diffcache.calibrate(pipe, TeaCache(0.25), prompts=[...])  # doctest: +SKIP
        >>> pipe = diffcache.wrap(pipe, method)  # doctest: +SKIP
        >>> pipe = diffcache.wrap(pipe, TeaCache.published("flux.1-dev"))  # doctest: +SKIP
    """

    numbers: ClassVar[str] = "coefficients"
    publishes: ClassVar[Mapping[str, Mapping[str, Any]]] = published_settings("teacache")
    collected_by: ClassVar[str] = "diffcache.offline.teacache_collect:Changes"
    schema: ClassVar[Schema] = Schema(
        {
            "coefficients": Entry(("degree+1",), low=-1e12, high=1e12),
            "range": Entry((2,), low=0, high=1e6),
            "points": Entry(("pairs", 2), low=0, high=1e6),
        },
        header={"degree": "count"},
    )

    threshold: Change = 0.25
    coefficients: tuple[float, ...] | None = None
    degree: Degree = 4
    tables: Tables | str | None = None
    input: Input | None = None
    warmup: float = 1
    last: bool = True
    by_branch: bool = False
    model: str = ""

    def __post_init__(self) -> None:
        if self.coefficients is not None:  # of any kind, such as numpy's
            object.__setattr__(self, "coefficients", check_coefficients(self.coefficients))
        super().__post_init__()

    def check(self) -> None:
        """Raise unless the gate can be made of the coefficients or the tables."""
        super().check()
        if isinstance(self.tables, Tables):
            _check_rises(self.tables)
        self._gate(Rescaled())
        if self.coefficients is not None and self.tables is not None:
            raise ValueError("coefficients and tables: give one of them")

    def parts(self) -> Combine:
        """Return a gate on the rescaled change of the input, and reuse between computed steps."""
        if self.threshold == 0:
            return Combine(Every(1), Reuse())
        if self.coefficients is not None:
            rescaled = Rescaled(self.coefficients)
        else:
            tables = self.measured()
            low, high = tables["range"].tolist()
            rescaled = Rescaled(tuple(tables["coefficients"].tolist()), low, high)
        return Combine(self._gate(rescaled), Reuse())

    def _gate(self, rescaled: Rescaled) -> Accumulated:
        """Return the gate, whose settings are checked where it is made."""
        return Accumulated(
            self.threshold, rescaled, warmup=self.warmup, last=self.last, of=self.compared(), by_branch=self.by_branch
        )

    def compared(self) -> Input:
        """Return the value to compare."""
        if not isinstance(self.tables, Tables):
            return self.input or "modulated"
        measured: Input = self.tables.header.get("input", "modulated")
        if measured not in INPUTS:
            raise TablesError(
                f"tables={self.tables!r}: input={measured!r} in their header: must be one of {', '.join(INPUTS)}"
            )
        if self.input not in (None, measured):
            raise TablesError(
                f"tables={self.tables!r}: measured with input={measured!r}, not {self.input!r}; "
                "leave input out, or calibrate again"
            )
        return measured

    def check_model(self, facts: Mapping[str, Any]) -> None:
        """Raise AttachError where the coefficients have no input named."""
        super().check_model(facts)
        family = facts["model"]
        published = self.coefficients not in (None, CHANGE)
        if not published or self.input is not None or family not in BY_TIME:
            return
        raise AttachError(
            f"coefficients={self.coefficients!r} on {family}: the published ones of this family "
            f"are for {BY_TIME[family]}; name it, or pass input='modulated' for a polynomial that "
            "was fitted to the modulated input"
        )


def _check_rises(tables: Tables) -> None:
    """Raise TablesError if a polynomial is nowhere above 0 for the changes it was fitted to.

    Nothing would ever add up, so that no step after the first would be computed. So it is where
    every change would be taken for the same one, as no change lies in the range.
    """
    low, high = tables["range"].tolist()
    if high < max(low, 1e-9):
        raise TablesError(f"tables={tables!r}: range={[low, high]}: no change; calibrate again")
    rescaled = Rescaled(tuple(tables["coefficients"].tolist()), low, high)
    if not any(rescaled.error(low + (high - low) * part / 16) > 1e-9 for part in range(17)):
        raise TablesError(
            f"tables={tables!r}: their polynomial is nowhere above 0 from {low:g} to {high:g}, so "
            "that nothing would be computed; calibrate again"
        )


def check_coefficients(values: Any) -> tuple[float, ...]:
    """Return finite coefficients as a tuple; raise ValueError if there are none or one is no finite number."""
    try:
        made = () if isinstance(values, str) else tuple(float(value) for value in values)
    except (TypeError, ValueError):
        made = ()
    if not made or not all(map(math.isfinite, made)):
        raise ValueError(f"coefficients={values!r}: must be finite numbers, highest power first")
    return made
