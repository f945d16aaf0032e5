"""`docs/causal_video.md` behind its introduction: the policies, and what was measured of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffcache.eval.pages import keep_pages, table
from diffcache.eval.record import ROOT
from diffcache.eval.workshop.method_page import section
from diffcache.files import read_json
from diffcache.registry import rows_of

PAGE = Path("docs/causal_video.md")
RECORD = "causal.json"
HEAD = "## Policies\n"  # what stands before is written by hand

MEASURED = """\
## Measured

Every policy films {samples} held-out sentences with sticker-causal and the same noise, {length}
chunks each: the model was trained on seven. *Right* is the share of every {every}th frame in which
the shipped judge finds the object whole, no other, and the ground; *late* that of the last quarter
of the films; *drift* the distance of the last quarter's colors (mean and deviation of each channel,
of 255) from those of the first frames; *motion* that of a frame of the last quarter from the next,
*static* the share of those that stand still; all with 95 % intervals. Rows in *italics* are
controls, which are built to lose.
"""
MEASURES = {"right": 2, "late": 2, "drift": 1, "motion": 1, "static": 2}  # digits
TIMED = """\
## Time and bytes of a chunk

{rounds} chunks of every policy, one film each, all policies in turn in one process: the time of a
chunk in each third of them, as a multiple of a chunk that has no history, bytes after each third,
and the last third by the middle one.
"""


def page(directory: Path = ROOT) -> str:
    """Return the whole page.

    Args:
        directory: The project, for its record and the introduction of the page.
    """
    introduction, _, _ = (directory / PAGE).read_text(encoding="utf-8").partition(HEAD)
    parts = [introduction + HEAD, *map(section, rows_of("video").values())]
    record = read_json(directory / "assets" / "bench" / RECORD)
    if record:
        parts += [_measured(record), _timed(record), _anew(record)]
    return "\n".join(parts).rstrip() + "\n"


def _name(row: Mapping[str, Any]) -> str:
    return f"*{row['name']}*" if row["role"] == "control" else str(row["name"])


def _value(found: Mapping[str, float], digits: int) -> str:
    value, low, high = (f"{found[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def _measured(record: Mapping[str, Any]) -> str:
    rows = [[_name(row), *(_value(row[key], digits) for key, digits in MEASURES.items())] for row in record["rows"]]
    about = MEASURED.format(**record["shapes"])
    told = f"{record['dtype']}, {record['threads']} thread, {record['device']} "
    return "\n".join([about, *table(["", *MEASURES], rows), "", f"{told}(`{record['command']}`).", ""])


def _timed(record: Mapping[str, Any]) -> str:
    rows = []
    for row in record["rows"]:
        chunk = row["chunk"]
        times, sizes = (
            [f"{value:{form}}" for value in chunk[key]] for key, form in (("of_alone", ".2f"), ("bytes", ","))
        )
        rows.append(
            [
                _name(row),
                f"{chunk['ms'][2]:.1f}",
                *times,
                f"{chunk['time_ratio']:.2f}",
                *sizes,
                f"{chunk['bytes_ratio']:.2f}",
            ]
        )
    heads = [
        "",
        "ms",
        "first third",
        "middle",
        "last",
        "last by middle",
        "first, bytes",
        "middle",
        "last",
        "last by middle",
    ]
    return "\n".join([TIMED.format(rounds=record["rounds"]), *table(heads, rows), ""])


def _anew(record: Mapping[str, Any]) -> str:
    rows = [
        [str(row["chunks"]), *(f"{row[key]['median']:.2f}" for key in ("of_cached", "of_window"))]
        for row in record["anew"]
    ]
    batch = record["stream_batch"]
    about = (
        "The time of a chunk whose history is computed anew, once a chunk, by that of a chunk with "
        "a cache of the whole history, and of twelve frames and three sinks:"
    )
    stream = (
        f"All {batch['levels']} noise levels in one batch are {batch['faster']['median']:.2f} "
        f"({batch['faster']['q1']:.2f} to {batch['faster']['q3']:.2f}) times faster than one after "
        f"the other; the films differ by at most {batch['largest_difference']:.1e}."
    )
    heads = ["chunks before", "by the whole history cached", "by a window cached"]
    return "\n".join([about, "", *table(heads, rows), "", stream, ""])


main = keep_pages(lambda text: page(), ROOT / PAGE)

if __name__ == "__main__":
    sys.exit(main())
