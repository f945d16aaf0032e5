"""Tables of methods on a shipped model: rows with intervals, a report and a plot.

For models whose call takes more than a prompt. A report is one JSON file that grows row by row, so
that an interrupted measurement goes on; `eval/method_page.py` shows its rows.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffcache.features.base import Method
from diffcache.features.collect import Calibrated
from diffcache.pipelines.small.export import versions

UNCACHED = "uncached"
Row = dict[str, Any]


def named(name: str, settings: Mapping[str, Any]) -> str:
    """Return a catalogue name with settings as on the command line: `taylorseer:every=5`."""
    given = ",".join(f"{key}={value}" for key, value in settings.items())
    return f"{name}:{given}" if given else name


def described(method: Method) -> str:
    """Return a method as text, without its tables."""
    if not isinstance(method, Calibrated):
        return repr(method)
    return repr(replace(method, tables=None))  # type: ignore[type-var]


def interval(values: Tensor, draws: int = 10_000, seed: int = 0) -> dict[str, float]:
    """Return the mean of one value a sample with its 95 % percentile bootstrap interval.

    Samples are drawn with replacement and the mean is taken again (Efron 1979).

    Args:
        values: `[N]`, N at least 2, any dtype.
        draws: Resamplings.
        seed: Of the resampling.

    Returns:
        `value`, `low`, `high` and `n`.

    Raises:
        ValueError: If there are fewer than two values, or one is not finite.
    """
    table = values.double()
    if table.ndim != 1 or len(table) < 2 or not bool(table.isfinite().all()):
        raise ValueError(
            f"values of shape {tuple(values.shape)}: must be at least two finite numbers, [N]"
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(table), (draws, len(table)), generator=generator)
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = table[chosen].mean(1).quantile(ends).tolist()
    return {"value": float(table.mean()), "low": low, "high": high, "n": len(table)}


def change(one: Tensor, other: Tensor) -> dict[str, float | bool]:
    """Return by how much the mean of `one` is above that of `other`, paired, with its interval.

    Args:
        one: One value a sample, `[N]`.
        other: The same samples without the method, `[N]`.
    """
    return {**interval(one.double() - other.double()), "paired": True}


def rounded(found: Mapping[str, Any], digits: int = 4) -> dict[str, Any]:
    """Return a dict with its floats rounded."""
    return {k: round(v, digits) if isinstance(v, float) else v for k, v in found.items()}


def flags_of(text: str) -> Tensor:
    """Return the outcomes that a row keeps as a text of 0 and 1, bool `[N]`."""
    return torch.tensor([flag == "1" for flag in text])


def text_of(flags: Tensor) -> str:
    """Return outcomes, bool `[N]`, as a text of 0 and 1."""
    return "".join("01"[int(flag)] for flag in flags)


def digest(directory: Path) -> str:
    """Return the SHA-256 of a pipeline's weights, by which rows of another model are told."""
    found = hashlib.sha256()
    for path in sorted(directory.rglob("*.safetensors")):
        found.update(path.relative_to(directory).as_posix().encode() + path.read_bytes())
    return found.hexdigest()


@dataclass
class Report:
    """A JSON report that grows row by row.

    Args:
        path: The file.
        about: What was measured and how: rows are kept only if all of it is equal.
        words: `quality` and `fidelity`, each the `key` in the rows' `quality` and `fidelity` and
            its `title`, and further words for the reader.
        rows: By name.
    """

    path: Path
    about: dict[str, Any]
    words: dict[str, Any]
    rows: dict[str, Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path.exists():
            return
        before = json.loads(self.path.read_text(encoding="utf-8"))
        other = [key for key, value in self.about.items() if before.get(key) != value]
        if other:
            print(f"{self.path.name}: has another {', '.join(other)}; its rows are measured anew")
        else:
            self.rows = {row["name"]: row for row in before["rows"]}

    def add(self, row: Row) -> None:
        """Add a row and write the file, atomically.

        Raises:
            ValueError: If a number is not finite.
        """
        self.rows[row["name"]] = row
        made = {
            **self.about,
            **self.words,
            "device": "cpu",
            "threads": torch.get_num_threads(),
            "date": datetime.date.today().isoformat(),
            "versions": versions(),
            "rows": list(self.rows.values()),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(made, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(part, self.path)
        shown = {key: value for key, value in row.items() if key != "outcomes"}
        print(json.dumps(shown), flush=True)

    def plot(self) -> Path | None:
        """Draw quality over the FLOPs ratio, beside the report; None without matplotlib."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            print("no plot drawn: matplotlib is not installed (pip install 'diffcache[eval]')")
            return None
        figure = Figure(figsize=(7, 4.5), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        key, title = self.words["quality"]["key"], self.words["quality"]["title"]
        _draw(axes, list(self.rows.values()), key)
        axes.set(xlabel="times fewer FLOPs", ylabel=title)
        axes.set_title(f"{self.about['model']}, {self.about['steps']} steps, 95 % intervals")
        axes.grid(alpha=0.3)
        figure.legend(loc="outside right upper", fontsize=8)
        path = self.path.with_suffix(".png")
        part = path.with_name(path.name + ".part")
        figure.savefig(part, format="png", metadata={"Software": None})
        os.replace(part, path)
        return path


def _draw(axes: Any, rows: list[Row], key: str) -> None:
    """Draw the uncached row as a line with a band, every method in a colour and mark of its own."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["name"].partition(":")[0], []).append(row)
    for plain in groups.pop(UNCACHED, []):
        found = plain["quality"][key]
        axes.axhline(found["value"], color="0.4", linewidth=1, label=UNCACHED)
        axes.axhspan(found["low"], found["high"], color="0.4", alpha=0.12, linewidth=0)
    for number, (name, group) in enumerate(groups.items()):
        found = [row["quality"][key] for row in group]
        values = [each["value"] for each in found]
        lengths = [[max(e["value"] - e["low"], 0) for e in found],
                   [max(e["high"] - e["value"], 0) for e in found]]  # fmt: skip
        axes.errorbar(
            [row["flops_ratio"] for row in group],
            values,
            yerr=lengths,
            fmt="osD^vPX*<>"[number % 10],
            color=f"C{number % 10}",
            markersize=5,
            elinewidth=1,
            capsize=2,
            label=name,
        )
