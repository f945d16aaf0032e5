"""Films and pictures on disk: lossless films that other tools can read, small previews, what is read back.

A film is uint8 [F, 3, H, W], RGB. Lossless means byte for byte: `.mp4` holds RGB H.264 at quantizer 0 (no color
conversion and no chroma subsampling, so odd sizes are kept), `.mkv` holds FFV1 with a checksum per slice.

A picture is read from a file of any common kind as 8-bit RGB. Grey and palette pictures are converted; of 16 bits the
upper eight are kept; a rotation noted in EXIF is not applied, as in other tools. Transparency is an error, since the
background it is laid on would decide the numbers; an alpha channel that is opaque everywhere is not.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageSequence
from torch import Tensor

FILM_ENDINGS = (".mp4", ".mkv", ".webm", ".mov", ".avi", ".gif")
LOSSLESS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    ".mp4": ("mp4", "libx264rgb", "rgb24", {"qp": "0", "preset": "veryfast", "threads": "1"}),
    ".mkv": ("matroska", "ffv1", "bgr0", {"level": "3", "slicecrc": "1", "threads": "1"}),
}
_PREVIEW = ("mp4", "libx264", "yuv420p", {"crf": "18", "preset": "veryfast", "threads": "1"})
# One fixed container identifier in place of a random one: equal films give equal files.
_CONTAINER = {"mp4": {"fflags": "+bitexact", "movflags": "+faststart"}, "matroska": {"fflags": "+bitexact"}}
_BT709 = 1  # the number of ITU-R BT.709 in H.264 for matrix, primaries and transfer
_LIMITED = 1  # the number that libav gives the 16..235 range
Picture = npt.NDArray[np.uint8]


def write_clip(path: str | Path, frames: torch.Tensor, fps: float) -> Path:
    """Write a film without loss, and return its path.

    Args:
        path: Path that ends in `.mp4` (H.264 RGB, quantizer 0) or `.mkv` (FFV1).
        frames: uint8 [F, 3, H, W], RGB; any height and width, odd ones too.
        fps: Frames per second.

    Raises:
        ValueError: The ending, the frames or the frame rate cannot be written.
    """
    path = Path(path)
    if path.suffix not in LOSSLESS:
        raise ValueError(f"{path}: a film is written as {' or '.join(LOSSLESS)}")
    _check(path, frames, fps)
    _encode(path, frames, fps, LOSSLESS[path.suffix])
    return path


def write_preview(path: str | Path, frames: torch.Tensor, fps: float) -> Path:
    """Write a small lossy film that browsers play, for looking at only and never for metrics.

    H.264, 4:2:0, BT.709; an odd side is padded by one repeated row or column. The path ends in `.mp4`; frames
    are uint8 [F, 3, H, W], RGB.

    Raises:
        ValueError: The ending, the frames or the frame rate cannot be written.
    """
    path = Path(path)
    if path.suffix != ".mp4":
        raise ValueError(f"{path}: a preview is written as .mp4")
    _check(path, frames, fps)
    height, width = frames.shape[2:]
    if height % 2:
        frames = torch.cat([frames, frames[:, :, -1:]], dim=2)
    if width % 2:
        frames = torch.cat([frames, frames[..., -1:]], dim=3)
    _encode(path, frames, fps, _PREVIEW)
    return path


def read_clip(path: str | Path) -> torch.Tensor:
    """Read every frame of a film file, a GIF, or a folder with one picture a frame.

    Films are what libav can read, `.gif`, or folders with pictures in natural name order. Frames are uint8 [F, 3, H,
    W], RGB.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: It is empty, cut off or damaged, or its frames differ in size; names the file.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no film {path}")
    if path.is_dir():
        pictures = _read_folder(path)
    elif path.stat().st_size == 0:
        raise ValueError(f"{path} is empty (0 bytes): write it again, or take it away")
    elif path.suffix.lower() == ".gif":
        pictures = _read_gif(path)
    else:
        pictures = _read_film(path)
    if not pictures:
        raise ValueError(f"{path} holds no frame")
    sizes = {picture.shape[:2] for picture in pictures}
    if len(sizes) > 1:
        raise ValueError(f"{path}: frames differ in height and width: {sorted(sizes)}")
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


def read_fps(path: str | Path) -> float | None:
    """Return the frame rate of a film; None for a folder, or a file that does not tell.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: The file cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no film {path}")
    if path.is_dir():
        return None
    if path.suffix.lower() == ".gif":
        with _opened(path, is_film=True) as film:
            milliseconds = film.info.get("duration", 0)
        return 1000 / float(milliseconds) if milliseconds else None
    with open_film(path) as (_, stream):
        return float(stream.average_rate) if stream.average_rate else None


def _check(path: Path, frames: torch.Tensor, fps: float) -> None:
    """Check the frames to write."""
    if frames.ndim != 4 or frames.shape[1] != 3 or frames.dtype != torch.uint8:
        raise ValueError(f"{path}: frames must be uint8 [F, 3, H, W], not {frames.dtype} {list(frames.shape)}")
    if frames.numel() == 0:
        raise ValueError(f"{path}: no frame to write, frames are {list(frames.shape)}")
    if not (math.isfinite(fps) and 0.01 <= fps <= 1000):
        raise ValueError(f"{path}: fps must be from 0.01 to 1000 frames per second, not {fps}")


def _av() -> Any:
    """Import PyAV, or say how to install it."""
    try:
        import av
    except ImportError as error:
        raise ImportError("films need PyAV: pip install 'diffcache[eval]'") from error
    return av


def _encode(path: Path, frames: torch.Tensor, fps: float, how: tuple[str, str, str, dict[str, str]]) -> None:
    """Encode all frames into `path`, which appears only when it is whole."""
    av = _av()
    kind, codec, pixel_format, options = how
    draft = path.with_name(path.name + ".tmp")
    pictures = frames.detach().cpu().permute(0, 2, 3, 1).contiguous().numpy()
    try:
        with av.open(os.path.abspath(draft), "w", format=kind, options=_CONTAINER[kind]) as out:
            stream = out.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
            stream.height, stream.width = pictures.shape[1:3]
            stream.pix_fmt = pixel_format
            stream.options = options
            if pixel_format == "yuv420p":
                colors = stream.codec_context  # set explicitly, since players guess missing values
                colors.colorspace = colors.color_primaries = colors.color_trc = _BT709
                colors.color_range = _LIMITED
            for picture in pictures:
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                if pixel_format == "yuv420p":
                    frame = frame.reformat(format=pixel_format, dst_colorspace="ITU709")
                out.mux(stream.encode(frame))
            out.mux(stream.encode(None))
        os.replace(draft, path)
    except av.error.FFmpegError as error:
        size = " x ".join(map(str, pictures.shape[1:3]))
        raise ValueError(f"{path}: {codec} cannot write {size} frames: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def open_film(path: Path) -> Iterator[tuple[Any, Any]]:
    """Open a film and its video stream; a failure inside names the file."""
    av = _av()
    try:
        # Absolute, since libav takes the text before a colon for a protocol.
        with av.open(os.path.abspath(path)) as container:
            if not container.streams.video:
                raise ValueError(f"{path} holds no video stream")
            yield container, container.streams.video[0]
    except (av.error.FFmpegError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read as a film, write it again: {reason}") from error


def _read_film(path: Path) -> list[Picture]:
    """Decode every frame, and refuse a film that ends before its header says or is damaged."""
    pictures: list[Picture] = []
    packets, damaged, end = 0, False, 0.0
    with open_film(path) as (container, stream), _checksum_errors(stream) as wrong:
        for packet in container.demux(stream):
            packets += packet.size > 0
            damaged |= packet.is_corrupt
            for frame in packet.decode():
                damaged |= frame.is_corrupt
                end = max(end, float(frame.time or 0))
                pictures.append(frame.to_ndarray(format="rgb24"))
        expected = _seconds(stream)
        interval = 1 / float(stream.average_rate) if stream.average_rate else math.inf
        count = stream.frames
    if wrong:
        raise ValueError(f"{path} is damaged: {wrong[0]}")
    if damaged or packets < count:
        raise ValueError(f"{path} is damaged or cut off: {packets} of {count or '?'} frames whole")
    if expected is not None and end + 1.5 * interval < expected:
        raise ValueError(f"{path} is cut off: {end:.2f} s of {expected:.2f} s")
    return pictures


@contextmanager
def _checksum_errors(stream: Any) -> Iterator[list[str]]:
    """Collect wrong checksums; the decoder only logs them and shows the frame before again."""
    wrong: list[str] = []
    if stream.codec_context.name != "ffv1":
        yield wrong
        return
    import av.logging

    level = av.logging.get_level()
    av.logging.set_level(av.logging.ERROR)
    stream.codec_context.thread_count = 1  # the log is collected for this thread
    try:
        with av.logging.Capture() as messages:
            yield wrong
            wrong += [text.strip() for _, _, text in messages if "CRC mismatch" in text]
    finally:
        av.logging.set_level(level)


def _seconds(stream: Any) -> float | None:
    """Length that a Matroska header gives its video stream, which is written last."""
    found = re.fullmatch(r"(\d+):(\d+):([\d.]+)", stream.metadata.get("DURATION", ""))
    if not found:
        return None
    hours, minutes, seconds = found.groups()
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def _read_gif(path: Path) -> list[Picture]:
    """Read the frames of a GIF."""
    with _opened(path, is_film=True) as film:
        return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(film)]


def _read_folder(path: Path) -> list[Picture]:
    """Read the pictures of a folder, `frame_2.png` before `frame_10.png`."""
    files = [file for file in path.iterdir() if is_picture(file)]
    if not files:
        raise ValueError(f"folder {path} holds no picture ({', '.join(PICTURE_ENDINGS)})")
    files.sort(key=lambda file: natural(file.name))
    return [read_picture(file).permute(1, 2, 0).numpy() for file in files]


PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
_UNREADABLE = (OSError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError)


def is_picture(file: Path) -> bool:
    """Return whether a file has a picture's ending; hidden files of the system do not count."""
    return file.suffix.lower() in PICTURE_ENDINGS and not file.name.startswith(".")


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key in which numbers inside a name count as numbers: 2 before 10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if place % 2 else (-1, part) for place, part in enumerate(parts)]


def read_picture(path: str | Path) -> Tensor:
    """Read a picture.

    It is uint8 [3, H, W], RGB. Raises FileNotFoundError if there is none, and ValueError if it is damaged,
    transparent, a film, or of a kind that has no 8-bit values.
    """
    with _opened(Path(path)) as picture:
        array = np.array(_rgb(picture, Path(path)))
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def read_size(path: str | Path) -> tuple[int, int]:
    """Read height and width of a picture, pixels, from its header.

    Raises FileNotFoundError if there is none, and ValueError if it is no picture.
    """
    with _opened(Path(path)) as picture:
        return picture.height, picture.width


def resized(picture: Tensor, side: int) -> Tensor:
    """Return the square in the middle of a picture, uint8 [3, side, side], by antialiased bicubic scaling.

    The shorter side of the picture, uint8 [3, H, W], is scaled to `side` pixels before the longer one is cut;
    proportions stay.
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
def _opened(path: Path, is_film: bool = False) -> Iterator[Image.Image]:
    """Open a picture or a GIF; a failure inside names the file."""
    if not path.is_file():
        raise FileNotFoundError(f"no picture {path}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty (0 bytes): write it again, or take it away")
    try:
        with Image.open(path) as picture:
            # Cameras put a preview beside the picture (MPO); it is no film.
            if not is_film and getattr(picture, "n_frames", 1) > 1 and picture.format != "MPO":
                raise ValueError(f"{path} holds {picture.n_frames} pictures; store one in a file")
            yield picture
    except _UNREADABLE as error:
        raise ValueError(f"{path} is damaged or no picture, write it again: {error}") from error


def _rgb(picture: Image.Image, path: Path) -> Image.Image:
    """Return a picture as RGB."""
    if picture.mode.startswith("I"):
        if picture.mode == "I" and picture.format != "PNG":  # Pillow may read 16 bits of a PNG as 32
            raise ValueError(f"{path} holds values of 32 bits: save it with 8 bits a channel")
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8)).convert("RGB")
    if picture.mode == "F":
        raise ValueError(f"{path} holds floating-point values: save it with 8 bits a channel")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        if picture.getextrema()[3][0] < 255:
            raise ValueError(f"{path} has transparent pixels: lay it on a background first")
    return picture.convert("RGB")
