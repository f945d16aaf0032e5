"""Films where VBench looks for them: `{prompt}-{i}.mp4`, flat, and nothing else in the folder.

VBench takes the ending of all films from the first name that the operating system lists, so a
manifest, a log or a half-written film in that folder breaks it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffcache.eval.samples.folders import is_film
from diffcache.eval.vbench import suite

INFO = "VBench_full_info.json"
_HOSTILE = re.compile(r'[/\\:*?"<>|\x00-\x1f]')
_LONGEST_NAME_BYTES = 255


@dataclass(frozen=True)
class Prompt:
    """A prompt of the suite."""

    text: str  # english prompt
    dimensions: tuple[str, ...]  # dimensions that it is evaluated on


def find_info(path: str | Path | None = None) -> Path:
    """Return where VBench's list of prompts is: the path given, or in the installed package.

    Raises:
        FileNotFoundError: It is in neither place.
    """
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"no file {path}: give VBench's {INFO}")
        return Path(path)
    package = importlib.util.find_spec("vbench")
    for folder in (package.submodule_search_locations or []) if package else []:
        if (Path(folder) / INFO).is_file():
            return Path(folder) / INFO
    raise FileNotFoundError(
        f"no {INFO}: give its path, from vbench/ in https://github.com/Vchitect/VBench, or install the package vbench"
    )


def read_info(path: str | Path) -> list[Prompt]:
    """Read VBench's list of prompts.

    Raises:
        ValueError: It is no such list; names the file and the entry.
    """
    entries = suite.json_of(Path(path))
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path} is not VBench's list of prompts: it must be a list of entries")
    prompts = []
    for number, entry in enumerate(entries):
        text = entry.get("prompt_en") if isinstance(entry, dict) else None
        named = entry.get("dimension") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not isinstance(named, list):
            raise ValueError(f"{path}: entry {number} needs prompt_en and a list dimension: {entry}")
        unknown = set(map(str, named)) - set(suite.DIMENSIONS)
        if unknown:
            raise ValueError(f"{path}: entry {number} names unknown dimensions {sorted(unknown)}")
        film_name(text, suite.SAMPLES * suite.FLICKER_TIMES - 1)
        prompts.append(Prompt(text, tuple(named)))
    return prompts


def film_name(prompt: str, index: int) -> str:
    """Return the name that VBench looks for.

    The prompt is taken as it is, with a final full stop if it has one; samples are numbered from 0.

    Raises:
        ValueError: The prompt cannot safely be the name of a file.
    """
    if index < 0:
        raise ValueError(f"index of a film must not be negative, but is {index}")
    name = f"{prompt}-{index}.mp4"
    way_out = "VBench finds films by their prompts; take it out of the list"
    found = _HOSTILE.search(prompt)
    if not prompt.strip() or found:
        what = repr(found[0]) if found else "no text"
        raise ValueError(f"prompt {prompt!r} cannot be a file name, it has {what}: {way_out}")
    if len(name.encode()) > _LONGEST_NAME_BYTES:
        raise ValueError(
            f"prompt {prompt!r} makes a file name of {len(name.encode())} bytes, more than "
            f"{_LONGEST_NAME_BYTES}: {way_out}"
        )
    return name


def expected(
    prompts: Iterable[Prompt], dimensions: Sequence[str] | None = None, samples: int = suite.SAMPLES
) -> list[str]:
    """Return the name of every film that these dimensions need, in the order of the prompts.

    `dimensions` of None are all. `samples` is the number of films of a prompt; flickering needs five times as many.
    """
    wanted = set(suite.choose(dimensions))
    names: dict[str, None] = {}
    for prompt in prompts:
        shared = wanted.intersection(prompt.dimensions)
        count = suite.samples(shared, samples) if shared else 0
        names.update((film_name(prompt.text, index), None) for index in range(count))
    return list(names)


def missing(
    folder: str | Path, prompts: Sequence[Prompt], dimensions: Sequence[str] | None = None
) -> dict[str, list[str]]:
    """Return the names of the films that are not there, for every dimension that lacks some."""
    there = {file.name for file in _files(Path(folder))}
    lacking = {}
    for dimension in suite.choose(dimensions):
        names = [name for name in expected(prompts, [dimension]) if name not in there]
        if names:
            lacking[dimension] = names
    return lacking


def require_complete(folder: str | Path, prompts: Sequence[Prompt], dimensions: Sequence[str] | None = None) -> None:
    """Refuse a folder that lacks films of the standard suite; its scores would not be VBench's.

    Raises:
        ValueError: Films or prompts are missing, with the number for every dimension, or something
            else lies in the folder.
    """
    check_folder(folder)
    for name in suite.choose(dimensions):
        count = sum(name in prompt.dimensions for prompt in prompts)
        if count < suite.DIMENSIONS[name].prompts:
            raise ValueError(
                f"the list of prompts has {count} of the {suite.DIMENSIONS[name].prompts} prompts "
                f"of {name}: a part of the suite is not VBench"
            )
    lacking = missing(folder, prompts, dimensions)
    if lacking:
        counts = ", ".join(f"{name} {len(films)}" for name, films in lacking.items())
        first = next(iter(lacking.values()))[0]
        raise ValueError(
            f"{folder} lacks films, and a part of the suite is not VBench: {counts}; the first is {first!r}"
        )


def check_folder(folder: str | Path) -> list[Path]:
    """Return the films of a folder, which must hold nothing but `.mp4` files.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: It is empty, or something else lies in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    files = _files(folder)
    films = [f for f in files if f.suffix == ".mp4" and is_film(f) and f.is_file()]
    strangers = sorted({file.name for file in files} - {film.name for film in films})
    if strangers:
        raise ValueError(
            f"{folder} must hold nothing but .mp4 films, but has {strangers[0]!r} "
            f"({len(strangers)} in all): VBench takes the ending of all from the first; move it"
        )
    if not files:
        raise ValueError(f"{folder} holds no film")
    return files


def _files(folder: Path) -> list[Path]:
    """Return everything in a folder but hidden files."""
    return sorted(f for f in folder.iterdir() if f.name != ".DS_Store") if folder.is_dir() else []
