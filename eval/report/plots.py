"""Plots of a record: its numbers brought into the form that the plot functions take."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from diffcache.eval.report import pareto
from diffcache.eval.report.columns import CHANGE, describe, metric_keys
from diffcache.eval.report.palette import (
    COMPUTED,
    GREY,
    INK,
    PALE,
    Picture,
    Style,
    family,
    legend_columns,
    new_figure,
    picture_of,
    short,
    styled,
    styles,
)
from diffcache.eval.report.records import Record, Value, metric_of, number, ordered, speed_of
from diffcache.eval.report.table import is_rival

# Each plot is of one metric; more than these would hide what matters.
_HEADLINES = ("fid", "fvd", "lpips", "psnr_db", "clip_score")
_MOST_LABELS = 48  # names of rows beside a timeline
_MOST_LABEL = 24  # characters beside a point
_BYTES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_FLOPS = ((1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"), (1, "FLOPs"))


def draw(record: Record) -> tuple[list[Picture], list[str]]:
    """Draw every plot for which the record has numbers.

    Returns:
        The plots, and one sentence for every plot that was left out.
    """
    found: list[Picture] = []
    left_out: list[str] = []
    for plots, missing in (draw_pareto(record), _timeline(record), _growth(record), _cost(record)):
        found += plots
        left_out += missing
    return found, left_out


def draw_pareto(record: Record) -> tuple[list[Picture], list[str]]:
    """Draw every headline metric against savings."""
    found, flat = [], []
    for key in _headlines(record):
        known = describe(record, key)
        sides = [("FLOPs ratio", "flops_ratio"), ("measured speed ratio", "ratio")]
        panels = [pareto.Panel(title, _points(record, key, side)) for title, side in sides]
        panels = [p for p in panels if any(point.kind == "method" for point in p.points)]
        if not panels:
            continue
        if _is_flat(panels):
            flat.append(str(known["title"]))
            continue
        title = f"{known['title']} ({known['unit']})" if known["unit"] else str(known["title"])
        paired = ", paired with uncached" if key.endswith(CHANGE) else ""
        caption = (
            f"{known['title']} of every row against its FLOPs ratio"
            f"{' and its measured speed ratio' if len(panels) > 1 else ''}. Error bars: 95 % "
            f"intervals upwards{paired}, quartiles sideways. A cache is worth having where it "
            "lies beyond the grey crosses, which are uncached at fewer steps. Rows that skip less than "
            "5 % are left out."
        )
        figure = pareto.plot(panels, title, known["direction"])
        about = f"pareto-{key}", f"{known['title']} against speed", caption
        found.append(picture_of(*about, figure))
    missing = [f"Quality against speed: all rows are equal in {', '.join(flat)}."] if flat else []
    if not found and not flat:
        missing = ["Quality against speed: no method row holds both a metric and a ratio."]
    return found, missing


def _is_flat(panels: Sequence[pareto.Panel]) -> bool:
    """Say whether all points of several rows are at one height, with nothing around them."""
    heights = [point.y for panel in panels for point in panel.points]
    ends = {end for y in heights for end in y if end is not None}
    return len(ends) == 1 and len(heights) > 1


def _headlines(record: Record) -> list[str]:
    """Return the metrics to plot; the paired change of one where there is one.

    The interval of a paired change shows what that of the metric itself, far wider, would hide.
    """
    held = metric_keys(record)
    keys = [key for stem in _HEADLINES for key in (stem, f"{stem}_lite") if key in held]
    keys = keys or [key for key in held if describe(record, key)["direction"]][:3]
    return [key + CHANGE if key + CHANGE in held else key for key in keys]


def _points(record: Record, key: str, side: str) -> list[pareto.Point]:
    looks = styles(record)
    rows = ordered(record)
    names = settings([row for row in rows if row["kind"] == "method"])
    points = []
    for row in rows:
        if row["kind"] == "method" and not is_rival(row):
            continue  # as close to uncached as one likes, it would set the scale of all others
        y = metric_of(row, key)
        x = speed_of(record, row, side) if side == "ratio" else _plain(row, side)
        if row["kind"] == "uncached":
            x = x or Value(1.0)
            y = Value(0.0) if key.endswith(CHANGE) else y
        if x is None or y is None or x.middle <= 0:
            continue
        label = names.get(row["name"], "")
        if row["kind"] == "fewer steps":
            label = f"{row['steps']} step{'s' * (row['steps'] != 1)}"
        points.append(pareto.Point(row["name"], row["kind"], x, y, looks[row["name"]], family(row), label))
    return points


def settings(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the settings that tell rows of a method apart; nothing for a method with one row.

    Returns:
        The words of a row's name that not all rows of its method have; nothing where they are too long for a label.
    """
    kin: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kin.setdefault(family(row), []).append(row)
    found = {}
    for members in kin.values():
        if len(members) > 1:
            words = {row["name"]: re.split(r"[\s,:()]+", row["name"]) for row in members}
            shared = set.intersection(*map(set, words.values()))
            for name, mine in words.items():
                own = " ".join(word for word in mine if word not in shared)
                found[name] = own if len(own) <= _MOST_LABEL else ""
    return found


def _plain(row: dict[str, Any], key: str) -> Value | None:
    found = number(row.get(key))
    return None if found is None else Value(found)


def _methods(record: Record) -> list[dict[str, Any]]:
    return [row for row in ordered(record) if row["kind"] == "method"]


def _timeline(record: Record) -> tuple[list[Picture], list[str]]:
    lanes = {}
    for row in _methods(record):
        steps = row.get("timeline") or []
        known = [(number(s.get("timestep")), number(s.get("computed")) or 0.0) for s in steps]
        if known:
            lanes[row["name"]] = known
    if not lanes:
        return [], ["Decisions: no row holds a timeline."]
    caption = "The share of runs in which each step was computed; the other runs skipped it."
    return [picture_of("timeline", "Decisions", caption, _draw_timeline(lanes))], []


@styled
def _draw_timeline(lanes: Mapping[str, Sequence[tuple[float | None, float]]]) -> Any:
    """Draw which steps were computed: rows downwards, steps to the right.

    Args:
        lanes: Name of a row -> of every step the timestep, or None, and the share of runs that computed it, 0 to 1.

    Returns:
        A matplotlib figure.
    """
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    columns = max(map(len, lanes.values()))
    names = [short(name) for name in lanes]
    height = 1.5 + 0.42 * len(lanes)
    figure, (axis,) = new_figure(_width(columns, names) + 1.2, height)
    grid = np.full((len(lanes), columns), np.nan)
    for row, lane in enumerate(lanes.values()):
        shares = [share for _, share in lane]
        grid[row, : len(lane)] = shares
        words = f"{sum(shares):.4g} of {len(lane)}"
        axis.text(columns - 0.3, row, words, va="center", fontsize=9, color=GREY)
    colors = LinearSegmentedColormap.from_list("computed", [PALE, COMPUTED])
    edges = [0.5 + np.arange(-1, count) for count in (columns, len(lanes))]
    mesh = axis.pcolormesh(
        *edges, np.ma.masked_invalid(grid), cmap=colors, vmin=0, vmax=1, edgecolor="white", linewidth=0.8
    )
    _label_rows(axis, names)
    _label_steps(axis, columns)
    _label_timesteps(axis, [[step for step, _ in lane] for lane in lanes.values()])
    bar = figure.colorbar(
        mesh, ax=axis, orientation="horizontal", fraction=0.09, aspect=40, shrink=0.5, pad=0.03, anchor=(0.0, 0.0)
    )
    bar.set_label("share of runs that computed the step", fontsize=9)
    bar.outline.set_visible(False)
    return figure


def _width(columns: int, names: Sequence[str]) -> float:
    labels = min(max((len(name) for name in names), default=0), 40) * 0.085
    return min(max(labels + columns * 0.22 + 1.2, 6.4), 13.0)


def _label_rows(axis: Any, names: Sequence[str]) -> None:
    """Name the rows; where there are too many, every second, third... of them."""
    every = -(-len(names) // _MOST_LABELS)
    axis.set_yticks(range(0, len(names), every), names[::every])
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.grid(False)


def _label_steps(axis: Any, count: int) -> None:
    every = next((n for n in (1, 2, 5, 10, 20, 50, 100) if count / n <= 26), 200)
    axis.set_xticks(range(0, count, every))
    axis.set_xlim(-0.5, count - 0.5)
    axis.set_xlabel("step")
    for side in ("left", "bottom"):
        axis.spines[side].set_visible(False)


def _label_timesteps(axis: Any, lanes: Sequence[Sequence[float | None]]) -> None:
    """Write the timesteps above the steps, where all lanes have the same."""
    first = lanes[0]
    if any(lane != first for lane in lanes) or None in first:
        return
    above = axis.secondary_xaxis("top")
    every = max(1, -(-len(first) // 9))
    places = range(0, len(first), every)
    above.set_xticks(places, [f"{first[place]:.4g}" for place in places])
    above.set_xlabel("timestep", fontsize=9)
    above.tick_params(labelsize=8, colors=INK)
    above.spines["top"].set_visible(False)


def _growth(record: Record) -> tuple[list[Picture], list[str]]:
    curves = {}
    for row in _methods(record):
        errors = [number(value) or 0.0 for value in row.get("latent_error") or []]
        if any(error > 0 for error in errors):
            curves[row["name"]] = [error if error > 0 else math.nan for error in errors]
    if not curves:
        return [], ["Error of the latents: no row holds one above 0."]
    caption = "Mean relative L2 distance of the latents to the uncached ones behind every step."
    figure = _draw_growth(curves, styles(record))
    return [picture_of("latent-error", "Error of the latents", caption, figure)], []


@styled
def _draw_growth(curves: Mapping[str, Sequence[float]], looks: Mapping[str, Style]) -> Any:
    """Draw the relative L2 error of the latents behind every step, a curve for each name."""
    width = 7.6
    columns = legend_columns([short(name) for name in curves], width)
    figure, (axis,) = new_figure(width, 3.9 + 0.2 * -(-len(curves) // columns))
    for name, errors in curves.items():
        look = looks[name]
        axis.plot(
            range(len(errors)),
            errors,
            color=look.color,
            linestyle=look.dash,
            linewidth=1.8,
            marker=look.marker,
            markersize=4,
            markevery=max(1, len(errors) // 14),
            label=short(name),
        )
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel("relative L2 error of the latents\n(log scale, less is better ↓)")
    axis.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside lower center", ncols=columns, handlelength=3.4)
    return figure


def _cost(record: Record) -> tuple[list[Picture], list[str]]:
    rows = ordered(record)
    flops, held = ([_plain(row, key) for row in rows] for key in ("flops", "held_bytes"))
    flops_scale, flops_unit = _scale(flops, _FLOPS)
    held_scale, held_unit = _scale(held, _BYTES)
    groups = {
        "seconds a call (less is better)": [speed_of(record, row, "seconds") for row in rows],
        f"{flops_unit} a sample (less is better)": _divided(flops, flops_scale),
        f"held by the cache, {held_unit}": _divided(held, held_scale),
    }
    full = {title: each for title, each in groups.items() if any(v and v.middle for v in each)}
    empty = [title.split(",")[0] for title in groups if title not in full]
    missing = [f"Cost: no row holds a number for: {'; '.join(empty)}."] if empty else []
    if not full:
        return [], missing
    caption = "What every row costs; whiskers are quartiles."
    figure = _draw_cost([row["name"] for row in rows], styles(record), full)
    return [picture_of("cost", "Cost", caption, figure)], missing


@styled
def _draw_cost(names: Sequence[str], looks: Mapping[str, Style], groups: Mapping[str, Sequence[Value | None]]) -> Any:
    """Draw a group of bars for each kind of cost, side by side, a bar for every row."""
    figure, axes = new_figure(2.4 + 2.9 * len(groups), 1.1 + 0.36 * len(names), len(groups))
    for place, (axis, (title, values)) in enumerate(zip(axes, groups.items(), strict=True)):
        for row, (name, found) in enumerate(zip(names, values, strict=True)):
            _draw_bar(axis, row, found, looks[name].color)
        axis.margins(x=0.22)
        axis.set_xlim(left=0)
        labels = [short(name) for name in names] if place == 0 else [""] * len(names)
        axis.set_yticks(range(len(names)), labels)
        axis.set_ylim(len(names) - 0.4, -0.6)
        axis.tick_params(axis="y", length=0)
        axis.grid(False, axis="y")
        axis.set_xlabel(title)
    return figure


def _draw_bar(axis: Any, row: int, found: Value | None, color: str) -> None:
    if found is None:
        axis.text(0, row, " not measured", va="center", fontsize=8, color="#697079")
        return
    axis.barh(row, found.middle, xerr=found.arms, height=0.62, color=color, capsize=2.5, ecolor="#8a929c")
    end = found.middle if found.high is None else max(found.high, found.middle)
    axis.annotate(
        f"{found.middle:.3g}", (end, row), (4, 0), textcoords="offset points", va="center", fontsize=8, color="#697079"
    )


def _scale(values: Iterable[Value | None], units: Any) -> tuple[float, str]:
    largest = max((v.middle for v in values if v is not None), default=0.0)
    return next(((size, unit) for size, unit in units if largest >= size), units[-1])


def _divided(values: Iterable[Value | None], scale: float) -> list[Value | None]:
    return [None if v is None else Value(v.middle / scale) for v in values]
