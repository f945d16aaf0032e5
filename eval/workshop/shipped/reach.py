"""Measure methods on the small policy: how often it succeeds, how far off it acts, what it costs.

    python -m diffcache.eval.workshop.shipped.reach

Every method sees the same held-out scenes, 256 of each of two seeds, and, for each episode, the
same noise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import diffcache
from diffcache.command import Seed, Threads, script
from diffcache.eval.metrics.bootstrap import mean_interval
from diffcache.eval.offline import demonstrations
from diffcache.eval.workshop.shipped.table import ALL, Drawn, Only, Rounds, Subject, draw_record
from diffcache.features.base import Method
from diffcache.features.collect import Calibrated
from diffcache.offline.calibrate import calibrate
from diffcache.pipelines.policy import DiffusionPolicyPipeline, rollout
from diffcache.pipelines.small import reach

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
METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("interval", {"every": 4}),
    ("interval", {"every": 4, "site": "module"}),
    ("taylorseer", {"every": 4, "site": "module"}),
    ("taylorseer", {"every": 4, "site": "stack"}),
    ("fitted-forecast", {"computed": 25}),
    ("cachequant", {"every": 4, "lead": 0, "tail": 0}),
    *(("bac", settings) for settings in _BAC),
    *(("interval", {"every": every, "site": "module"}) for every in (5, 10, 20)),
)
_SHARED = ("bac", "fitted-forecast")  # their tables serve any settings


class Policy(Subject):
    """The policy.

    Args:
        directory: Directory of the policy.
        episodes: Held-out episodes of a seed, run side by side.
        seed: First seed of scenes and noise.
        steps: Denoising steps.
        seeds: Number of seeds, one after the other.
    """

    name = "reach-policy"
    methods = METHODS
    metrics: Mapping[str, Mapping[str, Any]] = {
        "action_error": {"title": "Action error", "unit": "", "direction": "down"},
        "success_rate": {"title": "Success rate", "unit": "", "direction": "up"},
    }

    def __init__(
        self,
        directory: Path = reach.DIRECTORY,
        episodes: int = 256,
        seed: int = 0,
        steps: int = 100,
        seeds: int = 2,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.numbers = list(range(episodes) if numbers is None else numbers)
        self.directory, self.seeds = directory, range(seed, seed + seeds)
        source = f"held-out scenes of {seeds} seeds"
        self.about = {
            "pipeline": DiffusionPolicyPipeline.__name__,
            "kind": "episodes",
            "prompts": {"source": source, "count": seeds * episodes},
            "samples": seeds * episodes,
            "seed": seed,
            "steps": steps,
            "call": {},
            "calibration": "32 observations of 8 demonstrations, neither trained nor tested on",
        }
        self.episodes, self.seed, self.steps = episodes, seed, steps
        self.pipe, self.plain = reach.load(directory), reach.load(directory)
        self._tables: dict[Any, Any] = {}

    def calibrated(self, method: Calibrated) -> Calibrated:
        """Return a method with tables of demonstrations."""
        key = method.name if method.name in _SHARED else method
        if key not in self._tables:
            calls = demonstrations(32, 0, 32)
            with_tables = calibrate(self.pipe, method, calls, steps=self.steps, seed=self.seed)
            self._tables[key] = with_tables.tables
        return replace(method, tables=self._tables[key])  # type: ignore[type-var]

    def uncached(self) -> Drawn:
        """Return outcomes and first actions of the uncached policy."""
        return self._drawn(self.plain)

    def draw(self, method: Method) -> Drawn:
        """Run all episodes; cost is that of one chunk."""
        drawn = self._drawn(self.pipe)
        self.pipe(torch.zeros(1, reach.OBSERVED, reach.OBSERVATION), self.steps, torch.Generator().manual_seed(0))
        return replace(drawn, reports=[(diffcache.report(self.pipe), 1)])

    def fidelity(self, mine: Tensor, uncached: Tensor) -> dict[str, Any]:
        """Return the root mean square difference of the first chunks' actions."""
        squares = mean_interval((mine - uncached).square().mean((1, 2)), bounds=(0.0, torch.inf))
        ends = {key: getattr(squares, key) ** 0.5 for key in ("value", "low", "high")}
        return {"action_error": {**ends, "n": squares.n}}

    def one_step(self) -> dict[str, Any]:
        """Return the arguments of a call that takes one step for one chunk."""
        seen = torch.zeros(1, reach.OBSERVED, reach.OBSERVATION)
        return {"observation": seen, "num_inference_steps": 1}

    def timed(self, pipe: DiffusionPolicyPipeline, method: Method) -> Callable[[], object]:
        """Return a call that draws a batch of chunks."""
        scenes = reach.draw_scenes(min(TIMED, self.episodes), reach.HELD_OUT + 1000 + self.seed)
        seen = reach.Reach(scenes).observe()
        return lambda: pipe(seen, self.steps, torch.Generator().manual_seed(self.seed))

    def _drawn(self, pipe: DiffusionPolicyPipeline) -> Drawn:
        """Run the episodes, and draw the first chunk of each once more, `[E, n_action_steps, 2]`.

        The episodes end when they are over, so that their actions differ in number.
        """
        actions, succeeded = [], []
        for seed in self.seeds:
            scenes = reach.draw_scenes(self.episodes, reach.HELD_OUT + seed)
            episodes = reach.Reach(scenes, self.numbers)
            noises = [torch.Generator().manual_seed(number) for number in self.numbers]
            actions.append(pipe(episodes.observe()[self.numbers], self.steps, noises).actions)
            rollout(pipe, episodes, num_inference_steps=self.steps, seed=seed)
            succeeded.append(episodes.succeeded[self.numbers])
        return Drawn({"success_rate": torch.cat(succeeded)}, torch.cat(actions))


def measure(
    episodes: Annotated[int, typer.Option(min=2, help="Held-out episodes of a seed.")] = 256,
    seed: Seed = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds, from --seed on.")] = 2,
    rounds: Rounds = 10,
    threads: Threads = 1,
    only: Only = ALL,
) -> None:
    """Measure methods on the small policy."""
    torch.set_num_threads(threads)
    subject = Policy(episodes=episodes, seed=seed, seeds=seeds)
    told = {"episodes": episodes, "seed": seed, "seeds": seeds}
    draw_record(subject, "reach", told, rounds, only)


main = script(measure)

if __name__ == "__main__":
    sys.exit(main())
