"""Films where VBench looks for them: `{prompt}-{i}.mp4`, flat, and nothing else in the folder.

VBench takes the ending of all films from the first name that the operating system lists, so a
manifest, a log or a half-written film in that folder breaks it. Everything of that kind is kept one
level up.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from diffcache.eval.clips import write_clip
from diffcache.eval.vbench import suite
from diffcache.files import write_json

INFO = "VBench_full_info.json"
_HOSTILE = re.compile(r'[/\\:*?"<>|\x00-\x1f]')
_LONGEST_NAME_BYTES = 255


@dataclass(frozen=True)
class Prompt:
    """A prompt of the suite.

    Attributes:
        text: English prompt.
        dimensions: That it is evaluated on.
        entry: Its entry in VBench's file, unchanged.
    """

    text: str
    dimensions: tuple[str, ...]
    entry: Mapping[str, Any]


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
        f"no {INFO}: give its path, from vbench/ in https://github.com/Vchitect/VBench, or install "
        "the package vbench"
    )


def read_info(path: str | Path) -> list[Prompt]:
    """Read VBench's list of prompts.

    Raises:
        ValueError: It is no such list; names the file and the entry.
    """
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path} is not VBench's list of prompts: it must be a list of entries")
    prompts = []
    for number, entry in enumerate(entries):
        text = entry.get("prompt_en") if isinstance(entry, dict) else None
        named = entry.get("dimension") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not isinstance(named, list):
            raise ValueError(
                f"{path}: entry {number} needs prompt_en and a list dimension: {entry}"
            )
        unknown = set(map(str, named)) - set(suite.DIMENSIONS)
        if unknown:
            raise ValueError(f"{path}: entry {number} names unknown dimensions {sorted(unknown)}")
        film_name(text, suite.FLICKER_SAMPLES - 1)
        prompts.append(Prompt(text, tuple(named), entry))
    return prompts


def film_name(prompt: str, index: int, ending: str = ".mp4") -> str:
    """Return the name VBench looks for.

    Args:
        prompt: Taken as it is; a final full stop stays.
        index: Of the sample, from 0.
        ending: Of the file.

    Raises:
        ValueError: No file can safely carry the prompt as its name.
    """
    if index < 0:
        raise ValueError(f"index of a film must not be negative, but is {index}")
    name = f"{prompt}-{index}{ending}"
    way_out = "films of such prompts go through write_custom, which keeps prompts in a JSON"
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


def expected(prompts: Iterable[Prompt], dimensions: Sequence[str] | None = None) -> list[str]:
    """Return the name of every film that these dimensions need, in the order of the prompts."""
    wanted = set(suite.choose(dimensions))
    names: dict[str, None] = {}
    for prompt in prompts:
        shared = wanted.intersection(prompt.dimensions)
        count = suite.samples(shared) if shared else 0
        names.update((film_name(prompt.text, index), None) for index in range(count))
    return list(names)


def missing(
    folder: str | Path, prompts: Sequence[Prompt], dimensions: Sequence[str] | None = None
) -> dict[str, list[str]]:
    """Return the names of the films that are not there, for every dimension that lacks some."""
    there = {file.name for file in _films(Path(folder))}
    lacking = {}
    for dimension in suite.choose(dimensions):
        names = [name for name in expected(prompts, [dimension]) if name not in there]
        if names:
            lacking[dimension] = names
    return lacking


def require_complete(
    folder: str | Path, prompts: Sequence[Prompt], dimensions: Sequence[str] | None = None
) -> None:
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
            f"{folder} lacks films, and a part of the suite is not VBench: {counts}; "
            f"the first is {first!r}"
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
    files = _films(folder)
    strangers = sorted(file.name for file in files if file.suffix != ".mp4" or not file.is_file())
    if strangers:
        raise ValueError(
            f"{folder} must hold nothing but .mp4 films, but has {strangers[0]!r} "
            f"({len(strangers)} in all): VBench takes the ending of all from the first; move it"
        )
    if not files:
        raise ValueError(f"{folder} holds no film")
    return files


def write_film(
    folder: str | Path, name: str, frames: torch.Tensor, fps: float = suite.FRAME_RATE
) -> Path:
    """Write one film without loss; the folder never shows a part of it, even after a crash.

    Args:
        folder: Made if it is not there.
        name: From `film_name`.
        frames: `[F, 3, H, W]` uint8.
        fps: Frames per second.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder.parent / f".{folder.name}-{os.getpid()}.mp4"
    try:
        write_clip(draft, frames, fps)
        os.replace(draft, folder / name)
    finally:
        draft.unlink(missing_ok=True)
    return folder / name


def manifest(folder: str | Path) -> Path:
    """Return where the manifest of a folder stands: beside it."""
    folder = Path(folder)
    return folder.parent / f"{folder.name}.manifest.jsonl"


def record_film(folder: str | Path, name: str, **facts: Any) -> None:
    """Add a line about a film, such as its seed, to the manifest."""
    line = json.dumps({"file": name, **facts}, ensure_ascii=False, allow_nan=False)
    path = manifest(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        # An interrupt can leave half a line, which must not swallow this one.
        if file.tell() and not _ends_line(file):
            file.write(b"\n")
        file.write(f"{line}\n".encode())


def write_custom(
    folder: str | Path,
    films: Iterable[tuple[str, torch.Tensor]],
    fps: float = suite.FRAME_RATE,
) -> Path:
    """Write films of any prompts for VBench's mode `custom_input`.

    Args:
        folder: Receives `00000.mp4`, `00001.mp4`, ...
        films: Pairs of prompt and frames, `[F, 3, H, W]` uint8.
        fps: Frames per second.

    Returns:
        `prompts/<folder>.json` beside the folder, `{file name: prompt}`, for `--prompt_file`.
    """
    folder = Path(folder)
    prompts = {}
    for index, (prompt, frames) in enumerate(films):
        prompts[write_film(folder, f"{index:05d}.mp4", frames, fps).name] = prompt
    target = folder.parent / "prompts" / f"{folder.name}.json"
    write_json(target, prompts)
    return target


def full_info(
    folder: str | Path, prompts: Sequence[Prompt], dimensions: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the contents of VBench's `*_full_info.json`: entries, each with its films."""
    there = {file.name for file in _films(Path(folder))}
    wanted = set(suite.choose(dimensions))
    entries = []
    for prompt in prompts:
        if wanted.intersection(prompt.dimensions):
            names = [film_name(prompt.text, index) for index in range(suite.SAMPLES)]
            found = [os.path.join(folder, name) for name in names if name in there]
            entries.append({**prompt.entry, "video_list": found})
    return entries


def _films(folder: Path) -> list[Path]:
    """Return everything in a folder but what a file manager hides."""
    return sorted(_visible(folder)) if folder.is_dir() else []


def _ends_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _visible(folder: Path) -> Iterator[Path]:
    return (file for file in folder.iterdir() if file.name != ".DS_Store")
