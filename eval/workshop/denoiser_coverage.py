"""Write what a cache finds and skips in every case of the zoo: the table of docs/coverage.md.

    python -m diffcache.eval.workshop.denoiser_coverage --write

How blocks are chained goes into a table of `diffcache inspect` as well.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import diffusers
import torch
from torch import nn

import diffcache
from diffcache.attach.anatomy import Anatomy
from diffcache.attach.reuse.reusing import FeatureReuse
from diffcache.attach.reuse.trace import Wiring
from diffcache.eval.pages import entries, keep_pages, rendered, table
from diffcache.eval.record import ROOT
from diffcache.pipelines.demo.console import progress
from diffcache.pipelines.demo.describe import EXCLUDED, STREAMS_FILE
from diffcache.step import Site
from tests.zoo.case import Case
from tests.zoo.catalog import cases

STEPS, EVERY = 12, 3
SITES = tuple(Site.of(name) for name in ("stack", "block", "module", "attention", "feed-forward", "model"))


@dataclass(frozen=True)
class Outcome:
    """A run of one case at one site: evaluations of blocks or modules, and why the site cannot be cached."""

    computed: int = 0
    skipped: int = 0
    refusal: str = ""

    def __str__(self) -> str:
        return "refused" if self.refusal else f"{self.skipped}/{self.computed + self.skipped}"


@dataclass(frozen=True)
class Row:
    """Findings on one case: how its lists of blocks are chained, and what a cache skips at each site."""

    case: Case
    anatomy: Anatomy
    wirings: dict[str, Wiring]
    outcomes: dict[Site, Outcome]


def trace(case: Case, model: nn.Module) -> dict[str, Wiring]:
    """Learn from one forward how the lists of blocks of a model are chained, in the order of the first calls."""
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


@functools.cache
def _all_rows() -> list[Row]:
    """Run every case of the zoo."""
    chosen, rows = sorted(cases().values(), key=lambda case: case.name), []
    with warnings.catch_warnings(), progress("models") as show:
        warnings.simplefilter("ignore")
        for number, case in enumerate(chosen):
            show(number, len(chosen), case.name)
            rows.append(look(case))
        show(len(chosen), len(chosen), "")
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """Write rows as Markdown."""
    stack = [row.outcomes[Site.STACK] for row in rows]
    skipped = sum(outcome.skipped for outcome in stack)
    works = {site: sum(row.outcomes[site].skipped > 0 for row in rows) for site in SITES}
    sites = [[f"`{row.case.name}`", _lists(row.anatomy), *(str(row.outcomes[site]) for site in SITES)] for row in rows]
    carried = [
        [f"`{row.case.name}`", f"`{key}`", _pairs(wiring, "{} → `{}`") or "nothing", wiring.source]
        for row in rows
        for key, wiring in row.wirings.items()
    ]
    refused = [
        [f"`{row.case.name}`", site.value, outcome.refusal]
        for row in rows
        for site, outcome in row.outcomes.items()
        if outcome.refusal
    ]
    return rendered(
        "workshop/coverage.md.jinja",
        steps=STEPS,
        every=EVERY,
        computed=len(range(0, STEPS, EVERY)),
        configurations=len(rows),
        classes=len({row.case.cls for row in rows}),
        version=diffusers.__version__,
        works=", ".join(f"{count} at `{site.value}`" for site, count in works.items()),
        skipped=f"{skipped:,}",
        total=f"{skipped + sum(outcome.computed for outcome in stack):,}",
        sites=_table(["case", "block lists (depth)", *(site.value for site in SITES)], sites, right=len(SITES)),
        streams=_table(["case", "list", "output → argument", "learned by"], carried),
        refused="\n".join(entries(["case", "site", "reason"], refused)),
        excluded=_table(["class", "reason"], [[f"`{k}`", v] for k, v in sorted(EXCLUDED.items())]),
    )


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
    return f"{_pairs(wiring, '{} -> {}') or 'nothing is carried'} (by {wiring.source})"


def _pairs(wiring: Wiring, form: str) -> str:
    return ", ".join(form.format(number, key) for number, key in wiring.carry.items())


def _lists(anatomy: Anatomy) -> str:
    lists = [f"`{entry.key}` ({entry.depth})" for entry in anatomy.lists]
    lists += [f"`{key}` (1)" for key in anatomy.singles]
    return ", ".join(lists)


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


main = keep_pages(made, ROOT / "docs" / "coverage.md", STREAMS_FILE)

if __name__ == "__main__":
    sys.exit(main())
