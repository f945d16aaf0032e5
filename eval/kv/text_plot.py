"""Plot of recipes on texts: whole answers against bytes held and against the time of a token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffcache.eval.kv.words import NONE
from diffcache.eval.report.palette import DPI, GREY, INK, MARKERS, OKABE_ITO, new_figure, styled


def held_share(row: Mapping[str, Any]) -> float:
    """Return the share of exact bytes, of 16 bits where it is known; that of slots is the same."""
    return float(row["share"] if row["share_16"] is None else row["share_16"])


def method_of(word: str) -> str:
    """Return what a word does, without how much is held."""
    return " | ".join(part.partition(":")[0] for part in word.split("|"))


@styled
def draw(record: Mapping[str, Any], picture: Path) -> None:
    """Draw whole answers, or perplexity where nothing was asked; a color and a marker a method."""
    rows = record["rows"]
    what, said = "whole", "questions answered whole, 95 % interval"
    if any(row[what] is None for row in rows):
        what, said = "ratio", "perplexity by that of the exact cache, 95 % interval"
    figure, axes = new_figure(10.0, 4.6, 2)
    methods = list(dict.fromkeys(method_of(row["name"]) for row in rows if row["name"] != NONE))
    titles = "bytes held, share of an exact cache of 16 bits", "time of a token, DynamicCache = 1"
    for axis, title in zip(axes, titles, strict=True):
        first = rows[0][what]
        axis.axhspan(first["low"], first["high"], color=GREY, alpha=0.12, linewidth=0)
        axis.axhline(first["value"], color=INK, linewidth=1, linestyle="--")
        for row in rows:
            x = held_share(row) if axis is axes[0] else row["token_ratio"]["median"]
            place = None if row["name"] == NONE else methods.index(method_of(row["name"]))
            color = INK if place is None else OKABE_ITO[place % len(OKABE_ITO)]
            marker = MARKERS[0 if place is None else 1 + place % (len(MARKERS) - 1)]
            found = row[what]
            spread = [[found["value"] - found["low"]], [found["high"] - found["value"]]]
            sides = None
            if axis is axes[1]:
                ratio = row["token_ratio"]
                sides = [[ratio["median"] - ratio["q1"]], [ratio["q3"] - ratio["median"]]]
            name = "exact" if place is None else methods[place]
            shown = axis.get_legend_handles_labels()[1]
            point = {"marker": marker, "markersize": 6, "linewidth": 1, "color": color}
            point |= {"linestyle": "none", "label": None if name in shown else name}
            axis.errorbar([x], [found["value"]], spread, sides, **point)
        axis.set_xlabel(title)
        axis.set_xlim(left=0)
        if what == "whole":
            axis.set_ylim(0, 1.02)
    axes[0].set_ylabel(said)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=DPI, metadata={"Software": None})
