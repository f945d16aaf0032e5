"""Sets of samples to compare with: pictures, films, or statistics that were stored.

Everything about them is checked before anything is computed. In a run their features are computed
a part at a time, shared out over its processes like its own samples, and kept in its folder.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffcache.errors import MissingError
from diffcache.eval.metrics import i3d, inception, lite
from diffcache.eval.metrics.distances import Moments, moments
from diffcache.eval.metrics.sets import Reference, some
from diffcache.eval.runs.extractors import Columns, Extractors
from diffcache.eval.runs.score import DEFINITION, kept
from diffcache.eval.runs.task import digest
from diffcache.eval.samples import folders, npz
from diffcache.eval.samples.clips import read_clip

_PART = {False: 64, True: 4}  # pictures or films at once
_EXACT = 2**62  # count for statistics without one, which are taken as exact


@dataclass(frozen=True)
class Wish:
    """Way of taking the samples of a folder."""

    is_film: bool = False  # films are wanted
    side: int | None = None  # resize pictures to it, pixels; None where all are of one size
    recursive: bool = False  # look into folders inside, too
    samples: int | None = None  # use so many, drawn at random; None for all
    seed: int = 0  # seed of that draw
    # Shows how far sizes are looked at, of so many under a label
    progress: Callable[[Iterable[Any], int, str], Iterable[Any]] = lambda items, *_: items


@dataclass(frozen=True)
class Source:
    """Samples, checked and not read yet."""

    path: Path  # path as given
    folder: folders.Folder | None  # pictures or films; None where only statistics are known
    indices: Sequence[int] = ()  # indices of the samples that are used, increasing
    is_film: bool = False  # whether they are films
    side: int | None = None  # pictures are resized to it, pixels; None leaves them
    size: tuple[int, int] | None = None  # height and width of the pictures as they are used; None without
    statistics: npz.Statistics | None = None  # stored mean and covariance

    @property
    def parts(self) -> list[Sequence[int]]:
        """The samples that are used, some at a time; the same whoever reads them."""
        size = _PART[self.is_film]
        return [self.indices[i : i + size] for i in range(0, len(self.indices), size)]

    def read(self, part: Sequence[int]) -> Tensor | list[Tensor]:
        """Read samples: pictures uint8 [N, 3, H, W], or films uint8 [F, 3, H, W].

        Raises ValueError if a file cannot be read; it is named.
        """
        folder = self.folder
        assert folder is not None, "statistics have no parts"
        if self.is_film:
            return [read_clip(folder.files[i]) for i in part]
        return torch.stack([folder.picture(i, self.side) for i in part])

    @cached_property
    def identity(self) -> str:
        """Digest that changes with names, sizes and times of the files, and how they are read."""
        files = self.folder.files if self.folder and self.folder.files else (self.path,)
        stats = [(file.as_posix(), file.stat()) for file in files]
        known = [(name, s.st_size, s.st_mtime_ns) for name, s in stats]
        return digest([known, list(self.indices), self.side, self.is_film])

    def columns(self, part: Sequence[int], extractors: Extractors, place: Path) -> Columns:
        """Return the features of a part, those that are kept or computed ones.

        The part is one of `parts`; `place` is the folder where they are kept. Raises ValueError if a file cannot be
        read; it is named.
        """
        key = digest([DEFINITION, self.identity, list(part), extractors.identity])
        place = place / f"{part[0]:06d}.safetensors"
        return kept(place, key, lambda: extractors.of_real(self.read(part)))

    def reference(self, extractors: Extractors, place: Path) -> Reference:
        """Return moments, and the features of some samples drawn at random."""
        sets: dict[str, tuple[Moments, Tensor | None]] = {}
        if parts := [self.columns(part, extractors, place) for part in self.parts]:
            for key in parts[0]:
                features = torch.cat([part[key] for part in parts]).double()
                sets[key.removeprefix("features")] = (moments(features), some(features))
        if self.statistics is not None:
            ending = self.ending
            known = None if self.statistics.features is None else some(self.statistics.features)
            sets[ending] = (self.exact, sets[ending][1] if ending in sets else known)
        return Reference(self.path.name, sets)

    def check(self, extractors: Extractors) -> None:
        """Check that statistics were made by the network that reads the samples here.

        Raises MissingError if that network is missing here, and ValueError if it is another or an unknown one.
        """
        if self.statistics is None:
            return
        ending, name = self.ending, self._distance
        entry = extractors.describe(f"{name}{ending}")
        if entry["backend"] == "exact":  # there is no network for this metric
            reason = extractors.lacking.get(name, "")
            raise MissingError(
                f"--reference {self.path}: statistics of {len(self.statistics.mean)} features "
                f"need the network of {name.upper()}: {reason}"
            )
        npz.check_about(f"--reference {self.path}", self.statistics, entry)

    def describe(self, extractors: Extractors) -> dict[str, Any]:
        """Return the reference's entry in a record."""
        stored = self.statistics
        about: dict[str, Any] = {
            "path": str(self.path),
            "identity": self.identity,
            "resize": self.side,
            "count": len(self.folder) if self.folder else stored.count if stored else None,
            "statistics": None,
        }
        if stored is not None:
            said = stored.about or {"extractor": "not stated in the file, taken as that of fid"}
            some_features = 0 if stored.features is None else len(stored.features)
            about["statistics"] = {
                "count": stored.count,
                "dimensions": len(stored.mean),
                "of": said,
                "features": some_features,
            }
        return about

    def lacking(self) -> dict[str, str]:
        """Return the metrics that the reference does not allow, with the reason."""
        if self.folder is not None or self.statistics is None:
            return {}
        if self.statistics.features is not None:
            return {}
        names = ("kvd" if self.is_film else "kid", "precision", "recall", "density", "coverage")
        reason = (
            f"{self.path} holds mean and covariance only; pictures, or a file of `diffcache eval fid --save`, give it"
        )
        return {f"{name}{self.ending}": reason for name in names}

    @property
    def _distance(self) -> str:
        return "fvd" if self.is_film else "fid"

    @property
    def exact(self) -> Moments:
        """The stored mean and covariance."""
        stored = self.statistics
        assert stored is not None
        return Moments(stored.mean, stored.cov, stored.count or _EXACT)

    @property
    def ending(self) -> str:
        """The ending of the keys that the statistics belong to.

        Raises ValueError if no network here makes such features.
        """
        assert self.statistics is not None
        real = i3d.DIMENSIONS if self.is_film else inception.DIMENSIONS
        size = len(self.statistics.mean)
        if size not in (real, lite.DIMENSIONS):
            raise ValueError(
                f"{self.path}: statistics of {size} features; {self._distance.upper()} has {real}, "
                f"its stand-in {lite.DIMENSIONS}"
            )
        return "" if size == real else "_lite"


def open_source(path: str | Path, wish: Wish | None = None) -> Source:
    """Look at samples, which are pictures, films or statistics: names, sizes from headers, statistics.

    `wish` of None takes all pictures as they are. Raises FileNotFoundError if nothing is there, and ValueError if it
    holds nothing that can be used, or pictures differ in size.
    """
    path, wish = Path(path).expanduser(), wish or Wish()
    stored = None
    if path.suffix.lower() == ".npz" and not path.is_dir():
        stored = npz.read_statistics(path)
        if stored is not None and (wish.is_film or npz.PICTURES not in npz.keys(path)):
            for option, value in (("samples", wish.samples), ("resize", wish.side)):
                if value is not None:
                    raise ValueError(f"--{option} {value} needs pictures, and {path} holds statistics only")
            return Source(path, None, is_film=wish.is_film, statistics=stored)
    if wish.is_film:
        if wish.side is not None:
            raise ValueError(f"--resize {wish.side}: {path} is of films; only pictures are resized")
        films = folders.open_films(path)
        return Source(path, films, range(len(films)), True)
    folder = folders.open_pictures(path, wish.recursive)
    total, count = len(folder), wish.samples or len(folder)
    if count > total:
        raise ValueError(f"--samples {count}: {path} holds {total} pictures")
    if count < 2:
        raise ValueError(f"{path} holds one picture; a set needs two or more")
    indices = sorted(random.Random(wish.seed).sample(range(total), count))
    size = (wish.side, wish.side) if wish.side else None
    if size is None:
        size = folders.common_size(folder, lambda s: wish.progress(s, total, f"look at {path}"))
    # Statistics are of all pictures as they are.
    is_whole = wish.side is None and wish.samples is None
    statistics = stored if is_whole else None
    return Source(path, folder, indices, False, wish.side, size, statistics)


def summary(names: Sequence[str], lacking: dict[str, str]) -> list[str]:
    """Return lines on the real metrics that will run, and on those that will not, with the reason."""
    lines = [f"real metrics: {', '.join(names) if names else 'none'}"]
    reasons: dict[str, list[str]] = {}
    for name, reason in lacking.items():
        reasons.setdefault(reason, []).append(name)
    return lines + [f"left out: {', '.join(names)}: {why}" for why, names in reasons.items()]
