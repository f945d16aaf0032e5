"""Real samples to compare generated ones with: pictures, films, or statistics that were stored.

Everything about them is checked before a run draws anything. Their features are computed a part at
a time, shared out over the processes of a run like its own samples, and kept in its folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffcache.errors import MissingError
from diffcache.eval import folders, npz
from diffcache.eval.backends import FEATURES
from diffcache.eval.clips import read_clip
from diffcache.eval.metrics import i3d
from diffcache.eval.metrics.frechet import Moments, moments
from diffcache.eval.runs.extractors import Columns, Extractors
from diffcache.eval.runs.quality import Reference
from diffcache.eval.runs.score import DEFINITION, kept
from diffcache.eval.runs.task import digest
from diffcache.eval.sets import some

_PART = {False: 64, True: 4}  # pictures or films at once
_EXACT = 2**62  # count of statistics that do not say; they are taken as exact


@dataclass(frozen=True)
class Real:
    """Real samples, checked and not read yet.

    Attributes:
        path: As given.
        folder: Pictures or films; None where only statistics are known.
        is_film: Whether they are films.
        side: Pictures are resized to it, pixels; None leaves them.
        statistics: Stored mean and covariance.
    """

    path: Path
    folder: folders.Folder | None
    is_film: bool = False
    side: int | None = None
    statistics: npz.Statistics | None = None

    @property
    def parts(self) -> list[range]:
        """Places of the samples, some at a time; the same whoever reads them."""
        if self.folder is None:
            return []
        size, total = _PART[self.is_film], len(self.folder)
        return [range(i, min(i + size, total)) for i in range(0, total, size)]

    @cached_property
    def identity(self) -> str:
        """Digest that changes with names, sizes and times of the files, and how they are read."""
        files = self.folder.files if self.folder and self.folder.files else (self.path,)
        stats = [(file.as_posix(), file.stat()) for file in files]
        known = [(name, s.st_size, s.st_mtime_ns) for name, s in stats]
        return digest([known, self.side, self.is_film])

    def columns(self, part: range, extractors: Extractors, place: Path) -> Columns:
        """Return the features of a part, those that are kept or computed ones.

        Args:
            part: One of `parts`.
            extractors: What reads the samples.
            place: Folder where they are kept.

        Raises:
            ValueError: If a file cannot be read; it is named.
        """

        def compute() -> Columns:
            folder = self.folder
            assert folder is not None, "statistics have no parts"
            if self.is_film:
                return extractors.of_real([read_clip(folder.files[i]) for i in part])
            return extractors.of_real(torch.stack([folder.picture(i, self.side) for i in part]))

        key = digest([DEFINITION, self.identity, part.start, part.stop, extractors.identity])
        return kept(place / f"{part.start:06d}.safetensors", key, compute)

    def read(self, extractors: Extractors, place: Path) -> Reference:
        """Return moments, and the features of some samples drawn at random.

        Args:
            extractors: What reads the samples.
            place: Folder where features are kept.
        """
        sets: dict[str, tuple[Moments, Tensor | None]] = {}
        if parts := [self.columns(part, extractors, place) for part in self.parts]:
            for key in parts[0]:
                features = torch.cat([part[key] for part in parts]).double()
                sets[key.removeprefix("features")] = (moments(features), some(features))
        if self.statistics is not None:
            stored = self.statistics
            ending = self._ending(stored)
            known = None if stored.features is None else some(stored.features)
            exact = Moments(stored.mean, stored.cov, stored.count or _EXACT)
            sets[ending] = (exact, sets[ending][1] if ending in sets else known)
        return Reference(self.path.name, sets)

    def check(self, extractors: Extractors) -> None:
        """Check that statistics are of what reads the samples here.

        Raises:
            MissingError: If they are of a network that is missing here.
            ValueError: If they are of another network, or of no known one.
        """
        if self.statistics is None:
            return
        ending, name = self._ending(self.statistics), self._distance
        entry = extractors.describe(f"{name}{ending}")
        if entry["backend"] == "exact":  # no entry
            reason = extractors.lacking.get(name, "")
            raise MissingError(
                f"--reference {self.path}: statistics of {len(self.statistics.mean)} features "
                f"need the network of {name.upper()}: {reason}"
            )
        npz.check_about(f"--reference {self.path}", self.statistics, entry)

    def describe(self, extractors: Extractors) -> dict[str, Any]:
        """Return what a record says of the reference."""
        stored = self.statistics
        about: dict[str, Any] = {
            "path": str(self.path), "identity": self.identity, "resize": self.side,
            "count": len(self.folder) if self.folder else stored.count if stored else None,
            "statistics": None,
        }  # fmt: skip
        if stored is not None:
            said = stored.about or {"extractor": "not stated in the file, taken as that of fid"}
            some_features = 0 if stored.features is None else len(stored.features)
            about["statistics"] = {
                "count": stored.count, "dimensions": len(stored.mean), "of": said,
                "features": some_features,
            }  # fmt: skip
        return about

    def lacking(self) -> dict[str, str]:
        """Return the metrics that the reference does not allow, and why."""
        if self.folder is not None or self.statistics is None:
            return {}
        if self.statistics.features is not None:
            return {}
        names = ("kvd" if self.is_film else "kid", "precision", "recall", "density", "coverage")
        reason = (
            f"{self.path} holds mean and covariance only; pictures, or a file of `diffcache eval "
            "fid --save`, give it"
        )
        return {f"{name}{self._ending(self.statistics)}": reason for name in names}

    @property
    def _distance(self) -> str:
        return "fvd" if self.is_film else "fid"

    def _ending(self, stored: npz.Statistics) -> str:
        """Return the ending of the keys that statistics belong to."""
        real = i3d.DIMENSIONS if self.is_film else FEATURES["real"]
        sizes = {real: "", FEATURES["lite"]: "_lite"}
        size = len(stored.mean)
        if size not in sizes:
            raise ValueError(
                f"--reference {self.path}: statistics of {size} features; {self._distance.upper()} "
                f"has {real}, its stand-in {FEATURES['lite']}"
            )
        return sizes[size]


def open_real(path: Path, is_film: bool, side: int | None) -> Real:
    """Look at real samples: names, sizes from headers, statistics.

    Args:
        path: Folder of pictures or films, an .npz of pictures, or one of statistics.
        is_film: Whether films are wanted.
        side: Resize pictures to it, pixels; None where all are of one size.

    Raises:
        FileNotFoundError: If nothing is there.
        ValueError: If it holds nothing that can be used, or pictures differ in size.
    """
    path = path.expanduser()
    stored = None
    if path.suffix.lower() == ".npz" and not path.is_dir():
        stored = npz.read_statistics(path)
        if stored is not None and (is_film or npz.PICTURES not in npz.keys(path)):
            if side is not None:
                raise ValueError(f"--resize {side}: {path} holds statistics, which have no size")
            return Real(path, None, is_film, None, stored)
    if is_film:
        if side is not None:
            raise ValueError(f"--resize {side}: only pictures are resized, and {path} is of films")
        return Real(path, folders.open_films(path), True)
    folder = folders.open_pictures(path)
    if side is None:
        folders.common_size(folder)
    return Real(path, folder, False, side, None if side else stored)


def summary(names: Sequence[str], lacking: dict[str, str]) -> list[str]:
    """Say which real metrics will run, and what the others lack.

    Args:
        names: Metrics of real networks that are at hand.
        lacking: Metrics that are left out, and why.
    """
    lines = [f"real metrics: {', '.join(names) if names else 'none'}"]
    reasons: dict[str, list[str]] = {}
    for name, reason in lacking.items():
        reasons.setdefault(reason, []).append(name)
    return lines + [f"left out: {', '.join(names)}: {why}" for why, names in reasons.items()]
