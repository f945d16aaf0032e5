"""Time several contenders in turn, so that a busy machine slows all of them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from diffcache.eval.record import Setting, stats

Call = Callable[[], object]


@dataclass(frozen=True)
class Turn:
    """A contender that needs something untimed around its turn."""

    call: Call  # function that is timed
    # Makes the context of a turn, such as a cache put in and taken out again
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    prepare: Call | None = None  # called untimed in that context before the timed calls
    # Called untimed at the end of a turn; further numbers about it, by name
    readings: Callable[[], Mapping[str, float | None]] | None = None
    after: Call | None = None  # called untimed behind every timed call
    calls: int = 1  # timed calls in a row, for pieces of work that are short


@dataclass
class Timings:
    """Times, one number for every timed call; the first contender is the yardstick."""

    # Contender -> wall time of its call, the wait for an accelerator included
    seconds: dict[str, list[float]] = field(default_factory=dict)
    # Contender -> CPU time of the process until its call returned, all threads
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)
    # Contender -> name -> what its turns said besides
    readings: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    load: float | None = None  # highest load average (one minute) seen, None where the system has none
    cores: int = 1  # processor cores of this process

    def own(self, setting: Setting) -> dict[str, list[float]]:
        """Return contender -> seconds by the clock of a setting."""
        return self.cpu_seconds if setting.clock == "process_time" else self.seconds

    def ratios(self, reading: str = "seconds") -> dict[str, list[float]]:
        """Return the first contender's seconds over each one's own, call by call, by contender.

        Ratios are dimensionless; above 1 is faster than the first.

        Args:
            reading: `seconds`, `cpu_seconds`, or a reading of the turns.

        Raises:
            ValueError: If a contender has no such reading in every round, or one of 0 seconds.
        """
        taken = {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds}.get(reading)
        if taken is None:
            taken = {name: found.get(reading, []) for name, found in self.readings.items()}
        first = next(iter(taken.values()))
        if not first or any(len(values) != len(first) for values in taken.values()):
            raise ValueError(f"reading={reading!r}: not every contender has it in every round")
        if not all(all(values) for values in taken.values()):
            raise ValueError(f"reading={reading!r}: 0 seconds, too short for its clock")
        return {name: [one / own for one, own in zip(first, values, strict=True)] for name, values in taken.items()}

    @property
    def warning(self) -> str | None:
        """Warning to mind when reading the times; None where there is nothing."""
        if self.load is None or self.load <= self.cores:
            return None
        return (
            f"the load average reached {self.load:.1f} on {self.cores} "
            f"core{'s' * (self.cores > 1)}: other work lengthens wall times; ratios and CPU "
            "seconds hold better"
        )

    def rows(self, samples_per_call: int = 1) -> dict[str, dict[str, Any]]:
        """Return median and quartiles of everything as plain data, by contender.

        A row has `seconds`, `cpu_seconds`, the readings and `ratio`; it has `cpu_ratio` and `denoiser_ratio` where
        every contender has the readings for them. Each is a mapping with median, q1, q3 and n. Ratios are
        dimensionless; `throughput` is in samples a second.

        Args:
            samples_per_call: Pictures or films that one call makes.

        Raises:
            ValueError: If `samples_per_call` is below 1.
        """
        if samples_per_call < 1:
            raise ValueError(f"samples_per_call={samples_per_call}: must be at least 1")
        ratios = {"ratio": self.ratios()}
        for key, reading in (("cpu_ratio", "cpu_seconds"), ("denoiser_ratio", "denoiser_seconds")):
            with suppress(ValueError):
                ratios[key] = self.ratios(reading)
        return {
            name: {
                "seconds": summary(seconds),
                "cpu_seconds": summary(self.cpu_seconds[name]),
                **{key: summary(values[name]) for key, values in ratios.items()},
                "throughput": samples_per_call / summary(seconds)["median"],
                **{key: summary(values) for key, values in self.readings[name].items()},
            }
            for name, seconds in self.seconds.items()
        }


def too_fast(rows: Mapping[str, Mapping[str, Any]], allowed: Mapping[str, float | None]) -> list[str]:
    """Return a sentence on each row that is faster than its operations allow.

    Args:
        rows: Rows of `Timings.rows`.
        allowed: Contender -> its FLOPs ratio, dimensionless; None where it is not known.
    """
    titles = {"ratio": "speed", "cpu_ratio": "CPU ratio", "denoiser_ratio": "denoiser's speed"}
    found = []
    for name, row in rows.items():
        most = max(allowed.get(name) or math.inf, 1.0)  # a mean over calls: 1 may be rounded
        tops = {title: row[key]["q3"] for key, title in titles.items() if key in row}
        told = [f"{title} {top:.2f}" for title, top in tops.items() if top > most]
        if told:
            found.append(f"{name} ({', '.join(told)}; allowed {most:.2f})")
    if not found:
        return []
    noise = "timing noise, or work that FLOPs do not count"
    return [f"upper quartiles above what operations allow, {noise}, of {'; '.join(found)}"]


def summary(values: list[float]) -> dict[str, float]:
    """Return median, quartiles and number of some values."""
    found = stats(values)
    return {key: found[key] for key in ("median", "q1", "q3", "n")}


def quartiles(found: Mapping[str, float]) -> str:
    """Return a median of `summary` with its quartiles as text."""
    return "{median:.2f} ({q1:.2f} to {q3:.2f})".format(**found)


def measure(contenders: Mapping[str, Call | Turn], rounds: int, warmup: int, setting: Setting) -> Timings:
    """Time contenders in turn; each round calls every one once and begins with another one.

    An accelerator is waited for on both sides of a call. Each call is divided into the first contender's of the same
    round, so that a slow spell of the machine falls out of the ratios.

    Args:
        contenders: Name -> what to call; the first is what the others are compared with.
        rounds: Timed calls of each; five or more give quartiles a meaning.
        warmup: Untimed rounds before.
        setting: The device that is waited for, and where the progress is told.

    Raises:
        ValueError: If there are no contenders, or `rounds` or `warmup` is out of range.
    """
    if not contenders:
        raise ValueError("contenders: there must be at least one")
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: must be at least 1")
    if warmup < 0:
        raise ValueError(f"warmup={warmup}: must be 0 or more")
    turns = {n: c if isinstance(c, Turn) else Turn(c) for n, c in contenders.items()}
    names = list(turns)
    timings = Timings(load=_load(), cores=cores_here())
    for name in names:
        timings.seconds[name], timings.cpu_seconds[name] = [], []
        timings.readings[name] = {}
    total = len(names) * (rounds + warmup)
    for number in range(rounds + warmup):
        first = number % len(names)
        for place, name in enumerate(names[first:] + names[:first]):
            setting.progress(number * len(names) + place, total, name)
            _take(timings, name, turns[name], setting, number >= warmup)
        loads = (load for load in (timings.load, _load()) if load is not None)
        timings.load = max(loads, default=None)
    setting.progress(total, total, "")
    return timings


def _take(timings: Timings, name: str, turn: Turn, setting: Setting, counts: bool) -> None:
    """Give a contender its turn, and note its seconds if the round counts."""
    with turn.within():
        if turn.prepare is not None:
            turn.prepare()
        for _ in range(turn.calls):
            setting.wait()
            cpu, wall = time.process_time(), time.perf_counter()
            turn.call()
            cpu_seconds = time.process_time() - cpu  # before the wait, which may spin
            setting.wait()
            seconds = time.perf_counter() - wall
            if turn.after is not None:
                turn.after()
            if counts:
                timings.seconds[name].append(seconds)
                timings.cpu_seconds[name].append(cpu_seconds)
        more = {} if turn.readings is None else turn.readings()
    for key, value in more.items() if counts else ():
        if value is not None:
            timings.readings[name].setdefault(key, []).append(value)


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # not on every system
        return None


def cores_here() -> int:
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
