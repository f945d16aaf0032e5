"""Compare what `diffcache.predict` says before a run with the records of runs.

    python -m diffcache.eval.workshop.predicted            # a table of all records, minutes
    python -m diffcache.eval.workshop.predicted shapes-wan

prints a table in Markdown, as it stands in docs/predict.md. The seconds of the records are those of
the denoiser on one core of a CPU in float32. No sheet has its peaks: `CORE` is a round guess, of
which only the ratio counts, 5 operations a byte.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from diffcache.command import script
from diffcache.eval.cost.predict import Prediction, predict
from diffcache.eval.cost.roofline import Device
from diffcache.eval.methods import parse_row
from diffcache.eval.record import FOLDER
from diffcache.features.base import Method
from diffcache.pipelines.demo.console import quiet

CORE = Device("one core of a CPU", 0.05, 10)
HEADS = ("model", "method", "FLOPs ratio", "counted", "seconds ratio", "measured", "bytes", "held")
ALL: list[str] = []


def records(model: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the rows of methods in the records of a shipped model, each with its task."""
    for file in sorted(FOLDER.glob(f"eval-{model}*-methods.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        times = record["timing"]["rows"]
        for row in record["rows"]:
            ratio = times.get(row["name"], {}).get("denoiser_ratio", {}).get("median")
            if row["kind"] == "method" and "/" not in row["name"].partition(":")[0]:
                yield record["task"], {**row, "seconds_ratio": ratio}


def predicted(model: str, task: dict[str, Any], name: str) -> Prediction:
    """Return the prediction of a row of a record.

    Raises:
        ValueError: If the method does more than reuse features.
    """
    method = parse_row(name)
    assert isinstance(method, Method)
    batch = task.get("batch_size") or 1
    return predict(model, method, steps=task["steps"], batch=batch, device=CORE)


def compare(
    models: Annotated[list[str], typer.Argument(help="Shipped models (all).")] = ALL,
) -> None:
    """Print what was predicted beside what was counted and measured."""
    quiet()
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}")
    for model in models or [f"shapes-{name}" for name in ("flux", "dit", "unet", "wan", "kontext")]:
        for task, row in records(model):
            try:
                said = predicted(model, task, row["name"])
            except ValueError as error:
                print(f"{row['name']}: {error}", file=sys.stderr)
                continue
            flops, seconds = said.flops_ratio, said.seconds_ratio
            measured = row["seconds_ratio"]
            cells = (
                model,
                f"`{row['name'].partition(',tables=')[0].partition(':tables=')[0]}`",
                _range(flops),
                f"{row['flops_ratio']:.2f}",
                _range(seconds),
                "" if measured is None else f"{measured:.2f}",
                f"{2 * said.held_bytes:,}",  # of float32, where the prediction is of bfloat16
                f"{row['held_bytes']:,}",
            )
            print(f"| {' | '.join(cells)} |", flush=True)


def _range(ends: tuple[float, float]) -> str:
    low, high = (f"{end:.2f}" for end in ends)
    return low if low == high else f"{low} to {high}"


main = script(compare)

if __name__ == "__main__":
    sys.exit(main())
