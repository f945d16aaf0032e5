"""A tiny DiTPipeline, its loop replayed, and a router of it."""

import pytest
import torch

from diffcache.offline.harmonica.mixing import Mixer
from diffcache.offline.harmonica.replay import Replay
from tests.router_training.dit_loop import CALL, SITES, STEPS
from tests.zoo.pipes import pipes


@pytest.fixture(scope="module")
def pipe():
    return pipes()["DiTPipeline"].build(0)


@pytest.fixture(scope="module")
def replay(pipe):
    replay = Replay(pipe, CALL, [3, 8])
    for parameter in pipe.transformer.parameters():
        parameter.requires_grad_(False)
    yield replay
    for parameter in pipe.transformer.parameters():
        parameter.requires_grad_(True)


@pytest.fixture
def mixer(replay):
    mixer = Mixer(replay.model, SITES, 0.1)
    yield mixer
    mixer.remove()


@pytest.fixture
def logits():
    return 2 * torch.randn(STEPS, len(SITES), generator=torch.Generator().manual_seed(3))
