"""The small pipeline that is measured."""

import pytest

from tests import shipped as flux


@pytest.fixture(scope="module")
def pipe():
    return flux.load()
