"""Compute each module at steps of its own, found by dynamic programming (BAC)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from diffcache.errors import TablesError
from diffcache.features.collect import Calibrated
from diffcache.features.combine import Combine
from diffcache.features.parts.dynamic import adjacent_costs, anchor_costs, best_starts
from diffcache.features.parts.instead import Reuse
from diffcache.features.parts.when import Table
from diffcache.features.schema import Entry, Schema, shown
from diffcache.features.tables import Tables
from diffcache.ranges import Count, Whole
from diffcache.step import Site

Metric = Literal["cosine", "mse", "l1", "l2", "wasserstein"]
PAIRS, SHIFT = "pairs.", "shift."  # with the site's name: the names of its tables
Objective = Literal["anchor", "adjacent"]
Schedules = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class BAC(Calibrated):
    """Compute every module at `count` steps of its own, and reuse its output at the others.

    Reference: Block-wise Adaptive Caching, arXiv 2506.13456. Sites are the outputs of
    self-attention, cross-attention and feed-forward of each layer. For each site a dynamic
    programme splits the run into `count` segments that are most alike inside (section 4.2,
    adaptive caching scheduler). Then the `union` sites whose outputs differ most between steps are
    also computed whenever the feed-forward of their own or a deeper layer is, so that no
    feed-forward is computed from stale inputs and kept (section 4.3, bubbling union). The paper
    keeps outputs after dropout, which at inference is the same; where attention and feed-forward
    are one fused projection, it counts as a feed-forward. Activations of more than 65,536 numbers
    are thinned evenly for the comparison.

    Paper and code differ in the objective; both are here. The official code maximises where the
    metric is l2, by a slip in a list of names; here distances are always minimised.

    Args:
        count: Computed steps of each site before the union, 1 to the steps of the run; as many as
            the run has turns the cache off. 10 of 100 in the paper.
        metric: Measure of two steps' likeness: `cosine`, `mse`, `l1`, `l2` or `wasserstein` (of the
            sorted activations). Measured by the calibration, which must have been made with it.
        objective: `anchor` sums how alike a segment's steps are to its first, as the official code
            does; `adjacent` sums how alike they are to the step before, as in the paper.
        union: Sites that take part in the bubbling union; 0 for none. 3 or 5 in the paper.
        official: Also compute the last step of the run at every site, and leave the union out for
            a single site, as the official code does (which names steps 99 and 100 whatever the
            run; for its 100 steps that is the last).
        tables: Measured pairs of steps: `pairs.<site>` and `shift.<site>`, each `[T, T]`. Any
            count, objective and union can be made from the same tables.

    Raises:
        TablesError: If the tables are of another metric.

    Examples:
        >>> seen = [{"observation": o} for o in observations]  # doctest: +SKIP
        >>> method = diffcache.calibrate(pipe, BAC(count=10), seen)  # doctest: +SKIP
        >>> pipe = diffcache.wrap(pipe, method)  # doctest: +SKIP
    """

    collected_by: ClassVar[str] = "diffcache.offline.bac_collect:PairCollector"
    schema: ClassVar[Schema] = Schema(
        {
            PAIRS + "{sites}": Entry(("steps", "steps"), low=-1.001, high=1.001),  # rounded
            SHIFT + "{sites}": Entry(("steps", "steps"), low=0, high=1e30),
        },
        header={"sites": "names", "metric": "text"},
    )

    count: Count = 10
    metric: Metric = "cosine"
    objective: Objective = "anchor"
    union: Whole = 5
    official: bool = False
    tables: Tables | str | None = None

    def check(self) -> None:
        """Raise unless the tables are pairs of this metric, and the settings fit them."""
        super().check()
        tables = self.tables
        if not isinstance(tables, Tables):
            return
        sites, steps, metric = tables.header["sites"], tables.steps, tables.header["metric"]
        if metric != self.metric:
            raise TablesError(
                f"tables={tables!r}: measured with metric={shown(metric)}, not {self.metric!r}; "
                "calibrate again, or set that metric"
            )
        if self.count > steps:
            raise ValueError(f"count={self.count}: must be at most the {steps} steps of the run")
        if self.union > len(sites):
            raise ValueError(f"union={self.union}: must be at most the {len(sites)} sites")

    def parts(self) -> Combine:
        """Return each site's own steps, reused; raise UncalibratedError if there are no tables."""
        return Combine(Table(self.schedules(), self.measured().steps), Reuse(), Site.MODULE)

    def schedules(self) -> Schedules:
        """Return the computed steps of every site, as the tables say, in the order in which the sites run."""
        tables = self.measured()
        sites = list(tables.header["sites"])
        made = {site: tuple(self.starts(tables[PAIRS + site])) for site in sites}
        if self.union and not (self.official and self.union == 1):
            shift = {site: _mean_shift(tables[SHIFT + site]) for site in sites}
            made = bubble(made, widest(shift, self.union))
        if self.official:
            made = {site: tuple(sorted({*u, tables.steps - 1})) for site, u in made.items()}
        return made

    def starts(self, pairs: Tensor) -> list[int]:
        """Return the `count` steps that the programme chooses, by how alike or far apart two steps are, `[T, T]`."""
        costs = anchor_costs if self.objective == "anchor" else adjacent_costs
        return best_starts(costs(pairs), self.count, maximise=self.metric == "cosine")[0]


def bubble(schedules: Mapping[str, Sequence[int]], chosen: Sequence[str]) -> Schedules:
    """Compute chosen sites whenever a feed-forward of their own or a deeper layer is; no site loses a step.

    Sites are taken in the order of `schedules`, in which they run, and a chosen feed-forward's
    larger schedule is seen by those after it (arXiv 2506.13456, section 4.3, as in the official
    code).
    """
    made = {site: tuple(steps) for site, steps in schedules.items()}
    layers = list(dict.fromkeys(layer_of(site) for site in made))
    depth = {site: layers.index(layer_of(site)) for site in made}
    for site in made:
        if site in chosen:
            fed = [made[f] for f in made if is_feed_forward(f) and depth[f] >= depth[site]]
            made[site] = tuple(sorted({*made[site], *(step for steps in fed for step in steps)}))
    return made


def widest(shift: Mapping[str, float], count: int) -> list[str]:
    """Return the `count` sites of the largest shift; of equal ones those that run first."""
    return sorted(shift, key=lambda site: -shift[site])[:count]


def _mean_shift(distances: Tensor) -> float:
    """Return the mean over pairs of different steps, 0 for a single step."""
    pairs = len(distances) * (len(distances) - 1) // 2
    return float(distances.double().triu(1).sum()) / max(pairs, 1)


def layer_of(site: str) -> str:
    """Return the path of the layer that a module is in, such as `decoder.layers.0`."""
    return re.sub(r"\.[^.]*[^.\d][^.]*(\.\d+)*$", "", site)


def is_feed_forward(site: str) -> bool:
    """Return whether a module is a feed-forward, or has one in it, judged by its name."""
    return "att" not in re.sub(r"(\.\d+)*$", "", site).rpartition(".")[2]
