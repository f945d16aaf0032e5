"""The loop of a pipeline, replayed: it ends where the pipeline ends, or is refused."""

import pytest
import torch

import diffcache
from diffcache.errors import AttachError
from diffcache.offline.harmonica.replay import Replay
from tests.router_training.dit_loop import CALL, SITES, STEPS, Loop
from tests.zoo.pipes import pipes


@pytest.mark.parametrize(
    ("name", "sites"), [("FluxPipeline", 16), ("WanPipeline", 12), ("PixArtAlphaPipeline", 12)]
)
def test_the_replay_ends_where_the_pipeline_ends(name, sites):
    case = pipes()[name]
    pipe = case.build(0)
    given = case.call(pipe, 1, 3)
    given.pop("generator")
    wanted = pipe(**given, generator=torch.Generator().manual_seed(5))[0]
    replay = Replay(pipe, {}, [given])
    assert (replay.total, len(replay.sites())) == (3, sites)
    track = replay.begin([given], seed=5)
    with torch.no_grad():
        for _ in range(3):
            track.advance(track.predict())
    torch.testing.assert_close(track.sample, torch.as_tensor(wanted), atol=1e-4, rtol=1e-4)
    assert not any(module._forward_hooks for module in replay.model.modules())
    assert "step" not in vars(pipe.scheduler)


def test_guidance_is_measured(replay):
    assert replay.scale == 1 - CALL["guidance_scale"]  # from the conditional branch, which is first
    assert (replay.sites(), replay.total, replay.shape) == (SITES, STEPS, [4, 8, 8])


@torch.no_grad()
def test_the_replay_of_dit_equals_a_loop_of_its_own(pipe, replay):
    track, loop = replay.begin([3, 8], seed=11), Loop(pipe, [3, 8], 11)
    for step in range(STEPS):
        mine, theirs = track.predict(), loop.predict(step)
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
        track.advance(mine)
        loop.advance(step, theirs)
    torch.testing.assert_close(track.sample, loop.x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FluxControlNetPipeline", "'controlnet_.*' changes from step to step"),
        ("FluxKontextPipeline", "where it is given the sample alone"),
        ("WanPipeline-two", "has 2 denoisers"),
        ("LTX2Pipeline", r"calls its denoiser \[3\] times a step"),
        ("Lumina2Pipeline", r"not a \+ scale \* \(b - a\)"),
        ("HunyuanDiTPipeline", "does not end where the pipeline ended"),  # DDPM draws noise
    ],
)
def test_other_loops_are_refused(name, message):
    case = pipes()[name]
    pipe = case.build(0)
    given = case.call(pipe, 1, 3)
    with pytest.raises(AttachError, match=message):
        Replay(pipe, {}, [given])
    assert all("step" not in vars(part) for part in [pipe.scheduler])


def test_wrapped_pipelines_and_bare_models_are_refused(pipe):
    with (
        diffcache.wrapped(pipe, "taylorseer"),
        pytest.raises(AttachError, match="unwrap it before training"),
    ):
        Replay(pipe, CALL, [3])
    with pytest.raises(AttachError, match="on a pipeline, not a model"):
        Replay(pipe.transformer, CALL, [3])
