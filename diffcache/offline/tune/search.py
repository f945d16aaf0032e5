"""The search: try, refine the best, keep what was seen."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from diffcache.errors import AttachError
from diffcache.features.base import Method
from diffcache.features.combine import reuse_of
from diffcache.features.parts.when import Listed
from diffcache.offline.tune import space
from diffcache.offline.tune.trial import Bench, Trial

BEST = 3  # methods that are validated


@dataclass(frozen=True)
class Goal:
    """What is wanted; one of the three.

    Attributes:
        speedup: Least ratio of the uncached run's floating-point operations of the denoiser to
            the cached run's.
        psnr: Least mean PSNR to the uncached output, in dB.
        seconds: Most seconds a batch.
    """

    speedup: float | None = None
    psnr: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        given = {k: v for k, v in asdict(self).items() if v is not None}
        if len(given) != 1:
            raise ValueError(f"goal {given}: give one of speedup=, psnr= and seconds=")
        ((name, value),) = given.items()
        if not value > (1 if name == "speedup" else 0):
            raise ValueError(f"{name}={value!r}: must be above {1 if name == 'speedup' else 0}")

    def met(self, trial: Trial) -> bool:
        """Return whether a trial does what is wanted."""
        if self.speedup is not None:
            return trial.cost * self.speedup <= 1
        if self.psnr is not None:
            return trial.psnr_db >= self.psnr
        assert self.seconds is not None
        return trial.seconds <= self.seconds

    def rank(self, trial: Trial) -> tuple[bool, float]:
        """Return what is larger for the better of two trials."""
        if self.met(trial):
            return True, -trial.cost if self.psnr is not None else trial.psnr_db
        if self.psnr is not None:
            return False, trial.psnr_db
        return False, -trial.cost


@dataclass
class Search:
    """A search in progress.

    Attributes:
        bench: Runs the methods.
        goal: What is wanted.
        batches: Batches to search on; the others validate.
        trials: How many methods may be tried.
        progress: Called with what is done, what there is in all, and the best so far.
        seen: Every method that was tried on all search batches, and what it did.
    """

    bench: Bench
    goal: Goal
    batches: list[int]
    trials: int
    progress: Callable[[int, int, str], None] | None = None
    seen: dict[str, tuple[Method, Trial]] = field(default_factory=dict)
    first: dict[str, tuple[Method, Trial]] = field(default_factory=dict)
    used: int = 0

    def run(self, methods: Sequence[Method]) -> list[tuple[Method, Trial]]:
        """Try methods and refine the best; return the best few.

        Three fifths of the trials at most go to first looks, on one batch.
        """
        for method in methods[: max(1, self.trials * 3 // 5)]:
            self.attempt(method, self.batches[:1], self.first)
        kept = self._best(self.first, max(BEST, self.trials // 10))
        for method, _ in kept:
            self.attempt(method, self.batches, self.seen)
        for method, _ in self._best(self.seen, BEST):
            self.climb(method)
        return self._best(self.seen, BEST)

    def attempt(
        self,
        method: Method,
        batches: list[int],
        into: dict[str, tuple[Method, Trial]],
    ) -> Trial | None:
        """Measure a method, if trials are left and it fits the model."""
        key = repr(method)
        if key in into:
            return into[key][1]
        if self.used >= self.trials:
            return None
        self.used += 1
        if self.progress is not None:
            best = self._best(into, 1)
            word = f"{best[0][1].psnr_db:.1f} dB at {best[0][1].cost:.0%}" if best else ""
            self.progress(self.used, self.trials, word)
        try:
            trial = self.bench.measure(method, batches)
        except AttachError:
            return None  # this model has nothing at the method's site
        into[key] = method, trial
        return trial

    def climb(self, method: Method) -> None:
        """Move computed steps by one as long as that helps."""
        reuse = reuse_of(method)
        if reuse is None or not isinstance(reuse.when, Listed):
            return
        when = reuse.when
        steps, total = tuple(sorted({0, *when.steps})), self.bench.total
        best = self.seen[repr(method)][1]
        order = random.Random(0)
        improved = True
        while improved:
            improved = False
            tried = space.moves(steps, total)
            order.shuffle(tried)
            for listed in tried:
                moved = space.with_steps(method, listed, total)
                trial = self.attempt(moved, self.batches, self.seen)
                if trial is not None and self.goal.rank(trial) > self.goal.rank(best):
                    steps, best, improved = listed, trial, True
                    break

    def _best(
        self, tried: Mapping[str, tuple[Method, Trial]], count: int
    ) -> list[tuple[Method, Trial]]:
        return sorted(tried.values(), key=lambda pair: self.goal.rank(pair[1]), reverse=True)[
            :count
        ]


def front_of(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials than which no other is both cheaper and closer, the cheapest first."""
    front: list[Trial] = []
    for trial in sorted(trials, key=lambda t: (t.cost, -t.psnr_db)):
        if not front or trial.psnr_db > front[-1].psnr_db:
            front.append(trial)
    return front
