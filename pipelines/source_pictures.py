"""Read the pictures that a film begins with, or is made from: images, arrays and video files."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from diffcache.errors import MissingError
from diffcache.pipelines.demo.recording import has_mp4

Pictures = NDArray[np.uint8]
LATENTS = 60  # latent frames that a film begins with at most, as a source may be very long
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def film_of(source: Any, size: tuple[int, int], fps: float | None = None) -> Iterator[Pictures]:
    """Yield the pictures of a source, uint8 `[H, W, 3]`, cropped in the middle and scaled to a size.

    Args:
        source: Path of an image or a video file, an image of PIL, uint8 pictures `[H, W, 3]` or `[F, H, W, 3]`, or an
            iterable of any of these but files.
        size: Height and width in pixels.
        fps: Pictures a second to read from a video file: at each moment the one that it shows. None for all of its
            pictures.

    Raises:
        FileNotFoundError: If there is no such file.
        MissingError: If PyAV is not installed, for a video file.
        ValueError: If a file cannot be read, or something else is given.
    """
    if isinstance(source, str | os.PathLike):
        for picture in _read(Path(source), fps):
            yield fitted(picture, size)
        return
    if isinstance(source, np.ndarray) and source.ndim == 4:
        source = list(source)
    elif isinstance(source, Image.Image | np.ndarray):
        source = [source]
    try:
        pictures = iter(source)
    except TypeError:
        raise ValueError(
            f"pictures={type(source).__name__}: must be a file, an image of PIL, uint8 arrays "
            "[H, W, 3] or [F, H, W, 3], or a list of them"
        ) from None
    for picture in pictures:
        yield fitted(picture, size)


def fitted(picture: Any, size: tuple[int, int]) -> Pictures:
    """Return a picture, cropped in the middle and scaled to a height and width in pixels, uint8 `[H, W, 3]`.

    `picture` is an image of PIL with 8 bits a channel, put on white where it is transparent, or uint8 `[H, W, 3]`.

    Raises:
        ValueError: If it is neither.
    """
    if isinstance(picture, Image.Image):
        image = _opaque(picture)
    else:
        shape, dtype = getattr(picture, "shape", ()), getattr(picture, "dtype", None)
        if not isinstance(picture, np.ndarray) or dtype != np.uint8 or shape[2:] != (3,):
            given = f"{dtype} {list(shape)}" if dtype is not None else type(picture).__name__
            raise ValueError(f"pictures={given}: must be images of PIL, or uint8 [H, W, 3]")
        if shape[:2] == size:
            return picture
        image = Image.fromarray(picture)
    if image.size == size[::-1]:
        return np.array(image)
    return np.array(ImageOps.fit(image, size[::-1], Image.Resampling.LANCZOS))


def _opaque(picture: Image.Image) -> Image.Image:
    """Return an image in mode RGB, on white."""
    if picture.mode.startswith(("I", "F")):  # convert() would clip them to white or black
        raise ValueError(
            f"pictures=image of mode {picture.mode!r}: has more than 8 bits a channel; scale it to "
            "0..255 and convert it to 8 bits, mode 'RGB'"
        )
    if picture.has_transparency_data:
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture.convert("RGBA"))
    return picture.convert("RGB")


def begin_with(source: Any, size: tuple[int, int], each: int, fps: float | None = None) -> Pictures:
    """Return the pictures that a film begins with: the latest ones of a source that make whole latent frames.

    Of a long source only the latest 60 latent frames are used. Other arguments and errors are those of `film_of`.

    Args:
        source: As for `film_of`.
        size: Height and width in pixels.
        each: Pictures of a latent frame, after the first.
        fps: As for `film_of`.

    Returns:
        uint8 `[F, H, W, 3]`, where F is 1 and a multiple of `each`.

    Raises:
        ValueError: If there is no picture.
    """
    pictures = list(deque(film_of(source, size, fps), maxlen=1 + (LATENTS - 1) * each))
    if not pictures:
        raise ValueError("start=[]: must have a picture at least")
    return np.stack(pictures[(len(pictures) - 1) % each :])


def groups(pictures: Iterator[Pictures], counts: Iterator[int]) -> Iterator[Pictures]:
    """Yield pictures `[H, W, 3]` in groups, uint8 `[F, H, W, 3]`, each of the next number in `counts`.

    A last group that would be too short is left out.
    """
    for count in counts:
        group = list(islice(pictures, count))
        if len(group) < count:
            return
        yield np.stack(group)


def to_tensor(pictures: Pictures, device: torch.device) -> Tensor:
    """Return pictures, uint8 `[F, H, W, 3]`, as a tensor of values in -1..1, `[1, 3, F, H, W]`."""
    film = torch.from_numpy(np.ascontiguousarray(pictures)).to(device)
    return film.movedim(-1, 0)[None].float() / 127.5 - 1


def _read(path: Path, fps: float | None) -> Iterator[Image.Image]:
    """Yield the pictures of a file, one for an image, turned upright as the file tells."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r}: name an image or a video file")
    if path.suffix.lower() in IMAGES:
        try:
            with Image.open(path) as image:
                yield ImageOps.exif_transpose(image)
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(f"{path}: cannot be read as an image ({error})") from error
        return
    if not has_mp4():
        raise MissingError(f"{path}: reading a video needs PyAV: pip install 'diffcache[eval]'")
    import av

    try:
        with av.open(str(path)) as file:
            for frame in _timed(file.decode(video=0), fps):
                # Phones film on their side, and note how the film is turned to be shown.
                yield frame.to_image().rotate(frame.rotation, expand=True)
    except (av.FFmpegError, IndexError) as error:
        raise ValueError(f"{path}: cannot be read as a video ({error})") from error


def _timed(frames: Iterator[Any], fps: float | None) -> Iterator[Any]:
    """Yield the frame that a video shows at each moment, `fps` times a second from its first frame on.

    `fps` of None yields all frames.
    """
    shown, before, start = 0, None, None
    for frame in frames:
        if fps is None or frame.time is None:
            yield frame
            continue
        start = frame.time if start is None else start
        while before is not None and shown / fps < frame.time - start - 1e-3:
            yield before
            shown += 1
        before = frame
    if before is not None:  # the last frame is shown too, at least for a moment
        yield before
