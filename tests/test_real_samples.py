"""References of a run: mixed sizes, statistics, what is drawn from them, and what is checked first."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffcache.errors import MissingError
from diffcache.eval import fid
from diffcache.eval.metrics import lite, sets
from diffcache.eval.metrics.distances import moments
from diffcache.eval.metrics.sets import kernel_distance, neighbors, some
from diffcache.eval.runs import measure
from diffcache.eval.runs.draw import Drawer
from diffcache.eval.runs.evaluate import Plan
from diffcache.eval.runs.extractors import Extractors
from diffcache.eval.runs.ranks import Progress
from diffcache.eval.runs.task import Task
from diffcache.eval.samples import npz
from diffcache.eval.samples.sources import Wish, open_source
from tests.folder_scripts.pictures import drawn
from tests.picture_files import save_npz

pytestmark = pytest.mark.usefixtures("no_report")
PICTURES = drawn(70, 0)


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DIFFCACHE_WEIGHTS", "TORCH_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "no-weights"))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    folder = tmp_path / "mixed"
    folder.mkdir()
    for number, picture in enumerate(PICTURES):
        size = (64 + number % 3, 70)
        image = Image.fromarray(picture.permute(1, 2, 0).numpy()).resize(size)
        image.save(folder / f"{number}.png")
    return folder


def plan(tmp_path: Path, **changes: object) -> Plan:
    task = Task(model="sticker-flux", samples=32, batch_size=16, steps=1, call={"height": 32, "width": 32})
    return replace(Plan(task, {}, tmp_path / "run", rounds=0), **changes)


def test_mixed_sizes_are_refused_before_anything_is_drawn(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drawer, "pipe", property(lambda self: pytest.fail("it was loaded")))
    with pytest.raises(ValueError, match=r"1\.png is 70 x 65 and .*0\.png 70 x 64: --resize SIDE"):
        measure.evaluate(plan(tmp_path, reference=mixed), Progress())
    for size, words in ((2048, "need the network of FID: no file weights"), (7, "of 7 features")):
        np.savez(tmp_path / "s.npz", mu=np.zeros(size), sigma=np.eye(size))
        wanted = plan(tmp_path, reference=tmp_path / "s.npz")
        with pytest.raises((MissingError, ValueError), match=words):
            measure.evaluate(wanted, Progress())
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="resize=64: .* beside a reference"):
        plan(tmp_path, resize=64)


def test_features_of_a_reference_are_kept(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = plan(tmp_path, reference=mixed, resize=64)
    record = measure.evaluate(wanted, Progress())
    assert record is not None and record["task"]["reference"] == "mixed at 64 pixels"
    assert record["reference"]["count"] == 70 and record["reference"]["resize"] == 64
    quality = record["rows"][0]["quality"]
    assert {"fid_lite", "kid_lite", "recall_lite"} <= set(quality)
    assert quality["kid_lite"]["drawn"] == {"real": 70, "fake": 32, "seed": 0}
    assert "no file weights-inception" in record["missing"]["fid"]
    monkeypatch.setattr(lite, "embed", lambda pictures: pytest.fail("read anew"))
    again = measure.evaluate(wanted, Progress())
    assert again is not None and again["rows"] == record["rows"]
    (mixed / "3.png").write_bytes((mixed / "4.png").read_bytes())
    with pytest.raises(pytest.fail.Exception, match="read anew"):
        measure.evaluate(wanted, Progress())


def test_statistics_stand_for_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    networks = Extractors()
    file, bare, saved = (tmp_path / f"{name}.npz" for name in ("pictures", "bare", "saved"))
    save_npz(file, PICTURES)
    features = lite.embed(PICTURES).double()
    np.savez(bare, mu=features.mean(0), sigma=np.cov(features.T))
    arguments = [str(file), str(file), "--resamples", "0", "--save", str(saved), "--json", "-"]
    assert fid.main([*arguments, "--backend", "lite"]) == 0
    capsys.readouterr()
    read = {}
    for place in (file, bare, saved):
        real = open_source(place)
        real.check(networks)
        read[place] = real.reference(networks, tmp_path / "kept").sets["_lite"]
        assert torch.allclose(read[place][0].mean, features.mean(0), atol=1e-6)
        assert torch.allclose(read[place][0].cov, moments(features).cov, atol=1e-6)
    assert read[bare][1] is None and read[saved][1].shape == read[file][1].shape == (70, 64)
    assert set(open_source(bare).lacking()) == {
        f"{name}_lite" for name in ("kid", "precision", "recall", "density", "coverage")
    }
    assert open_source(saved).lacking() == {}
    said = open_source(saved).describe(networks)["statistics"]["of"]
    assert said["extractor"] == "sticker-features" and said["source"] == str(file)
    with pytest.raises(ValueError, match="--resize 64 needs pictures, and .*bare.npz holds statistics"):
        open_source(bare, Wish(side=64))
    stored = npz.read_statistics(saved)
    assert stored is not None
    stored.about["extractor"] = "another"
    npz.write_statistics(saved, stored)
    with pytest.raises(ValueError, match="statistics of another extractor .'another'"):
        open_source(saved).check(networks)


def test_neighbors_are_looked_for_among_samples_drawn_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 500
    monkeypatch.setattr(sets, "MOST_NEIGHBORS", most)
    generator = torch.Generator().manual_seed(0)
    classes = torch.randn(10, 16, generator=generator) * 3
    by_class = torch.cat([c + torch.randn(125, 16, generator=generator) for c in classes])
    order = torch.randint(10, (most,), generator=generator)
    fake = classes[order] + torch.randn(most, 16, generator=generator)
    real, fake = by_class.double(), fake.double()  # a folder sorted by class, equal distributions
    distance, near = kernel_distance(real, fake), neighbors(real, fake, resamples=0)
    assert abs(distance["value"]) < 0.1 * kernel_distance(real[:most], fake)["value"]
    assert near["precision"]["value"] > 0.7
    assert neighbors(real[:most], fake, resamples=0)["precision"]["value"] < 0.5
    assert near["recall"]["drawn"] == {"real": most, "fake": most, "seed": 0}
    assert torch.equal(some(real, 3), some(real, 3)) and len(some(real, 3)) == most
