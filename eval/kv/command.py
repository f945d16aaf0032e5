"""`diffcache kv`: what recipes for key-value caches cost and save."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from diffcache.command import Seed, check_target, guarded
from diffcache.kv.recipes.catalog import recipes
from diffcache.pipelines.demo.console import print_rows, progress, quiet
from diffcache.report import human

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
NO_RECIPES: list[str] = []


@guarded
def kv(
    recipe: Annotated[
        list[str],
        typer.Option(
            help="name:key=value,...; joined by | they compose; kvpress/name is a peer. May be "
            "repeated."
        ),
    ] = NO_RECIPES,
    model: Annotated[
        str, typer.Option(help="Directory of a model trained on the task, or recall-llama.")
    ] = "recall-llama",
    task: Annotated[str, typer.Option(help="What is asked: recall.")] = "recall",
    context: Annotated[int, typer.Option(help="Tokens of a context, 1 + 4 n.")] = 513,
    facts: Annotated[int, typer.Option(help="Facts in a context.")] = 64,
    samples: Annotated[int, typer.Option(help="Contexts.")] = 32,
    seed: Seed = 0,
    sweep: Annotated[
        Path | None, typer.Option(help="A TOML file of recipes and budgets, instead of --recipe.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the record here (JSON).")] = None,
    plot: Annotated[bool, typer.Option(help="Draw accuracy against bytes beside --out.")] = True,
    show: Annotated[bool, typer.Option("--list", help="List the recipes.")] = False,
) -> None:
    """Measure recipes: accuracy, perplexity, bytes, seconds, beside the uncompressed cache.

    A context with facts is read and compressed before anybody asks; then some facts are asked for,
    each on a copy of the cache. "accuracy" is the share of the answers' tokens that are right (95 %
    bootstrap interval; v1 needs a look-up, v2 follows it), "perplexity" that of filler afterwards,
    at best 4; "bytes" and "slots" are held for a context, "share" is of an exact cache, "read" is
    what a query reads of the slots.

    A budget is a number of slots, from 2 on, or a share of the tokens, such as 0.25; 1.0 keeps all,
    and 1 is refused. Values such as
    heads=@duo_attention are read from tables that python -m diffcache.eval.kv.prepare makes.
    kvpress/snapkv:budget=0.25 has kvpress choose the slots, if it is installed.

    [bold]Try[/bold]

        diffcache kv --list

        diffcache kv --recipe snapkv:budget=0.25 --recipe keydiff:budget=0.25

        diffcache kv --recipe "snapkv:budget=0.5|kivi:bits=2"

        diffcache kv --sweep assets/bench/kv-recall.toml --out out/kv-recall.json
    """
    if show:
        print_rows(("recipe", "what it does"), list(recipes().items()))
        return
    if task != "recall":
        raise ValueError(f"task={task!r}: must be 'recall'")
    if (sweep is None) == (not recipe):
        raise ValueError("give --recipe (may be repeated), --sweep FILE, or --list")
    if out is not None:
        check_target("--out", out, (".json",))
    quiet()
    from diffcache.eval.kv.recall import KVTask
    from diffcache.eval.kv.sweep import Sweep, draw, read_sweep, run
    from diffcache.eval.kv.words import parse_row

    if sweep is None:
        asked = KVTask(model=model, context=context, facts=facts, samples=samples, seed=seed)
        wanted = Sweep(asked, {"recipes": list(recipe)})
        list(map(parse_row, recipe))  # raises before anything is loaded
    else:
        wanted = read_sweep(sweep)
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


def _broken(name: str, width: int = 38) -> str:
    """Return a long name on several lines, broken behind commas and the signs |."""
    lines = [""]
    for part in re.findall(r"[^,|]+[,|]?", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


def tables(rows: list[dict[str, Any]]) -> tuple[Table, Table]:
    """Return titles and rows of what is printed: what is known, and what it takes."""
    known: list[tuple[str, ...]] = []
    takes: list[tuple[str, ...]] = []
    for row in rows:
        right, seconds = row["accuracy"], row["seconds"]
        name = _broken(str(row["name"]))
        known.append((
            name, f"{right['value']:.3f} [{right['low']:.3f}, {right['high']:.3f}]",
            f"{row['v1']:.3f}", f"{row['v2']:.3f}", f"{row['perplexity']:.2f}",
            f"{row['share']:.1%}",
        ))  # fmt: skip
        takes.append((
            name, human(row["bytes"], "B"), f"{row['share']:.1%}", f"{row['slots']:.0f}",
            f"{row['read']:.0%}", f"{seconds['prefill'] + seconds['compress']:.3f}",
            f"{1e3 * seconds['token']:.1f}",
        ))  # fmt: skip
    return (
        (("", "accuracy", "v1", "v2", "perplexity", "share"), known),
        (("", "bytes", "share", "slots", "read", "s/context", "ms/token"), takes),
    )
