"""The command line: demo, run, inspect, calibrate, tune, methods, cite, eval, kv."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated

import typer

from diffcache import __version__
from diffcache.catalog import make_method, method_class, settings_of
from diffcache.catalog import methods as method_names
from diffcache.cite import cite as bibtex
from diffcache.command import DEBUG, fail, guarded, parse_settings
from diffcache.eval import offline
from diffcache.eval.cli import app as eval_app
from diffcache.eval.kv.command import kv
from diffcache.pipelines.demo.console import console, print_rows, progress, quiet

DEMO_SETTINGS = ["every=6", "site=stack"]
NO_SETTINGS: list[str] = []

app = typer.Typer(
    name="diffcache",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(eval_app, name="eval")
app.command()(offline.calibrate)
app.command()(offline.tune)
app.command()(kv)

Method = Annotated[str, typer.Option(help="Name of the method; `diffcache methods` lists them.")]
Settings = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method; may be repeated."),
]
Steps = Annotated[int, typer.Option(min=1, help="Sampling steps.")]
Seed = Annotated[int, typer.Option(help="Of the noise.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"diffcache {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Feature caches for diffusers pipelines: run fewer blocks, see what it costs.

    Exit codes: 0 done, 1 a run failed, 2 something was asked that cannot be done, 130 interrupted.
    """
    DEBUG.set(debug)


@app.command()
@guarded
def demo(
    method: Method = "taylorseer",
    settings: Settings = DEMO_SETTINGS,
    steps: Steps = 50,
    prompt: Annotated[str, typer.Option(help="What to draw; the default is a good one.")] = "",
    seed: Seed = 0,
    samples: Annotated[int, typer.Option(min=1, max=4, help="Pictures to draw.")] = 1,
    out: Annotated[Path, typer.Option(help="The figure; a .json stands beside it.")] = Path(
        "out/demo.png"
    ),
    model: Annotated[
        Path | None, typer.Option(help="Another directory of a pipeline like shapes-flux.")
    ] = None,
) -> None:
    """Draw with the shipped model, uncached and cached, and measure both.

    The two runs take turns, from the same noise. Naming settings replaces the default ones.

    [bold]Try[/bold]

        diffcache demo

        diffcache demo --set every=4 --set site=module --steps 28

        diffcache demo --method first-block --set threshold=0.1 --samples 4
    """
    quiet()
    is_default = settings == DEMO_SETTINGS
    chosen = make_method(
        method, **parse_settings([] if is_default and method != "taylorseer" else settings)
    )
    from diffcache.pipelines.demo.compare import PROMPT, Task, compare
    from diffcache.pipelines.demo.panels import figure

    task = Task(prompt or PROMPT, steps, seed, samples)
    with progress("drawing") as show:
        result = compare(task, chosen, model, show)
    typer.echo(f"{task.prompt!r}, {steps} steps, seed {seed}\n")
    print_rows(("", "uncached", "cached"), result.rows())
    typer.echo(f"\n{result.report}\n")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure(result).save(out, optimize=True)
    record = out.with_suffix(".json")
    record.write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")
    typer.echo(f"wrote {out} and {record}")


@app.command()
@guarded
def run(
    model: Annotated[str, typer.Argument(help="Directory of a saved pipeline, or shapes-flux.")],
    prompt: Annotated[str, typer.Argument(help="What to draw, or a class number.")],
    method: Method = "taylorseer",
    settings: Settings = NO_SETTINGS,
    steps: Annotated[int | None, typer.Option(min=1, help="Sampling steps.")] = None,
    seed: Seed = 0,
    height: Annotated[int | None, typer.Option(min=1, help="Pixels.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Pixels.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, mps, ...")] = "cpu",
    out: Annotated[Path, typer.Option(help="Picture to write; a film becomes a GIF.")] = Path(
        "out/run.png"
    ),
    record: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run uncached too, and tell how close the two are.")
    ] = False,
) -> None:
    """Run any saved diffusers pipeline under a cache, and report what it did.

    [bold]Try[/bold]

        diffcache run shapes-flux "a small red ring on the left, on a yellow background"

        diffcache run ./my-flux "a lighthouse" --method first-block --set threshold=0.08 --compare
    """
    quiet()
    chosen = make_method(method, **parse_settings(settings))
    from diffcache.pipelines.demo import generate

    pipe, defaults = generate.load(model, dtype, device)
    order = generate.Order(prompt, steps, seed, height, width)
    done = generate.run(pipe, chosen, order, defaults, compare=compare)
    typer.echo(str(done.report))
    typer.echo("")
    for line in done.lines():
        typer.echo(line)
    typer.echo(f"wrote {generate.save(done.made, out)}")
    if done.plain:
        beside = out.with_name(f"{out.stem}-uncached{out.suffix}")
        typer.echo(f"wrote {generate.save(done.plain, beside)}")
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(done.to_dict(), indent=1) + "\n", encoding="utf-8")
        typer.echo(f"wrote {record}")


@app.command()
@guarded
def inspect(
    model: Annotated[
        str | None, typer.Argument(help="Directory of a pipeline or model, or a diffusers class.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every class; writes the table.")] = False,
    out: Annotated[Path, typer.Option(help="The table that --all writes.")] = Path(
        "docs/coverage.md"
    ),
    check: Annotated[
        bool, typer.Option("--check", help="With --all: write nothing, exit 1 if it would change.")
    ] = False,
) -> None:
    """Show what a cache finds in a model: block lists, streams, attention and feed-forward.

    Weights are not read. With --all, every denoiser of diffusers is run at a tiny size.

    [bold]Try[/bold]

        diffcache inspect FluxTransformer2DModel

        diffcache inspect ./my-pipeline

        diffcache inspect --all
    """
    quiet()
    if every == (model is not None):
        raise ValueError("name one model, or pass --all")
    if model is not None:
        from diffcache.pipelines.zoo.describe import describe, find

        screen = console()
        for name, (anatomy, wirings) in find(model).items():
            for part in describe(name, anatomy, wirings):
                screen.print(part, highlight=False)
        return
    from diffcache.pipelines.zoo.coverage import coverage

    with progress("models") as show:
        text = coverage(show)
    if check:
        if not out.exists() or out.read_text(encoding="utf-8") != text:
            fail(f"{out} is not what `diffcache inspect --all` would write", 1)
        typer.echo(f"{out} is up to date")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    typer.echo(text.split("**")[1])
    typer.echo(f"wrote {out}")


@app.command()
@guarded
def methods() -> None:
    """List the methods, and the recipes for key-value caches, with settings and defaults.

    [bold]Try[/bold]

        diffcache methods
    """
    from diffcache.kv.recipes.catalog import recipe_function, recipes

    rest = ("what it does", "settings and defaults")
    rows = [(name, text, settings_of(method_class(name))) for name, text in method_names().items()]
    print_rows(("method", *rest), rows)
    rows = [(name, text, settings_of(recipe_function(name))) for name, text in recipes().items()]
    print_rows(("recipe (diffcache.kv)", *rest), rows)


@app.command()
@guarded
def cite(name: Annotated[str, typer.Argument(help="Name of a method or recipe.")]) -> None:
    """Print the BibTeX entry of the paper of a method or recipe.

    [bold]Try[/bold]

        diffcache cite taylorseer

        diffcache cite snapkv
    """
    typer.echo(bibtex(name))


def main() -> None:
    """Run the command line; warnings are shown as one line each."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    app()
