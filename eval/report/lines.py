"""Plots of the drift of the latents from step to step, and of the cost of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diffcache.eval.report.palette import Style, legend_columns, new_figure, short, styled
from diffcache.eval.report.records import Value

_WIDTH = 7.6


@dataclass(frozen=True)
class Line:
    """One curve over the steps.

    Attributes:
        name: Name of the row.
        values: Value at each step; 0 and None are left out of a logarithmic scale.
        style: Color and dash.
    """

    name: str
    values: Sequence[float | None]
    style: Style


@dataclass(frozen=True)
class Bars:
    """One group of bars.

    Attributes:
        title: Title of the horizontal axis, with the unit.
        values: Value of each row; None leaves the bar out.
    """

    title: str
    values: Sequence[Value | None]


@styled
def plot_growth(lines: Sequence[Line]) -> Any:
    """Draw the relative error of the latents behind every step.

    Args:
        lines: One for every method; values are relative L2 errors, dimensionless.

    Returns:
        A matplotlib figure, or None where no error is above 0.
    """
    drawn = [line for line in lines if any(v is not None and v > 0 for v in line.values)]
    if not drawn:
        return None
    columns = legend_columns([short(line.name) for line in drawn], _WIDTH)
    figure, (axis,) = new_figure(_WIDTH, 3.9 + 0.2 * -(-len(drawn) // columns))
    for line in drawn:
        ys = [v if v is not None and v > 0 else float("nan") for v in line.values]
        axis.plot(
            range(len(ys)), ys, color=line.style.color, linestyle=line.style.dash, linewidth=1.8,
            marker=line.style.marker, markersize=4, markevery=max(1, len(ys) // 14),
            label=short(line.name),
        )  # fmt: skip
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel("relative L2 error of the latents\n(log scale, less is better ↓)")
    axis.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside lower center", ncols=columns, handlelength=3.4)
    return figure


@styled
def plot_cost(names: Sequence[str], styles: Sequence[Style], groups: Sequence[Bars]) -> Any:
    """Draw what every row costs: one group of bars for each kind of cost.

    Args:
        names: Names of the rows.
        styles: Styles of the rows.
        groups: Groups side by side; one without a number is left out.

    Returns:
        A matplotlib figure, or None where no group has a number.
    """
    groups = [group for group in groups if any(v and v.middle for v in group.values)]
    if not groups:
        return None
    width = 2.4 + 2.9 * len(groups)
    figure, axes = new_figure(width, 1.1 + 0.36 * len(names), len(groups))
    for place, (axis, group) in enumerate(zip(axes, groups, strict=True)):
        _draw_bars(axis, styles, group)
        labels = [short(name) for name in names] if place == 0 else [""] * len(names)
        axis.set_yticks(range(len(names)), labels)
        axis.set_ylim(len(names) - 0.4, -0.6)
        axis.tick_params(axis="y", length=0)
        axis.grid(False, axis="y")
        axis.set_xlabel(group.title)
    return figure


def _draw_bars(axis: Any, styles: Sequence[Style], group: Bars) -> None:
    for row, (style, found) in enumerate(zip(styles, group.values, strict=True)):
        if found is None:
            axis.text(0, row, " not measured", va="center", fontsize=8, color="#697079")
            continue
        arms = None
        if found.low is not None and found.high is not None:
            arms = [[max(found.middle - found.low, 0.0)], [max(found.high - found.middle, 0.0)]]
        axis.barh(row, found.middle, xerr=arms, height=0.62, color=style.color, capsize=2.5,
                  ecolor="#8a929c")  # fmt: skip
        end = found.middle if found.high is None else max(found.high, found.middle)
        axis.annotate(f"{found.middle:.3g}", (end, row), (4, 0), textcoords="offset points",
                      va="center", fontsize=8, color="#697079")  # fmt: skip
    axis.margins(x=0.22)
    axis.set_xlim(left=0)
