"""`diffcache eval`: measure the cost and the savings of caches."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffcache.command import EXIT_LINE, FAILED, Json, check_json, fail, guarded, print_or_write
from diffcache.eval.options import EMPTY, MODEL, NONE, Images, Methods, Quiet, Settings, given_of, with_task
from diffcache.eval.vbench.command import app as vbench_app

if TYPE_CHECKING:
    from diffcache.eval.runs.evaluate import Plan

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
SCRIPTS = {
    "doctor": "Say which metrics run here, with which weights, and what is missing.",
    "fid": "Compare two folders of pictures as sets: FID, KID, precision and recall.",
    "fidelity": "Compare two folders file by file: PSNR, SSIM, MS-SSIM, LPIPS.",
    "report": "Write tables, plots and a page from records.",
}

app = typer.Typer(
    invoke_without_command=True,
    no_args_is_help=True,
    epilog=EXIT_LINE,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(vbench_app, name="vbench")

Out = Annotated[Path | None, typer.Option(help="Folder of the run (default: runs/MODEL-HASH).")]
Memory = Annotated[bool, typer.Option("--memory", help="Measure peak memory, in a process for each case.")]


@app.callback()
@guarded
@with_task("samples", "steps", "prompts", "seed", "batch_size", "call", "fps", "dtype", "device", "threads", model="")
def evaluate(
    context: typer.Context,
    task: Settings = NONE,
    methods: Methods = EMPTY,
    images: Images = EMPTY,
    reference: Annotated[
        Path | None, typer.Option(help="Real pictures for FID and the like: a folder, or npz, or statistics.")
    ] = None,
    resize: Annotated[
        int | None, typer.Option(min=8, metavar="SIDE", help="Scale and cut real pictures to squares.")
    ] = None,
    convention: Annotated[
        str, typer.Option(help="How Inception gets pictures: torch-fidelity or clean.")
    ] = "torch-fidelity",
    stages: Annotated[str, typer.Option(help="Stages to run now, some of draw,score,time.")] = "draw,score,time",
    rounds: Annotated[int, typer.Option(min=0, help="Timed rounds; 0 times nothing.")] = 10,
    memory: Memory = False,
    reward: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Rewards of samples for prompts, with commas: pickscore, or your own module:function."
        ),
    ] = "",
    out: Out = None,
    machine: Json = "",
    quiet: Quiet = False,
) -> None:
    """Evaluate methods on a model: fidelity, quality, speed; with a report.

    Uncached runs of fewer steps stand beside every method, at its number of evaluations. What is
    drawn once is never drawn again: the same command goes on after an interrupt, and more samples
    or methods add to what is there. Under [bold]accelerate launch -m diffcache eval ...[/bold]
    samples are shared out; the result is the same.

    [bold]Try[/bold]

        diffcache eval --model sticker-flux --method taylorseer --method first-block --samples 256

        diffcache eval --model ./my-flux --method taylorseer:every=4 --method taylorseer:every=6
        --prompts drawbench.csv --samples 200 --dtype bfloat16 --call height=1024

        diffcache eval --model mine:pipeline --method first-block --image cat.png --batch-size 1

        diffcache eval --model sticker-flux --method interval:every=4
        --method diffusers/taylorseer:cache_interval=4

        diffcache eval sweep sweep.toml
    """
    if context.invoked_subcommand is not None:
        if task["model"] or methods:
            raise ValueError(f"options before {context.invoked_subcommand!r}: put them after it")
        return
    if not task["model"]:
        raise ValueError("--model is missing: name a directory, or sticker-flux")
    check_json(machine)
    _prepare()
    from diffcache.eval.methods import rows_of
    from diffcache.eval.runs.evaluate import Plan
    from diffcache.eval.runs.task import Task

    if not methods:
        message = f"no --method: {task['samples']} uncached samples are drawn and measured, nothing else"
        typer.echo(message, err=True)
    plan = Plan(
        Task(**task),
        rows_of(methods),
        out,
        reference,
        **given_of(task["model"], images),
        resize=resize,
        convention=convention,
        stages=stages.split(","),
        rounds=rounds,
        memory=memory,
        reward=reward,
        command=shlex.join(["diffcache", *sys.argv[1:]]),
    )
    show(plan, machine, quiet)


@app.command(epilog=EXIT_LINE)
@guarded
@with_task("prompts", "steps", "call", "dtype", "device", "threads", batch_size=1)
def latency(
    model: Annotated[str, typer.Argument(help=MODEL)],
    methods: Methods = EMPTY,
    task: Settings = NONE,
    images: Images = EMPTY,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each.")] = 10,
    memory: Memory = False,
    machine: Json = "",
    quiet: Quiet = False,
) -> None:
    """Time a pipeline uncached and under methods, in turn: medians and quartiles of the rounds.

    A busy machine slows all of them; "ratio" is uncached over cached seconds, by wall time, by CPU
    time and within the denoiser.

    [bold]Try[/bold]

        diffcache eval latency sticker-flux --method taylorseer --method taylorseer:every=4
    """
    check_json(machine)
    _prepare()
    from diffcache.eval.cost.latency import measure
    from diffcache.eval.live import Evaluation
    from diffcache.eval.methods import rows_of
    from diffcache.eval.runs.evaluate import Plan
    from diffcache.eval.runs.ranks import shown
    from diffcache.eval.runs.task import Task

    with TemporaryDirectory() as folder, shown(quiet) as progress:
        drawn = Task(model=model, samples=task["batch_size"], **task)
        plan = Plan(
            drawn,
            rows_of(methods),
            Path(folder) / "run",
            rounds=rounds,
            memory=memory,
            stages=("draw", "time"),
            **given_of(model, images),
            command=shlex.join(["diffcache", *sys.argv[1:]]),
        )
        record = measure(plan, progress)
    print_or_write(machine, record, Evaluation(record).print)


def show(plan: Plan, machine: str = "", quiet_bar: bool = False) -> dict[str, Any] | None:
    """Evaluate a plan and print its table; return the record in the first process."""
    from diffcache.eval.live import Evaluation
    from diffcache.eval.runs.measure import evaluate as run
    from diffcache.eval.runs.ranks import shown

    is_first = os.environ.get("RANK", "0") == "0"
    try:
        with shown(quiet_bar or not is_first) as progress:
            record = run(plan, progress)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt("interrupted; the same command goes on from here") from stop
    if record is None:
        if is_first:
            typer.echo("drawn, not scored: the same command with --stages score,time goes on")
        return None
    print_or_write(machine, record, Evaluation.of(record).print)
    return record


def _prepare() -> None:
    """Check that the extra is installed, and keep libraries from printing while they load.

    Raises MissingError if a package is missing; the message says how to install it.
    """
    from diffcache.eval.live import check_extra
    from diffcache.pipelines.demo.console import quiet

    check_extra()
    quiet()


@app.command(epilog=EXIT_LINE)
@guarded
def sweep(
    file: Annotated[Path, typer.Argument(help="TOML or YAML; docs/evaluation.md shows one.")],
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
    quiet: Quiet = False,
    device: Annotated[str, typer.Option(help="In place of the file's.")] = "",
    reward: Annotated[str, typer.Option(help="In place of the file's, which may not name code of its own.")] = "",
    dry: Annotated[bool, typer.Option("--dry-run", help="Only list the cases.")] = False,
) -> None:
    """Evaluate many settings: every list in the file is swept.

    Interrupted, the same command goes on. One run and report for each task; settings of methods
    become rows of one table.

    [bold]Try[/bold]

        diffcache eval sweep sweep.toml --dry-run
    """
    _prepare()
    from diffcache.eval.runs.sweep import read_sweep

    said = {"device": device, "reward": reward}
    plans = read_sweep(file, out, {name: value for name, value in said.items() if value})
    if dry:
        for plan in plans:
            typer.echo(f"{plan.out}: {plan.task.samples} samples, uncached and")
            for name in plan.methods:
                typer.echo(f"  {name}")
        return
    for number, plan in enumerate(plans):
        if not quiet and os.environ.get("RANK", "0") == "0":
            typer.echo(f"run {number + 1} of {len(plans)}: {plan.out}", err=True)
        show(plan, quiet_bar=quiet)


@app.command(epilog=EXIT_LINE)
@guarded
def compare(
    first: Annotated[Path, typer.Argument(help="Folder of a run, or its record.json.")],
    second: Annotated[Path, typer.Argument(help="Another, of the same task.")],
    limits: Annotated[
        list[str], typer.Option("--fail-on", metavar="METRIC<CHANGE", help="Such as 'psnr_db<-0.5'.")
    ] = EMPTY,
) -> None:
    """Compare two records row by row; exit 1 if a --fail-on limit is crossed.

    [bold]Try[/bold]

        diffcache eval compare runs/before runs/after --fail-on 'fid_lite>+0.5'
    """
    _prepare()
    from diffcache.eval.report.record_files import load
    from diffcache.eval.runs.compare import changes, crossed, read_limit
    from diffcache.pipelines.demo.console import print_rows

    wanted = [read_limit(text) for text in limits]
    records = load(first), load(second)
    found = changes(*records)
    alone = sorted(set.symmetric_difference(*({row["name"] for row in record["rows"]} for record in records)))
    if alone:
        typer.echo(f"warning: in one of the records alone, and not compared: {'; '.join(alone)}", err=True)
    rows = [[c.row, c.metric, f"{c.before:.4g}", f"{c.after:.4g}", c.words] for c in found]
    print_rows(("row", "metric", "first", "second", "change"), rows)
    broken = crossed(found, wanted)
    if broken:
        fail("; ".join(broken), FAILED, "limit crossed: ")


def _script(name: str, summary: str) -> None:
    """Add `diffcache eval NAME`, the same as `python -m diffcache.eval.NAME`."""

    @app.command(name, context_settings=PASS_ON, help=summary)
    def call(context: typer.Context) -> None:
        module = "report.__main__" if name == "report" else name
        main = importlib.import_module(f"diffcache.eval.{module}").main
        raise typer.Exit(main(context.args, context.command_path))


for _name, _summary in SCRIPTS.items():
    _script(_name, _summary)
