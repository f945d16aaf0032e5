"""`diffcache kv`: what recipes for key-value caches cost and save."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from diffcache.command import EXIT_LINE, FAILED, Device, Seed, check_target, device_of, fail, guarded, refuse
from diffcache.errors import MissingError
from diffcache.eval.cost.interleave import quartiles
from diffcache.eval.kv import choose, convert, reuse
from diffcache.eval.kv.calibrate import calibrate
from diffcache.eval.kv.parts import example, while_decoding
from diffcache.files import read_json
from diffcache.kv.recipes.catalog import recipe_function, recipes
from diffcache.pipelines.demo.console import print_rows, progress, quiet
from diffcache.run_report import human

NO_RECIPES: list[str] = []
TEXT, RECALL, MODEL = "text", "recall", "recall-llama"
FIRST = (  # recipes that are measured where none is named: those that hold about half, and less
    "snapkv:budget=0.5",
    "keydiff:budget=0.5",
    "streaming_llm:budget=0.5",
    "kivi:bits=4",
    "snapkv:budget=0.5|kivi:bits=4",
)
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


app = typer.Typer(
    invoke_without_command=True, rich_markup_mode="rich", context_settings={"help_option_names": ["-h", "--help"]}
)
app.command(epilog=EXIT_LINE)(calibrate)
app.command("choose", epilog=EXIT_LINE)(choose.command)
app.command("reuse", epilog=EXIT_LINE)(reuse.command)
app.command("convert", epilog=EXIT_LINE)(convert.command)


@app.callback(epilog=EXIT_LINE)
@guarded
def kv(
    call: typer.Context,
    recipe: Annotated[
        list[str],
        typer.Option(
            "--recipe",
            "--method",
            help="name:key=value,...; joined by | they compose; kvpress/name is a peer. May be repeated.",
        ),
    ] = NO_RECIPES,
    model: Annotated[
        str, typer.Option(help="Directory of a causal model, Hugging Face model ID, recall-llama, or smollm2.")
    ] = MODEL,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="text, recall, or names of tasks of lm-evaluation-harness, such as gsm8k,piqa.",
            show_default="recall for recall-llama, else text",
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            help='text: a file with a text on each line, a .jsonl file with "text", or a folder of .txt files.',
            show_default="Python's reference",
        ),
    ] = None,
    query_aware: Annotated[
        bool, typer.Option("--query-aware", help="text: compress after each question as well.")
    ] = False,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a context; of recall 1 + 4 n.", show_default="512, recall 513")
    ] = None,
    facts: Annotated[int | None, typer.Option(help="recall: facts in a context.", show_default="64")] = None,
    samples: Annotated[int | None, typer.Option(help="Contexts.", show_default="8, recall 32")] = None,
    sweep: Annotated[
        Path | None, typer.Option(help="recall: a TOML file of recipes and budgets, instead of --recipe.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Others: questions of each task.", show_default="all")] = None,
    include_path: Annotated[str | None, typer.Option(help="Others: a folder with task files of your own.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Others: prompts generated from at once.", show_default="1")
    ] = None,
    device: Device = "auto",
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Write the record here (JSON).")] = None,
    plot: Annotated[bool, typer.Option(help="text: draw answers against bytes and seconds beside --out.")] = True,
    show: Annotated[bool, typer.Option("--list", help="List the recipes.")] = False,
) -> None:
    """Measure recipes on a task, beside the cache that keeps everything.

    text: a window of your texts is read and compressed, with sentences to ask for between its
    words. "perplexity" is that of what follows; "copy" the share of right tokens where spans of the
    context are repeated; "whole" the share of questions (RULER's needles at five depths, several
    values, pairs, variables, frequent words; SCBench's one context for all) that greedy generation
    answers whole, of the kinds that the model itself can answer; "asked first" that where each
    question was known to what compresses. "x DynamicCache" is the time of a token by that of the
    same model with a DynamicCache and sdpa, taken in turn: median and quartiles, of CPU time on a
    CPU. Without --recipe a first set is measured.

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
    and 1 is refused. Values such as heads=@duo_attention are read from tables that diffcache kv
    calibrate makes. kvpress/snapkv:budget=0.25 has kvpress choose the slots, if it is installed.

    [bold]Try[/bold]

        diffcache kv --list

        diffcache kv --recipe snapkv:budget=0.25 --recipe keydiff:budget=0.25

        diffcache kv --model smollm2

        diffcache kv --model DIR --texts FILE --recipe "snapkv:budget=0.5|kivi:bits=2"

        diffcache kv --sweep assets/bench/kv-recall.toml --out out/kv-recall.json

        diffcache kv --tasks gsm8k,arc_easy --model DIR --recipe snapkv:budget=0.5 --limit 200
    """
    if call.invoked_subcommand is not None:
        return
    if show:
        _list()
        return
    if tasks is None:
        tasks = RECALL if model == MODEL and texts is None else TEXT
    recipe = recipe or list(FIRST if sweep is None and tasks == TEXT else ())
    if (sweep is None) == (not recipe):
        raise ValueError("give --recipe (may be repeated), --sweep FILE, or --list")
    if out is not None:
        check_target("--out", out, (".json",))
    quiet()
    shape: dict[str, Any] = {"context": context, "facts": facts, "samples": samples}
    if sweep is not None:
        named = {"model": None if model == MODEL else model, "seed": seed or None}
        refuse(shape | named, f"--sweep {sweep} says what is asked; leave it out")
    if tasks == TEXT:
        others = {"limit": limit, "include-path": include_path, "batch": batch}
        refuse(others | {"facts": facts, "sweep": sweep}, "is not for --tasks text")
        task = {"context": context, "samples": samples, "aware": query_aware}
        _text(recipe, model, texts, out, plot, device=device, seed=seed, **task)
        return
    refuse({"texts": texts, "query-aware": query_aware or None}, "is for --tasks text alone")
    if tasks == RECALL:
        refuse({"limit": limit, "include-path": include_path, "batch": batch}, "is not for --tasks recall")
        if device not in ("auto", "cpu"):
            raise ValueError(f"--device {device}: recall is measured on the CPU; leave it out")
        shape["samples"] = 32 if samples is None else samples
        _recall(recipe, sweep, out, model=model, seed=seed, **shape)
        return
    refuse(shape | {"sweep": sweep}, "is for --tasks recall alone")
    asked = {"limit": limit, "include_path": include_path, "batch": 1 if batch is None else batch}
    _harness(recipe, out, model, tasks, device=device, seed=seed, **asked)


def _list() -> None:
    """Print all recipes."""
    rows = []
    for name, what in recipes().items():
        rows.append((name, what, while_decoding(example(recipe_function(name)))))
    print_rows(("recipe", "what it does", "what it holds"), rows)


def _text(
    recipe: list[str], model: str, texts: Path | None, out: Path | None, plot: bool, device: str, **shape: Any
) -> None:
    """Measure recipes on texts, print what came out, and write and draw the record."""
    from diffcache.eval.kv.text_task import TextTask, draw, run
    from diffcache.eval.kv.texts import TextModel

    chosen = TextModel(model, str(device_of(device)))
    task = TextTask(chosen, texts, **{k: v for k, v in shape.items() if v is not None})
    with progress("reading") as show_progress:
        found = run(
            task, recipe, out, show_progress, lambda so_far, word: typer.echo(text_line(so_far.rows[word]), err=True)
        )
    for titles, lines in text_tables(found.rows):
        print_rows(titles, lines)
    typer.echo(f"{found.count} windows of {task.context} tokens, {chosen.device}")
    typer.echo(can_answer(found.rows["none"]))
    if found.timings is not None and found.timings.warning is not None:
        typer.echo(f"warning: {found.timings.warning}", err=True)
    _told(out, draw if plot else None)
    if found.failed:
        told = "; ".join(f"{word}: {why}" for word, why in found.failed.items())
        fail(f"{len(found.failed)} of {len(recipe)} recipes could not be measured: {told}", FAILED)


def text_line(row: Mapping[str, Any]) -> str:
    """Return a row of texts in one line, before anything was timed."""
    whole = "" if row["whole"] is None else f"whole {spread(row['whole'], places=2)}, "
    held = f"{row['share']:.0%} of the bytes"
    return f"{row['name']}: {whole}perplexity x {spread(row['ratio'])}, {held}"


def can_answer(row: Mapping[str, Any]) -> str:
    """Say what the model itself answers, and what is left out because it cannot."""
    if not row["kinds"]:
        return "no questions: the tokenizer cannot write them"
    shares = [f"{kind} {share['value']:.2f}" for kind, share in row["kinds"].items()]
    beyond = [kind for kind in row["kinds"] if kind not in row["able"]]
    left = f"; left out, since it cannot: {', '.join(beyond)}" if beyond else ""
    return f"the model itself answers: {', '.join(shares)}{left}"


def _recall(recipe: list[str], file: Path | None, out: Path | None, **task: Any) -> None:
    """Measure recall, print it, and write the record."""
    from diffcache.eval.kv.recall import KVTask, RecipeSweep, read_sweep, run
    from diffcache.eval.kv.words import parse_row

    if file is None:
        given = {name: value for name, value in task.items() if value is not None}
        wanted = RecipeSweep(KVTask(**given), {"recipes": recipe})
        list(map(parse_row, recipe))  # raises before anything is loaded
    else:
        wanted = read_sweep(file)
    with progress("asking") as show_progress:
        rows = run(wanted, out, show_progress)
    for titles, lines in recall_tables(rows):
        print_rows(titles, lines)
    _told(out)


def _harness(recipe: list[str], out: Path | None, model: str, tasks: str, device: str, **given: Any) -> None:
    """Ask questions of the harness, print what came out, and write the record."""
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingError(f"--tasks {tasks}: lm-evaluation-harness is missing: pip install 'diffcache[llm]'")
    from diffcache.eval.kv.harness import Questions, ask
    from diffcache.eval.kv.texts import TextModel
    from diffcache.eval.kv.words import names_tables, parse_recipe

    asked = Questions(model, tuple(tasks.split(",")), device=str(device_of(device)), **given)
    weights = TextModel(model).weights if any(map(names_tables, recipe)) else None
    parsed = {name: parse_recipe(name, weights) for name in recipe}
    rows = ask(asked, parsed, out, lambda name: typer.echo(f"asking {name}", err=True))
    titles = ("task", "metric", "recipe", "value", "change from none")
    lines = []
    for row in sorted(rows, key=lambda row: (row["task"], row["metric"])):
        change = "" if row["change"] is None else spread(row["change"], "+")
        value = spread(row["value"], "")
        lines.append((row["task"], row["metric"], broken(row["name"]), value, change))
    print_rows(titles, lines)
    _told(out)


def _told(out: Path | None, draw: Callable[[Any, Path], None] | None = None) -> None:
    """Say where the record is, and its plot, which `draw` draws."""
    if out is not None:
        typer.echo(f"wrote {out}")
    if out is not None and draw is not None:
        picture = out.with_suffix(".png")
        draw(read_json(out), picture)
        typer.echo(f"wrote {picture}")


def spread(found: Mapping[str, float], sign: str = "", places: int = 3) -> str:
    """Return a number with its interval, where it has one."""
    form = f"{sign}.{places}f"
    if "low" not in found:
        return f"{found['value']:{form}}"
    return f"{found['value']:{form}} [{found['low']:{form}}, {found['high']:{form}}]"


def broken(name: str, width: int = 38) -> str:
    """Return a long name on several lines, broken behind commas and the signs |."""
    lines = [""]
    for part in re.findall(r"[^,|]+[,|]?", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


def recall_tables(rows: list[dict[str, Any]]) -> tuple[Table, Table]:
    """Return titles and rows of what is printed of recall: what is known, and what it takes."""
    known: list[tuple[str, ...]] = []
    takes: list[tuple[str, ...]] = []
    for row in rows:
        seconds, name = row["seconds"], broken(str(row["name"]))
        share, held = f"{row['share']:.1%}", (human(row["bytes"], "B"), f"{row['slots']:.0f}")
        answers = f"{row['lookup']['value']:.3f}", f"{row['copy']['value']:.3f}"
        known.append((name, spread(row["whole"]), *answers, f"{row['perplexity']:.2f}", share))
        prompt, token = seconds["prefill"] + seconds["compress"], 1e3 * seconds["token"]
        read = f"{row['read']:.0%}"
        takes.append((name, held[0], share, held[1], read, f"{prompt:.3f}", f"{token:.1f}"))
    return (
        (("", "whole", "look-up", "copy", "perplexity", "share"), known),
        (("", "bytes", "share", "slots", "read", "s/context", "ms/token"), takes),
    )


def text_tables(rows: Mapping[str, dict[str, Any]]) -> tuple[Table, Table]:
    """Return titles and rows of what is printed of texts: what is known, and what it takes."""
    known: list[tuple[str, ...]] = []
    takes: list[tuple[str, ...]] = []
    for word, row in rows.items():
        name = broken(word)
        asked = []
        for key, sign in (("whole", ""), ("change", "+"), ("aware", "")):
            asked.append("" if row[key] is None else spread(row[key], sign, 2))
        perplexity, copied = (spread(row[key], places=2) for key in ("perplexity", "copy"))
        known.append((name, *asked, perplexity, spread(row["ratio"]), copied))
        milliseconds = 1e3 * row["token_seconds"]["median"]
        half = "" if row["share_16"] is None else f"{row['share_16']:.1%}"
        held = human(row["bytes"], "B"), f"{row['share']:.1%}", half
        takes.append((name, *held, f"{milliseconds:.1f}", quartiles(row["token_ratio"])))
    return (
        (("", "whole", "change", "asked first", "perplexity", "x none", "copy"), known),
        (("", "bytes", "share", "of 16 bits", "ms/token", "x DynamicCache"), takes),
    )
