"""Folders that others made: how files are found and paired, and errors that name the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from diffcache.eval.samples import folders
from diffcache.eval.samples.clips import read_clip, write_clip
from tests.picture_files import filled, noise, save


def test_pictures_come_in_natural_order(tmp_path: Path) -> None:
    names = ["10.png", "9.png", "x2.png", "x10.png", "1.png"]
    found = folders.open_pictures(filled(tmp_path, names))
    assert found.names == ("1", "9", "10", "x2", "x10") and found.notes == ()
    order = [4, 1, 0, 2, 3]
    expected = torch.stack([noise(seed=s) for s in order])
    assert torch.stack(list(found.pictures())).equal(expected)
    assert torch.stack(list(found.pictures([0, 3, 4]))).equal(expected[[0, 3, 4]])
    assert folders.common_size(found) == (12, 16)


def test_other_files_are_left_out_with_one_note(tmp_path: Path) -> None:
    filled(tmp_path, ["a.png"])
    for name in ("notes.txt", ".DS_Store", "._a.png"):
        (tmp_path / name).write_text("")
    filled(tmp_path / "inside", ["b.png"])
    found = folders.open_pictures(tmp_path)
    assert found.names == ("a",) and len(found.notes) == 2
    assert "left out 3 files that are no pictures, such as .DS_Store" in found.notes[0]
    assert (
        "left out 1 folders of pictures (--recursive reads them), such as inside" in found.notes[1]
    )
    assert folders.open_pictures(tmp_path, recursive=True).names == ("a", "inside/b")


def test_another_size_in_a_folder_names_the_file(tmp_path: Path) -> None:
    filled(tmp_path, ["1.png", "2.png"])
    save(tmp_path / "3.png", noise(12, 17))
    found = folders.open_pictures(tmp_path)
    with pytest.raises(ValueError, match=r"3\.png is 12 x 17 and .*1\.png 12 x 16: --resize"):
        folders.common_size(found)
    assert found.picture(2, side=8).shape == (3, 8, 8)


def test_folders_are_paired_by_name(tmp_path: Path) -> None:
    a = folders.open_pictures(filled(tmp_path / "a", ["1.png", "2.png", "10.png"]))
    b = folders.open_pictures(filled(tmp_path / "b", ["10.bmp", "2.png", "1.tif"]))
    assert folders.pair(a, b) == [(0, 0), (1, 1), (2, 2)]
    filled(tmp_path / "b", ["11.png", "12.png", "13.png", "14.png"])
    (tmp_path / "b" / "2.png").unlink()
    b = folders.open_pictures(tmp_path / "b")
    with pytest.raises(
        ValueError, match=r"b lacks 1 of .*a: 2; .*a lacks 4 of .*b: 11, 12, 13, \.\.\."
    ):
        folders.pair(a, b)
    one, other = (folders.open_pictures(tmp_path / "a" / f"{n}.png") for n in (1, 2))
    assert folders.pair(one, other) == [(0, 0)]


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    (tmp_path / "1.png").symlink_to(tmp_path / "gone.png")
    found = folders.open_pictures(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no picture .*1\.png"):
        folders.common_size(found)


def test_films_are_files_and_folders_of_frames(tmp_path: Path) -> None:
    film = torch.stack([noise(seed=s) for s in range(3)])
    write_clip(tmp_path / "b.mkv", film, 8)
    (tmp_path / "z.preview.mp4").touch()  # no film of its own
    filled(tmp_path / "a", ["2.png", "10.png", "1.png"])
    (tmp_path / "notes.txt").touch()
    found = folders.open_films(tmp_path)
    assert found.names == ("a", "b") and "2 files" in found.notes[0]
    frames, read = map(read_clip, found.files)
    assert read.equal(film) and frames.equal(film[[2, 0, 1]])
    assert folders.open_films(tmp_path / "a").names == ("a",)
    assert folders.open_films(tmp_path / "b.mkv").files == (tmp_path / "b.mkv",)
    assert folders.holds_films(tmp_path) and folders.holds_films(tmp_path / "b.mkv")
    assert not folders.holds_films(tmp_path / "a")
