"""Compare two folders of pictures as sets: FID, KID, precision and recall, Inception score.

    python -m diffcache.eval.fid REAL FAKE --kid --prdc --is

With the weights of Inception these are the published metrics; without them they are the stand-ins
on the shipped features, under keys that end in `_lite`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from diffcache.command import EXIT_LINE
from diffcache.eval import npz, script
from diffcache.eval.backends import KINDS, Choice, for_sets
from diffcache.eval.metrics import inception, lite
from diffcache.eval.metrics.frechet import moments
from diffcache.eval.runs.extractors import Extractors
from diffcache.eval.runs.score import joined
from diffcache.eval.sets import MOST_NEIGHBORS, FeatureSet, Wanted, compare, some
from diffcache.eval.sources import Source, Wish, open_source

SCHEMA = "diffcache.fid/1"
EPILOG = f"""\
REAL and FAKE are folders of pictures or .npz files (arr_0, as for the ADM evaluator); REAL may be
an .npz of statistics (mu, sigma), which has KID, precision and recall only if --save wrote it.
These look at {MOST_NEIGHBORS:,} pictures of each at most, drawn by --seed. Distances of sets fall
with the number of samples: compare equal numbers only, and read the floor beside them: two sets of
one distribution are that far apart. Only pictures of the same prompts and seeds are closer.
{EXIT_LINE}
"""
RESAMPLES = {"real": 100, "lite": 1000}
ENOUGH = {"real": 10_000, "lite": 2000}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two sets; print a table or JSON.

    Args:
        arguments: Command line; None for the one of the process.

    Returns:
        The exit code.
    """
    return script.guarded(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> None:
    options = _parser().parse_args(arguments)
    script.check_targets(json=options.json, npz=options.npz, save=options.save)
    torch.set_num_threads(options.threads)
    wish = Wish(False, options.resize, options.recursive, options.samples, options.seed, script.bar)
    real, fake = open_source(options.real, wish), open_source(options.fake, wish)
    _check(options, real, fake)
    warnings = _notes(real, fake)
    networks, real = _networks(options, real, warnings)
    kind = "lite" if networks.inception is None else "real"
    script.warn(*warnings)
    if options.npz:
        _write_npz(options.npz, fake)
    wanted = Wanted(
        options.kid, options.prdc, options.inception_score,
        RESAMPLES[kind] if options.resamples is None else options.resamples, options.seed,
    )  # fmt: skip
    sides = _features(real, networks, options), _embed(fake, networks)
    if options.save:
        _save(options.save, real, sides[0], networks)
    found = compare(*sides, wanted)
    few = _few(fake, kind, found["fid"])
    script.warn(*few)
    ending = "" if kind == "real" else "_lite"
    report = {
        "schema": SCHEMA, "real": _about(real), "fake": _about(fake), "seed": options.seed,
        "resize": options.resize, "resamples": wanted.resamples, "backend": _entry(networks),
        "metrics": {f"{name}{ending}": values for name, values in found.items()},
        "warnings": warnings + few,
    }  # fmt: skip
    script.show(options.json, report, lambda: _print(report))


def _parser() -> argparse.ArgumentParser:
    parser = script.Parser(
        prog="python -m diffcache.eval.fid",
        description="Compare two folders of pictures as sets: FID and others, with intervals.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count = parser.add_argument, script.at_least
    texts = {
        "backend": "real: Inception, lite: shipped features, auto: real if it is here (default)",
        "convention": "how Inception gets its pictures; numbers of the two do not compare",
        "resize": "scale shorter sides to SIDE pixels and cut out the middle",
        "resamples": "of the interval, 0 for none (default: 1000 lite; 100 real, some s each)",
        "npz": "also write the pictures of FAKE for the ADM evaluator",
        "save": "also write mean, covariance and some features of REAL, to be given as REAL later",
    }
    add("real", metavar="REAL", help="folder, .npz of pictures, or .npz of statistics")
    add("fake", metavar="FAKE", help="folder or .npz of pictures")
    add("--backend", choices=KINDS, default="auto", help=texts["backend"])
    add("--weights", metavar="PATH", help="weights of Inception; means --backend real")
    conventions = ("torch-fidelity", "clean")
    add("--convention", choices=conventions, default=conventions[0], help=texts["convention"])
    add("--kid", action="store_true", help="also KID")
    add("--prdc", action="store_true", help="also precision, recall, density, coverage")
    add("--is", action="store_true", dest="inception_score", help="also FAKE's Inception score")
    add("--samples", type=count(2), metavar="N", help="use N of each, drawn by --seed")
    add("--resize", type=count(8), metavar="SIDE", help=texts["resize"])
    add("--recursive", action="store_true", help="look into folders inside, too")
    add("--resamples", type=count(0), metavar="N", help=texts["resamples"])
    add("--seed", type=count(0), default=0, metavar="N", help="of every draw; default: 0")
    add("--device", default="auto", help="of Inception: auto, cpu, cuda (default: auto)")
    add("--threads", type=count(1), default=1, metavar="N", help="of torch; default: 1")
    add("--npz", metavar="FILE", help=texts["npz"])
    add("--save", metavar="FILE.npz", help=texts["save"])
    add("--json", metavar="FILE|-", help="write JSON to a file, or - for nothing but JSON")
    return parser


def _check(options: argparse.Namespace, real: Source, fake: Source) -> None:
    """Check that the two sources have what is asked for."""
    if fake.folder is None:
        raise ValueError(f"{fake.path} holds no pictures")
    stored = real.statistics
    if real.folder is None and stored is not None and stored.features is None:
        for name, wanted in (("--kid", options.kid), ("--prdc", options.prdc)):
            if wanted:
                raise ValueError(
                    f"{name} needs pictures, and {real.path} holds statistics (mu, sigma) only"
                )
    if options.save and real.folder is None:
        raise ValueError(f"--save {options.save}: {real.path} holds statistics already")
    if options.inception_score and options.convention == "clean" and options.backend != "lite":
        raise ValueError("--is needs logits, which --convention clean has not: leave one out")


def _notes(real: Source, fake: Source) -> list[str]:
    """Return what is odd about the two sets."""
    notes = [note for s in (real, fake) if s.folder for note in s.folder.notes]
    if real.folder and fake.folder:
        if real.folder.path.resolve() == fake.folder.path.resolve():
            notes.append(f"{real.path} is compared with itself")
        if real.size != fake.size:
            notes.append(
                f"{real.path} has {_size(real)} pictures and {fake.path} {_size(fake)}: the "
                "network scales both, which moves features"
            )
    return notes


def _size(source: Source) -> str:
    return " x ".join(map(str, source.size or ()))


def _networks(
    options: argparse.Namespace, real: Source, warnings: list[str]
) -> tuple[Extractors, Source]:
    """Load the network; statistics of another one are not used, or an error if there is no more."""
    stored = real.statistics
    kind = options.backend
    if real.folder is None and kind == "auto":
        kind = "lite" if real.ending else "real"
    choice = Choice(kind, options.weights, options.device)
    networks = for_sets(choice, options.convention, warnings)
    if stored is None:
        return networks, real
    mine = lite.DIMENSIONS if networks.inception is None else inception.DIMENSIONS
    if len(stored.mean) == mine:
        npz.check_about(str(real.path), stored, _entry(networks))
        return networks, real
    text = f"{real.path}: statistics of {len(stored.mean)} features, {kind} has {mine}"
    if real.folder is None:
        raise ValueError(f"{text}: choose the --backend that they are of, or give pictures")
    warnings.append(f"{text}: using the pictures")
    return networks, replace(real, statistics=None)


def _entry(networks: Extractors) -> dict[str, Any]:
    return networks.describe("fid_lite" if networks.inception is None else "fid")


def _features(real: Source, networks: Extractors, options: argparse.Namespace) -> FeatureSet:
    """Return the features of REAL, those that are stored where they do."""
    stored = real.statistics
    if stored is None:
        return _embed(real, networks)
    features = stored.features
    if features is None and (options.kid or options.prdc):
        features = _embed(real, networks).features
    return FeatureSet(real.exact, stored.count, features)


def _embed(source: Source, networks: Extractors) -> FeatureSet:
    """Show the network the pictures of one set."""
    seen = []
    for part in script.bar(source.parts, len(source.parts), f"read {source.path}"):
        seen.append(networks.of_pictures(cast(Tensor, source.read(part)), [""] * len(part)))
    columns = joined(seen)
    ending = "_lite" if networks.inception is None else ""
    features = columns[f"features{ending}"].double()
    classes = columns.get(f"probabilities{ending}")
    return FeatureSet(moments(features), len(features), features, classes)


def _save(path: str, real: Source, found: FeatureSet, networks: Extractors) -> None:
    """Write the statistics of REAL."""
    features = None if found.features is None else some(found.features)
    about = {**_entry(networks), "source": str(real.path), "size": real.size}
    both = found.moments.mean, found.moments.cov
    npz.write_statistics(Path(path), npz.Statistics(*both, found.count, features, about))


def _write_npz(path: str, fake: Source) -> None:
    """Write the pictures of FAKE that are used."""
    bar = script.bar(fake.indices, len(fake.indices), f"write {path}")
    pictures = (cast(Tensor, fake.read([index]))[0] for index in bar)
    npz.write_npz(path, pictures, len(fake.indices))


def _about(source: Source) -> dict[str, Any]:
    """Return what the report says of a set."""
    known = None if source.statistics is None else source.statistics.count
    return {
        "path": str(source.path), "count": len(source.indices) if source.folder else known,
        "size": list(source.size) if source.size else None,
        "statistics": source.statistics is not None,
    }  # fmt: skip


def _few(fake: Source, kind: str, distance: dict[str, Any]) -> list[str]:
    """Return the warning of too few samples."""
    count, name = len(fake.indices), "FID" if kind == "real" else "FID-lite"
    if count >= ENOUGH[kind]:
        return []
    floor = distance["floor"]
    about = "" if floor is None else f", two sets of one distribution are about {floor:.3g} apart"
    return [f"{count} samples are few for {name} ({ENOUGH[kind]:,} are enough){about}"]


def _print(report: dict[str, Any]) -> None:
    from diffcache.eval.metrics.catalog import METRICS
    from diffcache.pipelines.demo.console import console, print_rows

    rows = []
    for key, found in report["metrics"].items():
        arrow = {"up": "more", "down": "less"}[METRICS[key].direction]
        beside = f"{found['low']:.4g} .. {found['high']:.4g}" if "low" in found else ""
        beside = f"± {found['spread']:.3g} over parts" if "spread" in found else beside
        floor = "" if found.get("floor") is None else f"{found['floor']:.4g}"
        rows.append([METRICS[key].title, f"{found['value']:.4g}", beside, floor, arrow])
    print_rows(("metric", "value", "95 % interval", "floor", "better"), rows)
    console().print(
        f"{report['fake']['count']} samples against {report['real']['count'] or 'stored'}; "
        f"features of {report['backend']['extractor']}",
        highlight=False,
    )


if __name__ == "__main__":
    sys.exit(main())
