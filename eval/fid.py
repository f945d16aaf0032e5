"""Compare two folders of pictures as sets: FID, KID, precision and recall, Inception score.

    python -m diffcache.eval.fid REAL FAKE --kid --prdc --is

With the weights of Inception these are the published metrics; without them they are the stand-ins
on the shipped features, under keys that end in `_lite`.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from diffcache.command import EXIT_LINE
from diffcache.eval import folders, npz, script
from diffcache.eval.backends import FEATURES, KINDS, Choice, SetNetwork, for_sets
from diffcache.eval.metrics.frechet import Moments, moments
from diffcache.eval.sets import MOST_NEIGHBORS, FeatureSet, Wanted, compare, some

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
_UNKNOWN_COUNT = sys.maxsize  # of statistics that do not say; they are taken as exact


@dataclass(frozen=True)
class Source:
    """One of the two sets, before its features are known.

    Attributes:
        path: As given.
        folder: The pictures, None where only statistics are known.
        indices: Which of them are used, increasing.
        size: Height and width, pixels; None without pictures.
        statistics: Stored mean and covariance.
    """

    path: str
    folder: folders.Folder | None
    indices: Sequence[int] = ()
    size: tuple[int, int] | None = None
    statistics: npz.Statistics | None = None


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
    real, fake = _open_real(options), _open(options.fake, options)
    warnings = _notes(real, fake)
    network, real = _network(options, real, warnings)
    script.warn(*warnings)
    if options.npz:
        _write_npz(options, fake)
    wanted = Wanted(
        options.kid, options.prdc, options.inception_score,
        RESAMPLES[network.kind] if options.resamples is None else options.resamples, options.seed,
    )  # fmt: skip
    sides = _features(real, fake, network, options)
    if options.save:
        _save(options.save, real, sides[0], network)
    found = compare(*sides, wanted)
    few = _few(fake, network.kind, found["fid"])
    script.warn(*few)
    ending = "" if network.kind == "real" else "_lite"
    report = {
        "schema": SCHEMA, "real": _about(real), "fake": _about(fake), "seed": options.seed,
        "resize": options.resize, "resamples": wanted.resamples, "backend": network.entry,
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
    add("--batch-size", type=count(1), default=64, metavar="N", help="default: 64")
    add("--resamples", type=count(0), metavar="N", help=texts["resamples"])
    add("--seed", type=count(0), default=0, metavar="N", help="of every draw; default: 0")
    add("--device", default="auto", help="of Inception: auto, cpu, cuda (default: auto)")
    add("--threads", type=count(1), default=1, metavar="N", help="of torch; default: 1")
    add("--npz", metavar="FILE", help=texts["npz"])
    add("--save", metavar="FILE.npz", help=texts["save"])
    add("--json", metavar="FILE|-", help="write JSON to a file, or - for nothing but JSON")
    return parser


def _open_real(options: argparse.Namespace) -> Source:
    """Find the reference: pictures, statistics, or both."""
    path = Path(options.real).expanduser()
    if path.suffix.lower() != ".npz" or path.is_dir():
        return _open(options.real, options)
    statistics = npz.read_statistics(path)
    if statistics is None or npz.PICTURES in npz.keys(path):
        source = _open(options.real, options)
        # Statistics are of all pictures as they are.
        if options.samples or options.resize:
            statistics = None
        return Source(source.path, source.folder, source.indices, source.size, statistics)
    needs_features = statistics.features is None
    for name, wanted in (("--kid", options.kid and needs_features),
                         ("--prdc", options.prdc and needs_features),
                         ("--samples", options.samples), ("--resize", options.resize)):  # fmt: skip
        if wanted:
            raise ValueError(f"{name} needs pictures, and {path} holds statistics (mu, sigma) only")
    return Source(options.real, None, statistics=statistics)


def _open(path: str, options: argparse.Namespace) -> Source:
    """Find the pictures, and check what can be checked without decoding them."""
    folder = folders.open_pictures(path, options.recursive)
    count = options.samples or len(folder)
    if count > len(folder):
        raise ValueError(f"--samples {count}: {path} holds {len(folder)} pictures")
    if count < 2:
        raise ValueError(f"{path} holds one picture; a set needs two or more")
    indices = sorted(random.Random(options.seed).sample(range(len(folder)), count))
    size = (options.resize, options.resize)
    if not options.resize:
        total = len(folder)
        size = folders.common_size(folder, lambda s: script.bar(s, total, f"look at {path}"))
    return Source(path, folder, indices, size)


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


def _network(
    options: argparse.Namespace, real: Source, warnings: list[str]
) -> tuple[SetNetwork, Source]:
    """Load the network; statistics of another one are not used, or an error if there is no more."""
    stored = None if real.statistics is None else len(real.statistics.mean)
    kind = options.backend
    if real.folder is None and kind == "auto":
        kind = "lite" if stored == FEATURES["lite"] else "real"
    network = for_sets(
        Choice(kind, options.weights, options.device), options.convention,
        options.inception_score, warnings,
    )  # fmt: skip
    if stored in (None, FEATURES[network.kind]):
        if real.statistics is not None:
            npz.check_about(real.path, real.statistics, network.entry)
        return network, real
    text = f"{real.path}: statistics of {stored} features, {network.kind} has "
    text += f"{FEATURES[network.kind]}"
    if real.folder is None:
        raise ValueError(f"{text}: choose the --backend that they are of, or give pictures")
    warnings.append(f"{text}: using the pictures")
    return network, replace(real, statistics=None)


def _features(
    real: Source, fake: Source, network: SetNetwork, options: argparse.Namespace
) -> tuple[FeatureSet, FeatureSet]:
    """Show the network all pictures that are needed."""
    stored = real.statistics
    if stored is None:
        return _embed(real, network, options), _embed(fake, network, options)
    exact = Moments(stored.mean, stored.cov, stored.count or _UNKNOWN_COUNT)
    features = stored.features
    if features is None and (options.kid or options.prdc):
        features = _embed(real, network, options).features
    return FeatureSet(exact, stored.count, features), _embed(fake, network, options)


def _save(path: str, real: Source, found: FeatureSet, network: SetNetwork) -> None:
    """Write the statistics of REAL."""
    known = found.features
    if known is None and real.statistics is not None:
        raise ValueError(f"--save {path}: {real.path} holds statistics already")
    features = None if known is None else some(known)
    about = {**network.entry, "source": real.path, "size": real.size}
    both = found.moments.mean, found.moments.cov
    npz.write_statistics(Path(path), npz.Statistics(*both, found.count, features, about))


def _embed(source: Source, network: SetNetwork, options: argparse.Namespace) -> FeatureSet:
    """Show the network the pictures of one set."""
    if source.folder is None:
        raise ValueError(f"{source.path} holds no pictures")
    total = -(-len(source.indices) // options.batch_size)
    parts = folders.batches(source.folder, options.batch_size, source.indices, options.resize)
    seen = [network.call(part) for part in script.bar(parts, total, f"read {source.path}")]
    features = torch.cat([part.double() for part, _ in seen])
    classes = [part for _, part in seen if part is not None]
    return FeatureSet(
        moments(features), len(features), features, torch.cat(classes) if classes else None
    )


def _write_npz(options: argparse.Namespace, fake: Source) -> None:
    """Write the pictures of FAKE that are used."""
    if fake.folder is None:
        raise ValueError(f"{fake.path} holds no pictures")
    count = len(fake.indices)
    parts = folders.batches(fake.folder, 1, fake.indices, options.resize)
    pictures = (part[0] for part in script.bar(parts, count, f"write {options.npz}"))
    npz.write_npz(options.npz, pictures, count)


def _about(source: Source) -> dict[str, Any]:
    """Return what the report says of a set."""
    known = None if source.statistics is None else source.statistics.count
    return {
        "path": source.path, "count": len(source.indices) if source.folder else known,
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
