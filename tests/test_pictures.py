"""Pictures that others made: what is read, and errors that name the file."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffcache.eval.samples import pictures
from tests.picture_files import noise, save


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
    """Write a PNG of 16 bits by hand: Pillow cannot write colored ones."""
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


@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "bmp", "tif"])
def test_a_cut_off_picture_is_an_error(ending: str, tmp_path: Path) -> None:
    file = save(tmp_path / f"cut.{ending}", noise(64, 64))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"cut\.{ending} is damaged or no picture"):
        pictures.read_picture(file)


def test_other_damage_is_an_error(tmp_path: Path) -> None:
    flipped = save(tmp_path / "flipped.png", noise(64, 64))
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 0xFF
    flipped.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"flipped\.png is damaged"):
        pictures.read_picture(flipped)


def test_a_film_is_no_picture(tmp_path: Path) -> None:
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
