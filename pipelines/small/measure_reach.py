"""Measure how often the small policy succeeds, uncached and with BAC, and what it costs.

    python -m diffcache.pipelines.small.measure_reach

Writes `assets/bench/reach-policy-bac.json`. Every method sees the same held-out scenes and, for
each episode, the same noise; what is already in the report is kept, so that an interrupted run goes
on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import diffcache
from diffcache.attach.flops import counted
from diffcache.calibration import calibrate
from diffcache.features.bac import BAC
from diffcache.features.base import FeatureMethod
from diffcache.features.combine import Combine
from diffcache.features.when import Every
from diffcache.pipelines.policy import DiffusionPolicyPipeline, rollout
from diffcache.pipelines.small import reach, train_reach
from diffcache.pipelines.small.export import versions

REPORT = reach.DIRECTORY.parents[1] / "bench" / "reach-policy-bac.json"
CALIBRATION = reach.HELD_OUT // 2  # seed of the scenes that BAC is calibrated on


def wilson(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's interval of a share, 95 % for the default `z` (Wilson 1927)."""
    share = successes / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    spread = share * (1 - share) / count + z * z / (4 * count * count)
    half = z * math.sqrt(spread) / (1 + z * z / count)
    return middle - half, middle + half


def paired_interval(
    one: Tensor, other: Tensor, draws: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Return a 95 % bootstrap interval of the difference of two rates over the same episodes.

    Args:
        one: Outcomes, bool `[E]`.
        other: Outcomes of the same episodes with another method, bool `[E]`.
        draws: Resamples of the episodes.
        seed: Of the resampling.
    """
    difference = one.double() - other.double()
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(one), (draws, len(one)), generator=generator)
    low, high = difference[chosen].mean(1).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return low, high


def methods(tables: Any, steps: int) -> dict[str, FeatureMethod | None]:
    """Return what is compared, by name; None is the uncached policy."""
    found: dict[str, FeatureMethod | None] = {"uncached": None}
    for count in (10, 20, 5):
        for objective in ("anchor", "adjacent"):
            name, method = f"bac-{count}-{objective}", BAC(count, objective=objective, union=3)
            found[name] = replace(method, tables=tables)
            found[f"{name}-official"] = replace(method, official=True, tables=tables)
        found[f"interval-{count}"] = Combine(Every(steps // count), site="module")
    for count in (5, 10, 15, 20):
        every = BAC(count, union=len(tables.header["sites"]), official=True, tables=tables)
        found[f"bac-{count}-anchor-all-official"] = every
    for union in (0, 5):
        found[f"bac-10-anchor-union{union}"] = BAC(10, union=union, tables=tables)
    return found


def measure(
    pipe: DiffusionPolicyPipeline,
    method: FeatureMethod | None,
    episodes: int,
    seed: int,
    steps: int,
) -> tuple[dict[str, Any], Tensor]:
    """Return the row of one method, and the outcome of every episode, bool `[E]`.

    Args:
        pipe: The policy, not wrapped.
        method: The method, None for the uncached policy.
        episodes: Held-out episodes, run side by side.
        seed: Of scenes and noise.
        steps: Denoising steps.
    """
    environment = reach.Reach(reach.draw_scenes(episodes, reach.HELD_OUT + seed))
    start = time.perf_counter()
    with nullcontext() if method is None else diffcache.wrapped(pipe, method):
        chunks = rollout(pipe, environment, num_inference_steps=steps, seed=seed)
    outcome = environment.succeeded
    low, high = wilson(int(outcome.sum()), episodes)
    row: dict[str, Any] = {
        "success_rate": round(float(outcome.float().mean()), 4),
        "wilson_95": [round(low, 4), round(high, 4)],
        "touched_an_obstacle": round(float(environment.touched.float().mean()), 4),
        "chunks_in_turn": chunks,
        "seconds": round(time.perf_counter() - start, 1),
        "method": None if method is None else _described(method),
    }
    return row, outcome


def _described(method: FeatureMethod) -> str:
    """Return a method as text, without its tables or schedule."""
    return repr(replace(method, tables=None)) if isinstance(method, BAC) else repr(method)


def cost(
    pipe: DiffusionPolicyPipeline, method: FeatureMethod | None, steps: int
) -> dict[str, float]:
    """Return the operations of one chunk (a multiply-add is two), and how many times fewer.

    Matrix products and attention of the whole denoiser are counted; embeddings, the encoder of
    observations and the head run at every step.
    """
    seen = torch.zeros(1, reach.OBSERVED, reach.OBSERVATION)
    given = (torch.zeros(1, reach.HORIZON, 2), torch.tensor(0), seen)
    with torch.no_grad():
        _, once = counted(pipe.transformer, given, {})
    assert once
    saved, computed = 0.0, 1.0
    if method is not None:
        with diffcache.wrapped(pipe, method):
            pipe(seen, steps, torch.Generator().manual_seed(0))
            report = diffcache.report(pipe)
        saved = float(report.flops_saved or 0)
        computed = report.computed / (report.computed + report.skipped)
    return {
        "flops_per_chunk": steps * once - saved,
        "flops_ratio": round(steps * once / (steps * once - saved), 3),
        "modules_computed": round(computed, 4),
    }


def run(
    episodes: int,
    seed: int,
    steps: int,
    report: Path,
    directory: Path = reach.DIRECTORY,
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure every method that the report does not have yet, and write it after each.

    Args:
        episodes: Held-out episodes.
        seed: Of scenes and noise.
        steps: Denoising steps.
        report: JSON file.
        directory: The policy.
        only: Names of the methods to measure besides the uncached policy; all by default.

    Raises:
        ValueError: If a name is unknown.
    """
    pipe = reach.load(directory)
    seen = train_reach.demonstrate(8, CALIBRATION)[0]
    seen = seen[torch.arange(32) * len(seen) // 32]
    method = calibrate(pipe, BAC(union=0), [{"observation": seen}], steps=steps, seed=seed)
    about = {"episodes": episodes, "seed": seed, "steps": steps, "dtype": "float32"}
    done: dict[str, Any] = {"model": "reach-policy", **about, "rows": {}, "outcomes": {}}
    if report.exists():
        before = json.loads(report.read_text(encoding="utf-8"))
        if all(before.get(key) == value for key, value in about.items()):
            done = before
    done |= {
        "measure": "share of held-out episodes that reach the goal in time, touching nothing",
        "calibration": "32 observations of 8 demonstrations that are neither trained nor tested on",
        "device": "cpu",
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
    }
    chosen = methods(method.tables, steps)
    for name in only:
        if name not in chosen:
            raise ValueError(f"only={name!r}: must be one of {', '.join(chosen)}")
    chosen = {name: chosen[name] for name in ("uncached", *(only or list(chosen)[1:]))}
    for name, each in tqdm(chosen.items(), desc="methods"):
        if name in done["rows"]:
            continue
        row, outcome = measure(pipe, each, episodes, seed, steps)
        row |= cost(pipe, each, steps)
        done["outcomes"][name] = "".join("01"[int(flag)] for flag in outcome)
        if each is not None:
            base = torch.tensor([flag == "1" for flag in done["outcomes"]["uncached"]])
            low, high = paired_interval(outcome, base)
            row["difference"] = round(float(outcome.double().mean() - base.double().mean()), 4)
            row["difference_95"] = [round(low, 4), round(high, 4)]
        done["rows"][name] = row
        part = report.with_name(report.name + ".part")
        part.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        part.replace(report)
        print(name, json.dumps(row), flush=True)
    return done


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(
        prog="python -m diffcache.pipelines.small.measure_reach",
        description="Measure the small policy, uncached and with BAC.",
    )
    parser.add_argument("--episodes", type=int, default=256, help="held-out episodes")
    parser.add_argument("--steps", type=int, default=100, help="denoising steps")
    parser.add_argument("--seed", type=int, default=0, help="of scenes and noise")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--model", type=Path, default=reach.DIRECTORY, help="pipeline directory")
    parser.add_argument("--report", type=Path, default=REPORT, help="JSON file to write")
    parser.add_argument("--only", nargs="+", default=(), help="methods besides the uncached")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    how = (chosen.episodes, chosen.seed, chosen.steps, chosen.report, chosen.model)
    run(*how, only=chosen.only)


if __name__ == "__main__":
    main()
