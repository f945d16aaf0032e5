"""`python -m diffcache.eval.vbench DIR`: measure a folder of films."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from diffcache.command import EXIT_LINE
from diffcache.eval import script

Found = tuple[dict[str, Any], Callable[[], None]]
_INSTALLED = "(installed)"
_EPILOG = f"""\
own: weights-free dimensions; every key but temporal_flickering starts with lite_, since none is
VBench's. official: runs the package vbench in $VBENCH_PYTHON (default: this interpreter), finished
dimensions are kept; with --info as VBench's standard suite, else on films of any prompts.
  python -m diffcache.eval.vbench FILMS --json own.json
  python -m diffcache.eval.vbench FILMS --backend official --dimensions motion_smoothness
{EXIT_LINE}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or score existing results; print a table or JSON.

    Args:
        arguments: Command line; None for the one of the process.

    Returns:
        The exit code.
    """
    from diffcache.eval.vbench.driver import VBenchError

    return script.guarded(lambda: _main(arguments), (VBenchError,), lines=True)


def _main(arguments: Sequence[str] | None) -> None:
    from diffcache.eval.vbench.layout import find_info

    options = _parser().parse_args(arguments)
    script.check_targets(json=options.json)
    _check(options)
    if options.info:
        options.info = find_info(None if options.info == _INSTALLED else options.info)
    report, print_table = _run(options)
    script.show(options.json, report, print_table)


def _parser() -> argparse.ArgumentParser:
    parser = script.Parser(
        prog="python -m diffcache.eval.vbench",
        description="Measure a folder of films: own dimensions, or VBench where it is installed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", nargs="?", type=Path, metavar="DIR", help="folder of films")
    add("--backend", choices=("own", "official"), default="own", help="default: own")
    add("--dimensions", nargs="+", metavar="NAME", help="default: all that apply")
    add("--json", metavar="FILE|-", help="write JSON to a file, or - for nothing but JSON")
    add("--info", nargs="?", const=_INSTALLED, metavar="FILE", help="VBench_full_info.json: "
        "the standard suite; without FILE that of the installed package")  # fmt: skip
    add("--fps", type=float, help="frames per second of films that do not say (own)")
    add("--out", type=Path, metavar="DIR", help="results (official; default: DIR-vbench)")
    add("--prompts", type=Path, metavar="FILE", help="{file: prompt} of any films (official)")
    add("--filtered", type=Path, metavar="DIR", help="from VBench's static filter (official)")
    add("--device", help="torch device (official; default: cuda)")
    add("--score", type=Path, metavar="DIR", help="only normalise the results in this folder")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Refuse options that would do nothing."""
    if (options.folder is None) == (options.score is None):
        raise ValueError("give a folder of films, or --score and a folder of results: one of them")
    official = ("out", "prompts", "filtered", "device")
    useless = {
        "own": official,
        "official": ("fps",),
        "score": (*official, "fps", "info", "dimensions"),
    }["score" if options.score else options.backend]
    if options.fps is not None and not 0 < options.fps < math.inf:
        raise ValueError(f"--fps {options.fps}: must be frames per second, above 0")
    given = [f"--{name}" for name in useless if getattr(options, name) is not None]
    if given:
        mode = "--score" if options.score else f"--backend {options.backend}"
        raise ValueError(f"{', '.join(given)} has no effect with {mode}: leave out")
    if options.prompts and options.info:
        raise ValueError("--prompts is for films of any prompts, --info for the suite: give one")


def _run(options: argparse.Namespace) -> Found:
    """Do what was asked; return the JSON, and what prints the table."""
    from diffcache.eval.vbench import scores

    if options.score is not None:
        found = scores.summarise(scores.read_results(options.score))
        return {"backend": "official", **found.to_dict()}, partial(print, _scores_text(found))
    if options.backend == "official":
        return _official(options)
    return _own(options)


def _own(options: argparse.Namespace) -> Found:
    if importlib.util.find_spec("cv2") is None or importlib.util.find_spec("av") is None:
        raise ImportError("OpenCV or PyAV is missing: pip install 'diffcache[eval]'")
    from diffcache.eval.vbench import layout, summary

    films, others = summary.find_films(options.folder)
    report = summary.measure_films(films, options.dimensions, options.fps, _progress)
    warnings = report["warnings"]
    warnings += [f"not films, left out: {', '.join(others)}"] if others else []
    if options.info:
        lacking = layout.missing(options.folder, layout.read_info(options.info))
        counts = ", ".join(f"{name} {len(names)}" for name, names in lacking.items())
        warnings += [f"films missing from VBench's suite: {counts}"] if counts else []
    return report, partial(_print_own, report)


def _print_own(report: dict[str, Any]) -> None:
    from diffcache.pipelines.demo.console import print_rows

    better = {"up": "more", "down": "less"}
    rows = []
    for key, row in report["summary"].items():
        ends = "" if row["low"] is None else f"{row['low']:.4g} .. {row['high']:.4g}"
        rows.append([key, f"{row['value']:.4g}", ends, better.get(row["direction"], "")])
    print_rows(("dimension", "mean", "95 % interval", "better"), rows)
    print(f"{report['count']} films; none of the lite_ values is VBench's")
    for text in report["warnings"]:
        print(f"note: {text}")


def _official(options: argparse.Namespace) -> Found:
    from diffcache.eval.vbench import driver, scores

    folder: Path = options.folder
    job = driver.Job(
        films=folder,
        out=options.out or folder.resolve().parent / f"{folder.resolve().name}-vbench",
        info=options.info,
        prompts=_read_prompts(options.prompts) if options.prompts else None,
        filtered=options.filtered,
        device=options.device or "cuda",
    )
    found = scores.summarise(driver.run(job, options.dimensions))
    report: dict[str, Any] = {"backend": "official", "mode": job.mode, **found.to_dict()}
    text = _scores_text(found)
    if job.info is None:
        # The three scores are defined on the prompts of the suite.
        report.update(quality=None, semantic=None, total=None)
        text = "\n".join(f"{name:24} {value:.4f}" for name, value in found.raw.items())
    return report, partial(print, text)


def _read_prompts(path: Path) -> dict[str, str]:
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise ValueError(f"{path} must be JSON of the form {{file: prompt}}")
    return prompts


def _scores_text(found: Any) -> str:
    text = str(found.markdown())
    if found.missing:
        text += f"\n\nno total score, missing: {', '.join(found.missing)}"
    return text


def _progress(done: int, count: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done}/{count} films", end="\n" if done == count else "", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
