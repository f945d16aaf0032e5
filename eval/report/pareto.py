"""Plot fidelity or quality against savings, with the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diffcache.eval.report.palette import GREY, INK, Style, legend_columns, new_figure, short, styled
from diffcache.eval.report.records import Value
from diffcache.eval.report.table import LEAST_SAVED

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

    name: str  # name of the row
    kind: str  # "uncached", "method" or "fewer steps"
    x: Value  # saved cost as a ratio; more is better
    y: Value  # the metric
    style: Style  # color and marker
    group: str  # points of one group (values of a setting of a method) are joined by a thin line
    label: str = ""  # text beside the point; empty for none


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str  # title of the horizontal axis
    points: Sequence[Point]  # points to draw


def front(places: Sequence[tuple[float, float]], upward: bool) -> list[int]:
    """Return which points no other point beats, from left to right.

    A point is beaten by one that is at least as good in both and better in one; more x is better. Of points in the
    same place the first is kept. `places` are (x, y), x dimensionless; `upward` says whether more y is better.
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


@styled
def plot(panels: Sequence[Panel], title: str, direction: str | None) -> Any:
    """Draw a metric against savings; better is up and to the right.

    Caches and uncached have a staircase front; fewer steps are grey crosses and stand aside, so that one sees
    whether a cache lies beyond them. All panels have the same metric upwards; the axis is turned over where its
    direction is "down".

    Returns:
        A matplotlib figure.
    """
    figure, axes = new_figure(4.6 * len(panels) + (0.6 if len(panels) == 1 else 0), 4.4, len(panels))
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes, panels, strict=True):
        _draw(axis, panel, direction, handles)
        _log_ratio(axis, [p.x for p in panel.points])
        axis.set_xlabel(f"{panel.title} to uncached (more is better →)")
        axis.set_ylabel(f"{short(title)}{_WAYS.get(direction or '', '')}")
        axis.margins(x=0.12, y=0.12)
        if direction == "down":
            axis.invert_yaxis()
    names = sorted(handles, key=lambda name: (name == _FRONT, name == _FEWER))
    columns = legend_columns(names, figure.get_figwidth())
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
            markeredgecolor=GREY if cross else "white",
            elinewidth=1,
            capsize=2.5,
            linestyle="none",
            zorder=2 if cross else 3,
        )
        name = point.group if point.group in several else point.name
        handles.setdefault(_FEWER if cross else short(name), drawn.lines[0])


def _draw_front(axis: Any, points: Sequence[Point], direction: str | None, handles: dict[str, Any]) -> None:
    """Draw the staircase: the best metric to be had at this ratio or more.

    A row that skipped nothing is no rival.
    """
    least = {"uncached": -math.inf, "method": LEAST_SAVED}
    saved = [point for point in points if point.x.middle >= least.get(point.kind, math.inf)]
    rivals = [(point.x.middle, point.y.middle) for point in saved]
    if direction not in ("up", "down") or len(rivals) < 2:
        return
    best = [rivals[place] for place in front(rivals, direction == "up")]
    xs = [x for x, _ in best]
    ys = [y for _, y in best]
    (line,) = axis.plot(xs, ys, drawstyle="steps-pre", color=INK, linewidth=1.2, linestyle=(0, (4, 2)), zorder=1.5)
    handles.setdefault(_FRONT, line)


def _log_ratio(axis: Any, values: Sequence[Value]) -> None:
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
    """Write each label where it covers no point and no other label; else leave it out."""
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
                color=point.style.color,
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
