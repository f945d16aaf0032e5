"""Write the table of docs/methods.md that compares methods with other code, by running the tests.

    python -m diffcache.eval.workshop.compared --write

The tests that take the fixture `agrees` are run; they need diffusers, cache-dit and hicache-pp.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from diffcache.eval.pages import between, keep_pages, table
from diffcache.eval.record import ROOT
from diffcache.registry import rows_of

PAGE = ROOT / "docs" / "methods.md"
TESTS = ("tests/features", "tests/test_references.py")
TITLES = ("method", "compared with", "largest difference", "computed steps", "test")
NONE = "not compared"
BEGIN, END = (f"<!-- {place} of the comparisons -->" for place in ("beginning", "end"))
# method, source, largest difference, whether steps were compared, file of the test
Row = tuple[str, str, float | None, bool, str]


class Comparisons:
    """A plugin of pytest that runs the comparing tests alone, and keeps their findings."""

    __name__ = "compared"

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.missing: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests that compare."""
        items[:] = [item for item in items if "agrees" in getattr(item, "fixturenames", ())]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the findings of a test, or that it has none."""
        if not report.passed:
            self.missing.append(report.nodeid)
        elif report.when == "call":
            self.rows += [row for name, row in report.user_properties if name == "agrees"]  # type: ignore[misc]


def compare() -> list[Row]:
    """Run all comparisons, and return their findings.

    Raises:
        ValueError: If one failed or was skipped.
    """
    found = Comparisons()
    pytest.main(["-q", "--no-header", *(str(ROOT / name) for name in TESTS)], [found])
    if found.missing or not found.rows:
        raise ValueError(f"these comparisons were not made: {', '.join(found.missing) or 'all'}")
    return found.rows


def lines_of(found: list[Row]) -> list[str]:
    """Return the table: for each method and source the largest difference of all its tests."""
    merged: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        merged.setdefault(row[:2], []).append(row)
    rows = []
    for name in rows_of("method"):
        sources = [source for method, source in merged if method == name]
        for source in sources or [NONE]:
            own = merged.get((name, source), [])
            differences = [row[2] for row in own if row[2] is not None]
            shown = f"{max(differences):.0e}" if differences else ""
            files = dict.fromkeys(f"[`{Path(row[4]).name}`](../tests/{row[4]})" for row in own)
            steps = ("equal" if any(row[3] for row in own) else "given") if own else ""
            cells = source, shown.replace("0e+00", "0"), steps, ", ".join(files)
            rows.append([f"[`{name}`](#{name})", *cells])
    return table(TITLES, rows)


main = keep_pages(lambda before: between(before, BEGIN, END, "\n".join([*lines_of(compare()), ""])), PAGE)

if __name__ == "__main__":
    sys.exit(main())
