"""Compare two folders file by file: PSNR, SSIM, MS-SSIM, LPIPS; of films also the flicker.

    python -m diffcache.eval.fidelity UNCACHED CACHED --json fidelity.json --csv pairs.csv

Files are paired by name. The value of a film is the mean over its frames. Intervals are over pairs.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from diffcache.command import EXIT_LINE
from diffcache.eval import folders, script
from diffcache.eval.backends import KINDS, Choice, for_pairs
from diffcache.eval.metrics import bootstrap
from diffcache.eval.metrics.catalog import METRICS
from diffcache.eval.metrics.intervals import metric_interval
from diffcache.eval.pairs import KEYS, Columns, Pairs, measure, warn_of_encoding, warn_of_rates
from diffcache.eval.runs.extractors import Extractors
from diffcache.files import write_file
from diffcache.psnr import decibels

SCHEMA = "diffcache.fidelity/1"
EPILOG = f"""\
A is the reference, B what is compared with it: folders or .npz files of pictures, folders of films,
or two single files. Only lossless files show what a cache did: encoding a film as usual limits
PSNR to about 32 dB by itself.
{EXIT_LINE}
"""
LEAST_SIDE = {"ssim": 11, "ms-ssim": 22, "lpips": 32}  # pixels; LPIPS-lite takes any
WORST, WORST_SHOWN = 5, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two folders; print a table or JSON.

    Args:
        arguments: Command line; None for the one of the process.

    Returns:
        The exit code.
    """
    return script.guarded(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> None:
    options = _parser().parse_args(arguments)
    script.check_targets(json=options.json, csv=options.csv)
    torch.set_num_threads(options.threads)
    pairs = _open(options)
    metrics, network = _metrics(options, pairs)
    script.warn(*pairs.warnings)
    said = len(pairs.warnings)
    columns = measure(pairs, metrics, network, options.batch_size)
    errors = columns.pop("mse", None)
    key = next((key for key in ("lpips", "lpips_lite") if key in columns), "")
    if key == "lpips":
        columns.pop("lpips_lite", None)
    found = {key: _summary(key, column, pairs, options) for key, column in columns.items()}
    if errors is not None:
        found["psnr_db"]["pooled"] = float(
            decibels(torch.tensor(errors, dtype=torch.float64).mean())
        )
    report = {
        "schema": SCHEMA, "a": str(pairs.a.path), "b": str(pairs.b.path),
        "kind": "films" if pairs.is_film else "pictures", "count": len(pairs.places),
        "backend": network.describe(key) if key else None,
        "metrics": found, "warnings": pairs.warnings,
    }  # fmt: skip
    script.warn(*pairs.warnings[said:])
    if options.csv:
        _write_csv(Path(options.csv), pairs, columns)
    script.show(options.json, report, lambda: _print(report))


def _parser() -> argparse.ArgumentParser:
    parser = script.Parser(
        prog="python -m diffcache.eval.fidelity",
        description="Compare two folders of pictures or films file by file, with intervals.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count = parser.add_argument, script.at_least
    add("a", nargs="?", metavar="A", help="the reference: folder, .npz, or file")
    add("b", nargs="?", metavar="B", help="the other")
    add("-i1", metavar="A", help="the reference, pictures")
    add("-i2", metavar="B", help="the other, pictures")
    add("-v1", metavar="A", help="the reference, films; a folder of pictures is a film's frames")
    add("-v2", metavar="B", help="the other, films")
    add("--metrics", metavar="NAME,...", help=f"of {', '.join(KEYS)} (default: all that apply)")
    add("--backend", choices=KINDS, default="auto", help="of LPIPS (default: real if it is here)")
    add("--weights", metavar="PATH", help="AlexNet, for LPIPS; means --backend real")
    add("--recursive", action="store_true", help="look into folders inside, too (pictures)")
    add("--batch-size", type=count(1), default=16, metavar="N", help="default: 16")
    add("--resamples", type=count(0), default=bootstrap.RESAMPLES, metavar="N",
        help="of the interval, 0 for none (default: 1000)")  # fmt: skip
    add("--seed", type=count(0), default=0, metavar="N", help="of the interval; default: 0")
    add("--device", default="auto", help="of LPIPS: auto, cpu, cuda (default: auto)")
    add("--threads", type=count(1), default=1, metavar="N", help="of torch; default: 1")
    add("--csv", metavar="FILE", help="write the values of every pair")
    add("--json", metavar="FILE|-", help="write JSON to a file, or - for nothing but JSON")
    return parser


def _open(options: argparse.Namespace) -> Pairs:
    """Find the pairs, and check what can be checked without decoding them."""
    given = [
        (kind, two)
        for kind, two in (
            ("", (options.a, options.b)),
            ("pictures", (options.i1, options.i2)),
            ("films", (options.v1, options.v2)),
        )
        if any(two)
    ]
    if len(given) != 1 or not all(given[0][1]):
        raise ValueError("name two folders or files: A B, or -i1 A -i2 B, or -v1 A -v2 B")
    kind, two = given[0]
    if not kind:
        are_films = [folders.holds_films(path) for path in two]
        if are_films[0] != are_films[1]:
            film, other = two if are_films[0] else two[::-1]
            raise ValueError(f"{film} holds films and {other} none: compare one kind")
        kind = "films" if are_films[0] else "pictures"
    if kind == "films":
        a, b = (folders.open_films(path) for path in two)
    else:
        a, b = (folders.open_pictures(path, options.recursive) for path in two)
    pairs = Pairs(a, b, folders.pair(a, b), kind == "films", [*a.notes, *b.notes])
    if a.path.resolve() == b.path.resolve():
        pairs.warnings.append(f"{a.path} is compared with itself")
    return pairs


def _metrics(options: argparse.Namespace, pairs: Pairs) -> tuple[list[str], Extractors]:
    """Return the metrics that apply, and the network of LPIPS if it is one of them."""
    named = options.metrics is not None
    chosen = options.metrics.replace("_", "-").split(",") if named else list(KEYS)
    unknown = [name for name in chosen if name not in KEYS]
    if unknown:
        raise ValueError(f"--metrics: no {unknown[0]!r}; there are {', '.join(KEYS)}")
    if "temporal-error" in chosen and not pairs.is_film:
        if named:
            raise ValueError("--metrics temporal-error: needs films, such as -v1 A -v2 B")
        chosen.remove("temporal-error")
    least = dict(LEAST_SIDE)
    network = Extractors()
    if "lpips" in chosen:
        choice = Choice(options.backend, options.weights, options.device)
        network = for_pairs(choice, pairs.warnings)
        if network.lpips is None:
            del least["lpips"]
    if pairs.is_film:
        warn_of_encoding(pairs)
        warn_of_rates(pairs)
        return chosen, network
    return _fitting(pairs, chosen, least, named), network


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
            text = (
                f"{name} needs sides of {least[name]} pixels, {pairs.a.place(one)} is {_size(size)}"
            )
            if named:
                raise ValueError(f"--metrics: {text}")
            pairs.warnings.append(f"left out: {text}")
            chosen = [n for n in chosen if n != name]
    jpegs = [f for f in (*pairs.a.files, *pairs.b.files) if f.suffix.lower() in (".jpg", ".jpeg")]
    if jpegs:
        pairs.warnings.append(
            f"{len(jpegs)} JPEG files such as {jpegs[0].name}: compression counts as a difference"
        )
    return chosen


def _size(size: folders.Size) -> str:
    return f"{size[0]} x {size[1]}"


def _summary(
    key: str, column: Sequence[float], pairs: Pairs, options: argparse.Namespace
) -> dict[str, Any]:
    """Return mean, interval, the bad tail and the worst pairs of a metric."""
    values = torch.tensor(column, dtype=torch.float64)
    found: dict[str, Any] = {"value": float(values.mean()), "n": len(values)}
    if options.resamples and len(values) > 1:
        found = metric_interval(key, values, options.resamples, options.seed).to_dict()
    low_is_good = METRICS[key].direction == "down"
    tail = 0.95 if low_is_good else 0.05
    found[f"p{100 * tail:.0f}"] = float(torch.quantile(values, tail))
    order = sorted(range(len(column)), key=column.__getitem__, reverse=low_is_good)[:WORST]
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
    from diffcache.pipelines.demo.console import print_rows

    rows = []
    for key, found in report["metrics"].items():
        tail = found.get("p5", found.get("p95"))
        worst = [f"{w['name']} ({w['value']:.4g})" for w in found["worst"][:WORST_SHOWN]]
        interval = f"{found['low']:.4g} .. {found['high']:.4g}" if "low" in found else ""
        unit = f" {METRICS[key].unit}" if METRICS[key].unit else ""
        title = f"{METRICS[key].title} {'↓' if 'p95' in found else '↑'}"
        rows.append(
            [title, f"{found['value']:.4g}{unit}", interval, f"{tail:.4g}", "\n".join(worst)]
        )
    titles = ("metric", "mean", "95 % interval", "worst 5 % from", "worst")
    print_rows(titles, rows)
    print(f"{report['count']} pairs of {report['kind']}")
    if "psnr_db" in report["metrics"]:
        print(f"PSNR of the pooled error: {report['metrics']['psnr_db']['pooled']:.4g} dB")


if __name__ == "__main__":
    sys.exit(main())
