"""The 16 dimensions of VBench: weights, ranges, prompts and weight files; results, and the scores made from them.

Source: VBench, arXiv 2311.17982, and its repository (Apache-2.0): `scripts/constant.py` for weights and ranges,
`prompts/README.md` for prompts and samples, `scripts/cal_final_score.py` for scores:
`normalized = (raw - low) / (high - low)`; quality and semantic scores are means of these, weighted;
`total = (4 quality + semantic) / 5`. One departure: that script counts a missing dimension as 0 before normalizing;
here a score whose dimensions are not all there does not exist.

The one dimension that needs no weights is measured here, on any films. VBench itself drops films that move first, so
its own number is of fewer films.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from diffcache.eval.metrics.sets import interval
from diffcache.eval.metrics.weight_files import WEIGHTS, WeightFile
from diffcache.eval.pages import table
from diffcache.eval.samples.clips import read_clip
from diffcache.eval.samples.folders import open_films

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


def json_of(file: Path) -> Any:
    """Read a file of JSON; raises ValueError if it is none."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no JSON: {error}") from error


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
    """Return the number of films that a prompt of these dimensions needs; `each` for all but flickering."""
    return each * FLICKER_TIMES if FLICKER in dimensions else each


ENDING = "_eval_results.json"


@dataclass(frozen=True)
class Scores:
    """Scores of one model; all are shares from 0 to 1 (a normalized one can leave that range)."""

    raw: Mapping[str, float]  # raw score of every dimension that was measured
    normalized: Mapping[str, float]  # raw scores brought to VBench's ranges
    quality: float | None  # weighted mean of seven dimensions; None unless all are there
    semantic: float | None  # mean of nine dimensions; None unless all are there
    total: float | None  # `(4 quality + semantic) / 5`; None unless all 16 are there

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the dimensions without a score."""
        return tuple(name for name in DIMENSIONS if name not in self.raw)

    def to_dict(self) -> dict[str, Any]:
        """Return the scores as JSON holds them."""
        return {**asdict(self), "missing": list(self.missing)}

    def markdown(self) -> str:
        """Return a table, in percent as VBench's leaderboard shows it."""
        rows = [[n, f"{v:.2%}", f"{self.normalized[n]:.2%}"] for n, v in self.raw.items()]
        for title in ("quality", "semantic", "total"):
            score = getattr(self, title)
            rows.append([f"**{title} score**", "", "n/a" if score is None else f"{score:.2%}"])
        return "\n".join(table(["dimension", "raw", "normalized"], rows, numbers=True))


def normalize(name: str, raw: float) -> float:
    """Map a raw score onto VBench's range, before its weight.

    Raises:
        ValueError: The dimension is unknown.
    """
    dimension = DIMENSIONS[choose([name])[0]]
    return (raw - dimension.low) / (dimension.high - dimension.low)


def summarize(raw: Mapping[str, float]) -> Scores:
    """Normalize raw scores, and compute the total scores whose dimensions are all there.

    Scores are shares from 0 to 1 by name of dimension; `imaging_quality` too (VBench divides it by 100 over the
    films).

    Raises:
        ValueError: A name is unknown or a score is no share.
    """
    for name, value in raw.items():
        choose([name])
        if not (math.isfinite(value) and 0 <= value <= 1):
            raise ValueError(
                f"{name} must be a share from 0 to 1, but is {value}"
                + (": divide percentages by 100" if 1 < value <= 100 else "")
            )
    ordered = {name: float(raw[name]) for name in DIMENSIONS if name in raw}
    normalized = {name: normalize(name, value) for name, value in ordered.items()}
    quality = _mean(normalized, QUALITY)
    semantic = _mean(normalized, SEMANTIC)
    total = None
    if quality is not None and semantic is not None:
        shares = QUALITY_SHARE + SEMANTIC_SHARE
        total = (QUALITY_SHARE * quality + SEMANTIC_SHARE * semantic) / shares
    return Scores(ordered, normalized, quality, semantic, total)


def read_results(path: str | Path) -> dict[str, float]:
    """Read the scores in one file, or in every `*_eval_results.json` of a folder.

    A folder without such files is read for `*.json` with `{dimension: number}`. In both forms a
    name can have spaces for underscores.

    Raises:
        FileNotFoundError: There is no result.
        ValueError: A file is no result, or two disagree; names the files.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob(f"*{ENDING}")) or sorted(path.glob("*.json"))
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise FileNotFoundError(f"no VBench result in {path}: it has no *{ENDING}")
    scores: dict[str, float] = {}
    source: dict[str, Path] = {}
    for file in files:
        for name, value in _read(file).items():
            if scores.get(name, value) != value:
                raise ValueError(f"{source[name]} and {file} disagree on {name}: {scores[name]} and {value}")
            scores[name], source[name] = value, file
    return scores


def _mean(normalized: Mapping[str, float], names: Sequence[str]) -> float | None:
    """Return the weighted mean of the named scores, or None if one is missing."""
    if any(name not in normalized for name in names):
        return None
    weights = [DIMENSIONS[name].weight for name in names]
    weighted = sum(w * normalized[name] for w, name in zip(weights, names, strict=True))
    return weighted / sum(weights)


def _read(file: Path) -> dict[str, float]:
    """Read one file of results in either form."""
    data = json_of(file)
    if not isinstance(data, dict) or not data:
        raise ValueError(f"{file} is no VBench result: it must map dimensions to scores")
    scores = {}
    for key, value in data.items():
        name = str(key).replace(" ", "_")
        score = value[0] if isinstance(value, list) and value else value
        if name not in DIMENSIONS:
            raise ValueError(f"{file}: {key!r} is not one of VBench's 16 dimensions")
        if isinstance(score, bool) or not isinstance(score, (int, float)):
            raise ValueError(f"{file}: the score of {key} must be a number, but is {score!r}")
        if not (math.isfinite(score) and 0 <= score <= 1):
            raise ValueError(f"{file}: {key} must be a share from 0 to 1, but is {score}")
        scores[name] = float(score)
    return scores


SCHEMA = "diffcache.films/1"


def measure_films(folder: Path, progress: Callable[[Sequence[Path]], Iterable[Path]] = iter) -> dict[str, Any]:
    """Measure temporal flickering of the films of a folder.

    They are film files, or folders with one picture a frame.

    Returns:
        `warnings`: names of files left out. `summary`: the mean over films with its 95 % bootstrap interval (the
        value alone of one film). `results`: every film's value, in the shape of VBench's results.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: It holds no film, or one is damaged or has a single frame; names the file.
    """
    films = open_films(folder)
    values = []
    for file in progress(films.files):
        frames = read_clip(file)
        if len(frames) < 2:
            raise ValueError(f"{file} has a single frame: flickering needs 2 frames or more")
        values.append(temporal_flickering(frames))
    column = torch.tensor(values, dtype=torch.float64)
    rows = zip(films.files, values, strict=True)
    by_film = [{"video_path": str(file), "video_results": value} for file, value in rows]
    return {
        "schema": SCHEMA,
        "backend": "own",
        "count": len(values),
        "warnings": list(films.notes),
        "summary": {FLICKER: interval(FLICKER, column)},
        "results": {FLICKER: [float(column.mean()), by_film]},
    }


def temporal_flickering(frames: torch.Tensor) -> float:
    """Return VBench's score: one minus the mean absolute change between frames.

    `(255 - mean_t mean_px |F_t - F_{t+1}|) / 255`; sums in float32 over B, G, R as in VBench, so that the values are
    equal to the last bit.

    Args:
        frames: uint8 [F, 3, H, W], RGB, two frames or more.
    """
    film = frames.permute(0, 2, 3, 1).numpy()
    pictures = (np.ascontiguousarray(frame[..., ::-1], dtype=np.float32) for frame in film)
    changes = [np.mean(np.abs(a - b)) for a, b in pairwise(pictures)]
    return (255.0 - float(np.mean(np.array(changes)))) / 255.0
