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
from diffcache.registry import rows_of

PAGE, RECORD, CHOICES = Path("docs/kernels.md"), "kernels.json", Path("kernels/choices.json")
HEAD = "## Operators\n"  # what stands before is written by hand
UNKNOWN = "not measured yet"
EXPLAINED = """\
*Bytes* are the least that have to be read and written, in millions. *Limit* is the time of a copy
of as many bytes, or of the products of matrices where these take longer, on the device of the
record. *Used by* says who calls the operator; `auto` takes the kernel where a ratio was measured.
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
    kernel = ways["kernel"].get("us")
    shown = [
        f"{name} {ways[name]['us'][1]:.1f}" if "us" in ways[name] else f"{name}: failed"
        for name in others
    ]
    missed = [target for target in row["targets"] if not target["met"]]
    ours = f"{kernel[1]:.1f} µs" if kernel else "failed"
    for target in missed:
        ours += f"; aim {target['wanted']:.3g} of {target['against']}, {target['got'] or 0:.3g}"
    return [*head, f"{row['limit_us']:.1f} µs", ours, ", ".join(shown) + " µs", used]


def chosen(directory: Path = ROOT) -> str:
    """Return the table of measured ratios, `{device: {operator: ratio}}`, as JSON."""
    record = read_json(directory / "assets" / "bench" / RECORD) or {}
    return json.dumps(record.get("choices", {}), indent=2, sort_keys=True) + "\n"


def made(before: str) -> str:
    """Return the page or the table of ratios, whichever the text that is there is."""
    return chosen() if before.startswith("{") else page()


main = keep_pages(made, ROOT / PAGE, ROOT / CHOICES)

if __name__ == "__main__":
    sys.exit(main())
