"""Schedule of a live stream: frames of a chunk and noise levels of a call that keep it in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Annotated

import numpy as np

from diffcache.method import check_int
from diffcache.ranges import NotNegative, Positive, Range, Settings

Seconds = Annotated[float, Range(0, above=True, endless=True)]


@dataclass(frozen=True)
class CallTime(Settings):
    """Time of one call of a network, as a line: what it takes anyway, and more for every frame.

    In a call that is bound by memory, the first is the time to read the weights and the second that
    to move the numbers of a frame. `fit` measures both.

    Args:
        weights_seconds: Seconds of a call, whatever it is given.
        frame_seconds: Seconds more for each latent frame of each row, above 0.

    Reference: StreamDiffusionV2, arXiv 2511.07399 (SLO-aware batching scheduler: bytes of
    activations and of parameters over the bandwidth). Departure: the constants are measured.
    """

    weights_seconds: NotNegative
    frame_seconds: Positive

    @classmethod
    def fit(cls, measured: Sequence[tuple[int, int, float]]) -> CallTime:
        """Return the line through measured calls: frames of a row, rows and seconds, of two or more sizes.

        Raises ValueError if the sizes are all the same, or larger calls were not slower.
        """
        sizes = np.array([float(frames * rows) for frames, rows, _ in measured])
        if len(set(sizes.tolist())) < 2:
            raise ValueError(f"measured={list(measured)!r}: must be calls of two or more sizes")
        each, anyway = np.polyfit(sizes, [seconds for _, _, seconds in measured], 1)
        if each <= 0:
            raise ValueError(
                f"measured={list(measured)!r}: larger calls were not slower; measure longer, on a "
                "machine that does nothing else"
            )
        return cls(max(float(anyway), 0.0), float(each))

    def seconds(self, frames: int, rows: int) -> float:
        """Return the seconds of a call: `rows` rows of `frames` latent frames each."""
        return self.weights_seconds + self.frame_seconds * frames * rows

    def knee(self, frames: int) -> int:
        """Return the rows, of `frames` latent frames, at which a call takes twice as long as for its weights alone.

        Fewer rows leave the bandwidth to the weights; more add little to the throughput.
        """
        return max(ceil(self.weights_seconds / (self.frame_seconds * frames)), 1)


@dataclass(frozen=True)
class Goal(Settings):
    """Service level that a viewer is promised.

    Args:
        frames_per_second: Latent frames that come in and have to go out each second.
        first_seconds: Longest time from the first frame that comes in to the first that goes out.
    """

    frames_per_second: Seconds
    first_seconds: Seconds


@dataclass(frozen=True)
class Schedule:
    """Size of the calls that a stream is made with.

    Attributes:
        frames: Latent frames of a chunk.
        rows: Noise levels that run in one call, as `StreamBatch` takes them.
        frames_per_second: Latent frames that can be made each second.
        first_seconds: Time from the first frame that comes in to the first that goes out.
    """

    frames: int
    rows: int
    frames_per_second: float
    first_seconds: float


def scheduled(time: CallTime, steps: int, frames: int, rows: int, goal: Goal) -> Schedule:
    """Return the rate and the delay of chunks of `frames` frames and `steps` noise levels, `rows` of them a call."""
    calls = [min(rows, steps - start) for start in range(0, steps, rows)]
    busy = sum(time.seconds(frames, each) for each in calls)  # for each chunk that comes in
    comes_in = frames / goal.frames_per_second
    # Within a group of levels a chunk makes one step for each chunk that comes in after it.
    waits = comes_in + (steps - len(calls)) * max(busy, comes_in) + busy
    return Schedule(frames, rows, frames / busy, waits)


def choose(time: CallTime, steps: int, goal: Goal, *, longest: int, keeps_up: float = 1.0) -> Schedule:
    """Return the shortest chunk that holds a service level, with the rows at the knee if they do.

    Where they do not, of the other numbers of rows the one nearest to the knee is taken.

    Args:
        time: Time of a call.
        steps: Noise levels of a chunk.
        goal: Service level.
        longest: Most latent frames of a chunk.
        keeps_up: Factor by which the throughput has to exceed the goal.

    Raises:
        ValueError: If no chunk holds it, saying how near one comes.

    Reference: StreamDiffusionV2, arXiv 2511.07399 (SLO-aware batching scheduler). The released code
    has one rule of it: longer chunks if fewer frames a second were measured than wanted.
    """
    check_int("steps", steps, 1)
    check_int("longest", longest, 1)
    seen = []
    for frames in range(1, longest + 1):
        knee = time.knee(frames)
        for rows in sorted(range(1, steps + 1), key=lambda rows: (abs(rows - knee), rows)):
            found = scheduled(time, steps, frames, rows, goal)
            seen.append(found)
            if (
                found.frames_per_second >= keeps_up * goal.frames_per_second
                and found.first_seconds <= goal.first_seconds
            ):
                return found
    best = max(seen, key=lambda each: each.frames_per_second)
    soon = min(seen, key=lambda each: each.first_seconds)
    raise ValueError(
        f"{goal}: chunks of up to {longest} frames make {best.frames_per_second:.3g} a second at "
        f"most ({best.frames} frames, {best.rows} rows), and show the first after "
        f"{soon.first_seconds:.3g} seconds at least ({soon.frames} frames, {soon.rows} rows)"
    )


@dataclass(frozen=True)
class Simulated:
    """Timing of a stream as a viewer sees it.

    Attributes:
        first_seconds: Time from the first frame that comes in to the first that goes out.
        frames_per_second: Latent frames that go out each second, from the first chunk to the last.
        late: Share of chunks that come later than a film that began with the first one needs them.
    """

    first_seconds: float
    frames_per_second: float
    late: float


def simulate(
    seconds: Callable[[int, int], float], steps: int, schedule: Schedule, goal: Goal, *, chunks: int = 100
) -> Simulated:
    """Play a live stream through, call by call.

    Args:
        seconds: Function of frames and rows, which returns the seconds of the next call:
            `CallTime.seconds`, or measured times in turn.
        steps: Noise levels of a chunk.
        schedule: Frames and rows of the calls.
        goal: Service level, which says how fast frames come in.
        chunks: Chunks that come in, 2 or more.
    """
    check_int("chunks", chunks, 2)
    frames, rows = schedule.frames, schedule.rows
    starts = range(0, steps, rows)
    delay = steps - len(starts)  # chunks that come in before one that came in goes out
    comes_in = frames / goal.frames_per_second
    now, shown = 0.0, []
    for turn in range(chunks + delay):
        now = max(now, (min(turn, chunks - 1) + 1) * comes_in)
        for group, start in enumerate(starts):
            first = turn - start + group  # the chunk at the first level of the group
            levels = range(min(rows, steps - start))
            running = sum(0 <= first - level < chunks for level in levels)
            if running:
                now += seconds(frames, running)
        if turn >= delay:
            shown.append(now)
    needed = [shown[0] + number * comes_in for number in range(chunks)]
    late = sum(at > wanted + 1e-9 for at, wanted in zip(shown, needed, strict=True))
    rate = (chunks - 1) * frames / (shown[-1] - shown[0])
    return Simulated(shown[0], rate, late / chunks)
