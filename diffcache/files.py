"""Write files so that a crash leaves the old one or the new one, never half of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_file(path: Path, data: bytes | str) -> None:
    """Write a file in one piece; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    beside.write_bytes(data.encode() if isinstance(data, str) else data)
    os.replace(beside, path)


def write_json(path: Path, data: Any, indent: int = 1) -> None:
    """Write plain data as JSON, in one piece.

    Raises:
        TypeError: If something in it is not plain data.
        ValueError: If a number is not finite.
    """
    write_file(path, json.dumps(data, indent=indent, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read what `write_json` wrote; None where there is no file or not a whole one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
