"""Time a pipeline uncached and under methods, in turn: `python -m diffcache.eval.latency MODEL`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diffcache.command import DEVICES, DTYPES, EXIT_LINE, MODELS
from diffcache.eval import script
from diffcache.report import human

if TYPE_CHECKING:
    from diffcache.eval.cost.turns import Plan

Table = tuple[list[str], list[list[str]]]
EPILOG = f"""\
The uncached pipeline and every method run in turn, so that a busy machine slows all of them; what
is printed is the median of the rounds and its quartiles. "ratio" is uncached over cached seconds.
  python -m diffcache.eval.latency shapes-flux --method taylorseer --method taylorseer:every=4
{EXIT_LINE}
"""


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


def _parser() -> argparse.ArgumentParser:
    parser = script.Parser(
        prog="python -m diffcache.eval.latency",
        description="Time a pipeline uncached and under methods, in turn.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", help=MODELS)
    add("--method", action="append", default=[], metavar="NAME[:KEY=VALUE,...]",
        help="a cache to time beside the uncached pipeline; may be repeated")  # fmt: skip
    add("--prompt", default="", help="what to draw, or a class number")
    add("--steps", type=int, help="sampling steps (default: the pipeline's)")
    add("--height", type=int, help="pixels")
    add("--width", type=int, help="pixels")
    add("--frames", type=int, help="frames of a film")
    add("--batch-size", type=int, default=1, help="samples a call (default: 1)")
    add("--rounds", type=int, default=7, help="timed calls of each (default: 7)")
    add("--warmup", type=int, default=1, help="untimed rounds before (default: 1)")
    add("--device", default="auto", help=f"{DEVICES} (default: auto)")
    add("--dtype", default="auto", help=f"{DTYPES} (default: auto)")
    add("--threads", type=int, default=1, help="CPU threads of torch (default: 1)")
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Time what a command line asks for, and print the table.

    Args:
        arguments: Of the command line; those of the process by default.

    Returns:
        0 done, 1 the run failed, 2 something was asked that cannot be done, 3 a library is
        missing.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    return script.guarded(lambda: _main(given), (RuntimeError,))


def _main(arguments: Sequence[str]) -> None:
    from diffcache.pipelines.demo.console import progress, quiet

    quiet()  # before diffusers' pipelines are imported, which have much to say
    command = shlex.join(["python", "-m", "diffcache.eval.latency", *arguments])
    plan, out = plan_of(arguments)
    script.check_targets(json=out)
    from diffcache.eval.cost.turns import run

    with progress("timing") as show:
        record = run(plan, command, show)
    script.show(out, record, lambda: _print(record))


def _print(record: Mapping[str, Any]) -> None:
    from diffcache.pipelines.demo.console import print_rows

    for titles, rows in tables(record):
        print_rows(titles, rows)
    for text in record["warnings"]:
        print(f"note: {text}")


if __name__ == "__main__":
    raise SystemExit(main())
