"""Every metric that is computed here: its definition, source and requirements.

`python -m diffcache.eval.metrics.definitions --write docs/evaluation.md` puts the table into the
documentation, `--check` says whether it is up to date. `METRICS` are rows of the registry.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal, cast

from diffcache.eval.metrics.weight_files import WEIGHTS
from diffcache.eval.pages import between, entries, keep_pages
from diffcache.eval.record import ROOT
from diffcache.registry import Row, rows_of

Direction = Literal["up", "down", "none"]
BEGIN = "<!-- table of metrics: begin (generated, see eval/metrics/definitions.py) -->"
END = "<!-- table of metrics: end -->"
SHIPPED = ("sticker-features",)
TITLES = ("Metric", "Key", "Definition", "Source", "Library call", "Weights", "Offline stand-in", "Better")


@dataclass(frozen=True)
class Metric:
    """One metric."""

    key: str  # name in records
    title: str  # name in tables and plots
    definition: str  # one sentence, with the formula
    source: str  # paper or standard
    call: str  # function of this package that computes it
    weights: tuple[str, ...]  # names in `diffcache.eval.metrics.weight_files.WEIGHTS`
    packages: tuple[str, ...]  # modules beyond the base install that it imports, or the shipped model it uses
    stand_in: str  # key of the metric that is computed in its place without the weights, or empty
    direction: Direction  # whether more or less is better, or neither by itself
    unit: str  # empty where dimensionless
    group: str  # heading in the table

    @property
    def is_lite(self) -> bool:
        """Say whether it is an offline stand-in, which no published figure compares with."""
        return "_lite" in self.key


def _read(row: Row) -> Metric:
    words = {name: row.cells[name] for name in ("title", "definition", "call", "stand_in", "unit")}
    needed, imported = (tuple(filter(None, row.cells[name].split(", "))) for name in ("weights", "packages"))
    way = cast(Direction, row.cells["direction"])
    return Metric(
        key=row.name, source=row.paper, weights=needed, packages=imported, direction=way, group=row.family, **words
    )


METRICS: dict[str, Metric] = {name: _read(row) for name, row in rows_of("metric").items()}


def markdown() -> str:
    """Return the table of all metrics as Markdown, one heading and one table a group."""
    parts: list[str] = []
    for group in dict.fromkeys(metric.group for metric in METRICS.values()):
        rows = [_row(metric) for metric in METRICS.values() if metric.group == group]
        parts += [f"### {group}", "", *entries(TITLES, rows), ""]
    return "\n".join(parts)


def _row(metric: Metric) -> list[str]:
    files = [f"`{WEIGHTS[name].file}`" for name in metric.weights]
    files += [f"shipped `{name}`" for name in metric.packages if name in SHIPPED]
    title = f"{metric.title} ({metric.unit})" if metric.unit else metric.title
    instead = METRICS[metric.stand_in].title if metric.stand_in else "none"
    if not metric.weights and not metric.key.startswith("vbench_"):
        instead = "is one" if metric.is_lite else "not needed"
    better = {"up": "more ↑", "down": "less ↓", "none": "neither"}[metric.direction]
    cells = [title, f"`{metric.key}`", metric.definition, metric.source, metric.call]
    return [*cells, ", ".join(files) or "none", instead, better]


def insert(page: str) -> str:
    """Return a page with the table between its two markers."""
    return between(page, BEGIN, END, markdown())


main = keep_pages(insert, ROOT / "docs" / "evaluation.md")

if __name__ == "__main__":
    sys.exit(main())
