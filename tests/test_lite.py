"""The offline metrics: their features see what they claim to see, the shipped files agree, and their training."""

import hashlib
import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from diffcache.eval.metrics import lite
from diffcache.eval.metrics.distances import inception_score
from diffcache.eval.metrics.frechet import frechet, moments
from diffcache.eval.workshop.lite_card import card
from diffcache.eval.workshop.small import train_features
from diffcache.eval.workshop.small.train_features import (
    ExtractorJob,
    MatcherJob,
    alter,
    contrast,
    disturb,
    tally,
)
from diffcache.eval.workshop.small.trainer import Settings, train
from diffcache.pipelines.small import features
from diffcache.pipelines.small.corruptions import RANGES, corrupt
from diffcache.pipelines.small.moving import draw_films, film_statistics
from diffcache.pipelines.small.scenes import SHAPES, Figure, Scene, draw, prompt, render

COUNT = 500
LADDER = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02)


@pytest.fixture(scope="module")
def drawn():
    return draw(COUNT, 77, held=None)


@pytest.fixture(scope="module")
def clean(drawn):
    return lite.embed(drawn[1])


def fid(found):
    return frechet(moments(found), lite.reference().moments)


def picture(*figures, background="white"):
    return torch.from_numpy(render(Scene(background, figures))).permute(2, 0, 1)[None]


class TestFid:
    def test_falls_as_blur_is_removed(self, drawn, clean):
        rungs = [fid(lite.embed(corrupt(drawn[1], "blur", strength))) for strength in LADDER]
        rungs.append(fid(clean))
        assert all(more > less for more, less in pairwise(rungs)), rungs

    @pytest.mark.parametrize(("kind", "strength"), [("ghost", 0.1), ("grid", 0.006)])
    def test_sees_mild_artefacts(self, drawn, clean, kind, strength):
        assert fid(lite.embed(corrupt(drawn[1], kind, strength))) > 3 * fid(clean)

    def test_sees_a_missing_class(self, drawn, clean):
        scenes, _ = drawn
        kept = torch.tensor([all(f.shape != "ring" for f in scene.figures) for scene in scenes])
        even = torch.randperm(COUNT)[: int(kept.sum())]
        assert fid(clean[kept]) > 1.5 * fid(clean[even])

    def test_a_picture_does_not_depend_on_its_batch(self, drawn, clean):
        alone = torch.cat([lite.embed(drawn[1][index : index + 1]) for index in (0, 31, 32, 499)])
        assert torch.allclose(alone, clean[[0, 31, 32, 499]], atol=1e-4)
        assert torch.equal(lite.embed(drawn[1][:8]), lite.embed(drawn[1][:8]))

    def test_larger_pictures_are_brought_to_size(self, drawn, clean):
        twice = drawn[1][:40].repeat_interleave(2, 2).repeat_interleave(2, 3)
        found = lite.embed(twice)
        assert found.shape == (40, 64) and found.dtype == torch.float32
        other = clean[40:80]
        near = (found - clean[:40]).norm(dim=1)
        assert (near < 0.5 * (other - clean[:40]).norm(dim=1)).float().mean() > 0.9


class TestLpips:
    def test_zero_for_equal_and_symmetric(self, drawn):
        a, b = drawn[1][:20], drawn[1][20:40]
        assert torch.equal(lite.lpips_lite(a, a), torch.zeros(20))
        assert torch.equal(lite.lpips_lite(a, b), lite.lpips_lite(b, a))
        assert (lite.lpips_lite(a, b) > 0).all() and (lite.lpips_lite(a, b) <= 2).all()

    @pytest.mark.parametrize("kind", ["noise", "blur"])
    def test_grows_with_strength(self, drawn, kind):
        pictures = drawn[1][:40]
        strengths = (0.01, 0.03, 0.1) if kind == "noise" else (0.1, 0.3, 1.0)
        found = [lite.lpips_lite(pictures, corrupt(pictures, kind, s)) for s in strengths]
        assert (found[0] < found[1]).all() and (found[1] < found[2]).all()


class TestClipScore:
    def test_orders_right_and_wrong_prompts(self, drawn):
        scenes, pictures = drawn[0][:200], drawn[1][:200]
        rng = np.random.default_rng(3)

        def mean(texts):
            return float(lite.clip_score_lite(pictures, texts).mean())

        right = [prompt(scene) for scene in scenes]
        matched = mean(right)
        swapped = mean([prompt(alter(scene, "swap", rng)) for scene in scenes])
        others = mean(right[1:] + right[:1])
        assert matched > 85
        for wrong in ("shape", "color", "size", "place", "background"):
            assert others < mean([prompt(alter(s, wrong, rng)) for s in scenes]) < matched - 10
        assert others + 20 < swapped < matched - 20
        assert abs(others) < 20

    def test_neither_phrasing_nor_order_matters(self):
        one, two = Figure("ring", "red", "small", "left"), Figure("cross", "blue", "large", "right")
        texts = [prompt(Scene("white", (one, two)), 1), prompt(Scene("white", (two, one)), 0)]
        first, second = lite.clip_score_lite(picture(one, two).repeat(2, 1, 1, 1), texts).tolist()
        assert first == pytest.approx(second, abs=1e-3) and -100 <= first <= 100


class TestClasses:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_the_first_in_reading_order_counts(self, shape):
        other = SHAPES[SHAPES.index(shape) - 1]
        shown = picture(
            Figure(other, "red", "large", "bottom left"), Figure(shape, "blue", "small", "right")
        )
        assert lite.class_probabilities(shown)[0, SHAPES.index(shape)] > 0.9

    def test_limits_of_the_score(self, drawn):
        found = lite.class_probabilities(drawn[1])
        assert torch.allclose(found.sum(1), torch.ones(COUNT, dtype=torch.float64))
        assert 4.3 < inception_score(found, splits=1)[0] <= 5
        rng = np.random.default_rng(1)
        rings = [alter(s, "size", rng) for s in drawn[0] if s.figures[0].shape == "ring"]
        single = torch.cat([picture(s.figures[0], background=s.background) for s in rings])
        assert inception_score(lite.class_probabilities(single), splits=1)[0] < 1.1

    def test_nothing_found_is_spread_evenly(self):
        empty = features.Reading(
            torch.zeros(1, 7),
            torch.full((1, 9), -40.0),
            torch.randn(1, 9, 5),
            torch.zeros(1, 9, 7),
            torch.zeros(1, 9, 2),
        )
        assert torch.allclose(features.first_shape(empty), torch.full((1, 5), 0.2).double())


class TestFilms:
    def test_statistics_against_closed_forms(self):
        time = torch.arange(6.0)[:, None]
        slope, curve = torch.randn(64), torch.randn(64)
        mean, first, second, whole = film_statistics(time * slope).unflatten(0, (4, 64))
        assert torch.allclose(mean, 2.5 * slope, atol=1e-5)
        assert torch.allclose(first, slope.abs(), atol=1e-5)
        assert torch.allclose(second, torch.zeros(64), atol=1e-5)
        assert torch.allclose(whole, 5 * slope.abs(), atol=1e-5)
        bent = film_statistics(time**2 * curve)[128:192]
        assert torch.allclose(bent, 2 * curve.abs(), atol=1e-4)

    def test_sees_what_single_frames_do_not_show(self):
        films = draw_films(48, 9, held=None)
        real = lite.reference().films
        value = frechet(moments(lite.clip_features(films)), real)
        shuffled = [film[torch.randperm(len(film))] for film in films]
        frozen = [film[:1].repeat(16, 1, 1, 1) for film in films]
        assert frechet(moments(lite.clip_features(shuffled)), real) > 5 * value
        assert frechet(moments(lite.clip_features(frozen)), real) > 2 * value


class TestShippedFiles:
    def test_hashes(self):
        file = features.DIRECTORY / "model.safetensors"
        assert hashlib.sha256(file.read_bytes()).hexdigest() == lite.EXTRACTOR.sha256
        assert lite.EXTRACTOR.name == "shapes-features"
        assert sum(one.stat().st_size for one in features.DIRECTORY.iterdir()) < 1_500_000

    def test_changed_weights_are_refused(self, tmp_path):
        for name in ("model.safetensors", "config.json"):
            (tmp_path / name).write_bytes((features.DIRECTORY / name).read_bytes())
        broken = bytearray((tmp_path / "model.safetensors").read_bytes())
        broken[-1] ^= 1
        (tmp_path / "model.safetensors").write_bytes(broken)
        with pytest.raises(ValueError, match=r"model.safetensors has sha256 .* train again with"):
            features.load(tmp_path)

    def test_reference_is_reproduced(self):
        kept = lite.reference()
        found = lite.embed(features.reference_pictures(300))
        assert kept.features.shape == (2000, 64) and kept.moments.count == 10_000
        assert torch.allclose(found, kept.features[:300], atol=0.02)
        deviation = kept.moments.cov.diagonal().sqrt()
        error = (found.double().mean(0) - kept.moments.mean).abs() / (deviation / 300**0.5)
        assert error.max() < 4.5 and error.square().mean().sqrt() < 1.5
        ratio = found.double().std(0) / deviation
        assert ratio.min() > 0.7 and ratio.max() < 1.4

    def test_reference_films_are_reproduced(self):
        kept = lite.reference().films
        found = lite.clip_features(draw_films(40, 42))
        error = (found.mean(0) - kept.mean).abs() / (kept.cov.diagonal() / 40).sqrt()
        assert kept.count == 2048 and error.max() < 5

    def test_card_is_generated_from_its_numbers(self):
        numbers = json.loads((features.DIRECTORY / "sensitivity.json").read_text())
        assert card(numbers) == (features.DIRECTORY / "README.md").read_text()


@pytest.fixture(scope="module")
def scenes():
    return draw(64, 77, held=None)


class TestCorruptions:
    @pytest.mark.parametrize("kind", RANGES)
    def test_nothing_at_strength_zero_and_something_at_the_least(self, scenes, kind):
        pictures = scenes[1][:8]
        least, greatest = RANGES[kind]
        assert torch.equal(corrupt(pictures, kind, 0.0), pictures)
        mild, strong = corrupt(pictures, kind, least), corrupt(pictures, kind, greatest)
        assert not torch.equal(mild, pictures)
        assert torch.equal(strong, corrupt(pictures, kind, greatest))
        change = [(one.float() - pictures.float()).square().mean() for one in (mild, strong)]
        assert change[0] < change[1]

    def test_closed_forms(self):
        flat = torch.full((2, 3, 64, 64), 100, dtype=torch.uint8)
        flat[1] = 200
        assert torch.equal(corrupt(flat, "blur", 1.0), flat)
        assert corrupt(flat, "ghost", 0.25)[:, 0, 0, 0].tolist() == [125, 175]
        assert torch.equal(corrupt(flat, "echo", 0.5), flat)
        tiles = corrupt(flat, "patch", 0.08).unfold(2, 4, 4).unfold(3, 4, 4).flatten(-2)
        assert torch.equal(tiles.amin(-1), tiles.amax(-1))

    def test_errors(self, scenes):
        with pytest.raises(ValueError, match="unknown kind 'dust'; use one of blur, noise"):
            corrupt(scenes[1], "dust", 0.1)
        with pytest.raises(ValueError, match="pass at least 2"):
            corrupt(scenes[1][:1], "ghost", 0.1)


class TestTraining:
    def test_disturb_leaves_a_quarter(self, scenes):
        before = scenes[1][:64]
        after, kinds, severity = disturb(before, torch.Generator().manual_seed(0))
        same = (after == before).flatten(1).all(1)
        assert torch.equal(same[:16], torch.ones(16, dtype=torch.bool)) and not same[16:].any()
        assert set(kinds[16:].tolist()) == set(range(1, 8)) and (severity[16:] > 0).all()

    def test_alter_changes_what_it_says(self, scenes):
        rng = np.random.default_rng(0)
        for scene in scenes[0][:60]:
            for wrong in ("shape", "color", "size", "place", "background", "swap"):
                assert alter(scene, wrong, rng).key() != scene.key() or wrong == "swap"

    def test_tally(self):
        two = Figure("ring", "red", "small", "left"), Figure("ring", "blue", "small", "right")
        found = tally([Scene("white", two)])[0]
        assert found.sum() == 1 + 2 + 3 * 2
        assert found[16 + SHAPES.index("ring")] == 2 and found[-2:].tolist() == [2, 0]

    def test_contrast_ignores_equal_prompts(self):
        unit = torch.eye(4, 32)
        altered = -unit[:, None]
        alone = contrast(unit, unit, altered, torch.eye(4, dtype=torch.bool))[0]
        twice = unit[[0, 1, 2, 2]]
        apart = contrast(twice, twice, altered, torch.eye(4, dtype=torch.bool))[0]
        same = torch.eye(4, dtype=torch.bool)
        same[2, 3] = same[3, 2] = True
        together = contrast(twice, twice, altered, same)[0]
        assert alone < 1e-3 and together < 1e-3 and apart > 0.5


def test_training_runs_from_end_to_end(tmp_path, monkeypatch):
    small = {"PART": 32, "REFERENCE": 12, "KEPT": 5, "FILMS": 6, "COMPONENTS": 4}
    for name, value in small.items():
        monkeypatch.setattr(train_features, name, value)
    settings = Settings(steps=3, batch=32, examples=256, seed=3, measure_every=3)
    job = ExtractorJob(settings, tmp_path)
    rows = train(job, "shapes-extractor", precision="float32").rows
    assert {"scene", "number", "artefact", "severity"} <= set(rows[-1])
    job = MatcherJob(settings, tmp_path)
    run = train(job, "shapes-matcher", precision="float32")
    assert 0 <= run.rows[-1]["right"] <= 1
    job.export(run.average.eval(), tmp_path)
    extractor, matcher, config = features.load(tmp_path)
    assert config["seed"] == 3 and config["pictures"] == 256
    for one, other in zip(matcher.parameters(), run.average["matcher"].parameters(), strict=True):
        assert torch.equal(one, other.half().float())
    kept = features.load_reference(tmp_path)
    found = features.in_batches(extractor, features.reference_pictures(12, seed=44))
    assert torch.allclose(found.double().mean(0), kept["mean"], atol=1e-5)
    assert torch.allclose(found[:5], kept["features"].float(), atol=0.02)
    assert kept["film_components"].shape == (256, 4) and int(kept["film_count"]) == 6
