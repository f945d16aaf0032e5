"""A video of two layers and one step a chunk."""

from collections.abc import Iterator

import pytest

from diffcache.pipelines.causal_video import CausalVideo
from tests.video.toys import CHUNK, ONE, wan


@pytest.fixture(scope="module")
def video() -> Iterator[CausalVideo]:
    with CausalVideo(wan(layers=2), chunk=CHUNK, sampler=ONE) as video:
        yield video
