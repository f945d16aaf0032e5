"""Look of every plot: one color, marker and dash for a row everywhere, and its files."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec

from diffcache.errors import DiffcacheError
from diffcache.eval.report.record_files import Record, ordered

P = ParamSpec("P")

# Okabe and Ito, Color Universal Design (2008): told apart with any color vision. Yellow, which is
# pale on white, comes last; black and grey are kept for the uncached row and for fewer steps.
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
INK, GREY, PALE, LINE = "#1c2028", "#697079", "#d6e0ec", "#d0d4da"
COMPUTED = "#2563af"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "h", "*")
_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)))
_SETTINGS = {
    "axes.edgecolor": GREY, "axes.grid": True, "axes.labelcolor": INK, "axes.labelsize": 10,
    "axes.spines.right": False, "axes.spines.top": False, "axes.axisbelow": True,
    "axes.titlesize": 11, "figure.autolayout": False, "figure.constrained_layout.use": False,
    "font.family": "DejaVu Sans", "font.size": 10, "grid.color": "#e6e9ee",
    "grid.linewidth": 0.8, "legend.fontsize": 9, "legend.frameon": False, "text.color": INK,
    "svg.fonttype": "path", "svg.hashsalt": "diffcache", "xtick.color": GREY, "ytick.color": GREY,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "xtick.labelsize": 9, "ytick.labelsize": 9,
}  # fmt: skip
DPI = 160


@dataclass(frozen=True)
class Picture:
    """A plot or a sheet of samples, ready to be written."""

    stem: str  # name of its files, without the ending
    title: str
    caption: str  # caption that tells what it shows, for readers who cannot see it too
    png: bytes  # the file
    svg: bytes | None = None  # the file, or None for a sheet
    lines: tuple[str, ...] = ()  # more text under it, one line each


class PlotError(DiffcacheError):
    """Plots were asked for and matplotlib is not there."""


@dataclass(frozen=True)
class Style:
    """Style in which a row is drawn."""

    color: str  # color, the same for all settings of a method
    marker: str  # marker, the same for all settings of a method
    dash: Any  # tells the settings of a method apart in lines


def family(row: dict[str, Any]) -> str:
    """Return the key that rows of a method share: its class, a peer's name, else the row's name."""
    name = str(row["name"]).partition(":")[0]
    return name if "/" in name else str(row.get("method") or row["name"]).partition("(")[0]


def styles(record: Record) -> dict[str, Style]:
    """Return the style of every row by its name."""
    found: dict[str, Style] = {}
    families: dict[str, int] = {}
    for row in ordered(record):
        if row["kind"] == "uncached":
            found[row["name"]] = Style(INK, "o", "-")
        elif row["kind"] == "fewer steps":
            found[row["name"]] = Style(GREY, "x", "-")
        else:
            kin = families.setdefault(family(row), 0)
            families[family(row)] += 1
            place = list(families).index(family(row))
            found[row["name"]] = Style(
                OKABE_ITO[place % len(OKABE_ITO)], MARKERS[place % len(MARKERS)], _DASHES[kin % len(_DASHES)]
            )
    return found


def styled(plot: Callable[P, Any]) -> Callable[P, Any]:
    """Draw with the project's settings in place of the user's."""

    @functools.wraps(plot)
    def inner(*args: P.args, **kwargs: P.kwargs) -> Any:
        with _matplotlib().rc_context(_SETTINGS):
            return plot(*args, **kwargs)

    return inner


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Any, Sequence[Any]]:
    """Return a figure of a size in inches, and its axes side by side."""
    _matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, columns, squeeze=False).flatten())


def picture_of(stem: str, title: str, caption: str, figure: Any) -> Picture:
    """Return a figure as PNG (160 dots an inch) and SVG; the same figure gives the same bytes."""
    found = {}
    with _matplotlib().rc_context(_SETTINGS):
        # Laid out once for both files; it is the most of the work. "none" in place of None would
        # leave an engine that does nothing, for which each file is drawn twice.
        figure.draw_without_rendering()
        figure.set_layout_engine(None)
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            target = io.BytesIO()
            figure.savefig(target, format=kind, dpi=DPI, metadata=metadata, facecolor="white")
            found[kind] = target.getvalue()
    return Picture(stem, title, caption, found["png"], found["svg"])


def legend_columns(names: Sequence[str], width: float, most: int = 4) -> int:
    """Return the number of columns, at most so many, in which names fit into a width in inches."""
    longest = max((len(name) for name in names), default=1)
    return max(1, min(len(names), most, int(width / (0.078 * longest + 0.62))))


def short(name: str) -> str:
    """Return a name cut in its middle to fit a label; a `$` in it is escaped, so that it starts no formula."""
    cut = name if len(name) <= 44 else f"{name[:21]}…{name[-21:]}"
    return " ".join(cut.split()).replace("$", r"\$")


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise PlotError("matplotlib is missing: pip install 'diffcache[eval]', or ask for --format csv") from error
    return matplotlib
