"""The search: look at every family where the goal begins to be met, halve, and refine the best.

First looks are on one batch. Of them, the better half goes on with every batch more, and in the end the best are
changed step by step; a change is stopped as soon as it is behind on the same samples. The best methods of the catalog
go on with them as they are, so that the choice is behind none of them but by chance.

Costs that are known in advance spare trials: the operations of a method that lists its steps follow from those of
another at the same site. So a schedule is only run if it could change the choice. An optimizer that knows nothing of
this (optuna's TPE) takes nine to twelve steps in as many trials where nine are enough, on the landscape of the tests.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev

import torch

from diffcache.errors import AttachError
from diffcache.features.base import Method
from diffcache.features.combine import Combine, reuse_of
from diffcache.features.dpcache import DPCache
from diffcache.features.fitted import FittedForecast
from diffcache.features.tuned import Measure
from diffcache.offline.tune import space
from diffcache.offline.tune.trial import Trial, Trials, joined
from diffcache.step import Site

BEST = 3  # methods that are validated
FEWEST = 3  # samples before a trial may be stopped
UNKNOWN = 0.8  # expected rank of a trait that nobody had yet, 0 to 1
Tried = dict[str, tuple[Method, Trial]]
Run = Callable[[Method, int], Trial | None]  # of a batch


@dataclass(frozen=True)
class Goal:
    """Goal of a search; one of all but the last."""

    # least ratio of the uncached run's floating-point operations of the denoiser to the cached run's
    speedup: float | None = None
    psnr: float | None = None  # least mean PSNR to the uncached output, in dB
    seconds: float | None = None  # most seconds a batch
    lpips: float | None = None  # most mean LPIPS to the uncached output
    right: bool = False  # whether samples have to be right where the uncached output is; needs a confidence
    confidence: float | None = None  # share of the samples that are close enough, each for itself; None for their mean

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("speedup", "psnr", "seconds", "lpips")}
        given = {name: value for name, value in given.items() if value is not None}
        if self.right:
            given["right"] = True
        if len(given) != 1:
            raise ValueError(f"goal {given}: give one of speedup=, psnr=, seconds=, lpips= and right=")
        if self.confidence is not None:
            if self.bar is None:
                raise ValueError(f"confidence={self.confidence!r}: goes with psnr=, lpips= or right=, give one")
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
    """A search in progress."""

    bench: Trials  # runs the methods
    goal: Goal
    batches: list[int]  # batches to search on; the others validate
    trials: int  # budget: as many methods as may be run on all batches; a run on one is a part of one
    # called with the trials done, their number in all, and the best so far
    progress: Callable[[int, int, str], None] | None = None
    glance: int = 1  # number of batches of a first look
    seen: Tried = field(default_factory=dict)  # methods that ran on all search batches, with their trials
    first: Tried = field(default_factory=dict)  # methods that had a first look, with its trial on the first batches
    refused: dict[str, str] = field(default_factory=dict)  # method -> reason for which this model cannot run it
    skipped: dict[str, str] = field(default_factory=dict)  # family that was not looked at -> reason
    stopped: int = 0  # number of trials that were stopped early, as they could not win any more
    # methods that were left when halving was over, before any was refined
    leaders: list[str] = field(default_factory=list)
    _allowed: int = 0
    _ran: dict[str, dict[int, Trial]] = field(default_factory=dict)  # method -> batch -> trial
    _kind_of: dict[str, Method] = field(default_factory=dict)  # of what is on other steps
    _prices: dict[str, dict[int, float]] = field(default_factory=dict)
    _steps: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def run(self, families: Sequence[space.Rungs]) -> None:
        """Look at every family, then at other schedules of the best, halve these, refine the rest.

        Three fifths of the budget at most go to families and three quarters to first looks.
        """
        self._spend(3 / 5)
        self._look_at(families)
        self._spend(3 / 4)
        kinds = self._best_kinds(families)
        for method in self._listed(2):
            for steps in space.schedules(self.steps(method), kinds, self.bench.total):
                self._glance_at(self._on_steps(method, steps))
        for steps in dict.fromkeys(map(self.steps, self._listed(3))):
            for kind in kinds:
                self._glance_at(self._on_steps(kind, steps))
        for gate in [m for m, _ in self._hopeful() if not self.steps(m)][:2]:
            for kind in kinds[:BEST]:
                made = space.with_forecast(gate, kind)
                if made is not None:
                    self._glance_at(made)
        self._spend(1)
        self._halve()
        self._refine()

    @property
    def runs(self) -> int:
        """Number of runs of a batch so far."""
        return sum(map(len, self._ran.values()))

    @property
    def tried(self) -> int:
        """Number of methods that ran on any batch."""
        return len(self._ran)

    def steps(self, method: Method) -> tuple[int, ...]:
        """Return the computed steps of a method whose schedule is fixed, none of another."""
        key = repr(method)
        if key not in self._steps:
            self._steps[key] = space.steps_listed(method, self.bench.total)
        return self._steps[key]

    @staticmethod
    def whole(methods: Sequence[Method]) -> list[Method]:
        """Return the first few methods of the catalog: those that were not put together here."""
        return [method for method in methods if not isinstance(method, Combine)][:BEST]

    def best(self, tried: Tried) -> list[tuple[Method, Trial]]:
        """Return the trials, the best first."""
        return sorted(tried.values(), key=lambda pair: self.goal.rank(pair[1]), reverse=True)

    def _spend(self, share: float) -> None:
        """Let so large a share of the budget be used up."""
        self._allowed = max(1, int(share * self.trials * len(self.batches) + 1e-9))

    # first looks ---------------------------------------------------------------------------

    def _look_at(self, families: Sequence[space.Rungs]) -> None:
        """Look at families, next always the one whose neighbors did best."""
        waiting, ranks = list(families), dict[space.Rungs, Trial]()
        for family in families:
            self.skipped[str(family)] = "no trials were left"
        while waiting and self.runs < self._allowed:
            expected = self._expected(waiting, ranks)
            family = waiting.pop(expected.index(max(expected)))
            self._find_start(family.ladder)
            keys = [repr(rung) for rung in family.ladder]
            looks = {key: self.first[key] for key in keys if key in self.first}
            reason = next((self.refused[key] for key in keys if key in self.refused), "")
            if looks:
                ranks[family] = self.best(looks)[0][1]
                self.skipped.pop(str(family), None)  # of two alike one is enough
            elif self.runs < self._allowed or reason:
                self.skipped[str(family)] = reason or "no setting of it could change the choice"

    def _expected(self, waiting: Sequence[space.Rungs], ranks: dict[space.Rungs, Trial]) -> list[float]:
        """Return how well families should do, 0 to 1, by those that share a trait with them.

        A trait that nobody had yet counts for more than the middle, so that every kind is seen, but
        not before all that resembles the best.
        """
        order = sorted(ranks, key=lambda family: self.goal.rank(ranks[family]))
        places: dict[str, list[float]] = {}
        for place, family in enumerate(order, 1):
            for trait in family.traits:
                places.setdefault(trait, []).append(place / len(order))
        return [
            mean([mean(places.get(trait, [UNKNOWN])) for trait in family.traits] or [UNKNOWN]) for family in waiting
        ]

    def _find_start(self, ladder: space.Ladder) -> None:
        """Find by first looks the rung at which the goal begins, or ceases, to be met."""
        low, high, is_bounded = 0, len(ladder) - 1, False
        while True:
            while high >= low and self._is_hopeless(ladder[high], self.first):
                high, is_bounded = high - 1, True
            if low > high:
                return
            # below what is hopeless the top rung alone tells most: it fails, or is the best
            middle = high if is_bounded else (low + high) // 2
            trial = self._glance_at(ladder[middle])
            if trial is None or self._is_beaten(trial):
                return
            if self.goal.met(trial) == (self.goal.bar is not None):
                high = middle - 1
            else:
                low = middle + 1

    def _glance_at(self, method: Method) -> Trial | None:
        """Measure a method on the first batches, if that may change the choice."""
        return self.attempt(method, self.batches[: self.glance], self.first)

    # measuring -----------------------------------------------------------------------------

    def attempt(self, method: Method, batches: list[int], into: Tried, rival: Trial | None = None) -> Trial | None:
        """Return the trial of a method over batches, kept in `into`; None if it is refused, hopeless or out of budget.

        It is stopped as soon as the samples that it has in common with a rival show that it does not rank above.
        """
        key = repr(method)
        if key in into:
            return into[key][1]
        if key in self.refused or self._is_hopeless(method, into):
            return None
        trial = self._over(self._run, method, batches, rival)
        if trial is None:
            return None
        into[key] = method, trial
        place, steps = self._place(method)
        if steps:
            self._prices.setdefault(place, {})[steps] = self.goal.price(trial)
        return trial

    def validate(self, method: Method, batches: list[int], rival: Trial | None) -> Trial | None:
        """Return the trial of a finalist beside the budget, None once it is behind a rival."""
        return self._over(lambda m, n: self.bench.measure(m, [n]), method, batches, rival)

    def _over(self, run: Run, method: Method, batches: list[int], rival: Trial | None = None) -> Trial | None:
        """Return the trial over batches, None once it is behind a rival or a run is not made."""
        parts: list[Trial] = []
        for batch in batches:
            part = run(method, batch)
            if part is None:
                return None
            parts.append(part)
            if rival is not None and batch != batches[-1] and self._is_lost(joined(parts), rival):
                self.stopped += 1
                return None
        return joined(parts)

    def _run(self, method: Method, batch: int) -> Trial | None:
        """Run a method on one batch, once; return None if it does not fit or no budget is left."""
        key = repr(method)
        known = self._ran.get(key, {})
        if batch in known:
            return known[batch]
        if self.runs >= self._allowed:
            return None
        if self.progress is not None:
            best = self.best(self.seen or self.first)[:1]
            word = f"{best[0][1].psnr_db:.1f} dB at {best[0][1].cost:.0%}" if best else ""
            self.progress(self.runs // len(self.batches) + 1, self.trials, word)
        try:
            found = self.bench.measure(method, [batch])
        except (AttachError, torch.OutOfMemoryError) as error:
            self.refused[key] = str(error)
            return None
        self._ran.setdefault(key, {})[batch] = found
        return found

    def _is_lost(self, trial: Trial, rival: Trial) -> bool:
        """Return whether the samples so far show that a trial will not rank above its rival.

        A sample has the same prompt and noise in both, so that the differences of pairs tell sooner
        than the means do: it is lost two standard errors below. Of samples that each have to reach
        the goal, it is lost when too many do not.
        """
        mine, bar = trial.scored, self.goal.bar
        if self.goal.confidence is not None and bar is not None:
            may = int((1 - self.goal.confidence) * len(rival.scored) + 1e-9)
            return sum(score < bar for score in mine) > may
        if len(mine) < FEWEST:
            return False
        theirs = rival.scored[: len(mine)]
        pairs = [one - other for one, other in zip(mine, theirs, strict=True)]
        reach = mean(pairs) + 2 * stdev(pairs) / math.sqrt(len(pairs))
        if bar is None or not self.goal.met(rival):
            return reach < 0
        return mean(rival.scored) + reach < bar

    # the best ------------------------------------------------------------------------------

    def _halve(self) -> None:
        """Run the best looks on one batch more at a time, and keep the better half each time.

        The best few methods that are not put together here stay whatever their look: four samples
        tell too little of them.
        """
        alive = [method for method, _ in self._hopeful()]
        whole = self.whole(alive)
        alive = alive[: max(BEST, (self._allowed - self.runs) // 2)]
        for count in range(self.glance + 1, len(self.batches)):
            rows: Tried = {}
            for key, method in by_name([*alive, *whole]).items():
                trial = self._over(self._run, method, self.batches[:count])
                if trial is not None:
                    rows[key] = method, trial
            alive = [method for method, _ in self.best(rows)]
            alive = alive[: max(BEST, math.ceil(len(alive) / 2))]
        alive = alive[: max(2 * BEST, self.trials // 16)]
        for key, method in by_name([*alive, *whole]).items():
            if self.attempt(method, self.batches, self.seen) is not None:
                self.leaders.append(key)

    def _refine(self) -> None:
        """Climb from the best few, then from the best that nothing was tried around."""
        done: set[str] = set()
        waiting = self._starts(done)[:BEST]
        while self.runs < self._allowed and (starts := waiting or self._starts(done)):
            better: Method | None = starts.pop(0)
            while better is not None:
                done.add(repr(better))
                better = self._improved(better)

    def _starts(self, done: set[str]) -> list[Method]:
        """Return methods around which something may be better, the best first."""
        return [
            method
            for method, trial in self.best(self.seen)
            if repr(method) not in done
            and self.steps(method)
            and (self.goal.met(trial) or not self._is_hopeless(method, self.seen))
        ]

    def _improved(self, method: Method) -> Method | None:
        """Return the first neighbor of a method that ranks higher, None if there is none.

        Neighbors drop or add a computed step, or move one or two.
        """
        steps, trial = self.steps(method), self.seen[repr(method)][1]
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
            found = self.attempt(neighbor, self.batches, self.seen, rival=trial)
            if found is not None and self._is_better(found, trial):
                return neighbor
        return None

    def _is_better(self, trial: Trial, rival: Trial) -> bool:
        """Return whether a trial ranks above another, and not by chance.

        Among many changes one is ahead on few samples by luck, so that closeness has to be more
        than a standard error ahead in pairs; what is cheaper is so on all samples.
        """
        pairs = list(zip(trial.scored, rival.scored, strict=True))
        if self.goal.bar is None and len(pairs) >= FEWEST and self.goal.met(rival):
            ahead = [one - other for one, other in pairs]
            return mean(ahead) > stdev(ahead) / math.sqrt(len(ahead))
        return self.goal.rank(trial) > self.goal.rank(rival)

    def dearer(self, ladders: Sequence[space.Ladder], method: Method) -> list[Method]:
        """Return settings of a method's ladder that are dearer, the nearest first.

        Ladders of one rung, as methods of a user's are, count as one ladder: all of them.
        """
        if all(len(ladder) == 1 for ladder in ladders):
            return [ladder[0] for ladder in ladders if ladder[0] != method]
        kind, steps = repr(self._kind_of.get(repr(method), method)), len(self.steps(method))
        for ladder in ladders:
            keys = [repr(rung) for rung in ladder]
            if repr(method) in keys:
                return list(ladder[keys.index(repr(method)) + 1 :])
            if kind in keys:
                return [rung for rung in ladder if self._place(rung)[1] > steps]
        return []

    def _on_steps(self, method: Method, steps: tuple[int, ...]) -> Method:
        """Return a method on other steps, its weights fitted anew."""
        kind = self._kind_of.get(repr(method), method)
        changed = space.with_steps(kind, steps, self.bench.total)
        self._kind_of[repr(changed)] = kind
        return changed

    def _best_kinds(self, families: Sequence[space.Rungs]) -> list[Method]:
        """Return one method of each of the better two thirds of the families that list steps."""
        ranks = {repr(method): place for place, (method, _) in enumerate(self._hopeful())}

        def rank(ladder: space.Ladder) -> int:
            return min(ranks.get(repr(rung), len(ranks)) for rung in ladder)

        ladders = [family.ladder for family in families if self._place(family.ladder[0])[1]]
        best = sorted(ladders, key=rank)[: math.ceil(len(ladders) * 2 / 3)]
        return [ladder[0] for ladder in best]

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
        return [method for method, _ in self._hopeful() if self.steps(method)][:count]

    def _is_beaten(self, trial: Trial) -> bool:
        """Return whether no dearer setting than that of a trial could win.

        It misses the goal and another is as cheap and as close; or it is nearly as dear as may be and behind.
        """
        best = self.best(self.first)[0][1]
        price, limit = self.goal.price, self.goal.limit
        if limit is not None and 0.75 * limit < price(trial) <= limit:
            return self._is_lost(trial, best)
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
        place, steps = self._place(method)
        # the first place is the denoiser itself, at which skipping costs least
        known = self._prices.get(place) or next(iter(self._prices.values()), None)
        if not known or not steps:
            return 0.0
        near = min(known, key=lambda count: abs(count - steps))
        total, full = self.bench.total, self.bench.uncached_seconds if self.goal.seconds else 1.0
        return full - (full - known[near]) * (total - steps) / max(total - near, 1)

    def _place(self, method: Method) -> tuple[str, int]:
        """Return where a method skips and how many steps it computes, 0 if that is not known."""
        if isinstance(method, (FittedForecast, DPCache)):  # whose schedule takes a while to find
            return repr((Site.of(method.site), 0, 0)), method.computed
        reuse = reuse_of(method)
        if reuse is None:
            return "", 0
        return repr((reuse.site, reuse.lead, reuse.tail)), len(self.steps(method))


def by_name(methods: Sequence[Method]) -> dict[str, Method]:
    """Return methods by their repr, each once."""
    return {repr(method): method for method in methods}


def front_of(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials than which no other is both cheaper and closer, the cheapest first."""
    front: list[Trial] = []
    for trial in sorted(trials, key=lambda t: (t.cost, -t.psnr_db)):
        if not front or trial.psnr_db > front[-1].psnr_db:
            front.append(trial)
    return front
