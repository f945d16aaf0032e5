"""The shipped model, and a method calibrated on it."""

import pytest

import diffcache
from diffcache import FittedForecast
from tests.calibration.shipped import PROMPTS, SETTINGS
from tests.shipped import load


@pytest.fixture(scope="module")
def pipe():
    return load()


@pytest.fixture(scope="module")
def calibrated(pipe):
    return diffcache.calibrate(pipe, FittedForecast(computed=3), PROMPTS, **SETTINGS)
