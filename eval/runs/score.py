"""Measure the samples of a case: how close each is to the uncached one, and what it is like.

Per-sample values are computed once and kept beside the samples, under a key that changes with
the samples, the extractor and the definition; intervals are taken from them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from diffcache.eval.metrics import pixels
from diffcache.eval.runs.extractors import Columns, Extractors
from diffcache.eval.runs.folder import CaseFolder
from diffcache.eval.runs.quality import interval
from diffcache.eval.runs.task import digest
from diffcache.psnr import decibels

DEFINITION = 2  # of the values kept beside samples; a change of a metric's definition raises it
_AT_ONCE = 64
_BYTES_AT_ONCE = 1 << 25  # of 8-bit samples in memory; metrics need some twenty times as much
_SHOWN = 8  # samples named as worst, median and best
_SMALLEST_FOR_SCALES = 22  # pixels; MS-SSIM needs two scales
_LOW_IS_GOOD = ("lpips", "lpips_lite", "temporal_error")


@dataclass(frozen=True)
class Samples:
    """The samples of a case, complete.

    Attributes:
        folder: Where they are.
        ids: All of them, in order.
        prompts: One for each.
        sums: SHA-256 of the file of each.
    """

    folder: CaseFolder
    ids: tuple[int, ...]
    prompts: tuple[str, ...]
    sums: tuple[str, ...]

    @property
    def content(self) -> str:
        """Digest of the files."""
        return digest(self.sums)

    @cached_property
    def first(self) -> Tensor:
        """The first sample; all are of its size."""
        return self._read(slice(0, 1))[0]

    def __iter__(self) -> Iterator[tuple[tuple[str, ...], list[Tensor]]]:
        """Yield (prompts, samples) in batches that fit into memory."""
        size = min(_AT_ONCE, max(1, _BYTES_AT_ONCE // self.first.nbytes))
        for start in range(0, len(self.ids), size):
            chosen = slice(start, start + size)
            yield self.prompts[chosen], self._read(chosen)

    def _read(self, chosen: slice) -> list[Tensor]:
        ids = self.ids[chosen]
        return self.folder.read(ids, dict(zip(ids, self.sums[chosen], strict=True)))


def kept(path: Path, key: str, compute: Callable[[], Columns]) -> Columns:
    """Return the columns that a file keeps under this key, else compute and keep them."""
    # What cannot be read is computed again, as in `remember`.
    with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
        if (file.metadata() or {}).get("key") == key:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    found = {name: column.contiguous() for name, column in compute().items()}
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    save_file(found, beside, {"key": key})
    os.replace(beside, path)
    return found


def fidelity_values(samples: Samples, uncached: Samples, extractors: Extractors) -> Columns:
    """Return per-sample closeness to the uncached samples; films are means over their frames.

    Returns:
        Float64 [N] each: `psnr_db`, `mse` (full range is 1), `ssim`, `ms_ssim` where the pictures
        are large enough, `lpips_lite`, `lpips` where its weights are; for films `temporal_error`.
    """

    def compute() -> Columns:
        parts: list[Columns] = []
        for (_, mine), (_, theirs) in zip(samples, uncached, strict=True):
            if theirs[0].ndim == 3:
                parts.append(_pairs(torch.stack(theirs), torch.stack(mine), extractors))
            else:
                films = zip(theirs, mine, strict=True)
                parts += [_film_pair(one, other, extractors) for one, other in films]
        return _joined(parts)

    key = digest([DEFINITION, samples.content, uncached.content, extractors.identity])
    return kept(samples.folder.path / "fidelity.safetensors", key, compute)


def _pairs(theirs: Tensor, mine: Tensor, extractors: Extractors) -> Columns:
    found = {
        "psnr_db": pixels.psnr(theirs, mine),
        "mse": ((theirs.double() - mine.double()) / 255).square().mean(dim=(1, 2, 3)),
        "ssim": pixels.ssim(theirs, mine),
        **extractors.of_pairs(theirs, mine),
    }
    if min(theirs.shape[-2:]) >= _SMALLEST_FOR_SCALES:
        found["ms_ssim"] = pixels.ms_ssim(theirs, mine)
    return {name: column.double() for name, column in found.items()}


def _film_pair(theirs: Tensor, mine: Tensor, extractors: Extractors) -> Columns:
    found = {k: v.mean()[None] for k, v in _pairs(theirs, mine, extractors).items()}
    change = pixels.temporal_error(theirs, mine)
    return {**found, "temporal_error": torch.tensor([change], dtype=torch.float64)}


def quality_values(samples: Samples, extractors: Extractors) -> Columns:
    """Return what the extractors say of every sample by itself."""

    def compute() -> Columns:
        parts = []
        for prompts, found in samples:
            if found[0].ndim == 4:
                parts.append(extractors.of_films(found))
            else:
                parts.append(extractors.of_pictures(torch.stack(found), prompts))
        return _joined(parts)

    key = digest([DEFINITION, samples.content, samples.prompts, extractors.identity])
    return kept(samples.folder.path / "quality.safetensors", key, compute)


def _joined(parts: Sequence[Columns]) -> Columns:
    """Join columns; one that any part lacks (a prompt in other words) is left out."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def fidelity(values: Columns, ids: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return intervals of the per-sample values, and the worst and best samples by LPIPS."""
    found: dict[str, Any] = {}
    for name, column in values.items():
        if name == "mse":
            continue
        is_good_low = name in _LOW_IS_GOOD
        tail = torch.quantile(column, 0.95 if is_good_low else 0.05)
        found[name] = interval(name, column)
        found[name]["p95" if is_good_low else "p5"] = float(tail)
    found["psnr_db"]["pooled"] = float(decibels(values["mse"].mean()))
    distance = values.get("lpips", values["lpips_lite"]).tolist()
    order = sorted(range(len(ids)), key=lambda place: (distance[place], place))
    ranked = [ids[place] for place in order]
    middle = ranked[max(len(ranked) // 2 - _SHOWN // 2, 0) :][:_SHOWN]
    picked = {"worst": ranked[::-1][:_SHOWN], "median": middle, "best": ranked[:_SHOWN]}
    return found, {"count": len(ids), **picked}
