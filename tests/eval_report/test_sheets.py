"""Sheets of samples: pictures and films beside the uncached ones."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffcache.eval.report import strips
from diffcache.eval.report.samples import Samples
from diffcache.eval.report.write import write_report
from tests.eval_report.made import brief_record, make_record, make_run, picture, pixels_of, read_page


def test_sheet_shows_the_pixels_and_their_difference(tmp_path: Path) -> None:
    record = make_record()
    record["rows"] = record["rows"][:2]
    make_run(tmp_path, record)
    sheets, left_out = strips.draw(record, [tmp_path])
    assert [sheet.stem for sheet in sheets] == ["samples-worst", "samples-median", "samples-best"]
    assert left_out == []
    shown_pixels = pixels_of(sheets[2])
    wide = 6 * 32
    base = picture(3, 0).astype(int)
    theirs = np.asarray(Image.open(tmp_path / record["rows"][1]["folder"] / "samples/00003.png"))
    left, top = 16, 16 + 22
    for place, wanted in (
        ((left, top), base),
        ((left + wide + 12, top), theirs),
        ((left + wide + 12, top + wide + 26), np.minimum(5 * abs(theirs - base), 255)),
    ):
        x, y = place
        panel = shown_pixels[y : y + wide, x : x + wide][3::6, 3::6]
        assert np.array_equal(panel, wanted)


def test_narrow_samples_stand_side_by_side(tmp_path: Path) -> None:
    record = make_record()
    record["rows"] = record["rows"][:2]
    make_run(tmp_path, record)
    sheet = pixels_of(strips.draw(record, [tmp_path])[0][0])
    side = 6 * 32
    pitch = 2 * side + 12 + 2 * 16
    assert record["rows"][1]["samples"]["worst"] == [1, 0] and sheet.shape[1] == 2 * pitch
    for place, number in enumerate((1, 0)):
        left = 16 + place * pitch
        shown = sheet[38 : 38 + side, left : left + side][3::6, 3::6]
        assert np.array_equal(shown, picture(number, 0))


def test_closeness_is_the_psnr() -> None:
    one = np.zeros((4, 4, 3), np.uint8)
    assert strips.closeness(one, one) == "identical"
    assert strips.closeness(one, one + 255) == "PSNR 0.0 dB"
    wanted = 10 * math.log10(255**2 / 9)
    assert strips.closeness(one, one + 3) == f"PSNR {wanted:.1f} dB"


def test_methods_take_turns_in_the_choice_of_samples() -> None:
    methods = [
        {"name": "a", "samples": {"worst": [7, 2, 9]}},
        {"name": "b", "samples": {"worst": [7, 5]}},
        {"name": "c", "samples": None},
    ]
    assert strips.picks(methods, "worst", 3) == [(7, "a"), (2, "a"), (5, "b")]
    assert strips.picks(methods, "best", 3) == []


def test_damaged_and_foreign_files_are_not_shown(tmp_path: Path) -> None:
    record = make_record()
    make_run(tmp_path / "run", record)
    file = tmp_path / "run" / record["rows"][0]["folder"] / "samples" / "00000.png"
    file.write_bytes(file.read_bytes()[:60])
    samples = Samples([tmp_path / "run"])
    assert samples.picture(record["rows"][0], 0) is None
    assert samples.picture(record["rows"][0], 1).shape == (32, 32, 3)
    (tmp_path / "samples").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "samples" / "00000.png")
    assert samples.picture({"folder": ".."}, 0) is None
    moved = {"hash": "0123456789abcdef"}
    assert samples.picture(moved, 1) is None
    (tmp_path / "run/cases/taylorseer").rename(tmp_path / "run/cases/any-name-01234567")
    assert samples.picture(moved, 1) is not None


def test_films_have_contact_sheets_and_previews(tmp_path: Path) -> None:
    pytest.importorskip("av")
    from diffcache.eval.samples.clips import write_clip, write_preview

    record = brief_record()
    record["task"]["kind"] = "films"
    record["rows"] = record["rows"][:2]
    for row_ in record["rows"]:
        row_ |= {"timeline": None, "latent_error": None, "quality": {}}
        clips = tmp_path / row_["folder"] / "clips"
        clips.mkdir(parents=True)
        frames = torch.zeros(5, 3, 16, 16, dtype=torch.uint8)
        frames[:, 0] = torch.arange(5)[:, None, None] * 40
        frames[:, 1] = 90 if row_["name"] == "taylorseer" else 0
        write_clip(clips / "00001.mp4", frames, 8)
        (clips.parent / "previews").mkdir()
        write_preview(clips.parent / "previews" / "00001.mp4", frames, 8)
    (sheet, *_), left_out = strips.draw(record, [tmp_path])
    assert left_out == ["Pictures: the files of 3 samples are not in the run's folder."]
    pixels = pixels_of(sheet)
    for line, green in ((0, 0), (1, 90)):
        for column in range(5):
            spot = pixels[16 + 42 + line * 136 + 64, 16 + 150 + column * 132 + 64]
            assert spot.tolist() == [40 * column, green, 0]
    write_report(record, tmp_path, formats=["html"])
    reader = read_page(tmp_path / "report" / "report.html")
    assert reader.tags.count("video") == 2
    assert sum(link.startswith("data:video/mp4;base64,") for link in reader.fetched) == 2


def test_links_that_lead_out_of_a_run_are_not_followed(tmp_path: Path) -> None:
    own, other = tmp_path / "run" / "cases", tmp_path / "other"
    (other / "previews").mkdir(parents=True)
    (other / "samples").mkdir()
    (other / "previews" / "00000.mp4").write_bytes(b"secret")
    Image.new("RGB", (8, 8)).save(other / "samples" / "00000.png")
    (other / "manifest.jsonl").write_text('{"ids": [0], "prompts": ["secret"]}\n')
    linked, whole = own / "a-01234567", own / "b-76543210"
    for folder, name in (("previews", "00000.mp4"), ("samples", "00000.png"), (".", "manifest.jsonl")):
        (linked / folder).mkdir(parents=True, exist_ok=True)
        (linked / folder / name).symlink_to(other / folder / name)
    whole.symlink_to(other)
    samples = Samples([tmp_path / "run"])
    for row in (
        {"hash": "0123456789"},
        {"hash": "7654321098"},
        {"folder": "cases/a-01234567"},
        {"folder": "cases/b-76543210"},
    ):
        assert samples.preview(row, 0) is None
        assert samples.picture(row, 0) is None
    assert samples.prompts == {}
    within = Samples([tmp_path / "run", other])  # the other one is given too
    assert within.preview({"hash": "7654321098"}, 0) == b"secret"
    assert within.picture({"hash": "0123456789"}, 0) is not None
    assert within.prompts == {0: "secret"}
