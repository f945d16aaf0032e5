"""Maps over the steps of a run: errors of every site, and which steps were computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from diffcache.eval.report.palette import COMPUTED, GREY, INK, PALE, new_figure, short, styled

_MOST_LABELS = 48
_BLANK, _HATCH = "#eceff3", "#aab2bd"


@styled
def plot_errors(
    values: Sequence[Sequence[float | None]], sites: Sequence[str], steps: Sequence[int], name: str
) -> Any:
    """Draw the error of every stand-in: sites downwards, steps to the right.

    Args:
        values: A row for every site, a relative error (dimensionless) for every step, None where
            the step was computed.
        sites: Names of the rows.
        steps: Indices of the columns.
        name: Name of the method.

    Returns:
        A matplotlib figure, or None where no step was skipped.
    """
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Patch

    errors = np.array([[np.nan if v is None else v for v in row] for row in values], dtype=float)
    positive = errors[np.isfinite(errors) & (errors > 0)]
    if not errors.size or not np.isfinite(errors).any():
        return None
    low, high = _decades(positive.tolist())
    height = min(max(1.9 + 0.24 * len(sites), 2.6), 11.0)
    figure, (axis,) = new_figure(_width(len(steps), sites), height)
    grid = np.ma.masked_invalid(np.clip(errors, low, None))
    edges = [0.5 + np.arange(-1, count) for count in (len(steps), len(sites))]
    axis.patch.set(facecolor=_BLANK, edgecolor=_HATCH, hatch="////", linewidth=0)
    mesh = axis.pcolormesh(*edges, grid, cmap="cividis", norm=LogNorm(low, high), linewidth=0)
    _label_sites(axis, sites)
    _label_steps(axis, steps)
    axis.set_title(f"{short(name, 60)}: error of the stand-ins", loc="left")
    figure.colorbar(mesh, ax=axis, label="relative L1 error ↓", pad=0.02)
    key = Patch(facecolor=_BLANK, edgecolor=_HATCH, hatch="////", linewidth=0, label="computed")
    figure.legend(handles=[key], loc="outside lower left")
    return figure


@styled
def plot_timeline(lanes: Mapping[str, Sequence[tuple[float | None, float]]]) -> Any:
    """Draw which steps were computed: rows downwards, steps to the right.

    Args:
        lanes: Name of a row -> of every step the timestep, or None, and the share of runs that
            computed it, 0 to 1.

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
        *edges, np.ma.masked_invalid(grid), cmap=colors, vmin=0, vmax=1, edgecolor="white",
        linewidth=0.8,
    )  # fmt: skip
    _label_sites(axis, names)
    _label_steps(axis, list(range(columns)))
    _label_timesteps(axis, [[step for step, _ in lane] for lane in lanes.values()])
    bar = figure.colorbar(
        mesh, ax=axis, orientation="horizontal", fraction=0.09, aspect=40, shrink=0.5, pad=0.03,
        anchor=(0.0, 0.0),
    )  # fmt: skip
    bar.set_label("share of runs that computed the step", fontsize=9)
    bar.outline.set_visible(False)
    return figure


def _decades(positive: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a logarithmic scale that holds all errors, at most six decades."""
    high = 10.0 ** math.ceil(math.log10(max(positive, default=1.0)) * 2 + 1e-9)
    high = math.sqrt(high)
    low = min(positive, default=high / 10)
    low = math.sqrt(10.0 ** math.floor(math.log10(low) * 2 - 1e-9))
    return max(low, high / 1e6), high


def _width(columns: int, names: Sequence[str]) -> float:
    labels = min(max((len(name) for name in names), default=0), 40) * 0.085
    return min(max(labels + columns * 0.22 + 1.2, 6.4), 13.0)


def _label_sites(axis: Any, sites: Sequence[str]) -> None:
    """Name the rows; where there are too many, every second, third... of them."""
    every = -(-len(sites) // _MOST_LABELS)
    axis.set_yticks(range(0, len(sites), every), [short(site, 40) for site in sites[::every]])
    axis.set_ylim(len(sites) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.grid(False)


def _label_steps(axis: Any, steps: Sequence[int]) -> None:
    every = next((n for n in (1, 2, 5, 10, 20, 50, 100) if len(steps) / n <= 26), 200)
    axis.set_xticks(range(0, len(steps), every), [str(step) for step in steps[::every]])
    axis.set_xlim(-0.5, len(steps) - 0.5)
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
