"""Measure methods on the small policy: how often it succeeds, how far off it acts, what it costs.

    python -m diffcache.eval.workshop.shipped.reach

Every method sees the same held-out scenes, 256 of each of two seeds, and, for each episode, the
same noise. The record is one like those of `diffcache eval`, so that `docs/figures.md`,
`docs/methods.md` and the plots are made of it in the same way. It grows row by row: an interrupted
measurement goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm

import diffcache
from diffcache.catalog import make_method
from diffcache.command import Seed, Threads, script
from diffcache.eval.cost.flops import count
from diffcache.eval.cost.interleave import measure as measure_in_turn
from diffcache.eval.metrics.intervals import mean_interval, share_change, share_interval
from diffcache.eval.offline import demonstrations
from diffcache.eval.record import FOLDER, Row, Setting, envelope, values
from diffcache.eval.report.record_files import SCHEMA, checked
from diffcache.eval.runs.task import code_sha256, directory_sha256, versions
from diffcache.eval.workshop.figures import write_plot
from diffcache.features.base import Method
from diffcache.features.collect import Calibrated
from diffcache.files import read_json, write_json
from diffcache.offline.calibrate import calibrate
from diffcache.pipelines.policy import DiffusionPolicyPipeline, rollout
from diffcache.pipelines.small import reach
from diffcache.run_report import Report

UNCACHED, NAME = "uncached", "reach-policy"
ALL: list[str] = []
SETTING = Setting(torch.device("cpu"))
TIMED = 64  # chunks of a timed call
METRICS: Mapping[str, Mapping[str, Any]] = {
    "action_error": {"title": "Action error", "unit": "", "direction": "down"},
    "success_rate": {"title": "Success rate", "unit": "", "direction": "up"},
}
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


def named(name: str, settings: Mapping[str, Any]) -> str:
    """Return a catalogue name with settings as on the command line: `taylorseer:every=5`."""
    text = ",".join(f"{key}={value}" for key, value in settings.items())
    return f"{name}:{text}" if text else name


KNOWN = {named(name, settings): (name, settings) for name, settings in METHODS}


@dataclass(frozen=True)
class Drawn:
    """Results of the runs of one row.

    Attributes:
        succeeded: Outcome of every episode, bool [E].
        actions: First actions of every episode, float32 [E, n_action_steps, 2].
        report: What the cache did for one chunk; None uncached.
    """

    succeeded: Tensor
    actions: Tensor
    report: Report | None = None


class Policy:
    """The policy.

    Args:
        directory: Directory of the policy.
        episodes: Held-out episodes of a seed, run side by side.
        seed: First seed of scenes and noise.
        steps: Denoising steps.
        seeds: Number of seeds, one after the other.
        numbers: Numbers of the episodes of a seed that are run; all by default.
    """

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
        self.samples, self.episodes, self.seed, self.steps = seeds * episodes, episodes, seed, steps
        self.pipe, self.plain = reach.load(directory), reach.load(directory)  # the second stays uncached
        self._tables: dict[Any, Any] = {}

    def method(self, row: str) -> Method:
        """Return the method of a row, with tables of demonstrations where it takes some."""
        name, settings = KNOWN[row]
        made = make_method(name, **settings)
        if not isinstance(made, Calibrated):
            return made
        key = name if name in _SHARED else made
        if key not in self._tables:
            calls = demonstrations(32, 0, 32)
            self._tables[key] = calibrate(self.pipe, made, calls, steps=self.steps, seed=self.seed).tables
        return replace(made, tables=self._tables[key])  # type: ignore[type-var]

    def uncached(self) -> Drawn:
        """Return outcomes and first actions of the uncached policy."""
        return self._drawn(self.plain)

    def draw(self, method: Method) -> Drawn:
        """Run all episodes with the pipeline, which is wrapped in the method; cost is that of one chunk."""
        del method
        drawn = self._drawn(self.pipe)
        self.pipe(torch.zeros(1, reach.OBSERVED, reach.OBSERVATION), self.steps, torch.Generator().manual_seed(0))
        return replace(drawn, report=diffcache.report(self.pipe))

    def _drawn(self, pipe: DiffusionPolicyPipeline) -> Drawn:
        """Run the episodes, and draw the first chunk of each once more.

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
        return Drawn(torch.cat(succeeded), torch.cat(actions))

    @cached_property
    def step_flops(self) -> float:
        """Operations of one uncached step for one chunk."""
        seen = torch.zeros(1, reach.OBSERVED, reach.OBSERVATION)
        once = count(self.plain, {"observation": seen, "num_inference_steps": 1}).per_step
        assert once is not None  # nothing here is compiled
        return once

    def task(self) -> dict[str, Any]:
        """Return what must be equal for rows to be of the same measurement."""
        return {
            "model": NAME,
            "model_sha256": directory_sha256(self.directory),
            "pipeline": DiffusionPolicyPipeline.__name__,
            "kind": "episodes",
            "prompts": {"source": f"held-out scenes of {len(self.seeds)} seeds", "count": self.samples},
            "samples": self.samples,
            "seed": self.seed,
            "steps": self.steps,
            "call": {},
            "calibration": "32 observations of 8 demonstrations, neither trained nor tested on",
            "dtype": "float32",
            "device": "cpu",
            "threads": torch.get_num_threads(),
            "code_sha256": code_sha256(),
            "versions": versions(),
        }

    def row(self, name: str, method: Method | None, mine: Drawn, base: Drawn) -> Row:
        """Return a row: cost by count, distance of first actions from the uncached ones, outcomes."""
        quality: dict[str, Any] = {"success_rate": share_interval(mine.succeeded).to_dict()}
        fidelity = {}
        if method is not None:
            change = share_change(base.succeeded, mine.succeeded)
            quality["success_rate_change"] = {**change.to_dict(), "paired": True}
            apart = (mine.actions - base.actions).square().mean((1, 2))
            squares = mean_interval(apart, bounds=(0.0, torch.inf))
            ends = {key: getattr(squares, key) ** 0.5 for key in ("value", "low", "high")}
            fidelity = {"action_error": {**ends, "n": squares.n}}
        bare = replace(method, tables=None) if isinstance(method, Calibrated) else method  # type: ignore[type-var]
        return {
            "name": name,
            "kind": UNCACHED if method is None else "method",
            "method": None if method is None else repr(bare),
            "steps": self.steps,
            **cost(mine.report, self.steps, self.step_flops),
            "fidelity": fidelity,
            "quality": quality,
            "outcomes": {"success_rate": values(mine.succeeded)},
        }

    def times(self, name: str, rounds: int) -> dict[str, Any]:
        """Return seconds of a batch of chunks with the method that is on, in turn with the uncached pipeline."""
        scenes = reach.draw_scenes(min(TIMED, self.episodes), reach.HELD_OUT + 1000 + self.seed)
        seen = reach.Reach(scenes).observe()

        def of(pipe: DiffusionPolicyPipeline) -> Callable[[], object]:
            return lambda: pipe(seen, self.steps, torch.Generator().manual_seed(self.seed))

        timings = measure_in_turn({UNCACHED: of(self.plain), name: of(self.pipe)}, rounds, 1, SETTING)
        return {name: {**timings.rows()[name], "warning": timings.warning}}


def cost(report: Report | None, steps: int, step_flops: float) -> Row:
    """Return operations, evaluations and bytes of one chunk; uncached where nothing reports."""
    saved: float | None = 0.0
    if report is not None and (saved := report.flops_saved) is None:
        raise ValueError(f"{report.method!r}: operations of compiled blocks are not counted")
    took = steps - (saved or 0.0) / step_flops
    return {
        "evaluations": took,
        "computed_steps": steps * (1.0 if report is None else report.computed / (report.computed + report.skipped)),
        "flops": step_flops * took,
        "flops_ratio": steps / took,
        "held_bytes": 0 if report is None else report.peak_bytes,
    }


def run(policy: Policy, file: Path, command: str, rounds: int, only: Sequence[str] = ()) -> dict[str, Any]:
    """Measure every row that the record does not have yet, write it after each, and plot it.

    Args:
        policy: The policy.
        file: JSON file of the record.
        command: Command that measures it again.
        rounds: Timed calls of the uncached pipeline and of each method, at least 1.
        only: Rows to measure besides the uncached one; all by default.

    Returns:
        The record.

    Raises:
        ValueError: If a row is unknown, or `rounds` is out of range.
    """
    for name in only:
        if name not in KNOWN:
            raise ValueError(f"--only {name}: must be one of {', '.join(KNOWN)}")
    if rounds < 1:
        raise ValueError(f"--rounds {rounds}: must be at least 1")
    task, before = policy.task(), read_json(file)
    kept = before if isinstance(before, dict) and before.get("task") == task else {}
    rows: dict[str, Row] = {row["name"]: row for row in kept.get("rows", [])}
    times: dict[str, Any] = kept.get("timing", {}).get("rows", {})
    wanted = [UNCACHED, *(only or KNOWN)]
    missing = [name for name in wanted if name not in rows]
    base = policy.uncached() if missing else None
    for name in tqdm(missing, desc=NAME):
        assert base is not None
        if name == UNCACHED:
            rows[name] = policy.row(name, None, base, base)
        else:
            method = policy.method(name)
            with diffcache.wrapped(policy.pipe, method):
                rows[name] = policy.row(name, method, policy.draw(method), base)
                times |= policy.times(name, rounds)
        body = {
            "schema": SCHEMA,
            "seed": policy.seed,
            "task": task,
            "finished": all(name in rows for name in wanted),
            "metrics": dict(METRICS),
            "rows": list(rows.values()),
            "warnings": [],
            "timing": {
                "rows": times,
                "warning": next((one["warning"] for one in times.values() if one["warning"]), None),
            },
        }
        kept = checked(envelope("eval", SETTING, command, body))
        write_json(file, kept)
    write_plot(kept, file.with_suffix(".png"))
    return kept


def measure(
    episodes: Annotated[int, typer.Option(min=2, help="Held-out episodes of a seed.")] = 256,
    seed: Seed = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds, from --seed on.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each method.")] = 10,
    threads: Threads = 1,
    only: Annotated[list[str], typer.Option(metavar="ROW", help="A row; may be repeated.")] = ALL,
) -> None:
    """Measure methods on the small policy; records of other seeds stand beside the first."""
    torch.set_num_threads(threads)
    file = FOLDER / f"eval-{NAME}-methods{f'-seed{seed}' if seed else ''}.json"
    said = {"episodes": episodes, "seed": seed, "seeds": seeds, "rounds": rounds}
    words = [f"--{option} {value}" for option, value in (*said.items(), *(("only", name) for name in only))]
    command = " ".join(["python -m diffcache.eval.workshop.shipped.reach", *words])
    run(Policy(episodes=episodes, seed=seed, seeds=seeds), file, command, rounds, only)


main = script(measure)

if __name__ == "__main__":
    sys.exit(main())
