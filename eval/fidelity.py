"""Compare two folders file by file: PSNR, SSIM, MS-SSIM, LPIPS; of films also the flicker.

    python -m diffcache.eval.fidelity UNCACHED CACHED --json fidelity.json --csv pairs.csv

Files are paired by name. The value of a film is the mean over its frames. Intervals are over pairs.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from diffcache.command import Device, Json, Seed, Threads, check_json, check_target, print_or_write, script, warn
from diffcache.eval.metrics import intervals, pixels
from diffcache.eval.metrics.definitions import METRICS
from diffcache.eval.metrics.sets import summarized
from diffcache.eval.runs.extractors import Backend, Choice, Extractors, Recursive, Weights
from diffcache.eval.runs.score import closeness
from diffcache.eval.samples import clips, folders
from diffcache.files import write_file
from diffcache.pipelines.demo.console import print_rows, tracked
from diffcache.psnr import decibels

SCHEMA = "diffcache.fidelity/1"
LEAST_SIDE = {"ssim": 11, "ms-ssim": 22, "lpips": 32}  # pixels; LPIPS-lite takes any
WORST, WORST_SHOWN = 5, 3
KEYS = {"psnr": "psnr_db", "ssim": "ssim", "ms-ssim": "ms_ssim", "lpips": "lpips", "temporal-error": "temporal_error"}
_RGB_FORMATS = ("rgb", "bgr", "gbr", "0rgb", "argb", "abgr")
Columns = dict[str, list[float]]


@dataclass
class Pairs:
    """Samples to compare, pair by pair."""

    a: folders.Folder  # the reference
    b: folders.Folder
    places: list[tuple[int, int]]  # index in `a` and in `b` of each pair
    is_film: bool  # whether they are films
    warnings: list[str] = field(default_factory=list)

    def name(self, pair: int) -> str:
        """Return a pair's name."""
        return self.a.names[self.places[pair][0]]

    def both(self, pair: int) -> str:
        """Return the places of both samples of a pair, for messages."""
        one, other = self.places[pair]
        return f"{self.a.place(one)} and {self.b.place(other)}"


def fidelity(
    a: Annotated[str, typer.Argument(help="The reference: folder, .npz, or file.")],
    b: Annotated[str, typer.Argument(help="The other.")],
    films: Annotated[bool, typer.Option("--films", help="Pictures of a folder are the frames of one film.")] = False,
    metrics: Annotated[
        str, typer.Option(metavar="NAME,...", help=f"Of {', '.join(KEYS)} (default: all that apply).")
    ] = "",
    backend: Backend = "auto",
    weights: Weights = "",
    recursive: Recursive = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Pairs of pictures at once.")] = 16,
    resamples: Annotated[int, typer.Option(min=0, help="Resamples for intervals, 0 for none.")] = intervals.RESAMPLES,
    seed: Seed = 0,
    device: Device = "auto",
    threads: Threads = 1,
    values: Annotated[Path | None, typer.Option("--csv", help="Write the values of every pair.")] = None,
    machine: Json = "",
) -> None:
    """Compare two folders of pictures or films file by file, with intervals.

    A is the reference, B what is compared with it: folders or .npz files of pictures, folders of
    films, or two single files. Only lossless files show what a cache did: encoding a film as usual
    limits PSNR to about 32 dB by itself.
    """
    check_json(machine)
    if values is not None:
        check_target("--csv", values)
    torch.set_num_threads(threads)
    pairs = _open((a, b), films, recursive)
    names, network = _metrics(metrics, Choice(backend, weights, device), pairs)
    warn(*pairs.warnings)
    said = len(pairs.warnings)
    columns = measure(pairs, names, network, batch_size)
    errors = columns.pop("mse", None)
    key = next((key for key in ("lpips", "lpips_lite") if key in columns), "")
    if key == "lpips":
        columns.pop("lpips_lite", None)
    found = {k: _summary(k, column, pairs, (resamples, seed)) for k, column in columns.items()}
    if errors is not None:
        pooled = torch.tensor(errors, dtype=torch.float64).mean()
        found["psnr_db"]["pooled"] = float(decibels(pooled))
    report = {
        "schema": SCHEMA,
        "a": str(pairs.a.path),
        "b": str(pairs.b.path),
        "kind": "films" if pairs.is_film else "pictures",
        "count": len(pairs.places),
        "backend": network.describe(key) if key else None,
        "metrics": found,
        "warnings": pairs.warnings,
    }
    warn(*pairs.warnings[said:])
    if values is not None:
        _write_csv(values, pairs, columns)
    print_or_write(machine, report, lambda: _print(report))


main = script(fidelity)


def _open(two: tuple[str, str], are_films: bool, recursive: bool) -> Pairs:
    """Find the pairs, and check all that needs no decoding."""
    found = [are_films or folders.holds_films(path) for path in two]
    if found[0] != found[1]:
        film, other = two if found[0] else two[::-1]
        raise ValueError(f"{film} holds films and {other} none: compare one kind")
    if found[0]:
        a, b = (folders.open_films(path) for path in two)
    else:
        a, b = (folders.open_pictures(path, recursive) for path in two)
    pairs = Pairs(a, b, folders.pair(a, b), found[0], [*a.notes, *b.notes])
    if a.path.resolve() == b.path.resolve():
        pairs.warnings.append(f"{a.path} is compared with itself")
    return pairs


def _metrics(named: str, choice: Choice, pairs: Pairs) -> tuple[list[str], Extractors]:
    """Return the metrics that apply, and the network of LPIPS if it is one of them."""
    chosen = named.replace("_", "-").split(",") if named else list(KEYS)
    unknown = [name for name in chosen if name not in KEYS]
    if unknown:
        raise ValueError(f"--metrics: no {unknown[0]!r}; there are {', '.join(KEYS)}")
    if "temporal-error" in chosen and not pairs.is_film:
        if named:
            raise ValueError("--metrics temporal-error: needs films, or --films")
        chosen.remove("temporal-error")
    least = dict(LEAST_SIDE)
    network = Extractors()
    if "lpips" in chosen:
        network = choice.load("lpips", pairs.warnings)
        if network.lpips is None:
            del least["lpips"]
    if pairs.is_film:
        warn_of_encoding(pairs)
        warn_of_rates(pairs)
        return chosen, network
    return _fitting(pairs, chosen, least, bool(named)), network


def _fitting(pairs: Pairs, chosen: list[str], least: Mapping[str, int], named: bool) -> list[str]:
    """Check the sizes of pictures; leave out metrics that some are too small for."""
    sizes_a, sizes_b = list(pairs.a.sizes()), list(pairs.b.sizes())
    for number, (one, other) in enumerate(pairs.places):
        size = sizes_a[one]
        if size != sizes_b[other]:
            raise ValueError(
                f"{pairs.both(number)} are {_size(size)} and {_size(sizes_b[other])}: pairs must "
                "be of one size, resizing would change the result"
            )
        for name in [n for n in chosen if min(size) < least.get(n, 0)]:
            text = f"{name} needs sides of {least[name]} pixels, {pairs.a.place(one)} is {_size(size)}"
            if named:
                raise ValueError(f"--metrics: {text}")
            pairs.warnings.append(f"left out: {text}")
            chosen = [n for n in chosen if n != name]
    jpegs = [f for f in (*pairs.a.files, *pairs.b.files) if f.suffix.lower() in (".jpg", ".jpeg")]
    if jpegs:
        pairs.warnings.append(f"{len(jpegs)} JPEG files such as {jpegs[0].name}: compression counts as a difference")
    return chosen


def warn_of_encoding(pairs: Pairs) -> None:
    """Add a warning about films that may differ through their encoding alone.

    Raises ImportError if PyAV is missing.
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
    """Return a description of a film's encoding if that loses color; else an empty text."""
    if file.is_dir():
        return ""
    if file.suffix.lower() == ".gif":
        return "256 colors"
    try:
        with clips.open_film(file) as (_, stream):
            kind, codec = stream.codec_context.pix_fmt or "", stream.codec_context.name
    except ValueError:
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
        Under each metric's key one value a pair; under `mse` the mean squared errors that PSNR is of, of a full range
        of 1.

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
        folder.pictures([place[side] for place in pairs.places]) for side, folder in enumerate((pairs.a, pairs.b))
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
            sizes = " and ".join(f"{len(film)} frames of {_size(film.shape[2:])}" for film in (a, b))
            raise ValueError(f"{pairs.both(number)} are {sizes}: pairs must have the same frames")
        yield a, b


def _size(size: Sequence[int]) -> str:
    return f"{size[0]} x {size[1]}"


def _summary(key: str, column: Sequence[float], pairs: Pairs, drawn: tuple[int, int]) -> dict[str, Any]:
    """Return mean, interval (`drawn` is the number of resamples and the seed), bad tail and worst pairs."""
    values = torch.tensor(column, dtype=torch.float64)
    found = summarized(key, values, *drawn)
    order = sorted(range(len(column)), key=column.__getitem__, reverse="p95" in found)[:WORST]
    found["worst"] = [{"name": pairs.name(pair), "value": column[pair]} for pair in order]
    return found


def _write_csv(path: Path, pairs: Pairs, columns: Columns) -> None:
    """Write the values of every pair."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", *columns])
    for number, values in enumerate(zip(*columns.values(), strict=True)):
        writer.writerow([pairs.name(number), *map(repr, values)])
    write_file(path, text.getvalue())


def _print(report: dict[str, Any]) -> None:
    rows = []
    for key, found in report["metrics"].items():
        tail = found.get("p5", found.get("p95"))
        worst = [f"{w['name']} ({w['value']:.4g})" for w in found["worst"][:WORST_SHOWN]]
        interval = f"{found['low']:.4g} .. {found['high']:.4g}" if "low" in found else ""
        unit = f" {METRICS[key].unit}" if METRICS[key].unit else ""
        title = f"{METRICS[key].title} {'↓' if 'p95' in found else '↑'}"
        rows.append([title, f"{found['value']:.4g}{unit}", interval, f"{tail:.4g}", "\n".join(worst)])
    titles = ("metric", "mean", "95 % interval", "worst 5 % from", "worst")
    print_rows(titles, rows)
    print(f"{report['count']} pairs of {report['kind']}")
    if "psnr_db" in report["metrics"]:
        print(f"PSNR of the pooled error: {report['metrics']['psnr_db']['pooled']:.4g} dB")


if __name__ == "__main__":
    sys.exit(main())
