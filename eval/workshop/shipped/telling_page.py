"""`docs/telling_power.md`: what shipped models can tell about a cache, and what they cannot.

python -m diffcache.eval.workshop.bench telling
python -m diffcache.eval.workshop.shipped.telling_page --write
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diffcache.eval.pages import keep_pages, table
from diffcache.eval.record import FOLDER, ROOT
from diffcache.features.magcache import MagCache
from diffcache.files import read_json

RECORD = "telling.json"
FEWER, REUSE, FORECAST = "fewer steps", "reuse", "TaylorSeer, order 2"
FIRST = 10  # steps whose ratios are correlated
# ImageReward on DrawBench by FLUX.1-dev at 50 steps: around 3 to 4 times fewer operations, and
# around 5. github.com/vipshop/cache-dit bench/README.md, its rows of FORA, TaylorSeer, fewer steps.
PUBLISHED = {
    4: {FORECAST: (3.57, 0.9857), REUSE: (3.84, 0.9730), FEWER: (3.13, 0.9453)},
    6: {FORECAST: (5.54, 0.9128), FEWER: (4.55, 0.8183), REUSE: (5.55, 0.7418)},
}
HEAD = """# What these models can and cannot tell

A shipped model is of use where it tells a good cache from a bad one. This page says how well
sticker-flux does: `python -m diffcache.eval.workshop.bench telling` measures it, and `python -m
diffcache.eval.workshop.shipped.telling_page --write` writes the page from the record. {samples}
held-out sentences, {steps} steps, the same noise in every row; 95 % intervals. *Right* is the share
of pictures that the judge finds right in everything.
"""
SHORT = """## In short

- They can tell how close a cache stays to the uncached output, in pairs from the same noise: PSNR
  here is known to about {close:.1f} dB, and falls with every factor. {reversed}
- They can tell damage that one sees: {lost}
- They cannot tell small losses of right pictures. {samples} of them give a share to about
  {half:.0f} points, 256 to about {half_of_many:.0f}; a method that loses less looks like none.
- They cannot tell how many dB, or which setting, a large model gets: sticker-flux has 64 x 64
  pixels, and the norm of its residual takes another way than that of FLUX.1-dev (below). Take an
  order from here and a setting from `diffcache tune` on your own model.
- They cannot tell seconds elsewhere. Small models on a CPU spend much of a step outside of their
  arithmetic, so that evaluations and FLOPs carry over and ratios of seconds do not;
  [kernels](kernels.md) has times of large shapes on a GPU, of random weights.
- Where few samples are right without a cache ([shipped models](models.md)), as of films, a share of
  right ones says little about a cache, and closeness says more. The policy and the `chain-` models
  have right and wrong answers, known to 2 to 5 points; recall-llama was trained on the one task
  that it is asked, and language is asked on SmolLM2 ([caches of keys and values](kv.md)), of which
  few contexts were read.
"""
ORDER = """## Order beside the published one

ImageReward on DrawBench of FLUX.1-dev at 50 steps, as cache-dit's table has it, and the shares of
right pictures and PSNR here. A pair is reversed where both values here stand against the published
order.
"""
PATH = """## The path

How the residual of all blocks changes from step to step: the ratio of its norms, the cosine, and
the mean absolute change over the mean absolute value; and MagCache's published ratios at the
nearest place of their run.
"""


def page(record: Mapping[str, Any]) -> str:
    """Return the whole page.

    Args:
        record: Record of the benchmark `telling`.
    """
    rows = {(row["method"], row["factor"]): row for row in record["rows"]}
    uncached = record["rows"][0]
    factors = sorted({factor for _, factor in rows if factor > 1})
    names = list(dict.fromkeys(method for method, factor in rows if factor > 1))
    head = HEAD.format(samples=record["shapes"]["samples"], steps=uncached["steps"])
    right, worst = uncached["whole_right"], max(factors)
    changed = [row for row in record["rows"] if "whole_right_change" in row]
    order, told = _order(rows, factors)
    half = 50 * (right["high"] - right["low"])
    of_all = [row["psnr_db"] for row in changed]
    samples = record["shapes"]["samples"]
    numbers = {"samples": samples, "half": half, "half_of_many": half * (samples / 256) ** 0.5}
    close = max(each["high"] - each["low"] for each in of_all) / 2
    short = SHORT.format(close=close, reversed=told, lost=_lost(changed), **numbers)
    parts = [head, short, f"Uncached, {_share(right)} are right.\n"]
    for title, key, show in (("PSNR to uncached, dB", "psnr_db", _decibels), ("Right", "whole_right", _share)):
        lines = [[name, *(show(rows[name, n][key]) for n in factors)] for name in names]
        parts += [f"## {title}\n", *table(["", *(f"{n} times" for n in factors)], lines, True), ""]
    parts.append(f"![A row for each method at {worst} times](telling_power.png)\n")
    parts += [*order, *_path(record["residuals"])]
    parts.append(f"Measured at commit `{record['commit']}` in {record['seconds']:.0f} s by `{record['command']}`.")
    return "\n".join(parts) + "\n"


def _decibels(value: Mapping[str, float]) -> str:
    return f"{value['value']:.1f} ({value['low']:.1f} to {value['high']:.1f})"


def _share(value: Mapping[str, float]) -> str:
    return f"{value['value']:.0%} ({value['low']:.0%} to {value['high']:.0%})"


def _lost(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say which rows have fewer right pictures than uncached, by the intervals of their pairs."""
    lost = [f"{row['method']} at {row['factor']} times" for row in rows if row["whole_right_change"]["high"] < 0]
    told = f"by: {', '.join(lost)}" if lost else "by none"
    return f"fewer are right than uncached, picture by picture and beyond the interval, {told}."


def _order(rows: Mapping[tuple[str, int], Any], factors: Sequence[int]) -> tuple[list[str], str]:
    """Return the order of methods beside the published one, and which pairs are reversed."""
    found, reversals = [], []
    for factor, published in PUBLISHED.items():
        if factor not in factors:
            continue
        order = sorted(published, key=lambda name: -published[name][1])
        for name in order:
            times, reward = published[name]
            row = rows[name, factor]
            found.append(
                [
                    f"{name}, {factor} times",
                    f"{reward:.3f} at {times:.2f}",
                    _share(row["whole_right"]),
                    _decibels(row["psnr_db"]),
                ]
            )
        for place, one in enumerate(order):
            for other in order[place + 1 :]:
                better, worse = rows[one, factor], rows[other, factor]
                keys = ("whole_right", "psnr_db")
                if all(better[key]["value"] < worse[key]["value"] for key in keys):
                    reversals.append(f"{one} and {other} at {factor} times")
    titles = ["", "published", "right", "PSNR, dB"]
    told = f"Reversed: {'; '.join(reversals)}." if reversals else "No published pair is reversed."
    return [ORDER, *table(titles, found, True), ""], told


def _path(mine: Mapping[str, Sequence[float]]) -> list[str]:
    """Return ratios and cosines of neighboring residuals beside MagCache's published ratios."""
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
    far = (
        f"Ratios correlate {'; '.join(told)}. The residual of the last step has a cosine of "
        f"{mine['first_to_last'][0]:.2f} to that of the first."
    )
    return [PATH, *table(["step", "ratio", "cosine", "change", *peers], lines, True), "", far, ""]


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
