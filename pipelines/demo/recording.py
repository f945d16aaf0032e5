"""The latest frames of films, as JPEGs, and a file of them."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffcache.errors import MissingError

LATEST = 600  # frames of each film
_LEAST, _MOST = 240, 1280  # pixels of the shorter and the longer side that enlarging aims at


class Recording:
    """The latest frames of a number of films that run side by side, at `fps` frames a second."""

    def __init__(self, films: int, fps: int) -> None:
        self.fps = fps
        self._frames: list[deque[bytes]] = [deque(maxlen=LATEST) for _ in range(films)]

    def __len__(self) -> int:
        return min(map(len, self._frames))

    def add(self, film: int, jpegs: Sequence[bytes]) -> None:
        """Add frames, each a JPEG, to the film of a number."""
        self._frames[film].extend(jpegs)

    def mp4(self) -> bytes:
        """Return an MP4 file of the kept frames, films side by side; small pictures are enlarged.

        Raises:
            MissingError: If PyAV is not installed.
            ValueError: If nothing was filmed.
        """
        if not has_mp4():
            raise MissingError("MP4 needs PyAV: pip install 'diffcache[eval]'")
        films = [list(frames) for frames in self._frames]  # which go on while this is written
        count = min(map(len, films))
        if not count:
            raise ValueError("nothing was filmed yet: press Start first")
        pairs = zip(*(frames[-count:] for frames in films), strict=True)
        rows = (np.concatenate([np.asarray(Image.open(io.BytesIO(file))) for file in pair], 1) for pair in pairs)
        return _encoded(map(enlarged, rows), self.fps)


def to_file(path: Path, frames: Sequence[NDArray[np.uint8]], fps: int) -> None:
    """Write pictures of one size, uint8 `[H, W, 3]`, as a film: a GIF if the file is called `.gif`, else an MP4 file.

    Raises:
        MissingError: If PyAV is not installed, for an MP4 file.
    """
    if path.suffix.lower() == ".gif":
        first, *others = map(Image.fromarray, frames)
        first.save(path, save_all=True, append_images=others, duration=1000 // fps, loop=0)
        return
    if not has_mp4():
        raise MissingError(f"{path}: MP4 needs PyAV: pip install 'diffcache[eval]'; or name a .gif")
    path.write_bytes(_encoded((enlarged(frame) for frame in frames), fps))


def has_mp4() -> bool:
    """Return whether MP4 files can be written here."""
    return find_spec("av") is not None


def jpeg(frame: NDArray[np.uint8]) -> bytes:
    """Return a frame, uint8 `[H, W, 3]`, as a JPEG."""
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=88)
    return file.getvalue()


def enlarged(row: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a picture of even height and width, small ones enlarged by a whole number."""
    height, width = row.shape[0] // 2 * 2, row.shape[1] // 2 * 2
    times = max(1, min(-(-_LEAST // min(height, width)), _MOST // max(height, width)))
    larger: NDArray[np.uint8] = row[:height, :width].repeat(times, 0).repeat(times, 1)
    return larger


def _encoded(frames: Iterable[NDArray[np.uint8]], fps: int) -> bytes:
    """Return frames of one size as an MP4 file, H.264 where it can be written."""
    import av

    file = io.BytesIO()
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.pix_fmt = "yuv420p"
        for number, frame in enumerate(frames):  # one at a time: enlarged, they take gigabytes
            if number == 0:
                stream.height, stream.width = frame.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()
