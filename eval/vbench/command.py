"""`diffcache eval vbench`: draw the films of VBench's suite, measure films, form the scores."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from diffcache.command import EXIT_LINE, FAILED, METHOD, MISSING, Json, check_json, guarded, print_or_write, refuse
from diffcache.eval.options import EMPTY, NONE, Quiet, Settings, with_task

if TYPE_CHECKING:
    from diffcache.eval.vbench.suite import Scores

INSTALLED = "installed"


class _MeasureByDefault(TyperGroup):
    """The commands of VBench; without one of their names, `measure`."""

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        """Read the command line."""
        if args and args[0] not in (*self.commands, *context.help_option_names):
            args = ["measure", *args]
        return super().parse_args(context, args)


app = typer.Typer(
    cls=_MeasureByDefault,
    no_args_is_help=True,
    epilog=EXIT_LINE,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Draw the films of VBench's suite, measure films, form the scores.",
)
Dimensions = Annotated[
    list[str], typer.Option("--dimension", metavar="NAME", help="May be repeated (default: all that apply).")
]


@app.command(epilog=EXIT_LINE)
@guarded
@with_task("model", "steps", "seed", "call", "fps", "dtype", "device", "threads")
def draw(
    out: Annotated[Path, typer.Option(help="Folder of the run; the films go to OUT/films.")],
    info: Annotated[str, typer.Option(help="VBench_full_info.json, or the one of the installed package.")] = INSTALLED,
    dimensions: Dimensions = EMPTY,
    samples: Annotated[
        int, typer.Option("--samples-per-prompt", min=1, max=5, help="Films; 5 times as many for flickering.")
    ] = 5,
    rewritten: Annotated[
        Path | None, typer.Option(help="Prompts to draw from, a line for each of the list, in its order.")
    ] = None,
    method: Annotated[str, typer.Option(metavar=METHOD, help="Cache (default: uncached).")] = "",
    task: Settings = NONE,
    quiet: Quiet = False,
) -> None:
    """Draw the films of VBench's suite, named as VBench looks for them.

    A film that is there is not drawn again: the same command goes on after an interrupt. Under
    [bold]accelerate launch -m diffcache eval vbench draw ...[/bold] the films are shared out.

    [bold]Try[/bold]

        diffcache eval vbench draw --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --out wan
        --info VBench_full_info.json --rewritten all_dimension_aug_wanx_seed42.txt

        diffcache eval vbench wan/films --backend official --info VBench_full_info.json --gpus 8
    """
    from diffcache.eval.runs.ranks import shown
    from diffcache.eval.runs.task import Task
    from diffcache.eval.vbench.film_names import find_info
    from diffcache.eval.vbench.sampling import Suite, draw_suite
    from diffcache.pipelines.demo.console import quiet as silence

    silence()
    place = find_info(None if info == INSTALLED else info)
    drawn_task = Task(prompts=str(place), samples=1, batch_size=1, **task)
    job = Suite(drawn_task, out, method, dimensions or None, samples, rewritten)
    try:
        with shown(quiet) as progress:
            drawn = draw_suite(job, progress)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt("interrupted; the same command goes on from here") from stop
    if drawn:
        typer.echo(f"{drawn[0]} films of {drawn[1]:g} frames a second in {job.films}")
        command = f"diffcache eval vbench {shlex.quote(str(job.films))} --backend official"
        typer.echo(f"measure them with {command} --info {shlex.quote(str(place))}")


@app.command(epilog=EXIT_LINE)
@guarded
def measure(
    folder: Annotated[Path, typer.Argument(help="Folder of films.")],
    backend: Annotated[
        Literal["own", "official"],
        typer.Option(help="own: temporal flickering, which needs no weights. official: VBench."),
    ] = "own",
    dimensions: Dimensions = EMPTY,
    info: Annotated[
        str,
        typer.Option(
            help="VBench_full_info.json for films of its suite, or [bold]installed[/bold] for that "
            "of the package (default: films of any prompts)."
        ),
    ] = "",
    prompts: Annotated[Path | None, typer.Option(help="JSON {file: prompt} of films of any prompts.")] = None,
    filtered: Annotated[Path | None, typer.Option(help="Films that VBench's static filter kept.")] = None,
    device: Annotated[str, typer.Option(help="Device of torch (default: cuda).")] = "",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that share the dimensions.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the results (default: FOLDER-vbench).")] = None,
    machine: Json = "",
) -> None:
    """Measure a folder of films.

    VBench runs in $VBENCH_PYTHON (default: this interpreter); finished dimensions are kept.
    [bold]measure[/bold] may be left out. All options but --json are for the official back end.

    [bold]Try[/bold]

        diffcache eval vbench films --backend official --dimension motion_smoothness
    """
    from diffcache.eval.metrics.weight_files import MissingWeightsError
    from diffcache.eval.vbench import driver
    from diffcache.eval.vbench.film_names import find_info

    check_json(machine)
    if backend == "own":
        useless: dict[str, Any] = {"dimension": dimensions, "info": info, "prompts": prompts, "out": out}
        useless |= {"filtered": filtered, "device": device, "gpus": gpus if gpus > 1 else ""}
        given = {name: value or None for name, value in useless.items()}
        refuse(given, "has no effect with --backend own; leave it out")
        _own(folder, machine)
        return
    if prompts and info:
        raise ValueError("--prompts is for films of any prompts, --info for the suite: give one")
    job = driver.DriverJob(
        films=folder,
        out=out or folder.resolve().parent / f"{folder.resolve().name}-vbench",
        info=find_info(None if info == INSTALLED else info) if info else None,
        prompts=_read_prompts(prompts) if prompts else None,
        filtered=filtered,
        device=device or "cuda",
        gpus=gpus,
    )
    try:
        _official(job, dimensions, machine)
    except (MissingWeightsError, driver.VBenchError) as error:
        # Several lines: a list of files, or the end of what VBench said.
        typer.echo(f"error: {error}", err=True)
        is_missing = isinstance(error, MissingWeightsError)
        raise typer.Exit(MISSING if is_missing else FAILED) from error


@app.command(epilog=EXIT_LINE)
@guarded
def score(
    folder: Annotated[Path, typer.Argument(help="Folder of VBench's *_eval_results.json.")], machine: Json = ""
) -> None:
    """Normalize results of VBench, and form quality, semantic and total score.

    [bold]Try[/bold]

        diffcache eval vbench score wan/films-vbench
    """
    from diffcache.eval.vbench import suite

    found = suite.summarize(suite.read_results(folder))
    print_or_write(machine, {"backend": "official", **found.to_dict()}, lambda: typer.echo(_text(found)))


def _own(folder: Path, machine: str) -> None:
    from diffcache.eval.vbench.suite import measure_films
    from diffcache.pipelines.demo.console import tracked

    report = measure_films(folder, lambda files: tracked(files, len(files), "films"))
    (name, row), *_ = report["summary"].items()
    ends = f" [{row['low']:.4g}, {row['high']:.4g}]" if "low" in row else ""
    lines = [f"{name} {row['value']:.4g}{ends}, {report['count']} films", *report["warnings"]]
    print_or_write(machine, report, lambda: typer.echo("\n".join(lines)))


def _official(job: Any, dimensions: list[str], machine: str) -> None:
    from diffcache.eval.vbench import driver, suite

    found = suite.summarize(driver.run(job, dimensions or None))
    report: dict[str, Any] = {"backend": "official", "mode": job.mode, **found.to_dict()}
    text = _text(found)
    if job.info is None:
        # The three scores are defined on the prompts of the suite.
        report.update(quality=None, semantic=None, total=None)
        text = "\n".join(f"{name:24} {value:.4f}" for name, value in found.raw.items())
    print_or_write(machine, report, lambda: typer.echo(text))


def _read_prompts(path: Path) -> Any:
    from diffcache.eval.vbench.suite import json_of

    prompts = json_of(path)
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise ValueError(f"{path} must be JSON of the form {{file: prompt}}")
    return prompts


def _text(found: Scores) -> str:
    text = found.markdown()
    if found.missing:
        text += f"\n\nno total score, missing: {', '.join(found.missing)}"
    return text
