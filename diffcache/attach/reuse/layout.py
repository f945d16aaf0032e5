"""Hold the taps of the blocks of one kind of call, on computed and on skipped steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diffcache.attach.reuse.trace import Wiring

Place = tuple[str, int]  # a list of blocks and an index in it


@dataclass(frozen=True)
class BlockWork:
    """The work of the blocks in one kind of call."""

    counts: dict[str, tuple[int, int]]  # list -> (blocks that run, blocks that are skipped)
    # their operations, of those that run and of those that are skipped; None where a block's could not be counted
    flops: tuple[float, float] | None


def work_of(costs: list[tuple[Place, float | None]], skipped: set[Place]) -> BlockWork:
    """Return the work of a call in which some blocks are skipped."""
    counts: dict[str, tuple[int, int]] = {}
    flops, known = [0.0, 0.0], True
    for place, cost in costs:
        ran, left_out = counts.get(place[0], (0, 0))
        counts[place[0]] = (ran + (place not in skipped), left_out + (place in skipped))
        flops[place in skipped] += cost or 0.0
        known = known and cost is not None
    return BlockWork(counts, (flops[0], flops[1]) if known else None)


Mix = tuple[dict[str, list[Any]], BlockWork]


@dataclass
class Layout:
    """Stand-ins for every list of blocks, on computed and on skipped steps."""

    compute: dict[str, list[Any]]  # list -> its modules, with taps where features are taken
    skip: dict[str, list[Any]]  # list -> stand-ins for the skipped blocks
    follow: dict[str, list[Any]]  # form of `skip` for branches that need no probe and whose lead blocks may be skipped
    whole: BlockWork  # work of a computed step
    less: BlockWork  # work of a skipped step
    follow_less: BlockWork  # work of a skipped step in branches that `follow`
    closes: int  # number of spans of several blocks that a skipped step must close
    wirings: dict[str, Wiring]  # wiring of each list
    foreseen: list[tuple[str, int]]  # blocks whose estimates are made at the start of a skipped step
    lead_calls: list[tuple[str, int]]  # the lead blocks
    streams: dict[str, list[Any]]  # list -> where its first block may take the stream of the sample, likeliest first
    costs: list[tuple[Place, float | None]]  # the blocks in the order of their calls, with the operations of each
    look: float | None = None  # operations of the gate's look into the first block, None until it was counted
    # items to hand out while a decision waits for its probe, once they were needed
    gated: dict[str, list[Any]] | None = None
    sites: dict[str, set[Place]] = field(default_factory=dict)  # site that decides apart -> its blocks
    mixes: dict[frozenset[str], Mix] = field(default_factory=dict)  # skipped sites -> what `mix` returns of them

    def mix(self, skipped: frozenset[str]) -> Mix:
        """Return the items where only some sites are skipped, and the work of the call."""
        if skipped not in self.mixes:
            places = {place for site in skipped for place in self.sites[site]}
            items = {
                key: [
                    (self.skip if (key, index) in places else self.compute)[key][index] for index in range(len(group))
                ]
                for key, group in self.compute.items()
            }
            self.mixes[skipped] = items, work_of(self.costs, places)
        return self.mixes[skipped]
