"""Values of pairs of pictures or films, one after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from diffcache.eval.metrics import pixels
from diffcache.eval.runs.extractors import Extractors
from diffcache.eval.runs.score import closeness
from diffcache.eval.samples import clips
from diffcache.eval.samples.folders import Folder
from diffcache.pipelines.demo.console import tracked

KEYS = {
    "psnr": "psnr_db", "ssim": "ssim", "ms-ssim": "ms_ssim", "lpips": "lpips",
    "temporal-error": "temporal_error",
}  # fmt: skip
_RGB_FORMATS = ("rgb", "bgr", "gbr", "0rgb", "argb", "abgr")
Columns = dict[str, list[float]]


@dataclass
class Pairs:
    """Samples to compare, pair by pair.

    Attributes:
        a: The reference.
        b: The other.
        places: Index in `a` and in `b` of each pair.
        is_film: Whether they are films.
        warnings: Warnings so far.
    """

    a: Folder
    b: Folder
    places: list[tuple[int, int]]
    is_film: bool
    warnings: list[str] = field(default_factory=list)

    def name(self, pair: int) -> str:
        """Return a pair's name."""
        return self.a.names[self.places[pair][0]]

    def both(self, pair: int) -> str:
        """Say where the two of a pair are."""
        one, other = self.places[pair]
        return f"{self.a.place(one)} and {self.b.place(other)}"


def warn_of_encoding(pairs: Pairs) -> None:
    """Add a warning of films whose encoding alone is a difference.

    Raises:
        ImportError: If PyAV is missing.
    """
    lossy = [(f, how) for f in (*pairs.a.files, *pairs.b.files) if (how := _loss(f))]
    if lossy:
        file, how = lossy[0]
        pairs.warnings.append(
            f"{len(lossy)} of {2 * len(pairs.places)} films are encoded with loss, {file.name} as "
            f"{how}: that alone limits PSNR to about 32 dB; compare lossless files or frames"
        )


def warn_of_rates(pairs: Pairs) -> None:
    """Add a warning of pairs whose films have different frame rates."""
    for number, (one, other) in enumerate(pairs.places):
        rates = [clips.read_fps(f) for f in (pairs.a.files[one], pairs.b.files[other])]
        if None not in rates and rates[0] != rates[1]:
            pairs.warnings.append(
                f"{pairs.both(number)} have {rates[0]:g} and {rates[1]:g} frames per second: they "
                "are compared frame by frame, whenever each is shown"
            )
            return


def _loss(file: Path) -> str:
    """Say how a film is stored if that loses color, else nothing."""
    if file.is_dir():
        return ""
    if file.suffix.lower() == ".gif":
        return "256 colors"
    try:
        import av
    except ImportError as error:
        raise ImportError("films need PyAV: pip install 'diffcache[eval]'") from error
    try:
        with av.open(str(file.resolve())) as container:
            found = container.streams.video[0].codec_context
            kind, codec = found.pix_fmt or "", found.name
    except (av.error.FFmpegError, IndexError):
        return ""  # reading it will say what is wrong
    return "" if not kind or kind.startswith(_RGB_FORMATS) else f"{codec} {kind}"


def measure(pairs: Pairs, metrics: Sequence[str], network: Extractors, size: int) -> Columns:
    """Return the values of every pair; the value of a film is the mean over its frames.

    Args:
        pairs: Pairs to compare; takes warnings.
        metrics: Keys of `KEYS`.
        network: Network that sees pairs, for LPIPS.
        size: Pairs of pictures at once.

    Returns:
        Under each metric's key one value a pair; under `mse` the mean squared errors that PSNR is
        of, of a full range of 1.

    Raises:
        ValueError: If a file cannot be read or the two of a pair do not fit; names it.
    """
    columns: Columns = {}
    shapes: set[tuple[int, int]] = set()
    batches = _films(pairs) if pairs.is_film else _pictures(pairs, size)
    for one, other in batches:
        shapes.add((one.shape[-2], one.shape[-1]))
        try:
            found = closeness(one, other, network, [KEYS[name] for name in metrics])
            if "temporal-error" in metrics:
                change = pixels.temporal_error(one, other)
                found["temporal_error"] = torch.tensor([change], dtype=torch.float64)
        except ValueError as error:
            done = len(next(iter(columns.values()), ()))
            text = f"{pairs.both(done)}: {error}"
            raise ValueError(f"{text} (--metrics names those to measure)") from error
        for key, column in found.items():
            values = [float(column.mean())] if pairs.is_film else column.tolist()
            columns.setdefault(key, []).extend(values)
    if "ms-ssim" in metrics:
        variants = {pixels.ms_ssim_variant(*shape) for shape in shapes}
        if variants != {pixels.ms_ssim_variant(512, 512)}:
            pairs.warnings.append(f"MS-SSIM of {' and '.join(sorted(variants))}")
    return columns


def _pictures(pairs: Pairs, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of pictures in batches of one height and width."""
    held: list[tuple[Tensor, Tensor]] = []
    streams = (
        folder.pictures([place[side] for place in pairs.places])
        for side, folder in enumerate((pairs.a, pairs.b))
    )
    two: Iterable[tuple[Tensor, Tensor]] = zip(*streams, strict=True)
    for one, other in tracked(two, len(pairs.places), "compare"):
        if held and (len(held) == size or held[0][0].shape != one.shape):
            yield torch.stack([x for x, _ in held]), torch.stack([y for _, y in held])
            held = []
        held.append((one, other))
    yield torch.stack([x for x, _ in held]), torch.stack([y for _, y in held])


def _films(pairs: Pairs) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of films."""
    for number in tracked(range(len(pairs.places)), len(pairs.places), "compare"):
        one, other = pairs.places[number]
        a, b = clips.read_clip(pairs.a.files[one]), clips.read_clip(pairs.b.files[other])
        if a.shape != b.shape:
            raise ValueError(
                f"{pairs.both(number)} are {_film_size(a)} and {_film_size(b)}: pairs must have "
                "the same frames"
            )
        yield a, b


def _film_size(film: Tensor) -> str:
    return f"{len(film)} frames of {film.shape[2]} x {film.shape[3]}"
