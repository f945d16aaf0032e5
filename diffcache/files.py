"""Write files so that a crash leaves the old one or the new one, never half of it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any


def write_file(path: Path, data: bytes | str) -> None:
    """Write a file in one piece, or nothing; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, data: Any, indent: int = 1) -> None:
    """Write plain data as JSON, in one piece.

    Raises:
        TypeError: If something in it is not plain data.
        ValueError: If a number is not finite.
    """
    write_file(path, json.dumps(data, indent=indent, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a file of `write_json`; None where there is no file or not a whole one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def check_target(option: str, path: Path, endings: Collection[str] = ()) -> None:
    """Check that a file can be written before anything is computed; make its folder.

    A file that is there stays as it is.

    Args:
        option: Name of the option or argument, such as `--out`, for errors.
        path: The file.
        endings: Endings that its name may have, in lower case with the dot; none for any.

    Raises:
        ValueError: If the ending is another, the path is a folder, or it cannot be written.
    """
    if endings and path.suffix.lower() not in endings:
        raise ValueError(f"{option} {path}: the name must end in {', '.join(endings)}")
    if str(path) == "-":
        raise ValueError(f"{option} -: name a file; only --json prints")
    if path.is_dir():
        raise ValueError(f"{option} {path}: is a folder; name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.open("ab").close()
        else:
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name):
                pass
    except OSError as error:
        raise ValueError(
            f"{option} {path}: cannot be written ({error.strerror}); name a file in a folder that can be made"
        ) from error
