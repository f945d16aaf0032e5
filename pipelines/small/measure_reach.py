"""Measure methods on the small policy: how often it succeeds, how far off it acts, what it costs.

    python -m diffcache.pipelines.small.measure_reach

Writes `assets/bench/reach-policy-methods.json` and a plot beside it. Every method sees the same
held-out scenes and, for each episode, the same noise; rows that are in the report are kept, so that
an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import diffcache
from diffcache.catalog import make_method
from diffcache.features.base import Method
from diffcache.features.collect import Calibrated
from diffcache.offline.calibrate import calibrate
from diffcache.pipelines.policy import DiffusionPolicyPipeline, rollout
from diffcache.pipelines.small import reach, train_reach
from diffcache.pipelines.small.method_cost import denoiser_flops, ratio_in_turn
from diffcache.pipelines.small.method_rows import (
    UNCACHED,
    Report,
    Row,
    change,
    described,
    digest,
    flags_of,
    interval,
    named,
    rounded,
    text_of,
)

REPORT = reach.DIRECTORY.parents[1] / "bench" / "reach-policy-methods.json"
CALIBRATION = reach.HELD_OUT // 2  # seed of the scenes that methods are calibrated on
TIMED = 64  # chunks of a timed call
_LAST = {"union": 12, "official": True}  # all 12 modules in the union, the last step computed
_BAC: tuple[dict[str, Any], ...] = (
    *({"count": count, **_LAST} for count in (20, 15, 10, 5)),
    *({"count": count, "union": 3, "official": True} for count in (20, 10, 5)),
    *({"count": count, "union": 3} for count in (20, 10)),
    *(
        {"count": count, "objective": "adjacent", "union": 3, **official}
        for count in (20, 10)
        for official in ({"official": True}, {})
    ),
    *({"count": 10, "union": union} for union in (0, 5)),
)
# What is outside the blocks runs at every step: one step in 4 is 3.5 times fewer FLOPs. No module
# depends on the timestep alone, so that there is nothing for temporal tables.
_METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("interval", {"every": 4}),
    ("interval", {"every": 4, "site": "module"}),
    ("taylorseer", {"every": 4, "site": "module"}),
    ("taylorseer", {"every": 4, "site": "stack"}),
    ("fitted-forecast", {"computed": 25}),
    ("cachequant", {"every": 4, "lead": 0, "tail": 0}),
    *(("bac", settings) for settings in _BAC),
    *(("interval", {"every": every, "site": "module"}) for every in (5, 10, 20)),
)
ROWS = {named(name, settings): (name, settings) for name, settings in _METHODS}
_SHARED = ("bac", "fitted-forecast")  # their tables serve any settings
WORDS = {
    "measure": "share of held-out episodes that reach the goal in time, touching nothing",
    "quality": {"key": "success_rate", "title": "success rate"},
    "fidelity": {"key": "action_error", "title": "action error"},
    "action_error": "root mean square difference to the uncached actions of the first chunks, same "
    "noise; the arena is 2 wide, the longest move 0.1",
    "calibration": "32 observations of 8 demonstrations that are neither trained nor tested on",
    "held_bytes": "of one sample",
}


def wilson(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's interval of a share, 95 % for the default `z` (Wilson 1927)."""
    share = successes / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    spread = share * (1 - share) / count + z * z / (4 * count * count)
    half = z * math.sqrt(spread) / (1 + z * z / count)
    return middle - half, middle + half


def cost(pipe: DiffusionPolicyPipeline, method: Method | None, steps: int) -> dict[str, float]:
    """Return what one chunk costs: operations (a multiply-add is two), steps and bytes.

    Matrix products and attention of the whole denoiser are counted; embeddings, the encoder of
    observations and the head run at every step. `computed_steps` is the mean over the modules.
    """
    seen = torch.zeros(1, reach.OBSERVED, reach.OBSERVATION)
    once = denoiser_flops(pipe.transformer, lambda: pipe(seen, 1))
    saved, computed, held = 0.0, 1.0, 0
    if method is not None:
        with diffcache.wrapped(pipe, method):
            pipe(seen, steps, torch.Generator().manual_seed(0))
            report = diffcache.report(pipe)
        assert report.flops_saved is not None  # nothing here is compiled
        saved = report.flops_saved
        computed = report.computed / (report.computed + report.skipped)
        held = report.peak_bytes
    return {
        "computed_steps": round(steps * computed, 2),
        "flops": steps * once - saved,
        "flops_ratio": round(steps * once / (steps * once - saved), 3),
        "held_bytes": held,
    }


@dataclass(frozen=True)
class Measurement:
    """What every method is measured with.

    Args:
        directory: The policy.
        episodes: Held-out episodes, run side by side.
        seed: Of scenes and noise.
        steps: Denoising steps.
        rounds: Timed calls of the policy and of each method.
    """

    directory: Path = reach.DIRECTORY
    episodes: int = 256
    seed: int = 0
    steps: int = 100
    rounds: int = 3

    @cached_property
    def pipe(self) -> DiffusionPolicyPipeline:
        """The policy that methods are put on."""
        return reach.load(self.directory)

    @cached_property
    def plain(self) -> DiffusionPolicyPipeline:
        """The policy that stays uncached, for seconds in turn."""
        return reach.load(self.directory)

    @cached_property
    def uncached_actions(self) -> Tensor:
        """The uncached actions of the first chunks, `[E, n_action_steps, 2]`."""
        return self.first_actions(self.plain)

    def episode(self) -> reach.Reach:
        """Return the held-out episodes, fresh."""
        return reach.Reach(reach.draw_scenes(self.episodes, reach.HELD_OUT + self.seed))

    def first_actions(self, pipe: DiffusionPolicyPipeline) -> Tensor:
        """Return the actions of the first chunk of every episode, `[E, n_action_steps, 2]`."""
        noises = [torch.Generator().manual_seed(number) for number in range(self.episodes)]
        actions: Tensor = pipe(self.episode().observe(), self.steps, noises).actions
        return actions

    def timed(self, pipe: DiffusionPolicyPipeline, number: int) -> None:
        """Draw a batch of chunks, of other observations and noise for each number."""
        scenes = reach.draw_scenes(min(TIMED, self.episodes), reach.HELD_OUT + 1000 + number)
        pipe(reach.Reach(scenes).observe(), self.steps, torch.Generator().manual_seed(number))

    def tables(self, method: Calibrated) -> Any:
        """Return the tables that a method needs."""
        seen = train_reach.demonstrate(8, CALIBRATION)[0]
        seen = seen[torch.arange(32) * len(seen) // 32]
        given = [{"observation": seen}]
        return calibrate(self.pipe, method, given, steps=self.steps, seed=self.seed).tables

    def row(self, name: str, method: Method | None, base: Tensor | None) -> Row:
        """Measure one method.

        Args:
            name: Of the row.
            method: With its tables, None for the uncached policy.
            base: Outcomes of the uncached policy, bool `[E]`; None for itself.
        """
        episode = self.episode()
        with nullcontext() if method is None else diffcache.wrapped(self.pipe, method):
            chunks = rollout(self.pipe, episode, num_inference_steps=self.steps, seed=self.seed)
            against: dict[str, Any] = {} if method is None else self._against_uncached()
        outcome = episode.succeeded
        quality: dict[str, Any] = {"success_rate": rounded(interval(outcome))}
        if base is not None:
            quality["success_rate_change"] = rounded(change(outcome, base))
        low, high = wilson(int(outcome.sum()), self.episodes)
        return {
            "name": name,
            "method": None if method is None else described(method),
            **cost(self.pipe, method, self.steps),
            **against,
            "quality": quality,
            "wilson_95": [round(low, 4), round(high, 4)],
            "touched_an_obstacle": round(float(episode.touched.float().mean()), 4),
            "chunks_in_turn": chunks,
            "outcomes": text_of(outcome),
        }

    def _against_uncached(self) -> dict[str, Any]:
        """Return the error of the wrapped policy's actions and how many times faster it is."""
        error = (self.first_actions(self.pipe) - self.uncached_actions).square().mean((1, 2))
        found = interval(error)
        ends = {key: math.sqrt(found[key]) for key in ("value", "low", "high")}
        ratio = ratio_in_turn(
            lambda number: self.timed(self.plain, number),
            lambda number: self.timed(self.pipe, number),
            self.rounds,
        )
        fidelity = {"action_error": {**rounded(ends, 6), "n": self.episodes}}
        return {"seconds_ratio": ratio, "fidelity": fidelity}


def run(with_: Measurement, report: Path, only: Sequence[str] = ()) -> Mapping[str, Row]:
    """Measure every method that the report does not have yet, write it after each, and plot it.

    Args:
        with_: What every method is measured with.
        report: JSON file.
        only: Rows to measure besides the uncached policy; all by default.

    Returns:
        The rows by name.

    Raises:
        ValueError: If a row is unknown.
    """
    for name in only:
        if name not in ROWS:
            raise ValueError(f"only={name!r}: must be one of {', '.join(ROWS)}")
    about = {
        "model": "reach-policy",
        "model_sha256": digest(with_.directory),
        "samples": with_.episodes,
        "seed": with_.seed,
        "steps": with_.steps,
        "dtype": "float32",
    }
    done = Report(report, about, WORDS)
    if UNCACHED not in done.rows:
        done.add(with_.row(UNCACHED, None, None))
    base = flags_of(done.rows[UNCACHED]["outcomes"])
    tables: dict[str, Any] = {}
    for name in tqdm([name for name in only or ROWS if name not in done.rows], desc="methods"):
        kind, settings = ROWS[name]
        method = make_method(kind, **settings)
        if isinstance(method, Calibrated):
            key = kind if kind in _SHARED else name
            tables[key] = tables.get(key) or with_.tables(method)
            method = replace(method, tables=tables[key])  # type: ignore[type-var]
        done.add(with_.row(name, method, base))
    done.plot()
    return done.rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(
        prog="python -m diffcache.pipelines.small.measure_reach",
        description="Measure methods on the small policy.",
    )
    parser.add_argument("--episodes", type=int, default=256, help="held-out episodes")
    parser.add_argument("--steps", type=int, default=100, help="denoising steps")
    parser.add_argument("--seed", type=int, default=0, help="of scenes and noise")
    parser.add_argument("--rounds", type=int, default=3, help="timed calls of each method")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--model", type=Path, default=reach.DIRECTORY, help="pipeline directory")
    parser.add_argument("--report", type=Path, default=REPORT, help="JSON file to write")
    parser.add_argument("--only", nargs="+", default=(), help="rows besides the uncached")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    how = Measurement(given.model, given.episodes, given.seed, given.steps, given.rounds)
    run(how, given.report, given.only)


if __name__ == "__main__":
    main()
