"""VBench's results: reading them, normalizing them, and the three scores made from them.

`normalized = (raw - low) / (high - low)`; quality and semantic scores are means of these, weighted; `total = (4
quality + semantic) / 5`. Source: VBench's `scripts/cal_final_score.py`, with one departure: that script counts a
missing dimension as 0 before normalizing; here a score whose dimensions are not all there does not exist.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffcache.eval.pages import table
from diffcache.eval.vbench import suite

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
        return tuple(name for name in suite.DIMENSIONS if name not in self.raw)

    def to_dict(self) -> dict[str, Any]:
        """Return the scores as JSON holds them."""
        return {
            "raw": dict(self.raw),
            "normalized": dict(self.normalized),
            "quality": self.quality,
            "semantic": self.semantic,
            "total": self.total,
            "missing": list(self.missing),
        }

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
    dimension = suite.DIMENSIONS[suite.choose([name])[0]]
    return (raw - dimension.low) / (dimension.high - dimension.low)


def summarize(raw: Mapping[str, float]) -> Scores:
    """Normalize raw scores and form those of the three scores that can be formed.

    Scores are shares from 0 to 1 by name of dimension; `imaging_quality` too (VBench divides it by 100 over the
    films).

    Raises:
        ValueError: A name is unknown or a score is no share.
    """
    for name, value in raw.items():
        suite.choose([name])
        if not (math.isfinite(value) and 0 <= value <= 1):
            raise ValueError(
                f"{name} must be a share from 0 to 1, but is {value}"
                + (": divide percentages by 100" if 1 < value <= 100 else "")
            )
    ordered = {name: float(raw[name]) for name in suite.DIMENSIONS if name in raw}
    normalized = {name: normalize(name, value) for name, value in ordered.items()}
    quality = _mean(normalized, suite.QUALITY)
    semantic = _mean(normalized, suite.SEMANTIC)
    total = None
    if quality is not None and semantic is not None:
        shares = suite.QUALITY_SHARE + suite.SEMANTIC_SHARE
        total = (suite.QUALITY_SHARE * quality + suite.SEMANTIC_SHARE * semantic) / shares
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
    weights = [suite.DIMENSIONS[name].weight for name in names]
    weighted = sum(w * normalized[name] for w, name in zip(weights, names, strict=True))
    return weighted / sum(weights)


def _read(file: Path) -> dict[str, float]:
    """Read one file of results in either form."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(data, dict) or not data:
        raise ValueError(f"{file} is no VBench result: it must map dimensions to scores")
    scores = {}
    for key, value in data.items():
        name = str(key).replace(" ", "_")
        score = value[0] if isinstance(value, list) and value else value
        if name not in suite.DIMENSIONS:
            raise ValueError(f"{file}: {key!r} is not one of VBench's 16 dimensions")
        if isinstance(score, bool) or not isinstance(score, (int, float)):
            raise ValueError(f"{file}: the score of {key} must be a number, but is {score!r}")
        if not (math.isfinite(score) and 0 <= score <= 1):
            raise ValueError(f"{file}: {key} must be a share from 0 to 1, but is {score}")
        scores[name] = float(score)
    return scores
