"""Tell which metrics run here, with which weights, and why the others do not.

    python -m diffcache.eval.doctor [--json FILE|-]

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import typer
from rich.table import Table

import diffcache
from diffcache.command import Json, check_json, print_or_write, script
from diffcache.eval.metrics import clip, weight_files
from diffcache.eval.metrics.definitions import METRICS, SHIPPED, Metric
from diffcache.eval.metrics.inception import MissingPackageError, load_package
from diffcache.eval.metrics.lpips import heads_file
from diffcache.eval.vbench import driver
from diffcache.pipelines.demo.console import console

Backend = Literal["exact", "real", "lite", "none"]
Kind = Literal["package", "weights", "interpreter", "shipped"]
EXTRAS = {
    "torch_fidelity": "fid",
    "torchvision": "fid",
    "cleanfid": "",
    "torchmetrics": "eval",
    "matplotlib": "eval",
    "av": "eval",
    "lm_eval": "llm",
    "transformers": "",
}
_COLORS = {"exact": "green", "real": "green", "lite": "yellow", "none": "red"}
_INTERPRETER_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Part:
    """One requirement of a metric: where it is, or why it cannot be used.

    `summary` is a shorter form of a long `note`.
    """

    name: str
    kind: Kind
    found: bool
    note: str
    summary: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """Means by which a metric would be computed here."""

    key: str  # key of the metric; `title` and `group` likewise
    title: str
    group: str
    # `exact` without weights, `real` with the published weights, `lite` with the shipped stand-in, `none` not at all
    backend: Backend
    computed: str  # key that a record would hold, empty for `none`
    parts: tuple[Part, ...]


def rows() -> list[Row]:
    """Return one row for every metric; never raises, whatever is broken here."""
    once, found = functools.cache(probe), dict[str, Row]()
    for metric in sorted(METRICS.values(), key=lambda metric: bool(metric.stand_in)):
        parts = tuple(once(name, kind) for name, kind in _needs(metric))
        found[metric.key] = _row(metric, parts, found)
    return [found[key] for key in METRICS]


def packages() -> list[Part]:
    """Return every optional package, whether it imports, and its version."""
    return [probe(name, "package") for name in sorted(EXTRAS)]


def probe(name: str, kind: Kind) -> Part:
    """Look for one requirement; the note says what is wrong with it.

    `name` is a package, a key of `WEIGHTS`, a shipped model or an environment variable, as `kind` says.
    """
    look: dict[str, Callable[[str], Any]]
    look = {"weights": weight_files.find, "interpreter": _interpreter, "shipped": _shipped}
    weight = weight_files.WEIGHTS[name] if kind == "weights" else None
    shown = weight.file if weight else name
    try:
        return Part(shown, kind, True, str(look.get(kind, _package)(name)))
    except weight_files.MissingWeightsError as error:
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


def doctor(machine: Json = "") -> None:
    """Print which metrics run here, with which weights, and missing requirements.

    exact: no weights needed. real: the published weights are here. lite: a shipped stand-in under a
    name of its own. none: not measured here. Weight files are looked for in $DIFFCACHE_WEIGHTS.
    """
    check_json(machine)
    found, installed = rows(), packages()
    report = {
        "metrics": [dataclasses.asdict(row) for row in found],
        "packages": [dataclasses.asdict(part) for part in installed],
    }
    print_or_write(machine, report, lambda: _show(found, installed))


main = script(doctor)


def _show(found: Sequence[Row], installed: Sequence[Part]) -> None:
    console().print(table(found), highlight=False)
    marks = (f"{part.name} {part.note if part.found else '✗'}" for part in installed)
    typer.echo(f"packages: {', '.join(marks)}")
    lacking = missing(found)
    if lacking:
        typer.echo(
            f"missing (files go into ${weight_files.VARIABLE}, or stay in the cache of the library that "
            "downloads them; nothing is downloaded here):"
        )
        typer.echo("\n".join(f"- {line}" for line in lacking))


def _needs(metric: Metric) -> list[tuple[str, Kind]]:
    found: list[tuple[str, Kind]] = []
    for name in metric.packages:
        found.append((name, "shipped" if name in SHIPPED else "package"))
    if metric.key.startswith("vbench_"):
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
    """Return the Python that runs VBench."""
    named = os.environ.get(variable)
    if not named and importlib.util.find_spec("vbench"):
        named = sys.executable
    if not named:
        raise MissingPackageError("not set: the Python of an environment that has vbench")
    program = Path(named).expanduser()
    if not program.is_file():
        raise FileNotFoundError(f"{program}: there is no such interpreter")
    asked = "import importlib.util as u, sys; sys.exit(u.find_spec('vbench') is None)"
    done = subprocess.run([str(program), "-c", asked], capture_output=True, timeout=_INTERPRETER_SECONDS)
    if done.returncode:
        raise MissingPackageError(f"{program} has no package vbench")
    return str(program)


if __name__ == "__main__":
    sys.exit(main())
