"""Calls that are refused: `refused.txt` says which, and in which words."""

from __future__ import annotations

import builtins
import importlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import diffcache
from diffcache import errors
from tests.zoo.catalog import cases

TABLE = Path(__file__).with_name("refused.txt")
NAMES: dict[str, Any] = {
    "cases": cases, "diffcache": diffcache, "math": math, "nn": nn, "np": np, "torch": torch
}  # fmt: skip


@dataclass
class Section:
    """Modules whose names calls use, and lines that come before each of the calls."""

    modules: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)


def rows() -> Iterator[Any]:
    """Yield section, call, error and pattern of every row."""
    section = Section()
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = Section(line.strip("[]").split())
        elif " :: " in line and not line.startswith("#"):
            call, _, said = line.partition(" :: ")
            error, _, pattern = said.partition(": ")
            yield pytest.param(section, call, error, pattern, id=call)
        elif line and not line.startswith("#"):
            section.before.append(line)


@pytest.mark.parametrize(("section", "call", "error", "pattern"), list(rows()))
def test_a_call_is_refused(
    section: Section, call: str, error: str, pattern: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    def file(name: str, data: str | bytes) -> Path:
        (tmp_path / name).write_bytes(data.encode() if isinstance(data, str) else data)
        return tmp_path / name

    names = dict(NAMES)
    for module in section.modules:
        names.update(vars(importlib.import_module(module)))
    names.update(file=file, folder=tmp_path, patch=monkeypatch.setattr)
    exec("\n".join(section.before), names)
    kind = getattr(errors, error, None) or getattr(builtins, error)
    with pytest.raises(kind) as raised:
        eval(call, names)
    assert re.search(pattern, str(raised.value), re.DOTALL), str(raised.value)
