"""The 16 dimensions of VBench: weights, ranges, prompts, and the weight files that each needs.

Source: VBench, arXiv 2311.17982, and its repository (Apache-2.0): `scripts/constant.py` for weights
and ranges, `prompts/README.md` for prompts and samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from diffcache.eval.metrics.weights import WEIGHTS, WeightFile

SAMPLES = 5  # films a prompt
FLICKER_TIMES = 5  # as many of flickering, of which VBench's static filter keeps those that are still
FLICKER = "temporal_flickering"


@dataclass(frozen=True)
class Dimension:
    """One dimension of VBench."""

    name: str  # name in VBench's files
    group: Literal["quality", "semantic"]  # score that it belongs to
    low: float  # raw score that counts as 0
    high: float  # raw score that counts as 1
    prompts: int  # number of prompts in the standard suite
    weight: float = 1.0  # share within its group, dimensionless
    custom: bool = True  # whether VBench measures it on films of any prompt (mode `custom_input`)

    @property
    def files(self) -> tuple[WeightFile, ...]:
        """The weight files that VBench loads for it."""
        return tuple(w for w in WEIGHTS.values() if f"vbench_{self.name}" in w.used_by)


_ALL = (
    Dimension("subject_consistency", "quality", 0.1462, 1.0, 72),
    Dimension("background_consistency", "quality", 0.2615, 1.0, 86),
    Dimension(FLICKER, "quality", 0.6293, 1.0, 75),
    Dimension("motion_smoothness", "quality", 0.706, 0.9975, 72),
    Dimension("dynamic_degree", "quality", 0.0, 1.0, 72, weight=0.5),
    Dimension("aesthetic_quality", "quality", 0.0, 1.0, 93),
    Dimension("imaging_quality", "quality", 0.0, 1.0, 93),
    Dimension("object_class", "semantic", 0.0, 1.0, 79, custom=False),
    Dimension("multiple_objects", "semantic", 0.0, 1.0, 82, custom=False),
    Dimension("human_action", "semantic", 0.0, 1.0, 100),
    Dimension("color", "semantic", 0.0, 1.0, 85, custom=False),
    Dimension("spatial_relationship", "semantic", 0.0, 1.0, 84, custom=False),
    Dimension("scene", "semantic", 0.0, 0.8222, 86, custom=False),
    Dimension("appearance_style", "semantic", 0.0009, 0.2855, 90, custom=False),
    Dimension("temporal_style", "semantic", 0.0, 0.364, 100),
    Dimension("overall_consistency", "semantic", 0.0, 0.364, 93),
)
DIMENSIONS: dict[str, Dimension] = {dimension.name: dimension for dimension in _ALL}
QUALITY = tuple(d.name for d in _ALL if d.group == "quality")
SEMANTIC = tuple(d.name for d in _ALL if d.group == "semantic")
QUALITY_SHARE, SEMANTIC_SHARE = 4.0, 1.0  # of the total score


def choose(names: Sequence[str] | None, custom: bool = False) -> list[str]:
    """Check names of dimensions and return them once each, in VBench's order.

    None are all that apply; `custom` films are of prompts outside the standard suite.

    Raises:
        ValueError: A name is unknown, or VBench does not measure it on such films.
    """
    wanted = list(DIMENSIONS) if names is None else list(names)
    unknown = [name for name in wanted if name not in DIMENSIONS]
    if unknown or not wanted:
        raise ValueError(
            f"unknown VBench dimension {', '.join(unknown) or '(none given)'}: must be of {', '.join(DIMENSIONS)}"
        )
    refused = [name for name in wanted if custom and not DIMENSIONS[name].custom]
    if refused and names is not None:
        raise ValueError(
            f"VBench measures {', '.join(refused)} on its standard prompts only: leave out, or "
            "give its VBench_full_info.json and films of those prompts"
        )
    return [name for name in DIMENSIONS if name in wanted and name not in refused]


def samples(dimensions: Iterable[str], each: int = SAMPLES) -> int:
    """Return how many films a prompt of these dimensions needs."""
    return each * FLICKER_TIMES if FLICKER in dimensions else each
