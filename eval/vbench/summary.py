"""The own dimensions over a folder of films: every film's values, means and intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from diffcache.eval.clips import FILM_ENDINGS, read_clip, read_fps
from diffcache.eval.metrics import lite
from diffcache.eval.metrics.intervals import metric_interval
from diffcache.eval.pictures import is_picture
from diffcache.eval.vbench import flow, own, scores

SCHEMA = "diffcache.films/1"
Progress = Callable[[int, int], None]


def find_films(folder: str | Path) -> tuple[list[Path], list[str]]:
    """Return the films of a folder, and the names of everything else in it.

    A film is a file, or a folder with one picture a frame.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: It holds no film.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    films, others = [], []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            is_film = any(map(is_picture, entry.iterdir()))
        else:
            is_film = entry.suffix.lower() in FILM_ENDINGS
        if is_film:
            films.append(entry)
        else:
            others.append(entry.name)
    if not films:
        raise ValueError(
            f"{folder} holds no film: neither a file of {', '.join(FILM_ENDINGS)} nor a folder of "
            "pictures"
        )
    return films, others


def check_films(
    films: Sequence[Path], fps: float | None = None
) -> tuple[dict[Path, float], tuple[int, int]]:
    """Read every film once, before anything is measured.

    Args:
        films: Files or folders of pictures.
        fps: Frames per second of films that do not say.

    Returns:
        Frame rates in frames per second, and the height and width in pixels of all.

    Raises:
        ValueError: A film is damaged, too short, too small or of another size than the first, or
            its frame rate is unknown; names the file.
    """
    rates: dict[Path, float] = {}
    first: tuple[int, int] | None = None
    for film in films:
        frames = read_clip(film)
        try:
            own.check(frames)
        except ValueError as error:
            raise ValueError(f"{film}: {error}") from error
        size = (frames.shape[2], frames.shape[3])
        first = first or size
        if size != first:
            raise ValueError(
                f"{film} has frames of {size[0]} x {size[1]}, but {films[0]} of {first[0]} x "
                f"{first[1]}: films of different sizes are not comparable"
            )
        rate = read_fps(film) or fps
        if rate is None:
            raise ValueError(f"{film} does not say its frame rate: give it with --fps")
        rates[film] = rate
    if first is None:
        raise ValueError("no film to measure")
    return rates, first


def measure_films(
    films: Sequence[Path],
    keys: Sequence[str] | None = None,
    fps: float | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure films and summarise them.

    Args:
        films: Files or folders of pictures, of one height and width.
        keys: Of `own.DIRECTIONS`; None for all.
        fps: Frames per second of films that do not say.
        progress: Called with (films done, all) behind every film.

    Returns:
        `warnings`: what makes values uncertain. `summary`: by key `value, low, high, n,
        direction`, the mean over films and its 95 % bootstrap interval (null for one film).
        `results`: the same in the shape of VBench's results, with every film's value. No quality,
        semantic or total score is formed.

    Raises:
        ValueError: A film or a key is not fit; names it.
    """
    wanted = own.choose(keys)
    rates, size = check_films(films, fps)
    values: dict[str, list[float]] = {key: [] for key in wanted}
    for number, (film, rate) in enumerate(rates.items(), start=1):
        for key, value in own.measure(read_clip(film), rate, wanted).items():
            values[key].append(value)
        if progress:
            progress(number, len(rates))
    names = [str(film) for film in rates]
    results = {
        key: scores.as_result(sum(v) / len(v), list(zip(names, v, strict=True)))
        for key, v in values.items()
    }
    return {
        "schema": SCHEMA,
        "backend": "own",
        "count": len(names),
        "extractor": {"name": lite.EXTRACTOR.name, "sha256": lite.EXTRACTOR.sha256},
        "warnings": _warnings(size, wanted),
        "summary": {key: _interval(key, v) for key, v in values.items()},
        "results": results,
    }


def _warnings(size: tuple[int, int], keys: Sequence[str]) -> list[str]:
    """Say what the size of the films makes uncertain."""
    if min(size) >= flow.SHORTEST_SIDE or not set(keys) & set(own.BY_FLOW):
        return []
    shape = f"{size[0]} x {size[1]}"
    lost = "flow loses shifts of more than about 5 px a frame"
    return [f"frames of {shape}: with fewer than {flow.SHORTEST_SIDE} px a side, {lost}"]


def _interval(key: str, values: list[float]) -> dict[str, Any]:
    direction = own.DIRECTIONS[key]
    if len(values) == 1:
        return {"value": values[0], "low": None, "high": None, "n": 1, "direction": direction}
    table = torch.tensor(values, dtype=torch.float64)
    return {**metric_interval(key, table).to_dict(), "direction": direction}
