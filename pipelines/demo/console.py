"""Console of the command line: tables, one progress bar, and silence for libraries."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, TypeVar

Progress = Callable[..., None]
Item = TypeVar("Item")
SECONDS = 5.0  # between lines of progress where there is no terminal


def console() -> Any:
    """Return a console on standard output; without a terminal it is 100 columns wide."""
    import shutil

    from rich.console import Console

    return Console(width=shutil.get_terminal_size((100, 24)).columns)


def print_rows(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows as a table, without colors unless to a terminal."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*map(escape, row))
    console().print(table, highlight=False)


@contextmanager
def progress(label: str) -> Iterator[Progress]:
    """Show a bar on standard error; call the yielded function with (done, total[, next item]).

    The bar is drawn when it is told something and never in between, so that it takes no time
    from what is being measured. Without a terminal a line is written every few seconds.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    screen = Console(stderr=True)
    if not screen.is_terminal:
        with _logged(label) as log:
            yield log
        return
    with Bar(*columns, console=screen, auto_refresh=False, transient=True) as bar:
        task = bar.add_task(label, total=None)

        def show(done: int, total: int, following: str = "") -> None:
            words = f"{label} {following}".strip()
            bar.update(task, completed=done, total=total or None, description=words, refresh=True)

        yield show


@contextmanager
def _logged(label: str) -> Iterator[Progress]:
    """Write the latest progress to standard error every few seconds."""
    over, started, last = Event(), time.monotonic(), [label]

    def show(done: int, total: int, following: str = "") -> None:
        last[0] = f"{f'{label} {following}'.strip()}: {done} of {total}"

    def write() -> None:
        while not over.wait(SECONDS):
            taken = time.monotonic() - started
            print(f"{last[0]}, {taken:.0f} s", file=sys.stderr, flush=True)

    Thread(target=write, daemon=True).start()
    try:
        yield show
    finally:
        over.set()


def tracked(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """Yield items, and show on a bar how many of the total have been taken."""
    with progress(label) as show:
        for number, item in enumerate(items):
            show(number, total)
            yield item


def quiet() -> None:
    """Keep diffusers and transformers from printing bars and notices while they load."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r"(?s).*flex_attention called without torch.compile")
