"""Measure fidelity and quality of the samples of a case.

Values are computed one drawn batch at a time, on one thread or on an accelerator, so that they do not depend on the
way in which batches are shared out. They are kept beside the samples under a key that changes with the samples, the
networks and the definition; intervals are computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from diffcache.eval.metrics import pixels
from diffcache.eval.metrics.sets import summarized
from diffcache.eval.runs.extractors import Columns, Extractors
from diffcache.eval.runs.folder import Batch, CaseFolder
from diffcache.eval.runs.task import digest
from diffcache.files import write_file
from diffcache.psnr import decibels

DEFINITION = 3  # version of the values kept beside samples; raise it when a metric's definition changes
_BYTES_AT_ONCE = 1 << 23  # of 8-bit samples in memory; metrics need some twenty times as much
_SHOWN = 8  # samples named as worst, median and best
_SMALLEST_FOR_SCALES = 22  # pixels; MS-SSIM needs two scales
CLOSENESS = ("psnr_db", "mse", "ssim", "lpips_lite", "lpips", "ms_ssim", "temporal_error")


@dataclass(frozen=True)
class Samples:
    """The samples of a case, complete."""

    folder: CaseFolder
    batches: tuple[Batch, ...]  # all of them, in order
    sums: Mapping[int, str]  # SHA-256 of the file of each, by number

    @property
    def ids(self) -> tuple[int, ...]:
        """Numbers of the samples, in order."""
        return tuple(i for batch in self.batches for i in batch.ids)

    @property
    def content(self) -> str:
        """Digest of the files."""
        return digest([self.sums[i] for i in self.ids])

    @cached_property
    def first(self) -> Tensor:
        """The first sample; all are of its size."""
        return self.read(self.ids[:1])[0]

    def read(self, ids: Sequence[int]) -> list[Tensor]:
        """Read samples: pictures uint8 [3, H, W] or films uint8 [F, 3, H, W].

        Raises ManifestError if a file is missing or damaged; it is named.
        """
        return self.folder.read(ids, self.sums)

    def parts(self, batch: Batch) -> Iterator[slice]:
        """Yield the parts of a batch that fit into memory."""
        size = max(1, _BYTES_AT_ONCE // self.first.nbytes)
        yield from (slice(i, i + size) for i in range(0, len(batch.ids), size))


def kept(path: Path, key: str, compute: Callable[[], Columns]) -> Columns:
    """Return the columns that a file keeps under this key, else compute and keep them."""
    # A file that cannot be read is computed again, as in `remember`.
    with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
        if (file.metadata() or {}).get("key") == key:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    found = {name: column.contiguous() for name, column in compute().items()}
    write_file(path, save(found, {"key": key}))
    return found


def values(samples: Samples, uncached: Samples | None, extractors: Extractors) -> Columns:
    """Return per-sample values of a case, kept or computed.

    `uncached` are the counterparts of the samples; None for the uncached case itself.

    Returns:
        Values of the extractors for every sample by itself; and beside counterparts, float64 [N] each, films as means
        over their frames: `psnr_db`, `mse` (full range is 1), `ssim`, `ms_ssim` where the pictures are large enough,
        `lpips_lite`, `lpips` where its weights are, and of films `temporal_error`.
    """
    return joined([batch_values(samples, b, uncached, extractors) for b in samples.batches])


def batch_values(samples: Samples, batch: Batch, uncached: Samples | None, extractors: Extractors) -> Columns:
    """Return the values of one batch, as `values` does of all."""
    sets = [samples] if uncached is None else [samples, uncached]
    sums = [[one.sums[i] for i in batch.ids] for one in sets]
    key = digest([DEFINITION, sums, batch.prompts, extractors.identity])

    def compute() -> Columns:
        parts = []
        for part in samples.parts(batch):
            mine, *theirs = (one.read(batch.ids[part]) for one in sets)
            found = _alone(mine, batch.prompts[part], extractors)
            parts.append(found | (_beside(theirs[0], mine, extractors) if theirs else {}))
        return joined(parts)

    place = samples.folder.path / "values" / f"{batch.number:05d}.safetensors"
    return kept(place, key, compute)


def _alone(samples: list[Tensor], prompts: Sequence[str], extractors: Extractors) -> Columns:
    if samples[0].ndim == 4:
        return extractors.of_films(samples, prompts)
    return extractors.of_pictures(torch.stack(samples), prompts)


def _beside(theirs: list[Tensor], mine: list[Tensor], extractors: Extractors) -> Columns:
    if mine[0].ndim == 3:
        return _pairs(torch.stack(theirs), torch.stack(mine), extractors)
    return joined([_film_pair(*films, extractors) for films in zip(theirs, mine, strict=True)])


def closeness(theirs: Tensor, mine: Tensor, extractors: Extractors, wanted: Collection[str] = CLOSENESS) -> Columns:
    """Return measures of the closeness of pictures to their counterparts, float64 [N] each.

    Both are uint8 [N, 3, H, W]. `wanted` are keys of `CLOSENESS`; `lpips` includes `lpips_lite`, and `psnr_db` comes
    with `mse`. Raises ValueError if the pictures are too small for one of them.
    """
    theirs, mine = extractors.placed(theirs), extractors.placed(mine)
    found: Columns = {}
    if "psnr_db" in wanted:
        found["psnr_db"] = pixels.psnr(theirs, mine)
        found["mse"] = 10 ** (-found["psnr_db"] / 10)
    if "ssim" in wanted and "ms_ssim" in wanted:
        found["ssim"], found["ms_ssim"] = pixels.both_ssim(theirs, mine)
    else:
        for name, metric in (("ssim", pixels.ssim), ("ms_ssim", pixels.ms_ssim)):
            if name in wanted:
                found[name] = metric(theirs, mine)
    if "lpips" in wanted:
        found |= extractors.of_pairs(theirs, mine)
    return {name: column.double().cpu() for name, column in found.items()}


def _pairs(theirs: Tensor, mine: Tensor, extractors: Extractors) -> Columns:
    is_small = min(theirs.shape[-2:]) < _SMALLEST_FOR_SCALES
    wanted = [name for name in CLOSENESS if not (is_small and name == "ms_ssim")]
    return closeness(theirs, mine, extractors, wanted)


def _film_pair(theirs: Tensor, mine: Tensor, extractors: Extractors) -> Columns:
    found = {k: v.mean()[None] for k, v in _pairs(theirs, mine, extractors).items()}
    change = pixels.temporal_error(extractors.placed(theirs), extractors.placed(mine))
    return {**found, "temporal_error": torch.tensor([change], dtype=torch.float64)}


def joined(parts: Sequence[Columns]) -> Columns:
    """Join columns; a column that any part lacks, such as the score for prompts in words, is left out."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def fidelity(values: Columns, ids: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return intervals of the per-sample values, and the worst and best samples by LPIPS."""
    found: dict[str, Any] = {}
    for name in CLOSENESS:
        if name != "mse" and name in values:
            found[name] = summarized(name, values[name])
    found["psnr_db"]["pooled"] = float(decibels(values["mse"].mean()))
    distance = values.get("lpips", values["lpips_lite"]).tolist()
    order = sorted(range(len(ids)), key=lambda place: (distance[place], place))
    ranked = [ids[place] for place in order]
    middle = ranked[max(len(ranked) // 2 - _SHOWN // 2, 0) :][:_SHOWN]
    picked = {"worst": ranked[::-1][:_SHOWN], "median": middle, "best": ranked[:_SHOWN]}
    return found, {"count": len(ids), **picked}
