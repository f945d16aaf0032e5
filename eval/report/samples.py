"""The files of a run's samples: pictures, films, small films for browsers, and their prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


class Samples:
    """The files of a run's samples, found by row and number.

    A run's folder may be somebody else's: links that lead out of it are not followed.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [folder.resolve() for folder in folders]

    def picture(self, row: dict[str, Any], number: int) -> Any:
        """Return a picture as uint8 [H, W, 3]; None where there is no whole one."""
        for case in self._cases(row):
            file = self._inside(case / "samples" / f"{number:05d}.png")
            if file is None:
                continue
            try:
                with Image.open(file) as opened:
                    return np.array(opened.convert("RGB"))
            except (OSError, SyntaxError):
                continue  # Not there, or not a whole picture.
        return None

    def film(self, row: dict[str, Any], number: int) -> Any:
        """Return a film as uint8 [F, H, W, 3]; None where there is none."""
        from diffcache.eval.samples.clips import read_clip

        for case in self._cases(row):
            file = self._inside(case / "clips" / f"{number:05d}.mp4")
            if file is not None:
                return read_clip(file).movedim(1, -1).numpy()
        return None

    def preview(self, row: dict[str, Any], number: int) -> bytes | None:
        """Return the bytes of a small film for browsers; None where there is none."""
        named = (c / "previews" / f"{number:05d}.mp4" for c in self._cases(row))
        return next((file.read_bytes() for file in map(self._inside, named) if file), None)

    @cached_property
    def prompts(self) -> dict[int, str]:
        """The prompts by number of sample, from the manifests' `ids` and `prompts`."""
        found: dict[int, str] = {}
        for folder in self._folders:
            named = sorted(folder.glob("cases/*/manifest*.jsonl"))
            for file in filter(None, map(self._inside, named)):
                for text in file.read_text(encoding="utf-8").splitlines():
                    try:
                        line = json.loads(text)
                        pairs = zip(line["ids"], line["prompts"], strict=True)
                        found |= {int(key): str(prompt) for key, prompt in pairs}
                    except (ValueError, KeyError, TypeError):
                        continue  # A line cut off by a kill, or a manifest without prompts.
        return found

    def _cases(self, row: dict[str, Any]) -> list[Path]:
        """Return the folders that may hold a row's samples, never one outside the runs'."""
        found = []
        for folder in self._folders:
            if row.get("folder"):
                found.append((folder / str(row["folder"])).resolve())
            elif row.get("hash"):
                found += sorted(folder.glob(f"cases/*-{str(row['hash'])[:8]}"))
        return [case.resolve() for case in found if self._holds(case)]

    def _holds(self, place: Path) -> bool:
        """Return whether a place is in a run's folder, with links followed."""
        return any(map(place.resolve().is_relative_to, self._folders))

    def _inside(self, file: Path) -> Path | None:
        """Return a file that is in a run's folder, None if there is none."""
        return file if self._holds(file) and file.is_file() else None
