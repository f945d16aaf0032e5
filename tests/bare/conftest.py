"""Fixtures of the tests of bare denoisers."""

import warnings
from collections.abc import Iterator

import pytest
import torch

import diffcache
from tests.bare.toys import EVERY, Toy


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        yield log


@pytest.fixture
def model() -> Toy:
    return diffcache.wrap(Toy(), EVERY)
