"""Models that these tests share, one of each for a file."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kv.tiny import llama


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture(scope="module")
def exact() -> Any:
    """In float64."""
    return llama().double()
