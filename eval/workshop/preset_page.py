"""`docs/presets.md` behind its introduction: every preset, from the files of the families."""

from __future__ import annotations

import sys

from diffcache.eval.pages import entries, keep_pages, table
from diffcache.eval.record import ROOT
from diffcache.presets.choose import LEVELS, TITLES, known_models, presets, rows_of_model

PAGE = ROOT / "docs" / "presets.md"


def page(text: str) -> str:
    """Return the page; what stands in it before the first table is written by hand."""
    rows = [row for name in known_models() for row in rows_of_model(name)]
    first = table(list(TITLES), rows)
    origins: dict[str, list[str]] = {}
    for own in presets().values():
        for level in LEVELS:
            if level in own:
                origins.setdefault(own[level].origin, []).append(own[level].name)
    sources = entries(["source", "presets"], ([o, ", ".join(n)] for o, n in origins.items()))
    return text.partition(first[0])[0] + "\n".join([*first, "", "## Sources", "", *sources]) + "\n"


main = keep_pages(page, PAGE)

if __name__ == "__main__":
    sys.exit(main())
