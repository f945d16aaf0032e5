"""Write what a cache finds and skips in every case of the zoo: the table of docs/coverage.md.

    python -m diffcache.eval.workshop.coverage --write

How blocks are chained goes into a table of `diffcache inspect` as well.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import diffcache
from diffcache.attach.anatomy import Anatomy
from diffcache.attach.reuse.extension import FeatureReuse
from diffcache.attach.reuse.trace import Wiring
from diffcache.eval.pages import entries, keep_pages, table
from diffcache.eval.record import ROOT
from diffcache.pipelines.demo.console import progress
from diffcache.pipelines.demo.describe import EXCLUDED, STREAMS_FILE
from diffcache.step import Site
from tests.zoo.case import Case
from tests.zoo.catalog import cases

STEPS, EVERY = 12, 3
SITES = tuple(Site.of(name) for name in ("stack", "block", "module", "attention", "feed-forward", "model"))
_HEAD = """# Coverage

What diffcache finds in the denoisers of diffusers, and what it skips in them. Written by
`python -m diffcache.eval.workshop.coverage --write`; every number is counted in a real run of a
tiny random model of the class ({steps} steps, `Interval(every={every})`, which computes {computed}
of them), none is estimated.

"""


@dataclass(frozen=True)
class Outcome:
    """A run of one case at one site.

    Attributes:
        computed: Block or module evaluations that ran.
        skipped: Those that were skipped.
        refusal: Reason why the site cannot be cached, empty where it can.
    """

    computed: int = 0
    skipped: int = 0
    refusal: str = ""

    def __str__(self) -> str:
        if self.refusal:
            return "refused"
        return f"{self.skipped}/{self.computed + self.skipped}"


@dataclass(frozen=True)
class Row:
    """Findings on one case."""

    case: Case
    anatomy: Anatomy
    wirings: dict[str, Wiring]
    outcomes: dict[Site, Outcome]


def trace(case: Case, model: nn.Module) -> dict[str, Wiring]:
    """Learn how the lists of blocks of a model are chained, from one forward.

    Args:
        case: The case the model was built from.
        model: The model.

    Returns:
        List -> wiring, in the order of the first calls.

    Raises:
        AttachError: If the model cannot be cached at the site `stack`.
    """
    with diffcache.wrapped(model, diffcache.Interval(EVERY)) as handle, torch.no_grad():
        model(**case.kwargs(model, 0, step=0, steps=STEPS))
        (reuse,) = handle.denoisers[0].extensions
        assert isinstance(reuse, FeatureReuse)
        layouts = list(reuse.setup.layouts.values())
        wirings = layouts[0].wirings if layouts else {}
        return {key: _named(wiring, model.get_submodule(key)) for key, wiring in wirings.items()}


def _named(wiring: Wiring, blocks: nn.Module) -> Wiring:
    """Return a wiring that gives positional arguments by their names in the blocks' forward."""
    block = next(iter(blocks)) if isinstance(blocks, nn.ModuleList) else blocks
    names = list(inspect.signature(type(block).forward).parameters)[1:]
    carry = {
        number: names[key] if isinstance(key, int) and key < len(names) else key
        for number, key in wiring.carry.items()
    }
    return replace(wiring, carry=carry)


def inputs(case: Case, model: nn.Module, timestep: str | None, step: int) -> dict[str, Any]:
    """Make a case's arguments at a step.

    Where the blocks do not use the timestep, the case leaves it as it is; it is what tells the
    steps of a bare model, so it is made to fall here as well.
    """
    made = case.kwargs(model, 0, step=step, steps=STEPS)
    if not case.timestep and timestep in made:
        made[timestep] = torch.full_like(made[timestep], STEPS - step)
    return made


def run(case: Case, model: nn.Module, site: Site) -> Outcome:
    """Run a model over twelve steps with every third computed, and count."""
    try:
        handle = diffcache.wrapped(model, diffcache.Interval(EVERY, site=site))
    except diffcache.AttachError as error:
        return Outcome(refusal=str(error))
    with handle, handle.told(STEPS), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", diffcache.CacheWarning)
        computed = skipped = 0
        try:
            for step in range(STEPS):
                model(**inputs(case, model, handle.denoisers[0].anatomy.timestep, step))
                call = handle.last.calls[-1]
                computed += sum(ran for ran, _ in call.counts.values())
                skipped += sum(left for _, left in call.counts.values())
        except diffcache.AttachError as error:
            return Outcome(refusal=str(error))
        except Exception as error:  # a fault, to be seen in the table
            words = re.sub(r"0x[0-9a-f]+", "0x...", str(error))[:200]
            return Outcome(refusal=f"FAULT, {type(error).__name__}: {words}")
    return Outcome(computed, skipped)


def look(case: Case) -> Row:
    """Build a case and run it at every site."""
    model = case.build(0)
    anatomy = diffcache.inspect(model)
    if not isinstance(anatomy, Anatomy):
        raise TypeError(f"{case.name}: a zoo case builds one model, not a pipeline")
    outcomes = {site: run(case, model, site) for site in SITES}
    wirings = {} if outcomes[Site.STACK].refusal else trace(case, model)
    return Row(case, anatomy, wirings, outcomes)


def look_at_all(show: Callable[[int, int, str], None]) -> list[Row]:
    """Run every case of the zoo.

    Args:
        show: Called before every case with (cases done, cases in all, name of the case).
    """
    chosen = sorted(cases().values(), key=lambda case: case.name)
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, case in enumerate(chosen):
            show(number, len(chosen), case.name)
            rows.append(look(case))
    show(len(chosen), len(chosen), "")
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """Write rows as Markdown."""
    import diffusers

    head = _HEAD.format(steps=STEPS, every=EVERY, computed=len(range(0, STEPS, EVERY)))
    parts = [head + _summary(rows, diffusers.__version__)]
    titles = ["case", "block lists (depth)", *(site.value for site in SITES)]
    lines = [[f"`{row.case.name}`", _lists(row.anatomy), *(str(row.outcomes[site]) for site in SITES)] for row in rows]
    parts.append("## Sites\n\nSkipped evaluations of blocks or modules, out of all.\n")
    parts.append(_table(titles, lines, right=len(SITES)))
    parts.append(
        "## Streams\n\nWhich output of a block the next block takes as which argument. *identity*: "
        "the very tensors were seen to travel; *shape*: the model's loop changes them in between.\n"
    )
    lines = [
        [f"`{row.case.name}`", f"`{key}`", _carry(wiring), wiring.source]
        for row in rows
        for key, wiring in row.wirings.items()
    ]
    parts.append(_table(["case", "list", "output → argument", "learned by"], lines))
    parts += _refusals(rows)
    parts.append("## Not denoisers\n")
    parts.append(_table(["class", "reason"], [[f"`{k}`", v] for k, v in sorted(EXCLUDED.items())]))
    return "\n".join(parts)


def streams(rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """Return how the lists of every class are chained, a line each, as `diffcache inspect` prints.

    Of a class with several cases it is the one without a suffix.
    """
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        if row.case.name == row.case.cls and row.wirings:
            found[row.case.cls] = {key: _line(wiring) for key, wiring in row.wirings.items()}
    return found


def _line(wiring: Wiring) -> str:
    pairs = [f"{number} -> {key}" for number, key in wiring.carry.items()]
    return f"{', '.join(pairs) or 'nothing is carried'} (by {wiring.source})"


def _summary(rows: Sequence[Row], version: str) -> str:
    classes = {row.case.cls for row in rows}
    words = []
    for site in SITES:
        works = sum(row.outcomes[site].skipped > 0 for row in rows)
        words.append(f"{works} at `{site.value}`")
    stack = [row.outcomes[Site.STACK] for row in rows]
    skipped = sum(outcome.skipped for outcome in stack)
    total = skipped + sum(outcome.computed for outcome in stack)
    return (
        f"**{len(rows)} configurations of {len(classes)} classes (diffusers {version}); skipping "
        f"works in {', '.join(words)}. At `stack`, {skipped:,} of {total:,} block evaluations were "
        f"skipped.**\n"
    )


def _lists(anatomy: Anatomy) -> str:
    lists = [f"`{entry.key}` ({entry.depth})" for entry in anatomy.lists]
    lists += [f"`{key}` (1)" for key in anatomy.singles]
    return ", ".join(lists)


def _carry(wiring: Wiring) -> str:
    pairs = [f"{number} → `{key}`" for number, key in wiring.carry.items()]
    return ", ".join(pairs) or "nothing"


def _refusals(rows: Sequence[Row]) -> list[str]:
    lines = [
        [f"`{row.case.name}`", site.value, outcome.refusal]
        for row in rows
        for site, outcome in row.outcomes.items()
        if outcome.refusal
    ]
    if not lines:
        return []
    head = "## Refused\n\nA site that cannot be cached is an error that says why.\n"
    return [head, *entries(["case", "site", "reason"], lines), ""]


def _table(titles: Sequence[str], lines: Iterable[Sequence[str]], right: int = 0) -> str:
    """Return a Markdown table whose last `right` columns are aligned to the right."""
    rows = [[re.sub(r"\s+", " ", cell) for cell in line] for line in lines]
    head, _, *rest = table(titles, rows)
    marks = ["---"] * (len(titles) - right) + ["---:"] * right
    return "\n".join([head, f"| {' | '.join(marks)} |", *rest]) + "\n"


def made(text: str) -> str:
    """Return docs/coverage.md, or the table of streams where the text that is there is JSON.

    Both are the same on every run with the same versions.
    """
    rows = _all_rows()
    return json.dumps(streams(rows), indent=1) + "\n" if text.startswith("{") else markdown(rows)


@functools.cache
def _all_rows() -> list[Row]:
    with progress("models") as show:
        return look_at_all(show)


main = keep_pages(made, ROOT / "docs" / "coverage.md", STREAMS_FILE)

if __name__ == "__main__":
    sys.exit(main())
