"""`diffcache calibrate` and `diffcache tune`: the offline stage, from the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import diffcache
from diffcache.catalog import method_class
from diffcache.command import METHOD, check_target, guarded
from diffcache.eval.methods import parse_method
from diffcache.eval.options import EMPTY, NONE, Images, Settings, given_of, with_task
from diffcache.features.collect import Calibrated
from diffcache.features.tables import Tables
from diffcache.pipelines.demo.console import print_rows, progress, quiet
from diffcache.pipelines.load import named_function
from diffcache.registry import rows_of

if TYPE_CHECKING:
    from diffcache.eval.runs.task import Task

SEEDS = 1 << 31  # first of the noise; torch's generator on the CPU has 32 bits
Out = Annotated[Path | None, typer.Option(help="File of the tables.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Do not go on from an interrupted run.")]


@dataclass(frozen=True)
class TaskInputs:
    """Inputs of the offline stage."""

    pipe: Any
    prompts: list[Any]  # prompts as `diffcache.calibrate` takes them
    call: dict[str, Any]  # further arguments of the pipeline's call
    seed: int = SEEDS  # seed of the noise, none that an evaluation draws from


def inputs_of(task: Task, live: Any = None, pictures: Mapping[str, Any] | None = None) -> TaskInputs:
    """Load a pipeline with prompts and noise to calibrate it on.

    They differ from those that an evaluation draws by default: prompts come from a list of their own, or from the half
    of a file that a hash selects. `live` is a loaded pipeline, None for the task's model; `pictures` are for all
    calls, by argument. Raises FileNotFoundError if there is no such model or list of prompts, and ValueError if the
    pipeline needs more than prompts or class numbers.
    """
    import numpy as np
    import torch

    from diffcache.eval.runs.draw import Drawer
    from diffcache.eval.samples.prompts import calibration_prompts
    from diffcache.pipelines.demo.saved import locate

    how, name = task.loading, ""
    if live is None:
        directory = locate(task.model, variant=how.variant, revision=how.revision)
        name = directory.resolve().name
    if name in OWN and not pictures:
        if how.changes:
            raise ValueError(f"{name} is loaded as it is shipped; leave {how.changes!r} out")
        torch.set_num_threads(task.threads)
        return replace(OWN[name](task), seed=SEEDS + task.seed)
    drawer = Drawer(task, live=live, inputs=pictures)
    call = {**drawer.call, **drawer.inputs}
    if task.steps is not None:  # it takes precedence over the folder's own default
        call.pop("num_inference_steps", None)
    rng = np.random.default_rng([task.seed, 77])
    if "class_labels" in drawer.parameters:
        known = [int(text) for text in drawer.prompts.texts]
        order = rng.permutation(-(-task.samples // len(known)) * len(known)) % len(known)
        prompts: list[Any] = [known[i] for i in order[: task.samples]]
    elif "prompt" not in drawer.parameters:
        prompts = [drawer.prompts[i] for i in range(task.samples)]
    else:
        chosen = calibration_prompts(str(task.prompts or drawer.prompts.source))
        prompts = [chosen[i] for i in range(task.samples)]
    return TaskInputs(drawer.pipe, prompts, call, SEEDS + task.seed)


def demonstrations(samples: int, seed: int, batch_size: int) -> list[dict[str, Any]]:
    """Return calls with observations of demonstrations that the policy was not trained on."""
    import torch

    from diffcache.pipelines.small import demonstrations, reach

    seen, _ = demonstrations.demonstrate(8, reach.HELD_OUT // 2 + seed)
    seen = seen[torch.arange(samples) * len(seen) // samples]
    return [{"observation": part} for part in seen.split(batch_size)]


def _policy_inputs(task: Task) -> TaskInputs:
    from diffcache.pipelines.demo.saved import locate
    from diffcache.pipelines.small import reach

    prompts = demonstrations(task.samples, task.seed, task.batch_size)
    return TaskInputs(reach.load(locate(task.model)), prompts, dict(task.call))


# Shipped models whose calls take more than prompts or class numbers.
OWN = {"reach-policy": _policy_inputs}


@contextmanager
def _resumable(out: Path) -> Iterator[None]:
    """Print how to go on after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; the same command goes on with {out}") from None


@guarded
@with_task("model", "steps", "prompts", "seed", "call", "dtype", "device", samples=16, batch_size=4)
def calibrate(
    method: Annotated[str, typer.Option(metavar=METHOD, help="Method with tables.")],
    out: Out = None,
    task: Settings = NONE,
    images: Images = EMPTY,
    fresh: Fresh = False,
) -> None:
    """Measure a method's tables on a pipeline, and write them to one file.

    An interrupted calibration goes on where it stopped.

    [bold]Try[/bold]

        diffcache calibrate --method ertacache --model sticker-flux --steps 28

        diffcache run sticker-flux "a fox left of an owl on grass"
        --steps 28 --method ertacache:tables=ertacache.safetensors
    """
    quiet()
    chosen = parse_method(method)
    if not isinstance(chosen, Calibrated):
        needing = [n for n in rows_of("method") if issubclass(method_class(n), Calibrated)]
        raise ValueError(f"method {method!r} takes no tables; these do: {', '.join(needing)}")
    from diffcache.eval.runs.task import Task

    file = out or Path(f"{chosen.name}.safetensors")
    check_target("--out", file)
    given = given_of(task["model"], images)
    inputs = inputs_of(Task(**task), given["pipe"], given["inputs"])
    with progress(f"{chosen.name}") as show, _resumable(file):
        made = diffcache.calibrate(
            inputs.pipe,
            chosen,
            inputs.prompts,
            steps=task["steps"],
            batch_size=task["batch_size"],
            seed=inputs.seed,
            out=file,
            resume=not fresh,
            progress=show,
            **inputs.call,
        )
    typer.echo(repr(made))
    typer.echo(f"{len(inputs.prompts)} prompts, {made.measured().steps} steps; wrote {file}")


@guarded
@with_task("model", "steps", "prompts", "seed", "call", "dtype", "device", samples=48, batch_size=8)
def tune(
    speedup: Annotated[float | None, typer.Option(help="Closest method with N times fewer operations.")] = None,
    psnr: Annotated[float | None, typer.Option(help="Cheapest method with at least this PSNR, in dB.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Closest method with at most N seconds a batch.")] = None,
    lpips: Annotated[float | None, typer.Option(help="Cheapest method with at most this LPIPS.")] = None,
    right: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Cheapest method that spoils no picture, by a judge of yours; with --confidence.",
        ),
    ] = None,
    confidence: Annotated[
        float | None,
        typer.Option(help="With --psnr, --lpips or --right: probability that a new prompt stays this close."),
    ] = None,
    methods: Annotated[list[str], typer.Option("--method", metavar=METHOD, help="Try these instead.")] = EMPTY,
    trials: Annotated[int, typer.Option(min=1, help="Budget: methods run on all of the search.")] = 100,
    out: Out = None,
    task: Settings = NONE,
    images: Images = EMPTY,
    fresh: Fresh = False,
) -> None:
    """Search methods, settings, sites and schedules for a pipeline, and write the best to a file.

    A third of the prompts is searched on, the others validate. An interrupted search goes on.

    [bold]Try[/bold]

        diffcache tune --model sticker-flux --steps 28 --speedup 4

        diffcache run sticker-flux "a fox left of an owl on grass"
        --steps 28 --method tuned:tables=tuned.safetensors --compare
    """
    if sum(goal is not None for goal in (speedup, psnr, seconds, lpips, right)) != 1:
        raise ValueError("say what to aim at: one of --speedup, --psnr, --seconds, --lpips and --right")
    if confidence is not None:
        task["batch_size"] = 1  # samples of one batch share decisions
    steps, samples, batch_size = (task[name] for name in ("steps", "samples", "batch_size"))
    if samples <= batch_size:
        raise ValueError(
            f"--samples {samples} --batch-size {batch_size}: two batches are needed, to search and "
            "to validate on; take more samples or a smaller batch"
        )
    quiet()
    from diffcache.eval.runs.task import Task

    chosen = [parse_method(text) for text in methods] or None
    judge = None if right is None else named_function("--right", right)
    file = out or Path("tuned.safetensors")
    check_target("--out", file)
    given = given_of(task["model"], images)
    inputs = inputs_of(Task(**task), given["pipe"], given["inputs"])
    with progress("tune") as show, _resumable(file):
        best = diffcache.tune(
            inputs.pipe, inputs.prompts, speedup=speedup, psnr=psnr, seconds=seconds, lpips=lpips,
            right=judge, confidence=confidence, methods=chosen, trials=trials, steps=steps,
            batch_size=batch_size, seed=inputs.seed, out=file, resume=not fresh,
            progress=show, **inputs.call,
        )  # fmt: skip
    rows = [
        (f"{trial['cost']:.1%}", f"{trial['psnr_db']:.1f}", _validated(trial), trial["method"]) for trial in best.front
    ]
    print_rows(("operations", "PSNR dB", "validated [95 %]", "method"), rows)
    done, header = best.validation, Tables.load(file).header
    typer.echo(
        f"{header['tried']} methods tried, {header['stopped']} of them stopped early; "
        f"{len(header['refused'])} do not fit this model, {len(header['skipped'])} kinds skipped"
    )
    for refused, why in header["refused"].items():
        typer.echo(f"refused: {refused}: {why}")
    for kind, why in header["skipped"].items():
        typer.echo(f"skipped: {kind}: {why}")
    typer.echo(f"chosen: {best.method!r}")
    typer.echo(
        f"{done['psnr_db']:.1f} dB [{done['low_db']:.1f}, {done['high_db']:.1f}] at "
        f"{done['cost']:.1%} of the operations, on {done['samples']} samples not searched on"
    )
    if best.guarantee is not None:
        typer.echo(f"certified: {best.guarantee}")
    typer.echo(f"wrote {file}; use it as --method tuned:tables={file}")


def _validated(trial: dict[str, Any]) -> str:
    """Return the PSNR of a trial on held-out prompts with its interval, empty if there is none."""
    if trial["validation_psnr_db"] is None:
        return ""
    low, high = trial["validation_low_db"], trial["validation_high_db"]
    return f"{trial['validation_psnr_db']:.1f} [{low:.1f}, {high:.1f}]"
