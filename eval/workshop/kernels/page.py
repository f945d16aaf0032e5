"""`docs/kernels.md` behind its introduction, and the table that chooses kernels: from records."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffcache.eval.kernels.case import KernelCase, all_cases
from diffcache.eval.pages import keep_pages, table
from diffcache.eval.record import ROOT
from diffcache.files import read_json
from diffcache.kernels.dispatch import SHIPPED_FOR
from diffcache.registry import rows_of

PAGE, RECORD, CHOICES = Path("docs/kernels.md"), "kernels.json", Path("kernels/choices.json")
HEAD = "## Operators\n"  # what stands before is written by hand
UNKNOWN = "not measured yet"
EXPLAINED = """\
*Bytes* are the least that have to be read and written, in millions. Times are medians in
microseconds: the device's own, and in brackets what passes from call to call where the device waits
for the host. *Limit* is the time of a copy of as many bytes, or of the products of matrices where
these take longer. *Aim* is what a kernel was to reach and did not: times as fast as another way, or
a share of the limit, and what it reached. A dash was not timed. *Used by* says who calls the
operator; `auto` takes the kernel where its ratio is above 1.
"""


def page(directory: Path = ROOT) -> str:
    """Return the whole page.

    Args:
        directory: The project, for its record and the introduction of the page.
    """
    introduction, _, _ = (directory / PAGE).read_text(encoding="utf-8").partition(HEAD)
    record = read_json(directory / "assets" / "bench" / RECORD) or {"rows": []}
    timed = {(row["operator"], row["model"], row["shapes"]): row for row in record["rows"]}
    titles = ("Operator", "Model and shapes", "Bytes", "Limit", "Kernel", "Others", "Used by")
    lines = []
    used = {name: row.cells["used"] for name, row in rows_of("kernel").items()}
    for case in all_cases():
        row = timed.get((case.operator, case.model, case.shapes))
        lines.append(_line(case, row, used[case.operator]))
    return "\n".join([introduction + HEAD, EXPLAINED, *table(titles, lines), ""])


def _line(case: KernelCase, row: Mapping[str, Any] | None, used: str) -> list[str]:
    head = [f"`{case.operator}`", f"{case.model}: {case.shapes}", f"{case.moved / 1e6:.3g}"]
    others = [name for name in case.ways if name != "kernel"]
    if row is None:
        return [*head, UNKNOWN, UNKNOWN, ", ".join(others), used]
    ways = row["ways"]
    shown = [f"{name} {_times(ways[name])}" if name in ways else f"{name} -" for name in others]
    missed = [target for target in row["targets"] if not target["met"]]
    ours = _times(ways["kernel"])
    for target in missed:
        ours += f"; aim {target['wanted']:.3g} of {target['against']}, {target['got'] or 0:.3g}"
    limit = f"{row['limit_us']:.1f}" if row["limit_us"] >= 0.1 else "below 0.1"
    return [*head, limit, ours, ", ".join(shown), used]


def _times(way: Mapping[str, Any]) -> str:
    """Return the medians of a way: the device's own, and in brackets that from call to call."""
    if "us" not in way:
        return "failed"
    called = f" ({way['called_us'][1]:.1f})" if "called_us" in way else ""
    return f"{way['us'][1]:.1f}{called}"


def chosen(directory: Path = ROOT) -> str:
    """Return `{device: {"choices": {operator: ratio}, "versions": {name: version}}}` as JSON."""
    record = read_json(directory / "assets" / "bench" / RECORD) or {"choices": {}}
    found = {
        device: {
            "choices": ratios,
            "versions": {name: record["versions"][name] for name in SHIPPED_FOR},
        }
        for device, ratios in record["choices"].items()
    }
    return json.dumps(found, indent=2, sort_keys=True) + "\n"


def made(before: str) -> str:
    """Return the page or the table of ratios, whichever the text that is there is."""
    return chosen() if before.startswith("{") else page()


main = keep_pages(made, ROOT / PAGE, ROOT / CHOICES)

if __name__ == "__main__":
    sys.exit(main())
