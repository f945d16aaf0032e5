"""Calls that are refused: `refused.txt` says which, and in which words."""

from __future__ import annotations

import builtins
import importlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diffcache
from diffcache import errors
from tests.zoo.catalog import cases

TABLE = Path(__file__).with_name("refused.txt")
NAMES: dict[str, Any] = {
    "cases": cases, "diffcache": diffcache, "math": math, "nn": nn, "torch": torch
}  # fmt: skip


def rows() -> Iterator[Any]:
    """Yield modules, call, error and pattern of every row."""
    modules: list[str] = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            modules = line.strip("[]").split()
        elif line and not line.startswith("#"):
            call, _, said = line.partition(" :: ")
            error, _, pattern = said.partition(": ")
            yield pytest.param(modules, call, error, pattern, id=call)


@pytest.mark.parametrize(("modules", "call", "error", "pattern"), list(rows()))
def test_a_call_is_refused(modules: list[str], call: str, error: str, pattern: str) -> None:
    names = dict(NAMES)
    for module in modules:
        names.update(vars(importlib.import_module(module)))
    kind = getattr(errors, error, None) or getattr(builtins, error)
    with pytest.raises(kind) as raised:
        eval(call, names)
    assert re.search(pattern, str(raised.value)), str(raised.value)
