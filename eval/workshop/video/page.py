"""`docs/causal_video.md` behind its introduction: the policies, and what was measured of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffcache.eval.pages import keep_pages, rendered
from diffcache.eval.record import FOLDER, ROOT
from diffcache.eval.workshop.method_page import behind_policies, marked
from diffcache.files import read_json

PAGE = Path("docs/causal_video.md")
RECORD = "causal.json"


def page() -> str:
    """Return the whole page."""
    record = read_json(FOLDER / RECORD)
    return behind_policies(ROOT / PAGE, "video", measured(record) if record else "")


def measured(record: Mapping[str, Any]) -> str:
    """Return what a record says of films and chunks."""
    return rendered("workshop/video/page.md.jinja", **{**record, "rows": marked(record["rows"])})


main = keep_pages(lambda text: page(), ROOT / PAGE)

if __name__ == "__main__":
    sys.exit(main())
