"""Time a pipeline uncached and under methods, in turn: `python -m diffcache.eval.latency MODEL`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from diffcache.errors import DiffcacheError
from diffcache.report import human

if TYPE_CHECKING:
    from diffcache.eval.cost.turns import Plan

Table = tuple[list[str], list[list[str]]]


def tables(record: Mapping[str, Any]) -> tuple[Table, Table]:
    """Return titles and rows of the tables that are printed: times, and what they are against.

    Args:
        record: Of `diffcache.eval.cost.turns.run`.
    """
    rows = record["rows"]
    times = [
        [row["name"], *(_spread(row[key]) for key in ("seconds", "denoiser_seconds")),
         f"{row['cpu_seconds']['median']:.3g}", f"{row['throughput']:.3g}"]
        for row in rows
    ]  # fmt: skip
    further = {"peak": "peak_bytes", "energy": "joules"}
    further = {title: key for title, key in further.items() if key in rows[0]}
    costs = [
        [row["name"], _spread(row["ratio"]), f"{row['denoiser_ratio']['median']:.3g}",
         _or_none(row["flops_ratio"], "{:.2f}"), f"{row['computed_steps']:g}/{row['steps']:g}",
         human(row["held_bytes"], "B"), *(_further(row, key) for key in further.values())]
        for row in rows
    ]  # fmt: skip
    return (
        (["", "pipeline, s", "denoiser, s", "CPU, s", "samples/s"], times),
        (["", "ratio", "denoiser", "FLOPs", "computed", "held", *further], costs),
    )


def _further(row: Mapping[str, Any], key: str) -> str:
    if key == "peak_bytes":
        return human(row[key], "B")
    return _or_none(row[key]["median"] if key in row else None, "{:.3g} J")


def _or_none(value: float | None, form: str) -> str:
    return "n/a" if value is None else form.format(value)


def _spread(found: Mapping[str, float]) -> str:
    return f"{found['median']:.3g} [{found['q1']:.3g}, {found['q3']:.3g}]"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m diffcache.eval.latency", description=__doc__)
    add = parser.add_argument
    add("model", help="directory of a saved pipeline, or shapes-flux")
    add("--method", action="append", default=[], metavar="NAME[:KEY=VALUE,...]",
        help="a cache to time beside the uncached pipeline; may be repeated")  # fmt: skip
    add("--prompt", default="", help="what to draw, or a class number")
    add("--steps", type=int, help="sampling steps (default: the pipeline's)")
    add("--height", type=int, help="pixels")
    add("--width", type=int, help="pixels")
    add("--frames", type=int, help="frames of a film")
    add("--batch-size", type=int, default=1, help="samples a call")
    add("--rounds", type=int, default=7, help="timed calls of each")
    add("--warmup", type=int, default=1, help="untimed rounds before")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:0")
    add("--dtype", default="float32", help="float32, float16, bfloat16")
    add("--threads", type=int, default=1, help="CPU threads of torch")
    add("--memory", action="store_true", help="peak memory too, in a fresh process for each")
    add("--json", metavar="FILE|-", help="write the record; - prints it in place of the table")
    return parser


def plan_of(arguments: Sequence[str]) -> tuple[Plan, str | None]:
    """Return the plan that a command line asks for, and where its record goes.

    Raises:
        ValueError: If an argument is wrong.
    """
    given = _parser().parse_args(arguments)
    from diffcache.eval.cost.memory import Place
    from diffcache.eval.cost.turns import Plan

    call = {"num_inference_steps": given.steps, "height": given.height, "width": given.width,
            "num_frames": given.frames}  # fmt: skip
    plan = Plan(
        given.model, tuple(given.method), {k: v for k, v in call.items() if v is not None},
        given.prompt, given.batch_size, given.rounds, given.warmup,
        Place(given.device, given.dtype, given.threads), given.memory,
    )  # fmt: skip
    return plan, given.json


def write(record: Mapping[str, Any], file: Path) -> None:
    """Write a record whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".tmp")
    unfinished.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(unfinished, file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Time what a command line asks for, and print the table.

    Args:
        arguments: Of the command line; those of the process by default.

    Returns:
        0 done, 1 the run failed, 2 something was asked that cannot be done, 3 a library is
        missing.
    """
    from diffcache.pipelines.demo.console import print_rows, progress, quiet

    arguments = sys.argv[1:] if arguments is None else list(arguments)
    quiet()  # before diffusers' pipelines are imported, which have much to say
    command = shlex.join(["python", "-m", "diffcache.eval.latency", *arguments])
    try:
        plan, out = plan_of(arguments)
        from diffcache.eval.cost.turns import run

        with progress("timing") as show:
            record = run(plan, command, show)
        if out is not None and out != "-":
            write(record, Path(out))
    except (DiffcacheError, ValueError, OSError, ImportError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 3 if isinstance(error, ImportError) else 2
    except RuntimeError as error:
        print(f"error: the run failed: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    if out == "-":
        print(json.dumps(record, indent=1, allow_nan=False))
        return 0
    for titles, rows in tables(record):
        print_rows(titles, rows)
    for text in record["warnings"]:
        print(f"note: {text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
