"""The own film dimensions on folders of foreign films."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from diffcache.eval.clips import write_clip
from diffcache.eval.vbench import own, summary
from diffcache.eval.vbench.__main__ import main


@pytest.fixture
def folder(tmp_path: Path, moving_square: Any) -> Path:
    """Films of three kinds that we did not make, and a note."""
    films = tmp_path / "films"
    (films / "c").mkdir(parents=True)
    write_clip(films / "a.mp4", moving_square(seed=1), 8)
    write_clip(films / "b.mkv", moving_square(seed=2), 24)
    for index, frame in enumerate(moving_square(seed=3)):
        Image.fromarray(frame.permute(1, 2, 0).numpy()).save(films / "c" / f"{index}.png")
    (films / "notes.txt").write_text("not a film")
    return films


def test_a_folder_of_foreign_films_is_measured(
    folder: Path, capsys: pytest.CaptureFixture[str], moving_square: Any
) -> None:
    keys = ["temporal_flickering", "lite_warp_error"]
    command = [str(folder), "--fps", "8", "--dimensions", *keys]
    assert main([*command, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["warnings"] == ["not films, left out: notes.txt"]
    assert (report["backend"], report["count"]) == ("own", 3)
    assert len(report["extractor"]["sha256"]) == 64
    assert list(report["summary"]) == list(report["results"]) == keys
    score, films = report["results"]["lite_warp_error"]
    assert [Path(film["video_path"]).name for film in films] == ["a.mp4", "b.mkv", "c"]
    alone = own.measure(moving_square(seed=2), 24, ["lite_warp_error"])["lite_warp_error"]
    assert films[1]["video_results"] == alone
    row = report["summary"]["lite_warp_error"]
    assert row["value"] == pytest.approx(score)
    assert row["low"] <= row["value"] <= row["high"]
    assert (row["n"], row["direction"]) == (3, "down")
    assert not {"quality", "semantic", "total"} & set(report)

    target = folder.parent / "result.json"
    assert main([*command, "--json", str(target)]) == 0
    shown = capsys.readouterr().out
    assert "lite_warp_error" in shown and "none of the lite_ values is VBench's" in shown
    assert json.loads(target.read_text()) == report


def test_one_film_has_no_interval(tmp_path: Path, moving_square: Any) -> None:
    path = write_clip(tmp_path / "a.mkv", moving_square(), 8)
    row = summary.measure_films([path], ["temporal_flickering"])["summary"]["temporal_flickering"]
    assert (row["low"], row["high"], row["n"]) == (None, None, 1)


def _shorten(folder: Path, moving_square: Any) -> None:
    write_clip(folder / "b.mkv", moving_square()[:2], 8)


def _enlarge(folder: Path, moving_square: Any) -> None:
    write_clip(folder / "b.mkv", moving_square(side=80), 8)


def _damage(folder: Path, moving_square: Any) -> None:
    data = (folder / "b.mkv").read_bytes()
    (folder / "b.mkv").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_shorten, "b.mkv: a film needs 3 frames"),
        (_enlarge, "b.mkv has frames of 80 x 80, but .*a.mp4 of 64 x 64"),
        (_damage, "b.mkv (is|cannot)"),
        (lambda folder, moving_square: (folder / "b.mkv").write_bytes(b""), "b.mkv is empty"),
        (lambda folder, moving_square: None, "c does not say its frame rate: give it with --fps"),
    ],
)
def test_a_spoilt_film_is_named_before_anything_is_measured(
    folder: Path,
    spoil: Callable[[Path, Any], object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    moving_square: Any,
) -> None:
    spoil(folder, moving_square)
    films, _ = summary.find_films(folder)
    monkeypatch.setattr(own, "measure", lambda *_: pytest.fail("measured too early"))
    with pytest.raises(ValueError, match=message):
        summary.measure_films(films)


def test_folders_without_films_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("not a film")
    assert main([str(tmp_path)]) == 2
    assert "holds no film" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="no folder"):
        summary.find_films(tmp_path / "nowhere")


def test_films_missing_from_the_suite_are_noted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = folder.parent / "info.json"
    info.write_text(json.dumps([{"prompt_en": "a cat", "dimension": ["scene", "color"]}]))
    command = [str(folder), "--info", str(info), "--fps", "8", "--json", "-"]
    assert main([*command, "--dimensions", "temporal_flickering"]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert warnings[1] == "films missing from VBench's suite: color 5, scene 5"
