"""The small pipeline that is measured."""

import pytest

from diffcache.pipelines.small import flux


@pytest.fixture(scope="module")
def pipe():
    return flux.load()
