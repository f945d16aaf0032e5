"""`eval.fidelity` on folders, against the functions that it calls and closed forms."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from diffcache.eval import fidelity
from diffcache.eval.metrics import bootstrap, lite, lpips, pixels
from diffcache.eval.samples import backends
from diffcache.eval.samples.clips import write_clip, write_preview
from tests.folder_scripts.pictures import drawn, error, report, saved
from tests.picture_files import save_npz


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
        interval = bootstrap.mean_interval(column, 100)
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


def test_fidelity_prints_names_of_the_worst_pairs(capsys: Any, tmp_path: Path) -> None:
    a = drawn(6, 11)
    one, other = str(saved(tmp_path / "a", a)), str(saved(tmp_path / "b", noisy(a)))
    assert fidelity.main([one, other, "--metrics", "psnr"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "PSNR" in out and "6 pairs of pictures" in out
    assert f"5 ({float(pixels.psnr(a, noisy(a))[5]):.4g})" in out  # most noise


def test_a_choice_of_weights_means_the_real_network() -> None:
    assert backends.Choice("auto", "w.pth").kind == "real" and backends.Choice().kind == "auto"
