"""`eval.fid` on folders and sets of features, against the functions that it calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from diffcache.eval import fid
from diffcache.eval.metrics import bootstrap, inception, lite, sets
from diffcache.eval.metrics.frechet import frechet, moments
from tests.folder_scripts.pictures import error, report, saved
from tests.picture_files import save_npz


def test_fid_of_a_folder_with_itself_is_zero(capsys: Any, shapes: dict[str, Any]) -> None:
    found = report(capsys, fid.main, shapes["real"], shapes["real"], "--resamples", "20")
    assert found["metrics"]["fid_lite"]["value"] < 1e-6
    assert found["metrics"]["fid_lite"]["low"] == 0.0
    assert any("is compared with itself" in text for text in found["warnings"])


def test_fid_is_that_of_the_features_and_sees_ghosts(capsys: Any, shapes: dict[str, Any]) -> None:
    features = {name: lite.embed(x).double() for name, x in shapes["pictures"].items()}
    reference = moments(features["real"])
    values = {}
    for name in ("fake", "ghost"):
        found = report(capsys, fid.main, shapes["real"], shapes[name], "--resamples", "50")
        distance = found["metrics"]["fid_lite"]
        assert distance["value"] == pytest.approx(frechet(moments(features[name]), reference), rel=1e-5)
        expected = bootstrap.frechet_interval(features[name], reference, 50)
        assert distance["low"] == pytest.approx(expected.low, rel=1e-4)
        assert distance["high"] == pytest.approx(expected.high, rel=1e-4)
        assert distance["n"] == found["fake"]["count"] == 160
        values[name] = distance
    # Another draw of the same scenes is about at the floor, and ghosts are above it.
    assert values["fake"]["value"] == pytest.approx(values["fake"]["floor"], rel=0.3)
    assert values["ghost"]["low"] > values["ghost"]["floor"]


def test_fid_other_metrics_and_warnings(capsys: Any, shapes: dict[str, Any]) -> None:
    found = report(capsys, fid.main, shapes["real"], shapes["ghost"], "--kid", "--prdc", "--is", "--resamples", "50")
    assert list(found["metrics"]) == [
        f"{name}_lite" for name in ("fid", "kid", "precision", "recall", "density", "coverage", "is")
    ]
    assert found["metrics"]["precision_lite"]["value"] < 0.9
    assert 1 <= found["metrics"]["is_lite"]["value"] <= 5
    fallback, few = found["warnings"]
    assert "FID-lite in place of FID" in fallback and "weights-inception-2015-12-05-6726825d.pth" in fallback
    assert "160 samples are few for FID-lite (2,000 are enough)" in few
    assert found["backend"]["backend"] == "lite"


def test_fid_prints_a_table_and_warns_on_standard_error(capsys: Any, shapes: dict[str, Any]) -> None:
    assert fid.main([shapes["real"], shapes["fake"], "--backend", "lite", "--resamples", "20"]) == 0
    out, err = capsys.readouterr()
    assert "FID-lite" in out and " .. " in out and "160 samples against 160" in out
    assert [line[:8] for line in err.strip().splitlines()] == ["warning:"]  # too few samples


def test_fid_samples_resize_and_npz(capsys: Any, shapes: dict[str, Any], tmp_path: Path) -> None:
    arguments = ("--backend", "lite", "--samples", "70", "--resize", "32", "--resamples", "0")
    direct = report(capsys, fid.main, shapes["real"], shapes["fake"], *arguments)
    assert direct["fake"] == {**direct["fake"], "count": 70, "size": [32, 32]}
    assert "low" not in direct["metrics"]["fid_lite"]
    file = save_npz(tmp_path / "fake.npz", shapes["pictures"]["fake"])
    again = report(capsys, fid.main, shapes["real"], str(file), *arguments)
    assert again["metrics"] == direct["metrics"]


def test_fid_takes_stored_statistics(capsys: Any, shapes: dict[str, Any], tmp_path: Path) -> None:
    features = lite.embed(shapes["pictures"]["real"]).double().numpy()
    file = tmp_path / "real.npz"
    np.savez(file, mu=features.mean(0), sigma=np.cov(features.T))
    found = report(capsys, fid.main, str(file), shapes["fake"], "--resamples", "20")
    expected = report(capsys, fid.main, shapes["real"], shapes["fake"], "--resamples", "20")
    for key in ("value", "low", "high"):
        assert found["metrics"]["fid_lite"][key] == pytest.approx(expected["metrics"]["fid_lite"][key], rel=1e-4)
    assert found["real"]["statistics"] and found["real"]["count"] is None
    message = error(capsys, 2, fid.main, str(file), shapes["fake"], "--kid")
    assert "--kid needs pictures" in message and "real.npz" in message


def test_fid_statistics_of_inception_need_its_weights(capsys: Any, shapes: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "inception.npz"
    np.savez(file, mu=np.zeros(2048), sigma=np.eye(2048))
    message = error(capsys, 3, fid.main, str(file), shapes["fake"])
    assert "weights-inception-2015-12-05-6726825d.pth" in message
    message = error(capsys, 2, fid.main, str(file), shapes["fake"], "--backend", "lite")
    assert "inception.npz: statistics of 2048 features, lite has 64" in message
    pictures = shapes["pictures"]["real"].permute(0, 2, 3, 1).contiguous().numpy()
    np.savez(file, mu=np.zeros(2048), sigma=np.eye(2048), arr_0=pictures)
    found = report(capsys, fid.main, str(file), shapes["real"], "--resamples", "0", "--backend", "lite")
    assert found["metrics"]["fid_lite"]["value"] < 1e-6 and not found["real"]["statistics"]
    assert "statistics of 2048 features, lite has 64: using the pictures" in found["warnings"][0]


def test_fid_with_a_real_network_has_the_real_names(
    capsys: Any, shapes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def network(pictures: Tensor) -> inception.Features:
        seen = pictures.double().mean(dim=(2, 3)).float()
        return inception.Features(seen, seen)

    made = inception.Inception("torch-fidelity", "0" * 64, network, torch.device("cpu"))
    asked = []
    monkeypatch.setattr(inception, "load", lambda *given, **more: asked.append((given, more)) or made)
    found = report(
        capsys,
        fid.main,
        shapes["real"],
        shapes["fake"],
        "--weights",
        "w.pth",
        "--device",
        "cpu",
        "--is",
        "--resamples",
        "20",
    )
    assert asked == [(("w.pth",), {"device": "cpu", "convention": "torch-fidelity"})]
    means = [shapes["pictures"][name].double().mean(dim=(2, 3)) for name in ("real", "fake")]
    assert list(found["metrics"]) == ["fid", "is"]
    assert found["metrics"]["fid"]["value"] == pytest.approx(frechet(*map(moments, means)), rel=1e-5)
    assert found["backend"]["convention"] == "torch-fidelity"
    assert "160 samples are few for FID (10,000 are enough)" in found["warnings"][0]


def test_fid_without_weights_says_which_where_from_and_the_hash(capsys: Any, shapes: dict[str, Any]) -> None:
    message = error(capsys, 3, fid.main, shapes["real"], shapes["fake"], "--backend", "real")
    assert "no file weights-inception-2015-12-05-6726825d.pth" in message
    assert "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2" in message
    assert "https://github.com/toshas/torch-fidelity/releases" in message
    message = error(capsys, 3, fid.main, shapes["real"], shapes["fake"], "--weights", "/nowhere/w.pth")
    assert "/nowhere/w.pth" in message


def test_fid_errors_name_the_file_or_the_option(capsys: Any, shapes: dict[str, Any], tmp_path: Path) -> None:
    real, fake = shapes["real"], shapes["fake"]
    (tmp_path / "empty").mkdir()
    odd = saved(tmp_path / "odd", shapes["pictures"]["real"][:3])
    Image.new("RGB", (65, 64)).save(odd / "wide.png")
    corrupt = saved(tmp_path / "corrupt", shapes["pictures"]["real"][:3])
    whole = (corrupt / "1.png").read_bytes()
    (corrupt / "1.png").write_bytes(whole[:-40])
    one = saved(tmp_path / "one", shapes["pictures"]["real"][:1])
    cases = [
        ((real, str(tmp_path / "gone")), "gone"),
        ((real, str(tmp_path / "empty")), "empty holds no picture"),
        ((real, str(odd)), "wide.png is 64 x 65"),
        ((real, str(corrupt), "--backend", "lite"), "1.png is damaged or no picture"),
        ((real, str(one)), "one holds one picture"),
        ((real, fake, "--samples", "161"), "--samples 161"),
        ((real, fake, "--backend", "lite", "--weights", "w"), "--weights has no effect"),
        ((real, fake, "--backend", "lite", "--device", "gpu"), "--device has no effect"),
        ((real, fake, "--is", "--convention", "clean", "--backend", "real"), "--convention clean"),
        ((real, fake, "--device", "gpu", "--backend", "real"), "--device 'gpu'"),
        ((real, fake, "--json", str(corrupt / "1.png" / "x.json")), "--json"),
    ]
    for arguments, message in cases:
        assert message in error(capsys, 2, fid.main, *arguments)
    for words in ((real,), (real, fake, "--samples", "1"), (real, fake, "--backend", "fake")):
        assert fid.main(list(words)) == 2 and "Usage: " in capsys.readouterr().err


def test_fid_help_and_json_file(capsys: Any, shapes: dict[str, Any], tmp_path: Path) -> None:
    assert fid.main(["--help"]) == 0
    help_text = capsys.readouterr().out
    assert "Exit codes" in help_text and f"look at {sets.MOST_NEIGHBORS:,} pictures" in help_text
    file = tmp_path / "fid.json"
    assert fid.main([shapes["real"], shapes["fake"], "--resamples", "0", "--json", str(file)]) == 0
    assert f"wrote {file}" in capsys.readouterr().out.replace("\n", "")
    assert json.loads(file.read_text())["schema"] == "diffcache.fid/1"


def gaussian(count: int, seed: int, dim: int = 6) -> sets.FeatureSet:
    features = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return sets.FeatureSet(moments(features), count, features)


@pytest.mark.parametrize(("one", "other"), [(200, 200), (100, 1000), (1000, 100)])
def test_the_floor_is_what_two_sets_of_one_distribution_are_apart(one: int, other: int) -> None:
    apart = [frechet(gaussian(one, 2 * seed).moments, gaussian(other, 2 * seed + 1).moments) for seed in range(60)]
    floors = [sets.floor(gaussian(one, seed), gaussian(other, seed + 1), seed) for seed in range(12)]
    assert np.mean(floors) == pytest.approx(np.mean(apart), rel=0.15)
    exact = sets.FeatureSet(gaussian(100_000, 5).moments, None)
    floors = [sets.floor(exact, gaussian(other, seed), seed) for seed in range(12)]
    apart = [frechet(exact.moments, gaussian(other, seed).moments) for seed in range(60)]
    assert np.mean(floors) == pytest.approx(np.mean(apart), rel=0.15)


def test_comparing_sets_needs_what_it_is_asked_for() -> None:
    known, bare = gaussian(50, 0), sets.FeatureSet(gaussian(50, 1).moments, 50)
    with pytest.raises(ValueError, match="KID, precision.* need the pictures of the reference"):
        sets.compare(bare, known, sets.Wanted(kid=True, resamples=0))
    with pytest.raises(ValueError, match="features of the second set"):
        sets.compare(known, bare, sets.Wanted())
    with pytest.raises(ValueError, match="class probabilities"):
        sets.compare(known, known, sets.Wanted(inception_score=True, resamples=0))
    assert sets.floor(gaussian(3, 0), gaussian(3, 1)) is None
