"""Compare two folders of pictures as sets: FID, KID, precision and recall, Inception score.

    python -m diffcache.eval.fid REAL FAKE --kid --prdc --is

With the weights of Inception these are the published metrics; without them they are the stand-ins
on the shipped features, under keys that end in `_lite`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import typer
from torch import Tensor

from diffcache.command import Device, Json, Seed, Threads, check_json, check_target, print_or_write, script, warn
from diffcache.eval.metrics import inception, lite
from diffcache.eval.metrics.distances import moments
from diffcache.eval.metrics.sets import FeatureSet, Wanted, compare, some
from diffcache.eval.runs.extractors import Backend, Choice, Extractors, Recursive, Weights
from diffcache.eval.runs.score import joined
from diffcache.eval.samples import npz
from diffcache.eval.samples.sources import Source, Wish, open_source
from diffcache.pipelines.demo.console import console, print_rows, tracked

SCHEMA = "diffcache.fid/1"
RESAMPLES = {"real": 100, "lite": 1000}
ENOUGH = {"real": 10_000, "lite": 2000}


def fid(
    real: Annotated[str, typer.Argument(help="Folder, .npz of pictures, or .npz of statistics.")],
    fake: Annotated[str, typer.Argument(help="Folder or .npz of pictures.")],
    backend: Backend = "auto",
    weights: Weights = "",
    convention: Annotated[
        Literal["torch-fidelity", "clean"],
        typer.Option(help="How Inception gets its pictures; numbers of the two do not compare."),
    ] = "torch-fidelity",
    kid: Annotated[bool, typer.Option("--kid", help="Also KID.")] = False,
    prdc: Annotated[bool, typer.Option("--prdc", help="Also precision, recall, density, coverage.")] = False,
    inception_score: Annotated[bool, typer.Option("--is", help="Also the Inception score of FAKE.")] = False,
    samples: Annotated[int | None, typer.Option(min=2, help="Number to use, drawn by --seed.")] = None,
    resize: Annotated[
        int | None, typer.Option(min=8, metavar="SIDE", help="Scale shorter sides to it, cut out the middle.")
    ] = None,
    recursive: Recursive = False,
    resamples: Annotated[
        int | None,
        typer.Option(min=0, help="Resamples for intervals, 0 for none.", show_default="1000 lite, 100 real"),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    threads: Threads = 1,
    save: Annotated[Path | None, typer.Option(help="Write statistics of REAL (.npz), to be REAL later.")] = None,
    machine: Json = "",
) -> None:
    """Compare two folders of pictures as sets: FID and others, with intervals.

    REAL and FAKE are folders of pictures or .npz files (arr_0, as for the ADM evaluator); REAL may
    be an .npz of statistics (mu, sigma), which has KID, precision and recall only if --save wrote
    it. These look at 2,000 pictures of each at most, drawn by --seed. Distances of sets fall with
    the number of samples: compare equal numbers only, and read the floor beside them: two sets of
    one distribution are that far apart. Only pictures of the same prompts and seeds are closer.
    """
    check_json(machine)
    if save is not None:
        check_target("--save", save)
    torch.set_num_threads(threads)
    wish = Wish(False, resize, recursive, samples, seed, tracked)
    wanted = Wanted(kid, prdc, inception_score, seed=seed)
    one, other = open_source(real, wish), open_source(fake, wish)
    _check(wanted, one, other)
    if save and one.folder is None:
        raise ValueError(f"--save {save}: {real} holds statistics already")
    if inception_score and convention == "clean" and backend != "lite":
        raise ValueError("--is needs logits, which --convention clean has not: leave one out")
    warnings = _notes(one, other)
    networks, one = _networks(Choice(backend, weights, device), convention, one, warnings)
    kind = "lite" if networks.inception is None else "real"
    warn(*warnings)
    wanted = replace(wanted, resamples=RESAMPLES[kind] if resamples is None else resamples)
    sides = _features(one, networks, wanted), _embed(other, networks)
    if save:
        _save(save, one, sides[0], networks)
    found = compare(*sides, wanted)
    about = {"real": _about(one), "fake": _about(other)}
    few = _few([side["count"] for side in about.values() if side["count"]], kind, found["fid"])
    warn(*few)
    ending = "" if kind == "real" else "_lite"
    report = {
        "schema": SCHEMA,
        **about,
        "seed": seed,
        "resize": resize,
        "resamples": wanted.resamples,
        "backend": _entry(networks),
        "metrics": {f"{name}{ending}": values for name, values in found.items()},
        "warnings": warnings + few,
    }
    print_or_write(machine, report, lambda: _print(report))


main = script(fid)


def _check(wanted: Wanted, real: Source, fake: Source) -> None:
    """Check that the two sources suit the request."""
    if fake.folder is None:
        raise ValueError(f"{fake.path} holds no pictures")
    stored = real.statistics
    if real.folder is None and stored is not None and stored.features is None:
        for name, is_wanted in (("--kid", wanted.kid), ("--prdc", wanted.prdc)):
            if is_wanted:
                raise ValueError(f"{name} needs pictures, and {real.path} holds statistics (mu, sigma) only")
    counts = [sum(map(len, source.parts)) for source in (real, fake) if source.folder is not None]
    # One more than the neighbors of density and coverage; as many as the splits of the score, which is of FAKE alone.
    for name, is_wanted, least, count in (
        ("--prdc", wanted.prdc, 6, min(counts)),
        ("--is", wanted.inception_score, 10, counts[-1]),
    ):
        if is_wanted and count < least:
            raise ValueError(f"{name} needs {least} pictures or more, not {count}: give more, or leave it out")


def _notes(real: Source, fake: Source) -> list[str]:
    """Return warnings about the two sets."""
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


def _networks(choice: Choice, convention: str, real: Source, warnings: list[str]) -> tuple[Extractors, Source]:
    """Load the network, and drop statistics that another one made; raise an error if nothing else is left."""
    stored = real.statistics
    if real.folder is None and choice.kind == "auto":
        choice = replace(choice, kind="lite" if real.ending else "real")
    networks = choice.load("inception", warnings, convention=convention)
    if stored is None:
        return networks, real
    mine = lite.DIMENSIONS if networks.inception is None else inception.DIMENSIONS
    if len(stored.mean) == mine:
        npz.check_about(str(real.path), stored, _entry(networks))
        return networks, real
    text = f"{real.path}: statistics of {len(stored.mean)} features, {choice.kind} has {mine}"
    if real.folder is None:
        raise ValueError(f"{text}: choose the --backend that they are of, or give pictures")
    warnings.append(f"{text}: using the pictures")
    return networks, replace(real, statistics=None)


def _entry(networks: Extractors) -> dict[str, Any]:
    return networks.describe("fid_lite" if networks.inception is None else "fid")


def _features(real: Source, networks: Extractors, wanted: Wanted) -> FeatureSet:
    """Return the features of REAL: stored statistics where they are enough, else those of its pictures."""
    stored = real.statistics
    if stored is None:
        return _embed(real, networks)
    features = stored.features
    if features is None and (wanted.kid or wanted.prdc):
        features = _embed(real, networks).features
    return FeatureSet(real.exact, stored.count, features)


def _embed(source: Source, networks: Extractors) -> FeatureSet:
    """Show the network the pictures of one set."""
    seen = []
    for part in tracked(source.parts, len(source.parts), f"read {source.path}"):
        seen.append(networks.of_pictures(cast(Tensor, source.read(part)), [""] * len(part)))
    columns = joined(seen)
    ending = "_lite" if networks.inception is None else ""
    features = columns[f"features{ending}"].double()
    classes = columns.get(f"probabilities{ending}")
    return FeatureSet(moments(features), len(features), features, classes)


def _save(path: Path, real: Source, found: FeatureSet, networks: Extractors) -> None:
    """Write the statistics of REAL."""
    features = None if found.features is None else some(found.features)
    about = {**_entry(networks), "source": str(real.path), "size": real.size}
    both = found.moments.mean, found.moments.cov
    npz.write_statistics(path, npz.Statistics(*both, found.count, features, about))


def _about(source: Source) -> dict[str, Any]:
    """Return the report's entry of a set."""
    known = None if source.statistics is None else source.statistics.count
    return {
        "path": str(source.path),
        "count": len(source.indices) if source.folder else known,
        "size": list(source.size) if source.size else None,
        "statistics": source.statistics is not None,
    }


def _few(counts: list[int], kind: str, distance: dict[str, Any]) -> list[str]:
    """Return the warning of too few samples in the smaller set."""
    count, name = min(counts), "FID" if kind == "real" else "FID-lite"
    if count >= ENOUGH[kind]:
        return []
    floor = distance["floor"]
    about = "" if floor is None else f", two sets of one distribution are about {floor:.3g} apart"
    return [f"{count} samples are few for {name} ({ENOUGH[kind]:,} are enough){about}"]


def _print(report: dict[str, Any]) -> None:
    from diffcache.eval.metrics.definitions import METRICS

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
