"""The one dimension of VBench that needs no weights, on any films.

VBench itself drops films that move first, so its own number is of fewer films.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffcache.eval.metrics.sets import interval
from diffcache.eval.samples.clips import read_clip
from diffcache.eval.samples.folders import open_films
from diffcache.eval.vbench import suite

SCHEMA = "diffcache.films/1"


def measure_films(folder: Path, progress: Callable[[Sequence[Path]], Iterable[Path]] = iter) -> dict[str, Any]:
    """Measure temporal flickering of the films of a folder.

    They are film files, or folders with one picture a frame.

    Returns:
        `warnings`: names of files left out. `summary`: the mean over films with its 95 % bootstrap interval (the
        value alone of one film). `results`: every film's value, in the shape of VBench's results.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: It holds no film, or one is damaged or has a single frame; names the file.
    """
    films = open_films(folder)
    values = []
    for file in progress(films.files):
        frames = read_clip(file)
        if len(frames) < 2:
            raise ValueError(f"{file} has a single frame: flickering needs 2 frames or more")
        values.append(temporal_flickering(frames))
    column = torch.tensor(values, dtype=torch.float64)
    rows = zip(films.files, values, strict=True)
    by_film = [{"video_path": str(file), "video_results": value} for file, value in rows]
    return {
        "schema": SCHEMA,
        "backend": "own",
        "count": len(values),
        "warnings": list(films.notes),
        "summary": {suite.FLICKER: interval(suite.FLICKER, column)},
        "results": {suite.FLICKER: [float(column.mean()), by_film]},
    }


def temporal_flickering(frames: torch.Tensor) -> float:
    """Return VBench's score: one minus the mean absolute change between frames.

    `(255 - mean_t mean_px |F_t - F_{t+1}|) / 255`; sums in float32 over B, G, R as in VBench, so that the
    values are equal to the last bit. Frames are uint8 [F, 3, H, W], RGB, two or more.
    """
    film = frames.permute(0, 2, 3, 1).numpy()
    pictures = (np.ascontiguousarray(frame[..., ::-1], dtype=np.float32) for frame in film)
    changes = [np.mean(np.abs(a - b)) for a, b in pairwise(pictures)]
    return (255.0 - float(np.mean(np.array(changes)))) / 255.0
