"""Folders that others made: what is read, how files are paired, and errors that name the file."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from diffcache.eval import folders, npz, pictures
from diffcache.eval.clips import write_clip


def noise(height: int = 12, width: int = 16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)


def save(file: Path, picture: Tensor, **options: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture.permute(1, 2, 0).numpy()).save(file, **options)
    return file


def filled(folder: Path, names: list[str]) -> Path:
    for seed, name in enumerate(names):
        save(folder / name, noise(seed=seed))
    return folder


# Reading one picture


@pytest.mark.parametrize("name", ["a.png", "a.PNG", "a.bmp", "a.tiff", "a.tif"])
def test_lossless_pictures_are_read_byte_for_byte(name: str, tmp_path: Path) -> None:
    assert torch.equal(pictures.read_picture(save(tmp_path / name, noise())), noise())
    assert pictures.read_size(tmp_path / name) == (12, 16)


def test_webp_and_jpeg_are_read(tmp_path: Path) -> None:
    flat = torch.full((3, 16, 16), 200, dtype=torch.uint8)
    assert torch.equal(
        pictures.read_picture(save(tmp_path / "a.webp", noise(), lossless=True)), noise()
    )
    assert (pictures.read_picture(save(tmp_path / "a.jpg", flat)).int() - 200).abs().max() <= 2


def test_grey_palette_and_opaque_alpha_become_rgb(tmp_path: Path) -> None:
    grey = np.arange(192, dtype=np.uint8).reshape(12, 16)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    three = pictures.read_picture(tmp_path / "grey.png")
    assert all(torch.equal(channel, torch.from_numpy(grey)) for channel in three)
    few = Image.fromarray(noise().permute(1, 2, 0).numpy()).quantize(8)
    few.save(tmp_path / "palette.png")
    expected = torch.from_numpy(np.array(few.convert("RGB"))).permute(2, 0, 1)
    assert torch.equal(pictures.read_picture(tmp_path / "palette.png"), expected)
    opaque = torch.cat([noise(), torch.full((1, 12, 16), 255, dtype=torch.uint8)])
    assert torch.equal(pictures.read_picture(save(tmp_path / "opaque.png", opaque)), noise())


def sixteen_bit_png(file: Path, values: np.ndarray) -> Path:
    """Write a PNG of 16 bits by hand: Pillow cannot write coloured ones."""
    height, width = values.shape[:2]
    kind = 2 if values.ndim == 3 else 0
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return file


@pytest.mark.parametrize("shape", [(12, 16), (12, 16, 3)])
def test_of_sixteen_bits_the_upper_eight_are_kept(shape: tuple[int, ...], tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 65536, shape)
    found = pictures.read_picture(sixteen_bit_png(tmp_path / "a.png", values))
    upper = torch.from_numpy(values >> 8).to(torch.uint8)
    expected = upper.expand(3, 12, 16) if upper.ndim == 2 else upper.permute(2, 0, 1)
    assert torch.equal(found, expected)


def test_transparent_pixels_are_an_error(tmp_path: Path) -> None:
    alpha = torch.full((1, 12, 16), 255, dtype=torch.uint8)
    alpha[0, 3, 4] = 254
    file = save(tmp_path / "glass.png", torch.cat([noise(), alpha]))
    with pytest.raises(ValueError, match=r"glass\.png has transparent pixels"):
        pictures.read_picture(file)


@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "bmp", "tif"])
def test_a_cut_off_picture_is_an_error(ending: str, tmp_path: Path) -> None:
    file = save(tmp_path / f"cut.{ending}", noise(64, 64))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"cut\.{ending} is damaged or no picture"):
        pictures.read_picture(file)


def test_other_damage_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(ValueError, match=r"text\.png is damaged or no picture"):
        pictures.read_size(tmp_path / "text.png")
    (tmp_path / "empty.png").touch()
    with pytest.raises(ValueError, match=r"empty\.png is empty \(0 bytes\)"):
        pictures.read_picture(tmp_path / "empty.png")
    with pytest.raises(FileNotFoundError, match=r"no picture .*gone\.png"):
        pictures.read_picture(tmp_path / "gone.png")
    flipped = save(tmp_path / "flipped.png", noise(64, 64))
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 0xFF
    flipped.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"flipped\.png is damaged"):
        pictures.read_picture(flipped)


def test_kinds_without_eight_bits_and_films_are_errors(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((8, 8), np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(ValueError, match=r"float\.tif holds floating-point values"):
        pictures.read_picture(tmp_path / "float.tif")
    Image.fromarray(np.full((8, 8), 70_000, np.int32)).save(tmp_path / "deep.tif")
    with pytest.raises(ValueError, match=r"deep\.tif holds values beyond 16 bits"):
        pictures.read_picture(tmp_path / "deep.tif")
    frames = [Image.fromarray(noise(seed=s).permute(1, 2, 0).numpy()) for s in (0, 1)]
    frames[0].save(tmp_path / "film.webp", save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match=r"film\.webp holds 2 pictures"):
        pictures.read_picture(tmp_path / "film.webp")


def test_resizing_scales_the_shorter_side_and_cuts_the_middle() -> None:
    assert pictures.resized(noise(8, 8), 8).equal(noise(8, 8))
    flat = torch.full((3, 40, 20), 77, dtype=torch.uint8)
    assert pictures.resized(flat, 10).equal(torch.full((3, 10, 10), 77, dtype=torch.uint8))
    stripes = torch.zeros(3, 10, 30, dtype=torch.uint8)
    stripes[..., 10:20] = 255  # exactly the middle third
    assert pictures.resized(stripes, 10).min() == 255
    assert pictures.resized(noise(9, 31), 5).shape == (3, 5, 5)


# Folders


def test_pictures_come_in_natural_order_and_batches(tmp_path: Path) -> None:
    names = ["10.png", "9.png", "x2.png", "x10.png", "1.png"]
    found = folders.open_pictures(filled(tmp_path, names))
    assert found.names == ("1", "9", "10", "x2", "x10") and found.notes == ()
    order = [4, 1, 0, 2, 3]
    expected = torch.stack([noise(seed=s) for s in order])
    parts = list(folders.batches(found, 2))
    assert [len(part) for part in parts] == [2, 2, 1] and torch.cat(parts).equal(expected)
    some = torch.cat(list(folders.batches(found, 2, [0, 3, 4])))
    assert some.equal(expected[[0, 3, 4]])
    assert torch.cat(list(folders.open_samples(tmp_path, False, 3))).equal(expected)
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
    with pytest.warns(folders.FolderWarning, match=r"left out 3 files"):
        assert len(list(folders.open_samples(tmp_path, False))) == 1


def test_missing_and_empty_folders_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no folder or file .*gone"):
        folders.open_pictures(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"no folder or file .*gone"):
        folders.open_films(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"no file .*gone\.npz"):
        folders.open_pictures(tmp_path / "gone.npz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no picture \(\.png"):
        folders.open_pictures(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"empty holds no film \(\.mp4"):
        folders.open_films(tmp_path / "empty")
    filled(tmp_path / "outer" / "inner", ["a.png"])
    with pytest.raises(
        ValueError, match=r"outer holds no picture .*the folders inside do: use --recursive"
    ):
        folders.open_pictures(tmp_path / "outer")
    (tmp_path / "films").mkdir()
    (tmp_path / "films" / "a.mp4").touch()
    with pytest.raises(ValueError, match=r"films holds no picture .*it holds films"):
        folders.open_pictures(tmp_path / "films")
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match=r"a\.txt is no picture"):
        folders.open_pictures(tmp_path / "a.txt")
    with pytest.raises(ValueError, match=r"a\.txt is no film"):
        folders.open_films(tmp_path / "a.txt")


def test_two_files_of_one_name_are_an_error(tmp_path: Path) -> None:
    filled(tmp_path, ["a.png", "a.bmp"])
    with pytest.raises(ValueError, match=r"holds a\.bmp and a\.png: two files of one name"):
        folders.open_pictures(tmp_path)


def test_another_size_in_a_folder_names_the_file(tmp_path: Path) -> None:
    filled(tmp_path, ["1.png", "2.png"])
    save(tmp_path / "3.png", noise(12, 17))
    found = folders.open_pictures(tmp_path)
    with pytest.raises(ValueError, match=r"3\.png is 12 x 17 and .*1\.png 12 x 16: --resize"):
        folders.common_size(found)
    with pytest.raises(ValueError, match=r"3\.png is 12 x 17"):
        list(folders.open_samples(tmp_path, False))
    assert next(folders.batches(found, side=8)).shape == (3, 3, 8, 8)


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


# Films


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    (tmp_path / "1.png").symlink_to(tmp_path / "gone.png")
    found = folders.open_pictures(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no picture .*1\.png"):
        folders.common_size(found)


def test_films_are_files_and_folders_of_frames(tmp_path: Path) -> None:
    film = torch.stack([noise(seed=s) for s in range(3)])
    write_clip(tmp_path / "b.mkv", film, 8)
    filled(tmp_path / "a", ["2.png", "10.png", "1.png"])
    (tmp_path / "notes.txt").touch()
    found = folders.open_films(tmp_path)
    assert found.names == ("a", "b") and "notes.txt" in found.notes[0]
    with pytest.warns(folders.FolderWarning):
        (frames,), (read,) = folders.open_samples(tmp_path, True)
    assert read.equal(film) and frames.equal(film[[2, 0, 1]])
    assert folders.open_films(tmp_path / "a").names == ("a",)
    assert folders.open_films(tmp_path / "b.mkv").files == (tmp_path / "b.mkv",)
    assert folders.holds_films(tmp_path) and folders.holds_films(tmp_path / "b.mkv")
    assert not folders.holds_films(tmp_path / "a")


def test_films_beside_pictures_are_an_error(tmp_path: Path) -> None:
    filled(tmp_path, ["a.png"])
    (tmp_path / "b.mp4").touch()
    with pytest.raises(ValueError, match=r"holds films \(b\.mp4\) and pictures \(a\.png\)"):
        folders.holds_films(tmp_path)
    with pytest.raises(ValueError, match=r"holds films and pictures, such as a\.png"):
        folders.open_films(tmp_path)


# npz


def test_npz_round_trip_and_the_layout_of_the_adm_evaluator(tmp_path: Path) -> None:
    made = torch.stack([noise(seed=s) for s in range(5)])
    file = npz.write_npz(tmp_path / "a.npz", iter(made), 5)
    with np.load(file) as data:  # as the evaluator reads it
        assert data.files == ["arr_0"] and data["arr_0"].dtype == np.uint8
        assert (data["arr_0"] == made.permute(0, 2, 3, 1).numpy()).all()
    found = folders.open_pictures(file)
    assert found.names == ("0", "1", "2", "3", "4") and folders.common_size(found) == (12, 16)
    assert torch.cat(list(folders.batches(found, 2))).equal(made)
    assert torch.cat(list(folders.batches(found, 2, [1, 4]))).equal(made[[1, 4]])
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


@pytest.mark.parametrize("save_npz", [np.savez, np.savez_compressed])
def test_npz_of_numpy_is_read(save_npz: object, tmp_path: Path) -> None:
    made = torch.stack([noise(seed=s) for s in range(3)])
    save_npz(tmp_path / "a.npz", made.permute(0, 2, 3, 1).contiguous().numpy())  # type: ignore[operator]
    assert torch.cat(list(folders.open_samples(tmp_path / "a.npz", False))).equal(made)


def test_npz_with_something_else_is_an_error(tmp_path: Path) -> None:
    cases = {
        "float": (
            {"arr_0": np.zeros((2, 4, 4, 3))},
            r"float\.npz: arr_0 must be pictures, uint8 .* not float64",
        ),
        "nchw": (
            {"arr_0": np.zeros((2, 3, 4, 4), np.uint8)},
            r"nchw\.npz: .*not uint8 \[2, 3, 4, 4\]",
        ),
        "none": ({"labels": np.zeros(2)}, r"none\.npz holds no 'arr_0' .* but labels"),
        "zero": ({"arr_0": np.zeros((0, 4, 4, 3), np.uint8)}, r"zero\.npz: arr_0 must be pictures"),
    }
    for name, (arrays, message) in cases.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
        with pytest.raises(ValueError, match=message):
            folders.open_pictures(tmp_path / f"{name}.npz")


def test_damaged_npz_is_an_error(tmp_path: Path) -> None:
    made = torch.stack([noise(seed=s) for s in range(3)])
    file = npz.write_npz(tmp_path / "a.npz", iter(made), 3)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a\.npz cannot be read as \.npz"):
        folders.open_pictures(file)
    middle = len(whole) // 2
    file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :])
    with pytest.raises(ValueError, match=r"a\.npz cannot be read as \.npz.*CRC"):
        list(folders.open_pictures(file).pictures())


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    made = [noise(), noise(), noise(8, 8)]
    for pictures_given, count, message in (
        (made[:2], 3, r"a\.npz: 2 pictures, not 3"),
        (made, 3, r"a\.npz: picture 2 is \[3, 8, 8\], those before \[3, 12, 16\]"),
        ([noise().float()], 1, r"a\.npz: picture 0 is torch\.float32"),
        ([], 0, r"a\.npz: 0 pictures"),
    ):
        with pytest.raises(ValueError, match=message):
            npz.write_npz(tmp_path / "a.npz", pictures_given, count)
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"a\.zip: pictures are written as \.npz"):
        npz.write_npz(tmp_path / "a.zip", made[:1], 1)


def test_npz_pairs_with_npz_only(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 3), ("c", 2)):
        npz.write_npz(tmp_path / f"{name}.npz", (noise(seed=s) for s in range(count)), count)
    a, b, c = (folders.open_pictures(tmp_path / f"{name}.npz") for name in "abc")
    assert folders.pair(a, b) == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(ValueError, match=r"c\.npz lacks 1 of .*a\.npz: 2"):
        folders.pair(a, c)
    other = folders.open_pictures(filled(tmp_path / "d", ["0.png", "1.png", "2.png"]))
    with pytest.raises(ValueError, match=r"an \.npz has no file names"):
        folders.pair(a, other)


def test_statistics(tmp_path: Path) -> None:
    features = np.random.default_rng(0).normal(size=(50, 4))
    mu, sigma = features.mean(0), np.cov(features.T)
    np.savez(tmp_path / "a.npz", mu=mu, sigma=sigma)
    found = npz.read_statistics(tmp_path / "a.npz")
    assert found is not None and found.count is None
    assert np.allclose(found.mean, mu) and np.allclose(found.cov, sigma)
    np.savez(tmp_path / "b.npz", arr_0=np.zeros((2, 4, 4, 3), np.uint8))
    assert npz.read_statistics(tmp_path / "b.npz") is None
    skew = sigma + np.triu(np.ones((4, 4)), 1)
    for arrays, message in (
        ({"mu": mu[:3], "sigma": sigma}, r"c\.npz: mu \[3\] and sigma \[4, 4\]"),
        ({"mu": mu * np.nan, "sigma": sigma}, r"c\.npz: mu or sigma holds NaN"),
        ({"mu": mu, "sigma": skew}, r"c\.npz: sigma must be symmetric"),
    ):
        np.savez(tmp_path / "c.npz", **arrays)
        with pytest.raises(ValueError, match=message):
            npz.read_statistics(tmp_path / "c.npz")
