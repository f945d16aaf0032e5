"""Films of stickers are as they are told, and what a stream films is what training showed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from torch import nn

from diffcache.eval.workshop.small import sticker_causal, sticker_video_autoencoder
from diffcache.eval.workshop.small.causal_step import HeldChunks, predict
from diffcache.eval.workshop.small.job import Settings
from diffcache.eval.workshop.small.sticker_causal import CALL, CHUNK, LATENTS, SAMPLER, Causal
from diffcache.eval.workshop.small.sticker_films import render_film, sample_film
from diffcache.eval.workshop.small.sticker_video_autoencoder import CHANNELS
from diffcache.eval.workshop.small.stickers import OBJECTS, held_out
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.pretrained_video import streaming
from diffcache.pipelines.shipped_models import MODELS
from diffcache.video import FewSteps, FullHistory, VideoPolicy, Window


def test_an_object_stays_whole_in_every_frame_and_moves_no_faster_than_it_may():
    film = sample_film(np.random.default_rng(3))
    (sticker,) = film.scene.stickers
    still = replace(film, sway=0.0, scene=replace(film.scene, stickers=(replace(sticker, tilt=0.0),)))
    _, masks = render_film(still, 200)
    areas = masks.sum((1, 2))
    assert areas.min() > 0.93 * areas.max()  # never cut by an edge
    centers = np.array([np.argwhere(mask).mean(0) for mask in masks])
    assert np.abs(np.diff(centers, axis=0)).max() < 2
    assert np.ptp(centers, axis=0).max() > 10
    later, _ = render_film(still, 3, start=50)
    assert np.array_equal(later, render_film(still, 53)[0][50:])


@pytest.mark.parametrize("held", [False, True])
def test_every_object_of_a_film_is_held_out_or_none_is(held: bool):
    for seed in range(20):
        film = sample_film(np.random.default_rng(seed), held=held, switches=(9,), objects=OBJECTS)
        assert film.caption_at(8) != film.caption_at(9)
        names = {film.name_at(0), film.name_at(9)}
        assert {held_out((name,), film.scene.ground) for name in names} == {held}
    with pytest.raises(ValueError, match="a ground has 1 of these objects at most, for 1 switches"):
        sample_film(np.random.default_rng(0), held=True, switches=(9,))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Causal:
    """A training of random weights on four films."""
    folder = tmp_path_factory.mktemp("causal")
    torch.manual_seed(0)
    vae = nn.ModuleDict({"vae": sticker_video_autoencoder.build_autoencoder()})
    torch.save({"average": vae.state_dict()}, folder / "sticker-video-autoencoder.state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sticker_causal, "HELD", 2)
        return Causal(Settings(steps=2, batch=2, examples=4), folder)


@pytest.mark.parametrize(
    ("policy", "held"),
    [(FullHistory(), HeldChunks()), (Window(window=3, sinks=0), HeldChunks(1)), (Window(6), HeldChunks(2, True))],
)
def test_a_stream_films_what_training_showed(job: Causal, policy: VideoPolicy, held: HeldChunks):
    torch.manual_seed(1)
    models = job.build().eval()
    for weight in models["transformer"].parameters():  # gates of zero would hide most of it
        nn.init.normal_(weight, std=0.05)
    text = job.embed(models, job.ids(["a fox on grass"]))
    clean = torch.randn(1, CHANNELS, LATENTS, 8, 8, generator=torch.Generator().manual_seed(2))
    video = CausalVideo(models["transformer"], chunk=CHUNK, sampler=FewSteps((1000,), 1, predicts="clean"))
    with video, torch.no_grad():
        session = video.session(text, size=(8, 8), policy=policy, seed=4)
        session.take(clean[:, :, :-CHUNK])
        filmed = session.next()
    noisy = clean.clone()
    noisy[:, :, -CHUNK:] = torch.randn((1, CHANNELS, CHUNK, 8, 8), generator=torch.Generator().manual_seed(4))
    job.attention(models["transformer"]).held = held
    levels = torch.ones(1, LATENTS)
    with torch.no_grad():
        said = text[:, None].expand(-1, LATENTS, -1, -1)
        shown = predict(models["transformer"], clean, noisy, levels, said)
    assert filmed.std() > 0.02
    torch.testing.assert_close(filmed, shown[:, :, -CHUNK:], atol=2e-5, rtol=1e-4)


def test_a_shipped_folder_is_loaded_understands_as_in_training_and_says_how_it_is_streamed(
    job: Causal, tmp_path: Path
):
    models = job.build()
    wanted = job.embed(models, job.ids(["a fox on grass", "an owl"]))
    job.export(models, tmp_path)
    pipe = WanPipeline.from_pretrained(tmp_path)
    said = {"do_classifier_free_guidance": False, "max_sequence_length": CALL["max_sequence_length"]}
    with torch.no_grad():
        found, _ = pipe.encode_prompt(["a fox on grass", "an owl"], **said)
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.02)  # weights in bfloat16
    assert not found[1, 3:].any() and found[0, 4].any()
    way = streaming(tmp_path)
    assert (way.chunk, way.size, way.words, way.sampler) == (CHUNK, (64, 64), 8, SAMPLER)
    assert way.policy == "full"
    assert streaming(MODELS / "sticker-causal") == way


def test_the_loss_trains_every_part_and_histories_become_the_models_own(job: Causal):
    models = job.build()
    drawn = job.draw(torch.arange(2), torch.Generator().manual_seed(3))
    first = [job.loss(models, drawn, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*first) and first[0] > 0.5
    first[0].backward()
    assert models["transformer"].proj_out.weight.grad.abs().sum() > 0
    for weight in models["transformer"].parameters():
        nn.init.normal_(weight, std=0.05)
    job.attention(models["transformer"])
    found = job.measure(models)
    assert abs(found["held_loss"] - found["held_own"]) > 1e-4
