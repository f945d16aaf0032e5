"""`docs/telling_power.md`: what shipped models can tell about a cache, and what they cannot.

python -m diffcache.eval.workshop.bench telling
python -m diffcache.eval.workshop.shipped.telling_page --write
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diffcache.eval.pages import cell, keep_pages, rendered, table
from diffcache.eval.record import FOLDER, ROOT
from diffcache.features.magcache import MagCache
from diffcache.files import read_json

RECORD = "telling.json"
FEWER, REUSE, FORECAST = "fewer steps", "reuse", "TaylorSeer, order 2"
SHARE, DECIBELS = "{whole_right:.0%}", "{psnr_db:.1f}"
FIRST = 10  # steps whose ratios are correlated
# ImageReward on DrawBench by FLUX.1-dev at 50 steps: around 3 to 4 times fewer operations, and
# around 5. github.com/vipshop/cache-dit bench/README.md, its rows of FORA, TaylorSeer, fewer steps.
PUBLISHED = {
    4: {FORECAST: (3.57, 0.9857), REUSE: (3.84, 0.9730), FEWER: (3.13, 0.9453)},
    6: {FORECAST: (5.54, 0.9128), FEWER: (4.55, 0.8183), REUSE: (5.55, 0.7418)},
}


def page(record: Mapping[str, Any]) -> str:
    """Return the whole page.

    Args:
        record: Record of the benchmark `telling`.
    """
    rows = {(row["method"], row["factor"]): row for row in record["rows"]}
    factors = sorted({factor for _, factor in rows if factor > 1})
    names = list(dict.fromkeys(method for method, factor in rows if factor > 1))
    samples, right = record["shapes"]["samples"], record["rows"][0]["whole_right"]
    changed = [row for row in record["rows"] if "whole_right_change" in row]
    order, reversals = _order(rows, factors)
    half = 50 * (right["high"] - right["low"])

    def shown(form: str) -> str:
        lines = [[name, *(cell(form, rows[name, n]) for n in factors)] for name in names]
        return "\n".join(table(["", *(f"{n} times" for n in factors)], lines, True))

    path, told = _path(record["residuals"])
    lost = [f"{row['method']} at {row['factor']} times" for row in changed if row["whole_right_change"]["high"] < 0]
    return rendered(
        "workshop/shipped/telling_page.md.jinja",
        record=record,
        samples=samples,
        steps=record["rows"][0]["steps"],
        right=cell(SHARE, record["rows"][0]),
        half=half,
        half_of_many=half * (samples / 256) ** 0.5,
        close=max(row["psnr_db"]["high"] - row["psnr_db"]["low"] for row in changed) / 2,
        reversed=f"Reversed: {'; '.join(reversals)}." if reversals else "No published pair is reversed.",
        lost=f"by: {', '.join(lost)}" if lost else "by none",
        decibels=shown(DECIBELS),
        shares=shown(SHARE),
        worst=max(factors),
        order="\n".join(order),
        path="\n".join(path),
        told="; ".join(told),
        last=record["residuals"]["first_to_last"][0],
    )


def _order(rows: Mapping[tuple[str, int], Any], factors: Sequence[int]) -> tuple[list[str], list[str]]:
    """Return the table of methods in the published order, and which pairs are reversed."""
    found, reversals = [], []
    for factor, published in PUBLISHED.items():
        if factor not in factors:
            continue
        order = sorted(published, key=lambda name: -published[name][1])
        for name in order:
            times, reward = published[name]
            row = rows[name, factor]
            cells = f"{reward:.3f} at {times:.2f}", cell(SHARE, row), cell(DECIBELS, row)
            found.append([f"{name}, {factor} times", *cells])
        for place, one in enumerate(order):
            for other in order[place + 1 :]:
                better, worse = rows[one, factor], rows[other, factor]
                keys = ("whole_right", "psnr_db")
                if all(better[key]["value"] < worse[key]["value"] for key in keys):
                    reversals.append(f"{one} and {other} at {factor} times")
    return table(["", "published", "right", "PSNR, dB"], found, True), reversals


def _path(mine: Mapping[str, Sequence[float]]) -> tuple[list[str], list[str]]:
    """Return the table of neighboring residuals beside MagCache's published ratios, and correlations of these."""
    peers = {
        name: _published(model, branches)
        for name, model, branches in (("FLUX.1-dev", "flux.1-dev", 1), ("Wan2.1 1.3B", "wan2.1-t2v-1.3b", 2))
    }
    steps = len(mine["ratio"])
    shown = [step for step in (1, 2, 3, 4, 5, 7, 10, 14, 18, 22, 25, 26, 27) if step <= steps]
    lines = []
    for step in shown:
        others = [f"{peer[_nearest(step, steps, len(peer))]:.3f}" for peer in peers.values()]
        own = [f"{mine[key][step - 1]:.3f}" for key in ("ratio", "cosine", "change")]
        lines.append([str(step), *own, *others])
    told = []
    for name, peer in peers.items():
        same = [peer[_nearest(step, steps, len(peer))] for step in range(1, steps + 1)]
        early = np.corrcoef(mine["ratio"][:FIRST], same[:FIRST])[0, 1]
        every = np.corrcoef(mine["ratio"], same)[0, 1]
        told.append(f"{early:.2f} with {name} over the first ten steps, {every:.2f} over all")
    return table(["step", "ratio", "cosine", "change", *peers], lines, True), told


def _published(model: str, branches: int) -> list[float]:
    """Return published ratios of step 1 on, of the guided branch."""
    ratios: Any = MagCache.published(model).ratios
    return list((ratios[0] if branches > 1 else ratios)[1:])


def _nearest(step: int, steps: int, count: int) -> int:
    return round((step - 1) * (count - 1) / (steps - 1))


def made(_: str) -> str:
    """Return the page of the committed record."""
    record = read_json(FOLDER / RECORD)
    if not isinstance(record, dict):
        raise FileNotFoundError(f"{FOLDER / RECORD}: python -m diffcache.eval.workshop.bench telling")
    return page(record)


main = keep_pages(made, ROOT / "docs" / "telling_power.md")

if __name__ == "__main__":
    sys.exit(main())
