"""Small files that stand for weights."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest

from diffcache.eval.metrics.weights import WEIGHTS, WeightFile

CONTENT = b"weights"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def known(monkeypatch: pytest.MonkeyPatch, name: str, sha256: str | None) -> WeightFile:
    """Give an entry another hash, so that a small file can stand for it."""
    changed = dataclasses.replace(WEIGHTS[name], sha256=sha256)
    monkeypatch.setitem(WEIGHTS, name, changed)
    return changed


def put(path: Path, content: bytes = CONTENT) -> Path:
    """Write a file, with the folders that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
