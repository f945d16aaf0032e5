"""Pictures and statistics in `.npz` files, in the format of the evaluator of guided-diffusion (ADM).

Pictures are `arr_0`, uint8 [N, H, W, 3]; statistics are `mu` [D] and `sigma` [D, D], as in files of pytorch-fid and
clean-fid. A file may hold both. Files of ours describe the features in `about`, and hold some of them.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from diffcache.files import write_file

PICTURES = "arr_0"
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, LookupError, ValueError)


@dataclass(frozen=True)
class StoredPictures:
    """The pictures of an `.npz` file."""

    path: Path
    count: int  # number of pictures
    size: tuple[int, int]  # height and width, pixels

    @cached_property
    def _array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """All of them, uint8 [N, H, W, 3], in memory; a damaged file is a ValueError."""
        with _reading(self.path), np.load(self.path, allow_pickle=False) as data:
            array: np.ndarray[Any, np.dtype[np.uint8]] = data[PICTURES]
            return array

    def __getitem__(self, index: int) -> Tensor:
        """Return a picture, uint8 [3, H, W]; raises ValueError if the file is damaged."""
        return torch.from_numpy(self._array[index].transpose(2, 0, 1).copy())


@dataclass(frozen=True)
class Statistics:
    """Mean and covariance of features, as stored."""

    mean: Tensor  # float64 [D]
    cov: Tensor  # float64 [D, D]
    count: int | None  # samples they are of, None where the file does not say
    features: Tensor | None = None  # features of some of the samples, float64 [M, D]; None where the file has none
    # Network and resize that they are of; empty where the file does not say
    about: dict[str, Any] = field(default_factory=dict)


def keys(path: Path) -> tuple[str, ...]:
    """Return the names of the arrays of a file.

    Raises FileNotFoundError if there is none, and ValueError if it is not a whole `.npz` file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    with _reading(path), zipfile.ZipFile(path) as archive:
        return tuple(name.removesuffix(".npy") for name in archive.namelist())


def open_pictures(path: Path) -> StoredPictures:
    """Look at the pictures of a file without reading them.

    Raises FileNotFoundError if there is no such file, and ValueError if it is damaged or holds no pictures.
    """
    found = keys(path)
    if PICTURES not in found:
        raise ValueError(f"{path} holds no {PICTURES!r} (uint8 [N, H, W, 3]) but {', '.join(found) or 'nothing'}")
    shape, dtype = _header(path)
    if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or 0 in shape:
        raise ValueError(f"{path}: {PICTURES} must be pictures, uint8 [N, H, W, 3], not {dtype} {list(shape)}")
    return StoredPictures(path, shape[0], (shape[1], shape[2]))


def read_statistics(path: Path) -> Statistics | None:
    """Return the statistics in a file, None where it has none.

    Raises FileNotFoundError if there is no such file, and ValueError if it is damaged, or what it holds is no mean
    and covariance.
    """
    if not {"mu", "sigma"} <= set(keys(path)):
        return None
    with _reading(path), np.load(path, allow_pickle=False) as data:
        mean, cov = (torch.from_numpy(np.asarray(data[k], np.float64)) for k in ("mu", "sigma"))
        count = int(data["count"]) if "count" in data else None
        some = torch.from_numpy(data["features"].astype(np.float64)) if "features" in data else None
        about = json.loads(str(data["about"])) if "about" in data else {}
    if mean.ndim != 1 or cov.shape != (len(mean), len(mean)) or len(mean) == 0:
        raise ValueError(f"{path}: mu {list(mean.shape)} and sigma {list(cov.shape)} must be [D] and [D, D]")
    if not (bool(mean.isfinite().all()) and bool(cov.isfinite().all())):
        raise ValueError(f"{path}: mu or sigma holds NaN or infinity")
    if not torch.allclose(cov, cov.T, rtol=1e-4, atol=1e-6 * float(cov.abs().max())):
        raise ValueError(f"{path}: sigma must be symmetric")
    if some is not None and (some.ndim != 2 or some.shape[1] != len(mean)):
        raise ValueError(f"{path}: features {list(some.shape)} must be [M, {len(mean)}]")
    return Statistics(mean, (cov + cov.T) / 2, count, some, about)


def write_statistics(path: Path, statistics: Statistics) -> None:
    """Write statistics that `read_statistics`, pytorch-fid and clean-fid read."""
    arrays: dict[str, Any] = {"mu": statistics.mean.numpy(), "sigma": statistics.cov.numpy()}
    arrays["about"] = np.asarray(json.dumps(statistics.about))
    if statistics.count is not None:
        arrays["count"] = np.asarray(statistics.count)
    if statistics.features is not None:
        arrays["features"] = statistics.features.float().numpy()
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_file(path, buffer.getvalue())


def check_about(path: str, statistics: Statistics, entry: Mapping[str, Any]) -> None:
    """Check that statistics were made by the network that reads the other set, if they tell their network.

    Raises ValueError if they were made by another one.
    """
    for key in ("extractor", "convention", "sha256"):
        if key in statistics.about and statistics.about[key] != entry.get(key):
            raise ValueError(
                f"{path}: statistics of another {key} ({statistics.about[key]!r}, here "
                f"{entry.get(key)!r}); --convention says how Inception gets its pictures"
            )


def _header(path: Path) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    """Return shape and dtype of `arr_0` without reading it."""
    with _reading(path), zipfile.ZipFile(path) as archive, archive.open(f"{PICTURES}.npy") as stream:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(stream)
        return shape, dtype


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Put the file's name into the errors of reading it."""
    try:
        yield
    except _BROKEN as error:
        raise ValueError(f"{path} cannot be read as .npz, write it again: {error}") from error
