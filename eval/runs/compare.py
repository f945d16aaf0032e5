"""Two records of one task, row by row: for a pull request, or a nightly run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffcache.errors import DiffcacheError

_LIMIT = re.compile(r"(\w+)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)")
_SAME = ("model", "loading", "pipeline", "prompts", "samples", "seed", "steps", "call", "reference")


class CompareError(DiffcacheError):
    """Two records are not of one task."""


@dataclass(frozen=True)
class Bound:
    """A limit of the change of a metric, above or below which it is too much."""

    metric: str
    sign: str
    bound: float


@dataclass(frozen=True)
class Change:
    """A metric of a row in both records."""

    row: str
    metric: str  # key
    before: float  # value in the first record
    after: float  # value in the second
    apart: bool | None  # whether the 95 % intervals do not meet; None where there are none

    @property
    def words(self) -> str:
        """The change in print."""
        if self.after == self.before:
            return "the same"
        within = " (within the intervals)" if self.apart is False else ""
        return f"{self.after - self.before:+.3g}{within}"


def read_limit(text: str) -> Bound:
    """Read a limit such as `fid_lite>+0.5`, the change that is too much; raise ValueError if it cannot be read."""
    found = _LIMIT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"--fail-on {text!r}: write it like 'fid_lite>+0.5' or 'psnr_db<-1'")
    return Bound(found[1], found[2], float(found[3]))


def changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Change]:
    """Return every metric of every row that both records hold.

    Raises CompareError if the records are of different tasks, or share no row.
    """
    for name in _SAME:
        one, other = first["task"].get(name), second["task"].get(name)
        if one != other:
            raise CompareError(f"the records are of different tasks: {name} {one!r} and {other!r}")
    others = {row["name"]: row for row in second["rows"]}
    shared = [(row, others[row["name"]]) for row in first["rows"] if row["name"] in others]
    if not shared:
        raise CompareError("the records share no row")
    found = []
    for row, other in shared:
        for part in ("fidelity", "quality"):
            for metric, entry in row[part].items():
                if metric in other[part]:
                    found.append(_change(row["name"], metric, entry, other[part][metric]))
        for metric in ("evaluations", "held_bytes"):
            values = float(row[metric]), float(other[metric])
            found.append(Change(row["name"], metric, *values, None))
    return found


def _change(row: str, metric: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Change:
    apart = None
    if "low" in one and "low" in other:
        apart = one["high"] < other["low"] or other["high"] < one["low"]
    return Change(row, metric, one["value"], other["value"], apart)


def crossed(found: Sequence[Change], limits: Sequence[Bound]) -> list[str]:
    """Return a sentence for every limit that a row crosses.

    Raises ValueError if a limit names a metric that the records do not hold.
    """
    broken = []
    for limit in limits:
        here = [change for change in found if change.metric == limit.metric]
        if not here:
            known = ", ".join(sorted({change.metric for change in found}))
            raise ValueError(f"--fail-on: no metric {limit.metric!r} in the records; {known}")
        for change in here:
            moved = change.after - change.before
            too_much = moved > limit.bound if limit.sign == ">" else moved < limit.bound
            if too_much:
                broken.append(f"{change.row}: {limit.metric} {moved:+.3g} {limit.sign} {limit.bound}")
    return broken
