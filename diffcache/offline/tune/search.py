"""The search: find on every ladder where the goal begins to be met, then refine the best.

Costs that are known in advance spare trials: the operations of a method that lists its steps follow
from those of another at the same site. So a schedule is only run if it could change the choice. An
optimizer that knows nothing of this (optuna's TPE) takes nine to twelve steps in as many trials
where nine are enough, on the landscape of the tests.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean

import torch

from diffcache.errors import AttachError
from diffcache.features.base import Method
from diffcache.features.combine import reuse_of
from diffcache.features.fitted import FittedForecast
from diffcache.features.tuned import Measure
from diffcache.offline.tune import space
from diffcache.offline.tune.trial import Bench, Trial

BEST = 3  # methods that are validated
Tried = dict[str, tuple[Method, Trial]]


@dataclass(frozen=True)
class Goal:
    """Goal of a search; one of all but the last.

    Attributes:
        speedup: Least ratio of the uncached run's floating-point operations of the denoiser to
            the cached run's.
        psnr: Least mean PSNR to the uncached output, in dB.
        seconds: Most seconds a batch.
        lpips: Most mean LPIPS to the uncached output.
        right: Whether samples have to be right where the uncached output is; needs a confidence.
        confidence: Share of the samples that are close enough, each for itself; None for their
            mean.
    """

    speedup: float | None = None
    psnr: float | None = None
    seconds: float | None = None
    lpips: float | None = None
    right: bool = False
    confidence: float | None = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("speedup", "psnr", "seconds", "lpips")}
        given = {name: value for name, value in given.items() if value is not None}
        if self.right:
            given["right"] = True
        if len(given) != 1:
            raise ValueError(
                f"goal {given}: give one of speedup=, psnr=, seconds=, lpips= and right="
            )
        if self.confidence is not None:
            if self.bar is None:
                raise ValueError(
                    f"confidence={self.confidence!r}: goes with psnr=, lpips= or right=, give one"
                )
            if not 0 < self.confidence < 1:
                raise ValueError(f"confidence={self.confidence!r}: must be between 0 and 1")
        elif self.right:
            raise ValueError("right=: needs confidence=, such as confidence=0.9")
        ((name, value),) = given.items()
        if not value > (1 if name == "speedup" else 0):
            raise ValueError(f"{name}={value!r}: must be above {1 if name == 'speedup' else 0}")

    @property
    def measure(self) -> Measure:
        """Kind of the score that samples have to reach."""
        return "right" if self.right else "psnr" if self.lpips is None else "lpips"

    @property
    def bar(self) -> float | None:
        """Score that samples have to reach, higher for the closer; None where cost is the goal."""
        if self.right:
            return 1.0
        return self.psnr if self.lpips is None else -self.lpips

    @property
    def limit(self) -> float | None:
        """Highest price that meets the goal, None where closeness is the goal."""
        return 1 / self.speedup if self.speedup is not None else self.seconds

    def price(self, trial: Trial) -> float:
        """Return the cost of a trial: seconds if they are the goal, else its share of FLOPs."""
        return trial.cost if self.seconds is None else trial.seconds

    def met(self, trial: Trial) -> bool:
        """Return whether a trial meets the goal."""
        if self.limit is not None:
            return self.price(trial) <= self.limit * (1 + 1e-9)
        assert self.bar is not None
        if self.confidence is not None:
            return trial.reached(self.confidence) >= self.bar
        return (mean(trial.scores) if trial.scores else trial.psnr_db) >= self.bar

    def rank(self, trial: Trial) -> tuple[bool, float, float]:
        """Return the rank of a trial, larger for the better."""
        met, price = self.met(trial), self.price(trial)
        if met == (self.bar is not None):  # close enough, or not yet cheap enough
            return met, -price, trial.psnr_db
        return met, trial.psnr_db, -price


@dataclass
class Search:
    """A search in progress.

    Attributes:
        bench: Runs the methods.
        goal: Goal of the search.
        batches: Batches to search on; the others validate.
        trials: Number of methods that may be tried.
        progress: Called with what is done, what there is in all, and the best so far.
        seen: Every method that was tried on all search batches, and what it did.
        first: The same of first looks, on one batch.
        refused: Method -> why this model cannot run it.
        unreached: Ladders that were not looked at for want of trials.
        glance: Number of batches of a first look.
    """

    bench: Bench
    goal: Goal
    batches: list[int]
    trials: int
    progress: Callable[[int, int, str], None] | None = None
    seen: Tried = field(default_factory=dict)
    first: Tried = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    unreached: int = 0
    used: int = 0
    glance: int = 1
    _allowed: int = 0
    _kind_of: dict[str, Method] = field(default_factory=dict)  # of what is on other steps
    _prices: dict[str, dict[int, float]] = field(default_factory=dict)

    def run(self, ladders: Sequence[space.Ladder]) -> None:
        """Look at every ladder, then at other schedules of the best, and refine these.

        Three fifths of the trials at most go to ladders and three quarters to first looks, which
        are on one batch.
        """
        self._allowed = max(1, self.trials * 3 // 5)
        for ladder in ladders:
            self.unreached += self.used >= self._allowed
            self.look(ladder)
        self._allowed = max(1, self.trials * 3 // 4)
        kinds = self._best_kinds(ladders)
        for method in self._listed(2):
            for steps in space.schedules(space.steps_listed(method), kinds, self.bench.total):
                self.attempt(self._on_steps(method, steps), self.batches[: self.glance], self.first)
        for steps in dict.fromkeys(map(space.steps_listed, self._listed(3))):
            for kind in kinds:
                self.attempt(self._on_steps(kind, steps), self.batches[: self.glance], self.first)
        self._allowed = self.trials
        for method, _ in self._hopeful()[: max(BEST, self.trials // 16)]:
            self.attempt(method, self.batches, self.seen)
        self._refine()

    def best(self, tried: Tried) -> list[tuple[Method, Trial]]:
        """Return the trials, the best first."""
        return sorted(tried.values(), key=lambda pair: self.goal.rank(pair[1]), reverse=True)

    def look(self, ladder: space.Ladder) -> None:
        """Find on one batch the rung at which the goal begins, or ceases, to be met."""
        low, high, is_bounded = 0, len(ladder) - 1, False
        while True:
            while high >= low and self._is_hopeless(ladder[high], self.first):
                high, is_bounded = high - 1, True
            if low > high:
                return
            # below what is hopeless the top rung alone tells most: it fails, or is the best
            middle = high if is_bounded else (low + high) // 2
            trial = self.attempt(ladder[middle], self.batches[: self.glance], self.first)
            if trial is None or self._is_beaten(trial):
                return
            if self.goal.met(trial) == (self.goal.bar is not None):
                high = middle - 1
            else:
                low = middle + 1

    def attempt(self, method: Method, batches: list[int], into: Tried) -> Trial | None:
        """Measure a method if it fits the model, may change the choice, and trials are left."""
        key = repr(method)
        if key in into:
            return into[key][1]
        if key in self.refused or self.used >= self._allowed or self._is_hopeless(method, into):
            return None
        if self.progress is not None:
            best = self.best(into)[:1]
            word = f"{best[0][1].psnr_db:.1f} dB at {best[0][1].cost:.0%}" if best else ""
            self.progress(self.used + 1, self.trials, word)
        try:
            trial = self.bench.measure(method, batches)
        except (AttachError, torch.OutOfMemoryError) as error:
            self.refused[key] = str(error)
            return None
        self.used += 1
        into[key] = method, trial
        place, steps = _place(method)
        if steps:
            self._prices.setdefault(place, {})[steps] = self.goal.price(trial)
        return trial

    def _refine(self) -> None:
        """Climb from the best few, then from the best that nothing was tried around."""
        done: set[str] = set()
        waiting = self._starts(done)[:BEST]
        while self.used < self.trials and (waiting or self._starts(done)):
            better: Method | None = waiting.pop(0) if waiting else self._starts(done)[0]
            while better is not None:
                done.add(repr(better))
                better = self._improved(better)

    def _starts(self, done: set[str]) -> list[Method]:
        """Return methods around which something may be better, the best first."""
        return [
            method
            for method, trial in self.best(self.seen)
            if repr(method) not in done
            and space.steps_listed(method)
            and (self.goal.met(trial) or not self._is_hopeless(method, self.seen))
        ]

    def _improved(self, method: Method) -> Method | None:
        """Return the first neighbor of a method that ranks higher, None if there is none.

        Neighbors drop or add a computed step, or move one or two.
        """
        steps, trial = space.steps_listed(method), self.seen[repr(method)][1]
        total, order = self.bench.total, random.Random(0)
        # what is close enough can get cheaper, what is cheap enough closer, and the reverse
        if self.goal.met(trial) == (self.goal.bar is not None):
            groups = [space.drops(steps)]
        else:
            pairs = space.moves(steps, total, together=2)
            groups = [space.additions(steps, total), space.moves(steps, total), pairs]
        for group in groups:
            order.shuffle(group)
        for other in itertools.chain(*groups):
            neighbor = self._on_steps(method, other)
            if repr(neighbor) in self.seen:
                continue  # a start of its own
            found = self.attempt(neighbor, self.batches, self.seen)
            if found is not None and self.goal.rank(found) > self.goal.rank(trial):
                return neighbor
        return None

    def dearer(self, ladders: Sequence[space.Ladder], method: Method) -> list[Method]:
        """Return settings of a method's ladder that are dearer, the nearest first.

        Ladders of one rung, as methods of a user's are, count as one ladder: all of them.
        """
        if all(len(ladder) == 1 for ladder in ladders):
            return [ladder[0] for ladder in ladders if ladder[0] != method]
        kind, steps = repr(self._kind_of.get(repr(method), method)), len(space.steps_listed(method))
        for ladder in ladders:
            keys = [repr(rung) for rung in ladder]
            if repr(method) in keys:
                return list(ladder[keys.index(repr(method)) + 1 :])
            if kind in keys:
                return [rung for rung in ladder if _place(rung)[1] > steps]
        return []

    def _on_steps(self, method: Method, steps: tuple[int, ...]) -> Method:
        """Return a method on other steps, its weights fitted anew."""
        kind = self._kind_of.get(repr(method), method)
        changed = space.with_steps(kind, steps, self.bench.total)
        self._kind_of[repr(changed)] = kind
        return changed

    def _best_kinds(self, ladders: Sequence[space.Ladder]) -> list[Method]:
        """Return one method of each of the better two thirds of the ladders that list steps."""
        looks = [repr(method) for method, _ in self._hopeful()]

        def place(ladder: space.Ladder) -> int:
            return min((looks.index(repr(m)) for m in ladder if repr(m) in looks), default=999)

        listed = sorted((ladder for ladder in ladders if _place(ladder[0])[1]), key=place)
        return [ladder[0] for ladder in listed[: math.ceil(len(listed) * 2 / 3)]]

    def _hopeful(self) -> list[tuple[Method, Trial]]:
        """Return first looks, the best first; for a PSNR the best and the cheaper ones."""
        ranked = self.best(self.first)
        met = [pair for pair in ranked if self.goal.met(pair[1])]
        if met and self.goal.bar is None:
            return met
        bar = self.goal.price(met[0][1]) if met else math.inf
        return met[:1] + [pair for pair in ranked if self.goal.price(pair[1]) < bar]

    def _listed(self, count: int) -> list[Method]:
        """Return the best few hopeful methods that list their steps."""
        return [method for method, _ in self._hopeful() if space.steps_listed(method)][:count]

    def _is_beaten(self, trial: Trial) -> bool:
        """Return whether a trial misses the goal and another is as cheap and as close."""
        best = self.best(self.first)[0][1]
        price = self.goal.price
        return (
            not self.goal.met(trial)
            and self.goal.met(best)
            and price(best) <= price(trial)
            and best.psnr_db >= trial.psnr_db
        )

    def _is_hopeless(self, method: Method, tried: Tried) -> bool:
        """Return whether the price of a method, as far as it is known, rules it out unseen."""
        price = self._price(method)
        if self.goal.limit is not None:
            return price > self.goal.limit * (1 + 1e-9)
        best = self.best(tried)[:1]
        return bool(best) and self.goal.met(best[0][1]) and price >= best[0][1].cost * (1 - 1e-9)

    def _price(self, method: Method) -> float:
        """Return the cost of a method, judged by its first look or its number of steps, else 0."""
        if repr(method) in self.first:
            return self.goal.price(self.first[repr(method)][1])
        place, steps = _place(method)
        # the first place is the denoiser itself, at which skipping costs least
        known = self._prices.get(place) or next(iter(self._prices.values()), None)
        if not known or not steps:
            return 0.0
        near = min(known, key=lambda count: abs(count - steps))
        total, full = self.bench.total, self.bench.uncached_seconds if self.goal.seconds else 1.0
        return full - (full - known[near]) * (total - steps) / max(total - near, 1)


def _place(method: Method) -> tuple[str, int]:
    """Return where a method skips and how many steps it lists, 0 if it lists none."""
    if isinstance(method, FittedForecast):  # whose schedule takes a while to find
        return repr((method.site, 0, 0)), method.computed
    reuse = reuse_of(method)
    if reuse is None:
        return "", 0
    return repr((reuse.site, reuse.lead, reuse.tail)), len(space.steps_listed(method))


def front_of(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials than which no other is both cheaper and closer, the cheapest first."""
    front: list[Trial] = []
    for trial in sorted(trials, key=lambda t: (t.cost, -t.psnr_db)):
        if not front or trial.psnr_db > front[-1].psnr_db:
            front.append(trial)
    return front
