"""One picture from a file of any common kind, 8-bit RGB, and resizing.

Grey and palette pictures are converted; of 16 bits the upper eight are kept; a rotation noted in
EXIF is not applied, as in other tools. Transparency is an error, since the background it is laid on
would decide the numbers; an alpha channel that is opaque everywhere is not.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
_UNREADABLE = (OSError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError)
_SIXTEEN_BITS = 2**16


def is_picture(file: Path) -> bool:
    """Say whether a file has a picture's ending; files that systems hide do not count."""
    return file.suffix.lower() in PICTURE_ENDINGS and not file.name.startswith(".")


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key in which numbers inside a name count as numbers: 2 before 10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if place % 2 else (-1, part) for place, part in enumerate(parts)]


def read_picture(path: str | Path) -> Tensor:
    """Read a picture.

    Returns:
        uint8 [3, H, W], RGB.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged, transparent, a film, or of a kind that has no 8-bit values.
    """
    with _opened(Path(path)) as picture:
        array = np.array(_rgb(picture, Path(path)))
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def read_size(path: str | Path) -> tuple[int, int]:
    """Read height and width of a picture, pixels, from its header.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is no picture.
    """
    with _opened(Path(path)) as picture:
        return picture.height, picture.width


def resized(picture: Tensor, side: int) -> Tensor:
    """Return the square in the middle, `side` pixels: antialiased bicubic, no change of shape.

    The shorter side of the picture, uint8 [3, H, W], is brought to `side` before the longer one is cut.

    Returns:
        uint8 [3, side, side].
    """
    height, width = picture.shape[1:]
    shorter = min(height, width)
    if (height, width) == (side, side):
        return picture
    size = [max(side, round(length * side / shorter)) for length in (width, height)]
    image = Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())
    array = np.array(image.resize((size[0], size[1]), Image.Resampling.BICUBIC))
    top, left = ((length - side) // 2 for length in array.shape[:2])
    square = array[top : top + side, left : left + side]
    return torch.from_numpy(square).permute(2, 0, 1).contiguous()


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Open a picture; a failure inside names the file."""
    if not path.is_file():
        raise FileNotFoundError(f"no picture {path}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty (0 bytes): write it again, or take it away")
    try:
        with Image.open(path) as picture:
            # Cameras put a preview beside the picture (MPO); it is no film.
            if getattr(picture, "n_frames", 1) > 1 and picture.format != "MPO":
                raise ValueError(f"{path} holds {picture.n_frames} pictures; store one in a file")
            yield picture
    except _UNREADABLE as error:
        raise ValueError(f"{path} is damaged or no picture, write it again: {error}") from error


def _rgb(picture: Image.Image, path: Path) -> Image.Image:
    """Return a picture as RGB."""
    if picture.mode.startswith("I"):
        values = np.asarray(picture)
        if values.min() < 0 or values.max() >= _SIXTEEN_BITS:
            raise ValueError(f"{path} holds values beyond 16 bits: save it with 8 bits a channel")
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if picture.mode == "F":
        raise ValueError(f"{path} holds floating-point values: save it with 8 bits a channel")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        if picture.getextrema()[3][0] < 255:
            raise ValueError(f"{path} has transparent pixels: lay it on a background first")
    return picture.convert("RGB")
