"""Plots of a record: fidelity or quality against savings with the Pareto front, decisions, errors and cost."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffcache.eval.report import palette, record_files
from diffcache.eval.report.table import LEAST_SAVED, is_rival

# Each plot is of one metric; more than these would hide what matters.
_HEADLINES = ("fid", "fvd", "lpips", "psnr_db", "clip_score")
_MOST_LABELS = 48  # names of rows beside a timeline
_MOST_LABEL = 24  # characters beside a point
_MOST_OUTLINED = 200  # steps of a timeline; the lines around more would hide them
_BYTES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_FLOPS = ((1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"), (1, "FLOPs"))


def draw(record: record_files.Record) -> tuple[list[palette.Picture], list[str]]:
    """Draw every plot that the record has numbers for.

    Returns the plots, and a sentence about each plot that was left out.
    """
    found: list[palette.Picture] = []
    left_out: list[str] = []
    for plots, missing in (draw_pareto(record), _timeline(record), _growth(record), _cost(record)):
        found += plots
        left_out += missing
    return found, left_out


def draw_pareto(record: record_files.Record) -> tuple[list[palette.Picture], list[str]]:
    """Draw every headline metric against savings."""
    found, flat = [], []
    for key in _headlines(record):
        known = record_files.describe(record, key)
        sides = [("FLOPs ratio", "flops_ratio"), ("measured speed ratio", "ratio")]
        panels = [Panel(title, _points(record, key, side)) for title, side in sides]
        panels = [p for p in panels if any(point.kind == "method" for point in p.points)]
        if not panels:
            continue
        if _is_flat(panels):
            flat.append(str(known["title"]))
            continue
        title = f"{known['title']} ({known['unit']})" if known["unit"] else str(known["title"])
        paired = ", paired with uncached" if key.endswith(record_files.CHANGE) else ""
        caption = (
            f"{known['title']} of every row against its FLOPs ratio"
            f"{' and its measured speed ratio' if len(panels) > 1 else ''}. Error bars: 95 % "
            f"intervals upwards{paired}, quartiles sideways. A cache is worth having where it "
            "lies beyond the grey crosses, which are uncached at fewer steps. Rows that skip less than "
            "5 % are left out."
        )
        figure = plot_pareto(panels, title, known["direction"])
        stem = re.sub(r"\W", "-", key)  # a record may be somebody else's
        about = f"pareto-{stem}", f"{known['title']} against speed", caption
        found.append(palette.picture_of(*about, figure))
    missing = [f"Quality against speed: all rows are equal in {', '.join(flat)}."] if flat else []
    if not found and not flat:
        missing = ["Quality against speed: no method row holds both a metric and a ratio."]
    return found, missing


def _is_flat(panels: Sequence[Panel]) -> bool:
    """Return whether the points of several rows are all at one height, without intervals."""
    heights = [point.y for panel in panels for point in panel.points]
    ends = {end for y in heights for end in y if end is not None}
    return len(ends) == 1 and len(heights) > 1


def _headlines(record: record_files.Record) -> list[str]:
    """Return the metrics to plot; for a metric with a paired change, the change.

    The interval of a paired change shows differences that the far wider interval of the metric itself would hide.
    """
    held = record_files.metric_keys(record)
    keys = [key for stem in _HEADLINES for key in (stem, f"{stem}_lite") if key in held]
    keys = keys or [key for key in held if record_files.describe(record, key)["direction"]][:3]
    return [key + record_files.CHANGE if key + record_files.CHANGE in held else key for key in keys]


def _points(record: record_files.Record, key: str, side: str) -> list[Point]:
    looks = palette.styles(record)
    rows = record_files.ordered(record)
    names = settings([row for row in rows if row["kind"] == "method"])
    points = []
    for row in rows:
        if row["kind"] == "method" and not is_rival(row):
            continue  # a row this close to uncached would set the scale of all others
        y = record_files.metric_of(row, key)
        x = record_files.speed_of(record, row, side) if side == "ratio" else _plain(row, side)
        if row["kind"] == "uncached":
            x = x or record_files.Value(1.0)
            y = record_files.Value(0.0) if key.endswith(record_files.CHANGE) else y
        if x is None or y is None or x.middle <= 0:
            continue
        label = names.get(row["name"], "")
        if row["kind"] == "fewer steps":
            label = f"{row['steps']} step{'s' * (row['steps'] != 1)}"
        points.append(Point(row["name"], row["kind"], x, y, looks[row["name"]], palette.family(row), label))
    return points


def settings(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the settings that tell rows of a method apart; nothing for a method with one row.

    They are the words of a row's name that not all rows of its method have; nothing where they are too long for a
    label.
    """
    kin: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kin.setdefault(palette.family(row), []).append(row)
    found = {}
    for members in kin.values():
        if len(members) > 1:
            words = {row["name"]: re.split(r"[\s,:()]+", row["name"]) for row in members}
            shared = set.intersection(*map(set, words.values()))
            for name, mine in words.items():
                own = " ".join(word for word in mine if word not in shared)
                found[name] = own if len(own) <= _MOST_LABEL else ""
    return found


def _plain(row: dict[str, Any], key: str) -> record_files.Value | None:
    found = record_files.number(row.get(key))
    return None if found is None else record_files.Value(found)


def _methods(record: record_files.Record) -> list[dict[str, Any]]:
    return [row for row in record_files.ordered(record) if row["kind"] == "method"]


def _timeline(record: record_files.Record) -> tuple[list[palette.Picture], list[str]]:
    lanes = {}
    for row in _methods(record):
        steps = row.get("timeline") or []
        known = [
            (record_files.number(s.get("timestep")), record_files.number(s.get("computed")) or 0.0) for s in steps
        ]
        if known:
            lanes[row["name"]] = known
    if not lanes:
        return [], ["Decisions: no row holds a timeline."]
    caption = "The share of runs in which each step was computed; the other runs skipped it."
    return [palette.picture_of("timeline", "Decisions", caption, _draw_timeline(lanes))], []


@palette.styled
def _draw_timeline(lanes: Mapping[str, Sequence[tuple[float | None, float]]]) -> Any:
    """Draw the computed steps: rows downwards, steps to the right.

    Args:
        lanes: Name of a row -> for every step the timestep, or None, and the share of runs that computed it, 0 to 1.
    """
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    columns = max(map(len, lanes.values()))
    names = [palette.short(name) for name in lanes]
    labels = min(max(map(len, names)), 40) * 0.085
    width = min(max(labels + columns * 0.22 + 1.2, 6.4), 13.0) + 1.2
    figure, (axis,) = palette.new_figure(width, 1.5 + 0.42 * len(lanes))
    grid = np.full((len(lanes), columns), np.nan)
    for row, lane in enumerate(lanes.values()):
        shares = [share for _, share in lane]
        grid[row, : len(lane)] = shares
        words = f"{sum(shares):.4g} of {len(lane)}"
        beside = {"xycoords": axis.get_yaxis_transform(), "textcoords": "offset points", "va": "center"}
        axis.annotate(words, (1, row), (6, 0), **beside, fontsize=9, color=palette.GREY)
    colors = LinearSegmentedColormap.from_list("computed", [palette.PALE, palette.COMPUTED])
    edges = [0.5 + np.arange(-1, count) for count in (columns, len(lanes))]
    lines = {"edgecolor": "white", "linewidth": 0.8} if columns <= _MOST_OUTLINED else {}
    mesh = axis.pcolormesh(*edges, np.ma.masked_invalid(grid), cmap=colors, vmin=0, vmax=1, **lines)
    every = -(-len(names) // _MOST_LABELS)  # where there are too many rows, every second, third... of them is named
    axis.set_yticks(range(0, len(names), every), names[::every])
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.grid(False)
    every = next((n for n in (1, 2, 5, 10, 20, 50, 100) if columns / n <= 26), 200)
    axis.set_xticks(range(0, columns, every))
    axis.set_xlim(-0.5, columns - 0.5)
    axis.set_xlabel("step")
    for side in ("left", "bottom"):
        axis.spines[side].set_visible(False)
    first, *others = ([step for step, _ in lane] for lane in lanes.values())
    if None not in first and all(lane == first for lane in others):
        _label_timesteps(axis, first)
    bar = figure.colorbar(
        mesh, ax=axis, orientation="horizontal", fraction=0.09, aspect=40, shrink=0.5, pad=0.03, anchor=(0.0, 0.0)
    )
    bar.set_label("share of runs that computed the step", fontsize=9)
    bar.outline.set_visible(False)
    return figure


def _label_timesteps(axis: Any, steps: Sequence[float | None]) -> None:
    above = axis.secondary_xaxis("top")
    places = range(0, len(steps), max(1, -(-len(steps) // 9)))
    above.set_xticks(places, [f"{steps[place]:.4g}" for place in places])
    above.set_xlabel("timestep", fontsize=9)
    above.tick_params(labelsize=8, colors=palette.INK)
    above.spines["top"].set_visible(False)


def _growth(record: record_files.Record) -> tuple[list[palette.Picture], list[str]]:
    curves = {}
    for row in _methods(record):
        errors = [record_files.number(value) or 0.0 for value in row.get("latent_error") or []]
        if any(error > 0 for error in errors):
            curves[row["name"]] = [error if error > 0 else math.nan for error in errors]
    if not curves:
        return [], ["Error of the latents: no row holds one above 0."]
    caption = "Mean relative L2 distance of the latents to the uncached ones behind every step."
    figure = _draw_growth(curves, palette.styles(record))
    return [palette.picture_of("latent-error", "Error of the latents", caption, figure)], []


@palette.styled
def _draw_growth(curves: Mapping[str, Sequence[float]], looks: Mapping[str, palette.Style]) -> Any:
    """Draw the relative L2 error of the latents behind every step, a curve for each name."""
    width = 7.6
    names = [palette.short(name) for name in curves]
    columns = palette.legend_columns(names, width)
    figure, (axis,) = palette.new_figure(width, 3.9 + 0.2 * -(-len(curves) // columns))
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
        )
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel("relative L2 error of the latents\n(log scale, less is better ↓)")
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    # Lines that carried their names would go without where a name begins with an underscore.
    figure.legend(axis.lines, names, loc="outside lower center", ncols=columns, handlelength=3.4)
    return figure


def _cost(record: record_files.Record) -> tuple[list[palette.Picture], list[str]]:
    rows = record_files.ordered(record)
    flops, held = ([_plain(row, key) for row in rows] for key in ("flops", "held_bytes"))
    flops_scale, flops_unit = _scale(flops, _FLOPS)
    held_scale, held_unit = _scale(held, _BYTES)
    groups = {
        "seconds a call (less is better)": [record_files.speed_of(record, row, "seconds") for row in rows],
        f"{flops_unit} a sample (less is better)": _divided(flops, flops_scale),
        f"held by the cache, {held_unit}": _divided(held, held_scale),
    }
    full = {title: each for title, each in groups.items() if any(v and v.middle for v in each)}
    empty = [title.split(",")[0] for title in groups if title not in full]
    missing = [f"Cost: no row holds a number for: {'; '.join(empty)}."] if empty else []
    if not full:
        return [], missing
    caption = "What every row costs; whiskers are quartiles."
    figure = _draw_cost([row["name"] for row in rows], palette.styles(record), full)
    return [palette.picture_of("cost", "Cost", caption, figure)], missing


@palette.styled
def _draw_cost(
    names: Sequence[str], looks: Mapping[str, palette.Style], groups: Mapping[str, Sequence[record_files.Value | None]]
) -> Any:
    """Draw a group of bars for each kind of cost, side by side, a bar for every row."""
    figure, axes = palette.new_figure(2.4 + 2.9 * len(groups), 1.1 + 0.36 * len(names), len(groups))
    for place, (axis, (title, values)) in enumerate(zip(axes, groups.items(), strict=True)):
        for row, (name, found) in enumerate(zip(names, values, strict=True)):
            _draw_bar(axis, row, found, looks[name].color)
        axis.margins(x=0.22)
        axis.set_xlim(left=0)
        labels = [palette.short(name) for name in names] if place == 0 else [""] * len(names)
        axis.set_yticks(range(len(names)), labels)
        axis.set_ylim(len(names) - 0.4, -0.6)
        axis.tick_params(axis="y", length=0)
        axis.grid(False, axis="y")
        axis.set_xlabel(title)
    return figure


def _draw_bar(axis: Any, row: int, found: record_files.Value | None, color: str) -> None:
    if found is None:
        axis.text(0, row, " not measured", va="center", fontsize=8, color="#697079")
        return
    axis.barh(row, found.middle, xerr=found.arms, height=0.62, color=color, capsize=2.5, ecolor="#8a929c")
    end = found.middle if found.high is None else max(found.high, found.middle)
    axis.annotate(
        f"{found.middle:.3g}", (end, row), (4, 0), textcoords="offset points", va="center", fontsize=8, color="#697079"
    )


def _scale(values: Iterable[record_files.Value | None], units: Any) -> tuple[float, str]:
    largest = max((v.middle for v in values if v is not None), default=0.0)
    return next(((size, unit) for size, unit in units if largest >= size), units[-1])


def _divided(values: Iterable[record_files.Value | None], scale: float) -> list[record_files.Value | None]:
    return [None if v is None else record_files.Value(v.middle / scale) for v in values]


_AROUND = ((7, 5), (7, -12), (-7, 5), (-7, -12), (0, 9), (0, -16), (11, -3), (-11, -3))
_FRONT, _FEWER = "Pareto front of caches", "uncached, fewer steps"
_TICKS = (
    (0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100),
    (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.6, 1.8, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 4.5, 5, 6, 7, 8),
)
_LINES = 4  # of a legend for which there is room
_WAYS = {"up": " (more is better ↑)", "down": " (less is better: up)"}


@dataclass(frozen=True)
class Point:
    """A row in the plot."""

    name: str
    kind: str  # "uncached", "method" or "fewer steps"
    x: record_files.Value  # saved cost as a ratio; more is better
    y: record_files.Value
    style: palette.Style  # color and marker
    group: str  # points of one group (values of a setting of a method) are joined by a thin line
    label: str = ""  # text beside the point; empty for none


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str  # title of the horizontal axis
    points: Sequence[Point]


def front(places: Sequence[tuple[float, float]], upward: bool) -> list[int]:
    """Return the numbers of the points that no other point beats, from left to right.

    A point is beaten by one that is at least as good in both coordinates and better in one; more x is better. Among
    points in the same place the first is kept. `places` are (x, y), x dimensionless; `upward` tells whether more y is
    better.
    """
    sign = 1.0 if upward else -1.0
    order = sorted(range(len(places)), key=lambda i: (-places[i][0], -sign * places[i][1], i))
    kept: list[int] = []
    best = float("-inf")
    for place in order:
        if sign * places[place][1] > best:
            best = sign * places[place][1]
            kept.append(place)
    return kept[::-1]


@palette.styled
def plot_pareto(panels: Sequence[Panel], title: str, direction: str | None) -> Any:
    """Draw a metric against savings; better is up and to the right.

    Caches and uncached have a staircase front; fewer steps are grey crosses and stand aside, so that one sees
    whether a cache lies beyond them. All panels have the same metric upwards; the axis is turned over where its
    direction is "down".
    """
    figure, axes = palette.new_figure(4.6 * len(panels) + (0.6 if len(panels) == 1 else 0), 4.4, len(panels))
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes, panels, strict=True):
        _draw(axis, panel, direction, handles)
        _log_ratio(axis, [p.x for p in panel.points])
        axis.set_xlabel(f"{panel.title} to uncached (more is better →)")
        axis.set_ylabel(f"{palette.short(title)}{_WAYS.get(direction or '', '')}")
        axis.margins(x=0.12, y=0.12)
        if direction == "down":
            axis.invert_yaxis()
    names = sorted(handles, key=lambda name: (name == _FRONT, name == _FEWER))
    columns = palette.legend_columns(names, figure.get_figwidth())
    beyond = -(-len(names) // columns) - _LINES  # a longer legend must not eat the axes
    figure.set_figheight(figure.get_figheight() + 0.21 * max(beyond, 0))
    figure.legend([handles[n] for n in names], names, loc="outside lower center", ncols=columns)
    figure.draw_without_rendering()
    for axis, panel in zip(axes, panels, strict=True):
        _write_labels(axis, panel.points)
    return figure


def _draw(axis: Any, panel: Panel, direction: str | None, handles: dict[str, Any]) -> None:
    _draw_front(axis, panel.points, direction, handles)
    groups: dict[str, list[Point]] = {}
    for point in panel.points:
        if point.kind == "method":
            groups.setdefault(point.group, []).append(point)
    for members in groups.values():
        members = sorted(members, key=lambda point: point.x.middle)
        # Rows that differ in several settings are no curve.
        if len(members) > 1 and all(len(point.label.split()) == 1 for point in members):
            xs, ys = [p.x.middle for p in members], [p.y.middle for p in members]
            axis.plot(xs, ys, color=members[0].style.color, linewidth=1, alpha=0.5)
    several = {group for group, members in groups.items() if len(members) > 1}
    for point in panel.points:
        cross = point.kind == "fewer steps"
        drawn = axis.errorbar(
            [point.x.middle],
            [point.y.middle],
            xerr=point.x.arms,
            yerr=point.y.arms,
            color=point.style.color,
            marker=point.style.marker,
            markersize=8 if cross else 7,
            markeredgewidth=2 if cross else 0.8,
            markeredgecolor=palette.GREY if cross else "white",
            elinewidth=1,
            capsize=2.5,
            linestyle="none",
            zorder=2 if cross else 3,
        )
        name = point.group if point.group in several else point.name
        handles.setdefault(_FEWER if cross else palette.short(name), drawn.lines[0])


def _draw_front(axis: Any, points: Sequence[Point], direction: str | None, handles: dict[str, Any]) -> None:
    """Draw the staircase: the best metric at each ratio or more. A row that skipped nothing does not count."""
    least = {"uncached": -math.inf, "method": LEAST_SAVED}
    saved = [point for point in points if point.x.middle >= least.get(point.kind, math.inf)]
    rivals = [(point.x.middle, point.y.middle) for point in saved]
    if direction not in ("up", "down") or len(rivals) < 2:
        return
    best = [rivals[place] for place in front(rivals, direction == "up")]
    xs = [x for x, _ in best]
    ys = [y for _, y in best]
    (line,) = axis.plot(
        xs, ys, drawstyle="steps-pre", color=palette.INK, linewidth=1.2, linestyle=(0, (4, 2)), zorder=1.5
    )
    handles.setdefault(_FRONT, line)


def _log_ratio(axis: Any, values: Sequence[record_files.Value]) -> None:
    """Scale a ratio by its logarithm, with plain numbers as ticks."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    ends = [e for v in values for e in (v.middle, v.low, v.high) if e is not None]
    if min(ends, default=0.0) <= 0:
        return
    axis.set_xscale("log")
    low, high = min(ends) / 1.03, max(ends) * 1.03
    choices = [[t for t in ticks if low <= t <= high] for ticks in _TICKS]
    found = next((ticks for ticks in choices if len(ticks) >= 3), None)
    axis.xaxis.set_major_locator(FixedLocator(found) if found else MaxNLocator(4))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g}"))


def _write_labels(axis: Any, points: Sequence[Point]) -> None:
    """Write each label where it covers no point and no other label; leave it out if there is no such place."""
    figure = axis.figure
    renderer = figure.canvas.get_renderer()
    scale = figure.dpi / 72
    marks = [axis.transData.transform((p.x.middle, p.y.middle)) for p in points]
    taken: list[Any] = []
    written = set()
    for point in points:
        key = (point.label, point.x.middle, point.y.middle)
        if not point.label or key in written:
            continue
        written.add(key)
        for right, up in _AROUND:
            text = axis.annotate(
                point.label,
                (point.x.middle, point.y.middle),
                (right, up),
                textcoords="offset points",
                fontsize=8,
                color=palette.INK if point.style.color == palette.OKABE_ITO[-1] else point.style.color,
                ha="left" if right > 0 else "right" if right < 0 else "center",
            )
            box = text.get_window_extent(renderer).expanded(1.05, 1.1)
            inside = axis.bbox.contains(box.x0, box.y0) and axis.bbox.contains(box.x1, box.y1)
            clear = not any(
                box.x0 - 4 * scale < x < box.x1 + 4 * scale and box.y0 - 4 * scale < y < box.y1 + 4 * scale
                for x, y in marks
            )
            if inside and clear and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()
