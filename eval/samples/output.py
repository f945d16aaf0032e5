"""Write the output of a pipeline: an image, or a video as GIF or MP4."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from diffcache.command import check_target
from diffcache.errors import MissingError
from diffcache.eval.samples.clips import write_preview

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
VIDEO_ENDINGS = (".gif", ".mp4")
FRAME_MILLISECONDS = 100


def target_of(out: Path | None, is_video: bool) -> Path:
    """Return the file that a run is written to, checked before the run.

    `out` of None is `out/run.png`, or `out/run.gif` for a video. Raises MissingError if PyAV is needed and not
    installed, and ValueError if the file cannot be written, or its ending does not fit.
    """
    if out is None:
        out = Path("out/run.gif" if is_video else "out/run.png")
    endings = VIDEO_ENDINGS if is_video else IMAGE_ENDINGS
    if out.suffix.lower() not in endings:
        kind = "a video" if is_video else "an image"
        raise ValueError(f"--out {out}: {kind} is written as {', '.join(endings)}")
    check_target("--out", out)
    if out.suffix.lower() == ".mp4" and importlib.util.find_spec("av") is None:
        raise MissingError(f"--out {out}: needs PyAV, pip install 'diffcache[eval]'; or name a .gif")
    return out


def save(made: Sequence[Image.Image], path: Path) -> Path:
    """Write one image, or several as a video at ten frames per second; return the path.

    `target_of` has checked the path. Several images under the name of one become a GIF beside it.
    """
    if path.suffix.lower() == ".mp4":
        frames = torch.from_numpy(np.stack([np.asarray(frame.convert("RGB")) for frame in made]))
        return write_preview(path, frames.movedim(-1, 1), 1000 / FRAME_MILLISECONDS)
    first, *rest = made
    if not rest:
        first.save(path)
        return path
    path = path.with_suffix(".gif")
    first.save(path, save_all=True, append_images=rest, duration=FRAME_MILLISECONDS, loop=0)
    return path
