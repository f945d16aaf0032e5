"""`diffcache kv`: what recipes for key-value caches cost and save."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffcache.command import EXIT_LINE, Device, Seed, check_target, device_of, guarded
from diffcache.errors import MissingError
from diffcache.eval.kv.calibrate import calibrate
from diffcache.kv.recipes.catalog import recipes
from diffcache.pipelines.demo.console import print_rows, progress, quiet
from diffcache.report import human

if TYPE_CHECKING:
    from diffcache.eval.kv.harness import Questions

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
NO_RECIPES: list[str] = []
RECALL, MODEL = "recall", "recall-llama"


app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=EXIT_LINE)(calibrate)


@app.callback(epilog=EXIT_LINE)
@guarded
def kv(
    call: typer.Context,
    recipe: Annotated[
        list[str],
        typer.Option(
            "--recipe",
            "--method",
            help="name:key=value,...; joined by | they compose; kvpress/name is a peer. May be "
            "repeated.",
        ),
    ] = NO_RECIPES,
    model: Annotated[
        str,
        typer.Option(
            help="Directory of a causal model, or recall-llama; elsewhere than in "
            "recall also a Hugging Face model ID."
        ),
    ] = MODEL,
    tasks: Annotated[
        str,
        typer.Option(
            help="recall, or names of tasks of lm-evaluation-harness, such as gsm8k,piqa."
        ),
    ] = RECALL,
    context: Annotated[
        int | None, typer.Option(help="recall: tokens of a context, 1 + 4 n.", show_default="513")
    ] = None,
    facts: Annotated[
        int | None, typer.Option(help="recall: facts in a context.", show_default="64")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="recall: contexts.", show_default="32")
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(help="recall: a TOML file of recipes and budgets, instead of --recipe."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Others: questions of each task.", show_default="all")
    ] = None,
    include_path: Annotated[
        str | None, typer.Option(help="Others: a folder with task files of your own.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Others: prompts generated from at once.", show_default="1")
    ] = None,
    device: Device = "auto",
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Write the record here (JSON).")] = None,
    plot: Annotated[
        bool, typer.Option(help="recall: draw whole answers against bytes beside --out.")
    ] = True,
    show: Annotated[bool, typer.Option("--list", help="List the recipes.")] = False,
) -> None:
    """Measure recipes on a task, beside the cache that keeps everything.

    recall: a context with facts is read and compressed before anybody asks; then some facts are
    asked for, each on a copy of the cache. "whole" is the share of answers with both of their
    tokens right, as greedy generation gives them; "look-up" that of first tokens, which must be
    found in the context; "copy" that of second tokens after the right first one. "perplexity" is
    that of filler afterwards, at best 4; "bytes" and "slots" are held for a context, "share" is of
    an exact cache, "read" is what a query reads of the slots.

    Other tasks: lm-evaluation-harness asks its questions, of an exact cache and of each recipe.
    Answers are generated as model.generate does with the recipe; a log-likelihood is scored after
    its context was read and compressed. Intervals are of 95 %, changes of the same questions.

    A budget is a number of slots, from 2 on, or a share of the tokens, such as 0.25; 1.0 keeps all,
    and 1 is refused. Values such as
    heads=@duo_attention are read from tables that python -m diffcache.eval.kv.prepare makes.
    kvpress/snapkv:budget=0.25 has kvpress choose the slots, if it is installed.

    [bold]Try[/bold]

        diffcache kv --list

        diffcache kv --recipe snapkv:budget=0.25 --recipe keydiff:budget=0.25

        diffcache kv --recipe "snapkv:budget=0.5|kivi:bits=2"

        diffcache kv --sweep assets/bench/kv-recall.toml --out out/kv-recall.json

        diffcache kv --tasks gsm8k,arc_easy --model DIR --recipe snapkv:budget=0.5 --limit 200
    """
    if call.invoked_subcommand is not None:
        return
    if show:
        print_rows(("recipe", "what it does"), list(recipes().items()))
        return
    if (sweep is None) == (not recipe):
        raise ValueError("give --recipe (may be repeated), --sweep FILE, or --list")
    if out is not None:
        check_target("--out", out, (".json",))
    quiet()
    shape: dict[str, Any] = {"context": context, "facts": facts, "samples": samples}
    if sweep is not None:
        named = {"model": None if model == MODEL else model, "seed": seed or None}
        _refuse(shape | named, f"--sweep {sweep} says what is asked; leave it out")
    if tasks == RECALL:
        _refuse({"limit": limit, "include-path": include_path, "batch": batch},
                "is not for --tasks recall")  # fmt: skip
        if device not in ("auto", "cpu"):
            raise ValueError(f"--device {device}: recall is measured on the CPU; leave it out")
        shape["samples"] = 32 if samples is None else samples
        _recall(recipe, sweep, out, plot, model=model, seed=seed, **shape)
        return
    _refuse(shape | {"sweep": sweep}, "is for --tasks recall alone")
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingError(
            f"--tasks {tasks}: lm-evaluation-harness is missing: pip install 'diffcache[llm]'"
        )
    from diffcache.eval.kv.harness import Questions

    asked = Questions(
        model, tuple(tasks.split(",")), limit, include_path,
        str(device_of(device)), batch=1 if batch is None else batch, seed=seed,
    )  # fmt: skip
    _harness(asked, recipe, out)


def _refuse(options: dict[str, Any], why: str) -> None:
    """Raise for the first option that was given."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"--{name} {value}: {why}")


def _recall(
    recipe: list[str], file: Path | None, out: Path | None, plot: bool, **task: Any
) -> None:
    """Measure recall, print it, and write and draw the record."""
    from diffcache.eval.kv.recall import KVTask
    from diffcache.eval.kv.sweep import Sweep, draw, read_sweep, run
    from diffcache.eval.kv.words import parse_row

    if file is None:
        given = {name: value for name, value in task.items() if value is not None}
        wanted = Sweep(KVTask(**given), {"recipes": recipe})
        list(map(parse_row, recipe))  # raises before anything is loaded
    else:
        wanted = read_sweep(file)
    with progress("asking") as show_progress:
        rows = run(wanted, out, show_progress)
    for titles, lines in tables(rows):
        print_rows(titles, lines)
    if out is not None:
        typer.echo(f"wrote {out}")
    if out is not None and plot:
        picture = out.with_suffix(".png")
        draw(json.loads(out.read_text(encoding="utf-8")), picture)
        typer.echo(f"wrote {picture}")


def _harness(asked: Questions, recipe: list[str], out: Path | None) -> None:
    """Ask questions of the harness, print what came out, and write the record."""
    from diffcache.eval.kv.harness import ask
    from diffcache.eval.kv.words import parse_recipe

    rows = ask(
        asked, {name: parse_recipe(name) for name in recipe}, out,
        lambda name: typer.echo(f"asking {name}", err=True),
    )  # fmt: skip
    titles = ("task", "metric", "recipe", "value", "change from none")
    lines = [
        (row["task"], row["metric"], _broken(row["name"]), _spread(row["value"], ""),
         "" if row["change"] is None else _spread(row["change"], "+"))
        for row in sorted(rows, key=lambda row: (row["task"], row["metric"]))
    ]  # fmt: skip
    print_rows(titles, lines)
    if out is not None:
        typer.echo(f"wrote {out}")


def _spread(found: dict[str, float], sign: str = "") -> str:
    """Return a number with its interval, where it has one."""
    if "low" not in found:
        return f"{found['value']:{sign}.3f}"
    ends = f"{found['low']:{sign}.3f}, {found['high']:{sign}.3f}"
    return f"{found['value']:{sign}.3f} [{ends}]"


def _broken(name: str, width: int = 38) -> str:
    """Return a long name on several lines, broken behind commas and the signs |."""
    lines = [""]
    for part in re.findall(r"[^,|]+[,|]?", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


def tables(rows: list[dict[str, Any]]) -> tuple[Table, Table]:
    """Return titles and rows of what is printed of recall: what is known, and what it takes."""
    known: list[tuple[str, ...]] = []
    takes: list[tuple[str, ...]] = []
    for row in rows:
        seconds, name = row["seconds"], _broken(str(row["name"]))
        known.append((
            name, _spread(row["whole"]), f"{row['lookup']['value']:.3f}",
            f"{row['copy']['value']:.3f}", f"{row['perplexity']:.2f}", f"{row['share']:.1%}",
        ))  # fmt: skip
        takes.append((
            name, human(row["bytes"], "B"), f"{row['share']:.1%}", f"{row['slots']:.0f}",
            f"{row['read']:.0%}", f"{seconds['prefill'] + seconds['compress']:.3f}",
            f"{1e3 * seconds['token']:.1f}",
        ))  # fmt: skip
    return (
        (("", "whole", "look-up", "copy", "perplexity", "share"), known),
        (("", "bytes", "share", "slots", "read", "s/context", "ms/token"), takes),
    )
