"""The damage that the offline extractor is trained on, and its training."""

import numpy as np
import pytest
import torch

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
from diffcache.pipelines.small.scenes import SHAPES, Figure, Scene, draw


@pytest.fixture(scope="module")
def drawn():
    return draw(64, 77, held=None)


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

    def test_closed_forms(self):
        flat = torch.full((2, 3, 64, 64), 100, dtype=torch.uint8)
        flat[1] = 200
        assert torch.equal(corrupt(flat, "blur", 1.0), flat)
        assert corrupt(flat, "ghost", 0.25)[:, 0, 0, 0].tolist() == [125, 175]
        assert torch.equal(corrupt(flat, "echo", 0.5), flat)
        tiles = corrupt(flat, "patch", 0.08).unfold(2, 4, 4).unfold(3, 4, 4).flatten(-2)
        assert torch.equal(tiles.amin(-1), tiles.amax(-1))

    def test_errors(self, drawn):
        with pytest.raises(ValueError, match="unknown kind 'dust'; use one of blur, noise"):
            corrupt(drawn[1], "dust", 0.1)
        with pytest.raises(ValueError, match="pass at least 2"):
            corrupt(drawn[1][:1], "ghost", 0.1)


class TestTraining:
    def test_disturb_leaves_a_quarter(self, drawn):
        before = drawn[1][:64]
        after, kinds, severity = disturb(before, torch.Generator().manual_seed(0))
        same = (after == before).flatten(1).all(1)
        assert torch.equal(same[:16], torch.ones(16, dtype=torch.bool)) and not same[16:].any()
        assert set(kinds[16:].tolist()) == set(range(1, 8)) and (severity[16:] > 0).all()

    def test_alter_changes_what_it_says(self, drawn):
        rng = np.random.default_rng(0)
        for scene in drawn[0][:60]:
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
