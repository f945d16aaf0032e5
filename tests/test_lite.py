"""The offline metrics: their features see what they claim to see, the shipped files agree, and their training."""

import hashlib
import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from diffcache.eval.metrics import lite
from diffcache.eval.metrics.distances import frechet, inception_score, moments
from diffcache.eval.workshop.lite_card import card
from diffcache.eval.workshop.small import sticker_features
from diffcache.eval.workshop.small.sticker_features import RANGES, corrupt, draw, draw_films
from diffcache.eval.workshop.small.stickers import OBJECTS, draw_scenes, render

COUNT = 300
LADDER = (1.0, 0.25, 0.05)


@pytest.fixture(scope="module")
def drawn():
    return draw(COUNT, 77, held=True)


@pytest.fixture(scope="module")
def clean(drawn):
    return lite.embed(drawn[1])


def fid(found):
    return frechet(moments(found), lite.reference().moments)


class TestFid:
    def test_falls_as_blur_is_removed(self, drawn, clean):
        rungs = [fid(lite.embed(corrupt(drawn[1], "blur", strength))) for strength in LADDER]
        rungs.append(fid(clean))
        assert all(more > less for more, less in pairwise(rungs)), rungs

    def test_sees_missing_classes(self, drawn, clean):
        kept = torch.tensor([all(OBJECTS.index(s.name) < 8 for s in scene.stickers) for scene in drawn[0]])
        even = torch.randperm(COUNT)[: int(kept.sum())]
        assert fid(clean[kept]) > 1.2 * fid(clean[even])

    def test_a_picture_does_not_depend_on_its_batch(self, drawn, clean):
        alone = torch.cat([lite.embed(drawn[1][index : index + 1]) for index in (0, 31, 32, 299)])
        assert torch.allclose(alone, clean[[0, 31, 32, 299]], atol=1e-4)
        assert torch.equal(lite.embed(drawn[1][:8]), lite.embed(drawn[1][:8]))

    def test_larger_pictures_are_brought_to_size(self, drawn, clean):
        twice = drawn[1][:40].repeat_interleave(2, 2).repeat_interleave(2, 3)
        found = lite.embed(twice)
        assert found.shape == (40, 64) and found.dtype == torch.float32
        other = clean[40:80]
        near = (found - clean[:40]).norm(dim=1)
        assert (near < 0.5 * (other - clean[:40]).norm(dim=1)).float().mean() > 0.75


class TestLpips:
    def test_zero_for_equal_and_symmetric(self, drawn):
        a, b = drawn[1][:20], drawn[1][20:40]
        assert torch.equal(lite.lpips_lite(a, a), torch.zeros(20))
        assert torch.equal(lite.lpips_lite(a, b), lite.lpips_lite(b, a))
        assert (lite.lpips_lite(a, b) > 0).all() and (lite.lpips_lite(a, b) <= 2).all()


def test_classes_are_the_objects_of_the_pictures(drawn):
    features, found = lite.embed_and_classify(drawn[1])
    assert torch.equal(features, lite.embed(drawn[1]))
    assert found.shape == (COUNT, lite.CLASSES) and len(OBJECTS) == lite.CLASSES
    assert torch.allclose(found.sum(1), torch.ones(COUNT, dtype=torch.float64))
    alone = [len(scene.stickers) == 1 for scene in drawn[0]]
    named = torch.tensor([OBJECTS.index(scene.stickers[0].name) for scene in drawn[0]])
    assert (found.argmax(1) == named)[torch.tensor(alone)].float().mean() > 0.5
    assert 1 < inception_score(found, splits=1)[0] <= lite.CLASSES


class TestFilms:
    def test_statistics_against_closed_forms(self):
        time = torch.arange(6.0)[:, None]
        slope, curve = torch.randn(64), torch.randn(64)
        mean, first, second, whole = lite.film_statistics(time * slope).unflatten(0, (4, 64))
        assert torch.allclose(mean, 2.5 * slope, atol=1e-5)
        assert torch.allclose(first, slope.abs(), atol=1e-5)
        assert torch.allclose(second, torch.zeros(64), atol=1e-5)
        assert torch.allclose(whole, 5 * slope.abs(), atol=1e-5)
        bent = lite.film_statistics(time**2 * curve)[128:192]
        assert torch.allclose(bent, 2 * curve.abs(), atol=1e-4)

    def test_sees_what_single_frames_do_not_show(self):
        films = draw_films(48, 9)
        real = lite.reference().films
        value = frechet(moments(lite.clip_features(films)), real)
        shuffled = [film[torch.randperm(len(film))] for film in films]
        frozen = [film[:1].expand(3, -1, -1, -1) for film in films]
        assert frechet(moments(lite.clip_features(shuffled)), real) > 3 * value
        assert frechet(moments(lite.clip_features(frozen)), real) > 1.5 * value


class TestShippedFiles:
    def test_hashes(self):
        file = lite.DIRECTORY / "model.safetensors"
        assert hashlib.sha256(file.read_bytes()).hexdigest() == lite.ENTRY["sha256"]
        assert lite.ENTRY["extractor"] == "sticker-features"
        assert sum(one.stat().st_size for one in lite.DIRECTORY.iterdir()) < 1_000_000

    def test_reference_is_reproduced(self):
        kept = lite.reference()
        scenes = draw_scenes(300, sticker_features.REFERENCE_SEED, held=True)
        pictures = torch.from_numpy(np.stack([render(scene) for scene in scenes]))
        found = lite.embed(pictures.permute(0, 3, 1, 2))
        assert kept.features.shape == (2000, 64) and kept.moments.count == 10_000
        assert torch.allclose(found, kept.features[:300], atol=0.02)
        deviation = kept.moments.cov.diagonal().sqrt()
        error = (found.double().mean(0) - kept.moments.mean).abs() / (deviation / 300**0.5)
        assert error.max() < 4.5 and error.square().mean().sqrt() < 1.5

    def test_reference_films_are_reproduced(self):
        kept = lite.reference().films
        found = lite.clip_features(draw_films(40, sticker_features.FILMS_SEED))
        error = (found.mean(0) - kept.mean).abs() / (kept.cov.diagonal() / 40).sqrt()
        assert kept.count == 1024 and error.max() < 5

    def test_card_is_generated_from_its_numbers(self):
        numbers = json.loads((lite.DIRECTORY / "sensitivity.json").read_text())
        assert card(numbers) == (lite.DIRECTORY / "README.md").read_text()


class TestCorruptions:
    @pytest.mark.parametrize("kind", RANGES)
    def test_nothing_at_strength_zero_and_something_at_the_least(self, drawn, kind):
        pictures = drawn[1][:8]
        least, greatest = RANGES[kind]
        assert torch.equal(corrupt(pictures, kind, 0.0), pictures)
        mild, strong = corrupt(pictures, kind, least), corrupt(pictures, kind, greatest)
        assert not torch.equal(mild, pictures)
        assert torch.equal(strong, corrupt(pictures, kind, greatest))
        change = [(one.float() - pictures.float()).square().mean() for one in (mild, strong)]
        assert change[0] < change[1]
