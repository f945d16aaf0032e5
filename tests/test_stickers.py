"""Scenes of stickers and their sentences, their judge, and the film model."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from torch import nn

from diffcache.eval.workshop.small import sticker_causal, sticker_judge, sticker_video_autoencoder, stickers
from diffcache.eval.workshop.small.job import Settings
from diffcache.eval.workshop.small.sticker_causal import CALL, CHUNK, LATENTS, SAMPLER, Causal, HeldChunks, predict
from diffcache.eval.workshop.small.sticker_films import sample_film
from diffcache.eval.workshop.small.sticker_judge import Reading, faults, fit, likeness
from diffcache.eval.workshop.small.sticker_video_autoencoder import CHANNELS
from diffcache.eval.workshop.small.stickers import (
    GROUNDS,
    OBJECTS,
    Sticker,
    caption,
    held_out,
    layer,
    parse,
    render,
    sample_scene,
)
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.demo.images import PROMPTS
from diffcache.pipelines.pretrained_video import streaming
from diffcache.pipelines.shipped_models import MODELS
from diffcache.video import FewSteps, FullHistory, VideoPolicy, Window

RNG = np.random.default_rng(0)
SEEN = [sample_scene(RNG) for _ in range(300)]
HELD = [sample_scene(RNG, held=True) for _ in range(100)]


@pytest.mark.parametrize(("scenes", "held"), [(SEEN, False), (HELD, True)])
def test_no_combination_is_both_trained_on_and_held_out(scenes, held):
    for scene in scenes:
        names = tuple(sticker.name for sticker in scene.stickers)
        assert held_out(names, scene.ground) == held
        assert held_out(names[::-1], scene.ground) == held
    assert all(held_out(parse(prompt)[0], "") for prompt in PROMPTS)  # of the demo, as README.md says


def test_most_objects_are_held_out_somewhere_and_all_are_seen_elsewhere():
    apart = [(name, ground) for name in OBJECTS for ground in GROUNDS if held_out((name,), ground)]
    assert 0 < len(apart) < len(OBJECTS) * len(GROUNDS) / 4
    pairs = {held: set[str]() for held in (False, True)}
    for pair in combinations(OBJECTS, 2):
        pairs[held_out(pair, "")].update(pair)
    assert pairs[False] == set(OBJECTS) and len(pairs[True]) >= 0.8 * len(OBJECTS)


def test_a_sentence_is_read_back_as_what_it_was_written_from():
    for scene in SEEN + HELD:
        names, relation, ground = parse(caption(scene))
        assert names == tuple(sticker.name for sticker in scene.stickers)
        assert relation == scene.relation
        assert ground == (scene.ground if scene.says_ground else "")
        assert set(caption(scene).split()) <= set(stickers.words())


def test_an_object_is_drawn_where_it_is_said_to_be_and_is_not_cut_off():
    for scene in SEEN[:40]:
        for sticker in scene.stickers:
            upright = Sticker(sticker.name, 32, 32, sticker.size, 0, False, 1)
            whole = layer(upright)[1].sum()
            cover = layer(sticker)[1]
            assert cover.sum() == pytest.approx(whole, rel=0.08)
            rows, columns = np.nonzero(cover > 0.5)
            reach = 0.75 * sticker.size
            assert abs(rows - sticker.y).max() < reach and abs(columns - sticker.x).max() < reach


def test_a_scene_is_the_same_picture_each_time_and_its_ground_depends_on_the_seed():
    scene = SEEN[0]
    picture = render(scene)
    assert picture.dtype == np.uint8 and picture.shape == (64, 64, 3)
    assert np.array_equal(picture, render(scene))
    for ground in GROUNDS:
        one, other = (stickers.ground(ground, seed) for seed in (1, 2))
        assert one.min() >= 0 and one.max() < 300 and np.abs(one - other).mean() > 2


FOX = Sticker("fox", 20, 24, 24, 8, False, 1.0)
OWL = Sticker("owl", 46, 46, 28, -5, True, 0.9)


def picture(*objects: Sticker, ground: str = "grass") -> np.ndarray:
    scene = replace(sample_scene(np.random.default_rng(5)), stickers=objects, ground=ground)
    return render(scene)


def accepts(sticker: Sticker, shown: np.ndarray) -> bool:
    return likeness(fit(sticker, shown)[0], shown) >= sticker_judge.LEAST_LIKENESS


def test_a_blurred_and_moved_object_is_like_its_drawing_and_a_broken_one_is_not():
    shown = picture(FOX, OWL)
    soft = np.stack([np.roll(shown, step, (0, 1)) for step in ((0, 0), (1, 0), (0, 1), (1, 1))])
    assert accepts(FOX, shown) and accepts(FOX, soft.mean(0).round().astype(np.uint8))
    ground = picture(OWL)
    parts, half, quarter, shuffled = (shown.copy() for _ in range(4))
    parts[24:40, 8:32] = np.roll(parts[24:40, 8:32], 8, axis=1)  # the lower half slides away
    half[24:] = ground[24:]
    quarter[24:, :20] = ground[24:, :20]
    shuffled[12:36, 8:32] = shown[12:36, 8:32, [1, 2, 0]]  # other colors
    assert not any(accepts(FOX, each) for each in (parts, half, quarter, shuffled))
    assert not accepts(replace(OWL, name="penguin"), shown)


def test_a_fragment_is_no_small_object():
    shown, ground = picture(replace(FOX, size=40, x=32, y=32)), picture()
    shown[:, 32:] = ground[:, 32:]
    assert not accepts(replace(FOX, size=18, x=26, y=32), shown)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("a fox left of an owl on grass", []),
        ("an owl below a fox", []),
        ("a fox right of an owl", ["not right of"]),
        ("a fox on wood", ["also a owl", "on grass, not wood"]),
        ("a fox and a car", ["no car", "also a owl"]),
    ],
)
def test_all_that_a_sentence_says_has_to_be_there(text: str, wrong: list[str]):
    assert faults(text, Reading((FOX, OWL), (), "grass")) == wrong


def test_a_broken_object_counts_as_a_fault():
    assert faults("a fox", Reading((FOX,), ("owl",), "sky")) == ["a broken owl"]
    assert faults("a fox", Reading((), ("fox",), "sky")) == ["no fox", "a broken fox"]


@pytest.mark.parametrize("held", [False, True])
def test_every_object_of_a_film_is_held_out_or_none_is(held: bool):
    for seed in range(20):
        film = sample_film(np.random.default_rng(seed), held=held, switches=(9,), objects=OBJECTS)
        assert film.caption_at(8) != film.caption_at(9)
        names = {film.name_at(0), film.name_at(9)}
        assert {held_out((name,), film.scene.ground) for name in names} == {held}


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
