"""A case's folder: samples that are complete, and the manifest that says so.

A batch is drawn, its files are written, then one line is appended to the manifest and flushed to
the disk. A batch without a line was not drawn, so a run can be killed at any time and goes on
where it was; what is half written is never read.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from diffcache.errors import DiffcacheError
from diffcache.files import read_json, write_file, write_json

MARKER = "run.json"  # says whose the folder of a run is
PICTURE, FILM = "samples/{:05d}.png", "clips/{:05d}.mp4"
FILMS = "films"  # folder of films under other names than numbers
PREVIEW = "previews/{:05d}.mp4"  # out of the folder of films, which other tools read as a whole


class RunError(DiffcacheError):
    """A run cannot be made, or its folder holds a run of other settings."""


class ManifestError(DiffcacheError):
    """A manifest does not match its samples."""


@dataclass(frozen=True)
class Batch:
    """Samples that are drawn in one call."""

    number: int  # number of the batch, from 0
    ids: tuple[int, ...]
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of ids, prompts and seeds."""
        return sha256(json.dumps([self.ids, self.prompts, self.seeds]).encode())[:16]


def batches(texts: Sequence[str], samples: int, size: int, seed: int) -> list[Batch]:
    """Cut samples into batches; the same whoever draws them.

    Sample `i` has prompt `i`, from the start again where they end, and `seed + i`; the last batch may be smaller.
    """
    made = []
    for number, start in enumerate(range(0, samples, size)):
        ids = tuple(range(start, min(start + size, samples)))
        prompts = tuple(texts[i % len(texts)] for i in ids)
        made.append(Batch(number, ids, prompts, tuple(seed + i for i in ids)))
    return made


class CaseFolder:
    """The samples of one case.

    Args:
        path: The folder; made when the first batch is written.
        rank: Rank of this process, which writes a manifest of its own.
        fps: Frames per second of films that are written; None for pictures.
        names: Name of the film of every sample, for films that go by other names than numbers.
    """

    def __init__(self, path: Path, rank: int = 0, fps: float | None = None, names: Sequence[str] = ()) -> None:
        self.path, self.fps, self.names = path, fps, names
        self.manifest = path / f"manifest.{rank}.jsonl"

    def lines(self) -> dict[int, list[dict[str, Any]]]:
        """Return the manifest's lines by the number of their batch, of all processes.

        A last line that was cut off is left out. A batch has several lines where it was drawn again: longer or
        shorter, as the last one, or because a file was gone. Raises ManifestError if another line cannot be read.
        """
        found: dict[int, list[dict[str, Any]]] = {}
        for file in sorted(self.path.glob("manifest.*.jsonl")):
            for text in file.read_text(encoding="utf-8").split("\n")[:-1]:
                try:
                    line = json.loads(text)
                    found.setdefault(line["batch"], []).append(line)
                except (ValueError, KeyError, TypeError) as error:
                    raise ManifestError(
                        f"{file} is damaged: delete the folder {self.path} and run the command again ({error})"
                    ) from error
        return found

    def done(self, wanted: Iterable[Batch]) -> dict[int, dict[str, Any]]:
        """Return the lines of the wanted batches that are complete, by number.

        A batch whose files are missing or of another size counts as not drawn. Raises ManifestError if a line is
        about other prompts or seeds than the wanted ones, or cannot be read.
        """
        lines = self.lines()
        complete = {}
        for batch in wanted:
            all_drawn = lines.get(batch.number, [])
            for line in all_drawn:
                if len(line["ids"]) != len(batch.ids):
                    continue
                if line["digest"] != batch.digest:
                    raise ManifestError(
                        f"batch {batch.number} of {self.path} was drawn from other prompts or "
                        "seeds; name another folder with --out"
                    )
                # Only the contents tell which of several lines the files are of.
                if all(self._is_whole(file, len(all_drawn) > 1) for file in line["files"]):
                    complete[batch.number] = line
        return complete

    def _is_whole(self, file: Mapping[str, Any], read: bool) -> bool:
        place = self.path / file["name"]
        try:
            same_size = place.stat().st_size == file["bytes"]
            return same_size and (not read or sha256(place.read_bytes()) == file["sha256"])
        except OSError:
            return False

    def write(self, batch: Batch, samples: Sequence[Tensor], about: Mapping[str, Any]) -> None:
        """Write the samples of a batch, then its line.

        Pictures are uint8 [3, H, W], films uint8 [F, 3, H, W]; `about` are further fields of the line: the report of
        the cache and the seconds.
        """
        files = [self._save(i, sample) for i, sample in zip(batch.ids, samples, strict=True)]
        line = {
            "batch": batch.number,
            "ids": batch.ids,
            "prompts": batch.prompts,
            "digest": batch.digest,
            "files": files,
        }
        text = json.dumps({**line, **about}, allow_nan=False) + "\n"
        self._drop_cut_line()
        with self.manifest.open("ab") as manifest:
            manifest.write(text.encode())
            manifest.flush()
            os.fsync(manifest.fileno())

    def _drop_cut_line(self) -> None:
        """Remove a line that was cut off by a kill from this process's manifest."""
        if not self.manifest.exists():
            return
        data = self.manifest.read_bytes()
        if data and not data.endswith(b"\n"):
            write_file(self.manifest, data[: data.rfind(b"\n") + 1])

    def _save(self, number: int, sample: Tensor) -> dict[str, Any]:
        name = PICTURE.format(number) if sample.ndim == 3 else self._film(number)
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if sample.ndim == 3:
            write_file(file, encoded(sample))
        else:
            from diffcache.eval.samples.clips import write_clip

            if self.fps is None:
                raise RunError(f"{file} is a film, but its pipeline takes no number of frames")
            # A folder of films never holds a part of one: other tools read all that lies in it.
            draft = self.path / f".{os.getpid()}.mp4"
            os.replace(write_clip(draft, sample, self.fps), file)
        data = file.read_bytes()
        return {"name": name, "bytes": len(data), "sha256": sha256(data)}

    def _film(self, number: int) -> str:
        return f"{FILMS}/{self.names[number]}" if self.names else FILM.format(number)

    def read(self, ids: Sequence[int], sums: Mapping[int, str] | None = None) -> list[Tensor]:
        """Read samples back: pictures uint8 [3, H, W] or films uint8 [F, 3, H, W].

        `sums` are the SHA-256 of the files; without them damage that can still be decoded goes unseen. Raises
        ManifestError, with the name of the file, if one is missing or damaged.
        """
        return [self._load(i, None if sums is None else sums[i]) for i in ids]

    def _load(self, number: int, wanted: str | None) -> Tensor:
        picture, film = self.path / PICTURE.format(number), self.path / self._film(number)
        place = film if film.exists() else picture
        try:
            if wanted is not None and sha256(place.read_bytes()) != wanted:
                raise ValueError("it is not the file that was drawn")
            if place is film:
                from diffcache.eval.samples.clips import read_clip

                return read_clip(film)
            with Image.open(picture) as opened:
                array = np.array(opened.convert("RGB"))
        except (OSError, SyntaxError, ValueError) as error:
            raise ManifestError(f"cannot read {place}: {error}; delete the file and run the command again") from error
        return torch.from_numpy(array).movedim(-1, 0)


def encoded(picture: Tensor) -> bytes:
    """Return a picture, uint8 [3, H, W], as PNG."""
    buffer = io.BytesIO()
    array = picture.movedim(0, -1).contiguous().numpy()
    # Several times faster than the default level, and a few per cent larger.
    Image.fromarray(array).save(buffer, "png", compress_level=1)
    return buffer.getvalue()


def sha256(data: bytes) -> str:
    """Return the SHA-256 of data in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def check_claim(folder: Path, mine: Mapping[str, Any]) -> bool:
    """Return whether the folder of a run is new, after checking that it holds no other run.

    `mine` are its settings, with their digest under `identity`. Raises RunError if the folder holds a run of other
    settings, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; name a folder with --out")
    found = read_json(folder / MARKER)
    if not isinstance(found, dict):
        return True
    if found.get("identity") != mine["identity"]:
        plain = json.loads(json.dumps(mine))
        # As text, since 1 and 1.0 are different settings here.
        other = [k for k in plain if k != "identity" and repr(found.get(k)) != repr(plain[k])]
        name = other[0] if other else "identity"
        raise RunError(
            f"{folder} holds a run with another {name} ({found.get(name)!r}, now "
            f"{plain[name]!r}); name another folder with --out"
        )
    return False


def remember(path: Path, key: str, compute: Callable[[], Any]) -> Any:
    """Return the plain data that a file keeps under this key, else compute and keep it."""
    found = read_json(path)
    value = found.get("value") if isinstance(found, dict) and found.get("key") == key else None
    if value is None:
        value = compute()
        write_json(path, {"key": key, "value": value})
    return value


def evaluations(lines: Sequence[Mapping[str, Any]], steps: int, full: float | None) -> float:
    """Return the number of full steps that cost as much as a run, as a mean over samples.

    It is counted in FLOPs of the whole denoiser; where they are unknown, computed steps are counted. `lines` are those
    of the case's manifest; `full` are the FLOPs of one uncached step and sample.
    """
    total = weight = 0.0
    for line in lines:
        count, cache = len(line["ids"]), line.get("cache")
        if cache is None:
            here = float(steps)
        elif full is None or cache["flops_saved"] is None:
            here = steps * fmean(computed for _, computed in cache["steps"])
        else:  # solvers of higher order call the denoiser more often than there are steps
            calls = len(cache["steps"])
            here = steps * (1 - cache["flops_saved"] / (full * count * calls))
        total, weight = total + here * count, weight + count
    return total / weight


def shares(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return for every step the share of samples that computed it, None without a cache."""
    runs = [(line["cache"]["steps"], len(line["ids"])) for line in lines if "cache" in line]
    if not runs:
        return None
    length = max(len(steps) for steps, _ in runs)
    made = []
    for step in range(length):
        here = [(steps[step], count) for steps, count in runs if step < len(steps)]
        total = sum(count for _, count in here)
        computed = sum(mark[1] * count for mark, count in here) / total
        made.append({"step": step, "timestep": here[0][0][0], "computed": computed})
    return made
