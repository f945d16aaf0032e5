"""Scripts on folders, against the functions that they call and closed forms."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from diffcache.eval import fid, fidelity
from diffcache.eval.metrics import inception, intervals, lite, lpips, pixels, sets
from diffcache.eval.metrics.distances import frechet, moments
from diffcache.eval.samples.clips import write_clip, write_preview
from tests.folder_scripts.pictures import drawn, error, report, saved
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
        expected = intervals.frechet_interval(features[name], reference, 50)
        assert distance["low"] == pytest.approx(expected.low, rel=1e-4)
        assert distance["high"] == pytest.approx(expected.high, rel=1e-4)
        assert distance["n"] == found["fake"]["count"] == 80
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
    assert "80 samples are few for FID-lite (2,000 are enough)" in few
    assert found["backend"]["backend"] == "lite"


def test_fid_samples_resize_and_npz(capsys: Any, shapes: dict[str, Any], tmp_path: Path) -> None:
    arguments = ("--backend", "lite", "--samples", "70", "--resize", "32", "--resamples", "0")
    direct = report(capsys, fid.main, shapes["real"], shapes["fake"], *arguments)
    assert direct["fake"] == {**direct["fake"], "count": 70, "size": [32, 32]}
    assert "low" not in direct["metrics"]["fid_lite"]
    file = save_npz(tmp_path / "fake.npz", shapes["pictures"]["fake"])
    again = report(capsys, fid.main, shapes["real"], str(file), *arguments)
    assert again["metrics"] == direct["metrics"]
    real = save_npz(tmp_path / "real.npz", shapes["pictures"]["real"][:9])
    found = report(capsys, fid.main, str(real), str(file), "--backend", "lite", "--resamples", "0")
    assert "9 samples are few" in found["warnings"][-1]  # of either set


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
    few = (shapes["real"], shapes["fake"], "--samples", "9")
    assert "--is needs 10 pictures or more, not 9: give more" in error(capsys, 2, fid.main, *few, "--is")
    assert "--prdc needs 6" in error(capsys, 2, fid.main, *few[:3], "5", "--prdc")


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
    words = ["--weights", "w.pth", "--device", "cpu", "--is", "--resamples", "20"]
    found = report(capsys, fid.main, shapes["real"], shapes["fake"], *words)
    assert asked == [(("w.pth",), {"device": "cpu", "convention": "torch-fidelity"})]
    means = [shapes["pictures"][name].double().mean(dim=(2, 3)) for name in ("real", "fake")]
    assert list(found["metrics"]) == ["fid", "is"]
    assert found["metrics"]["fid"]["value"] == pytest.approx(frechet(*map(moments, means)), rel=1e-5)
    assert found["backend"]["convention"] == "torch-fidelity"
    assert "80 samples are few for FID (10,000 are enough)" in found["warnings"][0]


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
        ((real, fake, "--samples", "81"), "--samples 81"),
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


def shifted(pictures: Tensor, by: int = 1) -> Tensor:
    return (pictures.int() + by).clamp(0, 255).to(torch.uint8)


def noisy(pictures: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(pictures.shape, generator=generator) * torch.linspace(1, 9, len(pictures))[:, None, None, None]
    return (pictures.float() + noise).round().clamp(0, 255).to(torch.uint8)


def test_fidelity_equals_the_functions_on_the_same_pictures(capsys: Any, tmp_path: Path) -> None:
    a = drawn(12, 3)
    b = noisy(a)
    folders = [str(saved(tmp_path / "a", a)), str(saved(tmp_path / "b", b, "bmp"))]
    table = tmp_path / "pairs.csv"
    found = report(capsys, fidelity.main, *folders, "--batch-size", "5", "--csv", str(table), "--resamples", "100")
    expected = {
        "psnr_db": pixels.psnr(a, b),
        "ssim": pixels.ssim(a, b),
        "ms_ssim": pixels.ms_ssim(a, b),
        "lpips_lite": lite.lpips_lite(a, b).double(),
    }
    assert list(found["metrics"]) == list(expected)
    order = sorted(range(12), key=str)  # natural order is numeric: 0, 1, 2, ..., 10, 11
    with table.open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["name"] for row in rows] == [str(i) for i in range(12)] != [str(i) for i in order]
    for key, column in expected.items():
        row = found["metrics"][key]
        interval = intervals.mean_interval(column, 100)
        for name in ("value", "low", "high"):
            assert row[name] == pytest.approx(getattr(interval, name), rel=1e-5)
        assert [float(r[key]) for r in rows] == pytest.approx(column.tolist(), rel=1e-5)
        low_is_good = key == "lpips_lite"
        worst = int(column.argmax() if low_is_good else column.argmin())
        assert row["worst"][0]["name"] == str(worst) and len(row["worst"]) == 5
        tail = torch.quantile(column, 0.95 if low_is_good else 0.05)
        assert row["p95" if low_is_good else "p5"] == pytest.approx(float(tail), rel=1e-5)
    assert found["metrics"]["psnr_db"]["pooled"] == pytest.approx(pixels.pooled_psnr(a, b), rel=1e-9)
    assert any("LPIPS-lite in place of LPIPS" in text for text in found["warnings"])
    assert any("MS-SSIM of 3 of 5 scales" in text for text in found["warnings"])


def test_fidelity_of_a_constant_shift_is_known(capsys: Any, tmp_path: Path) -> None:
    a = torch.full((3, 3, 40, 30), 100, dtype=torch.uint8)
    one, other = saved(tmp_path / "a", a), saved(tmp_path / "b", shifted(a, 5))
    found = report(capsys, fidelity.main, str(one), str(other), "--metrics", "psnr")
    psnr = found["metrics"]["psnr_db"]
    assert psnr["value"] == pytest.approx(20 * np.log10(255 / 5)) == psnr["pooled"]
    assert found["backend"] is None and found["warnings"] == []
    single = report(capsys, fidelity.main, str(one / "0.png"), str(other / "1.png"), "--metrics", "psnr")
    assert single["metrics"]["psnr_db"]["value"] == psnr["value"] and single["count"] == 1
    assert "low" not in single["metrics"]["psnr_db"]


def test_fidelity_of_npz_and_of_different_sizes_in_a_folder(capsys: Any, tmp_path: Path) -> None:
    a = drawn(5, 4)
    files = [str(save_npz(tmp_path / f"{n}.npz", x)) for n, x in (("a", a), ("b", noisy(a)))]
    found = report(capsys, fidelity.main, *files, "--metrics", "psnr,ssim", "--batch-size", "2")
    assert found["metrics"]["psnr_db"]["value"] == pytest.approx(float(pixels.psnr(a, noisy(a)).mean()))
    sizes = [(24, 24), (24, 24), (30, 24), (24, 30)]
    b = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in sizes]
    for name, by in (("c", 0), ("d", 2)):
        (tmp_path / name).mkdir()
        for index, picture in enumerate(b):
            image = Image.fromarray(shifted(picture, by).permute(1, 2, 0).numpy())
            image.save(tmp_path / name / f"{index}.png")
    found = report(capsys, fidelity.main, *(str(tmp_path / n) for n in "cd"), "--metrics", "psnr")
    expected = [float(pixels.psnr(x[None], shifted(x, 2)[None])) for x in b]
    assert found["metrics"]["psnr_db"]["value"] == pytest.approx(np.mean(expected))


def test_fidelity_of_films(capsys: Any, tmp_path: Path) -> None:
    films = [drawn(4, seed)[:, :, :48, :56].contiguous() for seed in (5, 6)]
    others = [noisy(film) for film in films]
    for name, made in (("a", films), ("b", others)):
        (tmp_path / name).mkdir()
        write_clip(tmp_path / name / "first.mkv", made[0], 8)
        saved(tmp_path / name / "second", made[1])
    found = report(capsys, fidelity.main, str(tmp_path / "a"), str(tmp_path / "b"), "--resamples", "20")
    expected = [float(pixels.psnr(x, y).mean()) for x, y in zip(films, others, strict=True)]
    change = [pixels.temporal_error(x, y) for x, y in zip(films, others, strict=True)]
    assert found["kind"] == "films" and found["count"] == 2
    assert found["metrics"]["psnr_db"]["value"] == pytest.approx(np.mean(expected))
    pooled = pixels.pooled_psnr(torch.cat(films), torch.cat(others))
    assert found["metrics"]["psnr_db"]["pooled"] == pytest.approx(pooled)
    assert found["metrics"]["temporal_error"]["value"] == pytest.approx(np.mean(change))
    assert not any("encoded with loss" in text for text in found["warnings"])
    frames = [str(tmp_path / name / "second") for name in "ab"]
    single = report(capsys, fidelity.main, *frames, "--films", "--metrics", "temporal-error")
    assert single["metrics"]["temporal_error"]["value"] == pytest.approx(change[1])
    (tmp_path / "b" / "second").rename(tmp_path / "cached")  # frames of one film, whatever their folder is called
    frames[1] = str(tmp_path / "cached")
    again = report(capsys, fidelity.main, *frames, "--films", "--metrics", "temporal-error")
    assert again["metrics"] == single["metrics"]
    as_pictures = report(capsys, fidelity.main, *frames, "--metrics", "psnr")
    assert as_pictures["kind"] == "pictures" and as_pictures["count"] == 4


def test_fidelity_warns_of_lossy_films_and_pictures(capsys: Any, tmp_path: Path) -> None:
    film = drawn(3, 7)
    write_preview(tmp_path / "a.mp4", film, 8)
    write_clip(tmp_path / "b.mp4", film, 8)
    found = report(capsys, fidelity.main, str(tmp_path / "b.mp4"), str(tmp_path / "a.mp4"), "--metrics", "psnr")
    assert "1 of 2 films are encoded with loss, a.mp4 as h264 yuv420p" in found["warnings"][0]
    assert "about 32 dB" in found["warnings"][0] and found["metrics"]["psnr_db"]["value"] < 45
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "b.mp4").read_bytes()[:1500])
    assert fidelity.main([*[str(tmp_path / "cut.mp4")] * 2, "--metrics", "psnr"]) == 2
    said = capsys.readouterr().err
    assert "error: " in said and "cut.mp4" in said and "encoded with loss" not in said
    write_clip(tmp_path / "fast.mp4", film, 16)
    both = str(tmp_path / "b.mp4"), str(tmp_path / "fast.mp4")
    found = report(capsys, fidelity.main, *both, "--metrics", "psnr")
    assert "fast.mp4 have 8 and 16 frames per second" in found["warnings"][0]
    assert found["metrics"]["psnr_db"]["value"] == 100 and len(found["warnings"]) == 1
    one, other = saved(tmp_path / "c", film), saved(tmp_path / "d", film, "jpg")
    found = report(capsys, fidelity.main, str(one), str(other), "--metrics", "psnr")
    assert "3 JPEG files such as 0.jpg" in found["warnings"][0]


def test_fidelity_leaves_out_what_pictures_are_too_small_for(capsys: Any, tmp_path: Path) -> None:
    a = drawn(3, 8)[:, :, :16, :20].contiguous()
    one, other = str(saved(tmp_path / "a", a)), str(saved(tmp_path / "b", noisy(a)))
    found = report(capsys, fidelity.main, one, other, "--backend", "lite")
    assert list(found["metrics"]) == ["psnr_db", "ssim", "lpips_lite"]
    assert "left out: ms-ssim needs sides of 22 pixels" in found["warnings"][0]
    message = error(capsys, 2, fidelity.main, one, other, "--metrics", "ms-ssim")
    assert "0.png" in message and "ms-ssim needs sides of 22 pixels" in message
    write_clip(tmp_path / "a.mkv", a, 8)
    message = error(capsys, 2, fidelity.main, *[str(tmp_path / "a.mkv")] * 2, "--metrics", "ms-ssim")
    assert "a.mkv" in message and "22 pixels" in message


def test_fidelity_with_a_real_network_has_the_real_name(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fake:
        def entry(self) -> dict[str, str]:
            return {"backend": "real", "extractor": "alexnet", "sha256": "0" * 64}

        def distances(self, a: Tensor, b: Tensor) -> Tensor:
            return (a.float() - b.float()).abs().mean(dim=(1, 2, 3))

    monkeypatch.setattr(lpips, "load", lambda *given, **more: Fake())
    a = drawn(3, 9)
    one, other = str(saved(tmp_path / "a", a)), str(saved(tmp_path / "b", noisy(a)))
    found = report(capsys, fidelity.main, one, other, "--metrics", "lpips")
    assert list(found["metrics"]) == ["lpips"] and found["backend"]["backend"] == "real"
    assert found["metrics"]["lpips"]["value"] == pytest.approx(float(Fake().distances(a, noisy(a)).mean()), rel=1e-6)
    small = a[:, :, :30].contiguous()
    one, other = str(saved(tmp_path / "c", small)), str(saved(tmp_path / "d", noisy(small)))
    assert "lpips needs sides of 32 pixels" in error(capsys, 2, fidelity.main, one, other, "--metrics", "lpips")


def test_fidelity_errors_name_the_file_or_the_option(capsys: Any, tmp_path: Path) -> None:
    a = drawn(3, 10)
    one, other = saved(tmp_path / "a", a), saved(tmp_path / "b", a)
    fewer = saved(tmp_path / "fewer", a[:2])
    narrow = saved(tmp_path / "narrow", a)
    Image.new("RGB", (60, 64)).save(narrow / "1.png")
    cut = saved(tmp_path / "cut", a)
    (cut / "2.png").write_bytes((cut / "2.png").read_bytes()[:-40])
    write_clip(tmp_path / "short.mkv", a[:2], 8)
    write_clip(tmp_path / "long.mkv", a, 8)
    write_clip(tmp_path / "still.mkv", a[:1], 8)
    (tmp_path / "broken.mp4").write_text("no film")
    names = {p.stem: str(p) for p in tmp_path.iterdir()}
    cases = [
        ((names["a"], names["fewer"]), "fewer lacks 1 of"),
        ((names["a"], names["narrow"]), "narrow/1.png are 64 x 64 and 64 x 60: pairs must be of one size"),
        ((names["a"], names["cut"]), "2.png is damaged or no picture"),
        ((names["a"], str(tmp_path / "gone")), "gone"),
        ((names["a"], names["long"]), "long.mkv holds films and "),
        ((names["long"], names["short"]), "3 frames of 64 x 64 and 2 frames of 64 x 64"),
        ((names["still"], names["still"]), "still.mkv: temporal_error needs two frames"),
        ((names["long"], names["broken"]), "broken.mp4 cannot be read"),
        ((names["a"], names["b"], "--metrics", "psnr,sim"), "--metrics: no 'sim'; there are psnr"),
        ((names["a"], names["b"], "--metrics", "temporal-error"), "needs films"),
        ((names["a"], names["b"], "--csv", str(tmp_path / "broken.mp4" / "x.csv")), "--csv"),
        ((names["a"], names["b"], "--csv", "-"), "--csv"),
    ]
    for arguments, message in cases:
        assert message in error(capsys, 2, fidelity.main, *arguments, "--backend", "lite")
    message = error(capsys, 3, fidelity.main, names["a"], names["b"], "--backend", "real")
    assert "alexnet-owt-7be5be79.pth" in message and "7be5be791159472b" in message
    assert one != other and fewer
