"""Say which metrics run here, with what, and what the others lack.

    python -m diffcache.eval.doctor [--json FILE|-] [--selftest] [--time SIDE]

Every package is really imported and every weight file really hashed, so that a torchvision built
for another torch shows as broken and a wrong file as wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

import diffcache
from diffcache.command import FAILED, Json, check_json, fail, print_or_write, script
from diffcache.eval.metrics import clip, reward, weights
from diffcache.eval.metrics.catalog import METRICS, SHIPPED, Metric
from diffcache.eval.metrics.inception import MissingPackageError, load_package
from diffcache.eval.metrics.lpips import heads_file
from diffcache.eval.runs.seconds import seconds_a_picture
from diffcache.eval.vbench import driver
from diffcache.pipelines.demo.console import console, print_rows

Backend = Literal["exact", "real", "lite", "none"]
Kind = Literal["package", "weights", "interpreter", "shipped"]
EXTRAS = {
    "torch_fidelity": "fid", "torchvision": "fid", "cleanfid": "", "torchmetrics": "eval",
    "matplotlib": "eval", "av": "eval", "lm_eval": "llm",
    "pynvml": "energy", "transformers": "",
}  # fmt: skip
SELFTEST_PICTURES = 2000
CLEAN_AT_MOST = 0.6  # FID-lite of two sets of that many such pictures; it is 0.2
GHOST_AT_LEAST = 2.4  # of the same with 30 % of another picture mixed in, half of what it is
_SELFTEST_SEED = 77
_COLORS = {"exact": "green", "real": "green", "lite": "yellow", "none": "red"}
_INTERPRETER_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Part:
    """One thing that a metric needs: where it is, or what is wrong with it.

    `summary` says the latter in fewer words where `note` is long.
    """

    name: str
    kind: Kind
    found: bool
    note: str
    summary: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """Means by which a metric would be computed here.

    Attributes:
        key: Key of the metric; `title` and `group` likewise.
        backend: `exact` without weights, `real` with the published weights, `lite` with the
            shipped stand-in, `none` not at all.
        computed: Key that a record would hold, empty for `none`.
        parts: Parts that it needs.
    """

    key: str
    title: str
    group: str
    backend: Backend
    computed: str
    parts: tuple[Part, ...]


def rows() -> list[Row]:
    """Return one row for every metric; nothing raises, whatever is broken here."""
    once, found = functools.cache(probe), dict[str, Row]()
    for metric in sorted(METRICS.values(), key=lambda metric: bool(metric.stand_in)):
        parts = tuple(once(name, kind) for name, kind in _needs(metric))
        found[metric.key] = _row(metric, parts, found)
    return [found[key] for key in METRICS]


def packages() -> list[Part]:
    """Return every optional package, whether it imports, and its version."""
    return [probe(name, "package") for name in sorted(EXTRAS)]


def probe(name: str, kind: Kind) -> Part:
    """Look for one thing; what is wrong with it is in the note.

    Args:
        name: Package, key of `WEIGHTS`, shipped model or environment variable.
        kind: Kind of the thing, which decides where to look.
    """
    look: dict[str, Callable[[str], Any]]
    look = {"weights": weights.find, "interpreter": _interpreter, "shipped": _shipped}
    weight = weights.WEIGHTS[name] if kind == "weights" else None
    shown = weight.file if weight else name
    try:
        return Part(shown, kind, True, str(look.get(kind, _package)(name)))
    except weights.MissingWeightsError as error:
        digest = f"sha256 {weight.sha256}" if weight and weight.sha256 else "no published hash"
        summary = f"from {weight.url} ({digest})" if weight else ""
        return Part(shown, kind, False, " ".join(str(error).split()), summary)
    except Exception as error:  # whatever a broken install raises is what this is here to show
        is_broken = kind == "package" and importlib.util.find_spec(name) is not None
        reason = " ".join(str(error).split()) or type(error).__name__
        return Part(shown, kind, False, f"broken: {reason}" if is_broken else reason)


def table(found: Sequence[Row]) -> Table:
    """Return a rich table of rows; metrics of a group that need the same share one."""
    alike: dict[tuple[str, Backend, tuple[Part, ...]], list[Row]] = {}
    for row in found:
        alike.setdefault((row.group, row.backend, row.parts), []).append(row)
    shown = Table("metrics", "here", show_lines=True)
    shown.add_column("needs", overflow="fold")
    for (_, backend, parts), same in alike.items():
        needs = "\n".join(f"{'✓' if part.found else '✗'} {part.name}" for part in parts)
        titles = ", ".join(row.title for row in same)
        shown.add_row(titles, f"[{_COLORS[backend]}]{backend}", needs)
    return shown


def missing(found: Sequence[Row]) -> list[str]:
    """Return a line for everything that some metric lacks, each once."""
    lacking = dict.fromkeys(part for row in found for part in row.parts if not part.found)
    return [f"{part.name}: {part.summary or part.note}" for part in lacking]


def selftest() -> dict[str, Any]:
    """Measure FID-lite between halves of smooth noise, clean and with 30 % of another mixed in.

    Returns:
        `clean` and `ghost` (dimensionless), `passed`, `pictures` and `seconds`.
    """
    started = time.perf_counter()
    clean, ghost = _distances()
    passed = clean <= CLEAN_AT_MOST and ghost >= GHOST_AT_LEAST
    return {
        "pictures": SELFTEST_PICTURES, "clean": clean, "ghost": ghost, "passed": passed,
        "seconds": time.perf_counter() - started,
    }  # fmt: skip


def _distances() -> tuple[float, float]:
    import torch
    from torch.nn.functional import interpolate

    from diffcache.eval.metrics import lite
    from diffcache.eval.metrics.frechet import frechet, moments

    generator = torch.Generator().manual_seed(_SELFTEST_SEED)
    coarse = torch.rand(2 * SELFTEST_PICTURES, 3, 4, 4, generator=generator)
    smooth = interpolate(coarse, (lite.SIZE, lite.SIZE), mode="bilinear")
    ghosts = smooth.lerp(smooth.roll(1, 0), 0.3)
    real, clean, ghost = (
        moments(lite.embed((255 * part).byte()))
        for part in (*smooth.split(SELFTEST_PICTURES), ghosts[SELFTEST_PICTURES:])
    )
    return frechet(real, clean), frechet(real, ghost)


def doctor(
    machine: Json = "",
    tested: Annotated[
        bool, typer.Option("--selftest", help="Also measure FID-lite of 2,000 pictures.")
    ] = False,
    side: Annotated[
        int | None,
        typer.Option("--time", min=32, metavar="SIDE",
                     help="Also time every value of a picture of SIDE pixels, on each device."),
    ] = None,
) -> None:  # fmt: skip
    """Say which metrics run here, with which weights, and what is missing.

    exact: no weights needed. real: the published weights are here. lite: a shipped stand-in under a
    name of its own. none: not measured here. Weight files are looked for in $DIFFCACHE_WEIGHTS.
    """
    check_json(machine)
    found, installed, test = rows(), packages(), None
    if tested:
        try:
            test = selftest()
        except (ImportError, OSError, ValueError) as error:
            fail(f"the self-test cannot run: {error}", FAILED)
    taken = seconds_a_picture(side) if side else None
    report = {
        "metrics": [dataclasses.asdict(row) for row in found],
        "packages": [dataclasses.asdict(part) for part in installed],
        "selftest": test,
        "seconds_a_picture": taken,
    }

    def print_text() -> None:
        if side and taken:
            _show_seconds(side, taken)
        _show(found, installed, test)

    print_or_write(machine, report, print_text)
    if test and not test["passed"]:
        raise typer.Exit(FAILED)


main = script(doctor)


def _show_seconds(side: int, taken: dict[str, dict[str, float]]) -> None:
    rows = [[name, *(_seconds(row.get(name)) for row in taken.values())] for name in taken["cpu"]]
    total = [_seconds(sum(row.values())) for row in taken.values()]
    titles = (f"seconds a picture of {side} x {side}", *taken)
    print_rows(titles, [*rows, ["all", *total]])


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _show(found: Sequence[Row], installed: Sequence[Part], test: dict[str, Any] | None) -> None:
    console().print(table(found), highlight=False)
    marks = (f"{part.name} {part.note if part.found else '✗'}" for part in installed)
    typer.echo(f"packages: {', '.join(marks)}")
    lacking = missing(found)
    if lacking:
        typer.echo(
            f"missing (files go into ${weights.VARIABLE}, or stay in the cache of the library that "
            "downloads them; nothing is downloaded here):"
        )
        typer.echo("\n".join(f"- {line}" for line in lacking))
    if test:
        word = "passed" if test["passed"] else "FAILED"
        typer.echo(
            f"self-test {word}: FID-lite of {test['pictures']} clean pictures {test['clean']:.3f}"
            f" (at most {CLEAN_AT_MOST}), with 30 % ghosts {test['ghost']:.3f} (at least "
            f"{GHOST_AT_LEAST}), {test['seconds']:.1f} s"
        )


def _needs(metric: Metric) -> list[tuple[str, Kind]]:
    found: list[tuple[str, Kind]] = []
    for name in metric.packages:
        found.append((name, "shipped" if name in SHIPPED else "package"))
    if metric.key in reward.PACKAGES:
        found.append((reward.PACKAGES[metric.key].variable, "interpreter"))
    elif metric.key.startswith("vbench_"):
        found.append((driver.PYTHON, "interpreter"))
    return [*found, *((name, "weights") for name in metric.weights)]


def _row(metric: Metric, parts: tuple[Part, ...], others: dict[str, Row]) -> Row:
    backend: Backend = "none"
    computed = ""
    if all(part.found for part in parts):
        is_real = any(part.kind in ("weights", "interpreter") for part in parts)
        backend = "lite" if metric.is_lite else "real" if is_real else "exact"
        computed = metric.key
    elif metric.stand_in and others[metric.stand_in].backend != "none":
        backend, computed = "lite", metric.stand_in
    return Row(metric.key, metric.title, metric.group, backend, computed, parts)


def _package(name: str) -> str:
    if name == "torchmetrics":  # only its file is used; it need not import
        heads_file()
    elif name == "transformers":
        clip.classes()
    else:
        load_package(name, EXTRAS[name])
    known = _distributions().get(name)
    return importlib.metadata.version(known[0]) if known else "installed"


_distributions = functools.cache(importlib.metadata.packages_distributions)


def _shipped(name: str) -> str:
    folder = Path(diffcache.__file__).parent / "assets" / "models" / name
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: no shipped model there; install diffcache again")
    return str(folder)


def _interpreter(variable: str) -> str:
    rewards = {package.variable: package.name for package in reward.PACKAGES.values()}
    package = rewards.get(variable, "vbench")
    named = os.environ.get(variable)
    if not named and package == "vbench" and importlib.util.find_spec(package):
        named = sys.executable
    if not named:
        raise MissingPackageError(f"not set: the Python of an environment that has {package}")
    program = Path(named).expanduser()
    if not program.is_file():
        raise FileNotFoundError(f"{program}: there is no such interpreter")
    asked = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    done = subprocess.run(
        [str(program), "-c", asked], capture_output=True, timeout=_INTERPRETER_SECONDS
    )
    if done.returncode:
        raise MissingPackageError(f"{program} has no package {package}")
    return str(program)


if __name__ == "__main__":
    sys.exit(main())
