"""Pages of docs/ that are generated: write one, or check that it is up to date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from diffcache.files import write_file


def keep_page(
    module: str, default: Path, page: Callable[[], str], arguments: Sequence[str] | None
) -> int:
    """Write a page or check it, as the command line says.

    Args:
        module: What `python -m` runs.
        default: The file, where none is named.
        page: Makes the text.
        arguments: Of the command line; None for those of this process.

    Returns:
        The exit code, 1 if the page is out of date.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("page", type=Path, nargs="?", default=default)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="exit with 1 if it is out of date")
    what.add_argument("--write", action="store_true", help="write it")
    given = parser.parse_args(arguments)
    wanted = page()
    if given.write:
        write_file(given.page, wanted)
        return 0
    if not given.page.exists() or given.page.read_text(encoding="utf-8") != wanted:
        print(f"{given.page}: out of date; run with --write", file=sys.stderr)
        return 1
    return 0
