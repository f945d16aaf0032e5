"""`diffcache kv`: what recipes for key-value caches cost and save; their tables; models with small latents."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy

from diffcache.command import EXIT_LINE, FAILED, Device, Seed, check_target, device_of, fail, guarded, refuse
from diffcache.errors import MissingError
from diffcache.eval.cost.interleave import quartiles
from diffcache.eval.kv import choose_recipe, reuse
from diffcache.eval.kv.recipe_parts import example, while_decoding
from diffcache.eval.metrics.intervals import mean_interval
from diffcache.eval.options import CausalModel, Texts
from diffcache.files import read_json
from diffcache.kv.recipes.by_name import recipe_function, recipes
from diffcache.pipelines.demo.console import print_rows, progress, quiet
from diffcache.registry import read_word
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


@app.callback(epilog=EXIT_LINE)
@guarded
def kv(
    call: typer.Context,
    recipe: Annotated[
        list[str],
        typer.Option(
            "--recipe",
            "--method",
            help="name:key=value,...; joined by | they compose; kvpress/name is a peer in recall. May be repeated.",
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
    calibrate makes. kvpress/snapkv:budget=0.25 has kvpress choose the slots of recall, if it is installed.

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
    """Return a row of texts as one line, with what is known before anything was timed."""
    whole = "" if row["whole"] is None else f"whole {spread(row['whole'], places=2)}, "
    held = f"{row['share']:.0%} of the bytes"
    return f"{row['name']}: {whole}perplexity x {spread(row['ratio'])}, {held}"


def can_answer(row: Mapping[str, Any]) -> str:
    """Return a sentence on the kinds of questions that the model can answer, and on those left out."""
    if not row["kinds"]:
        return "no questions: the tokenizer cannot write them"
    shares = [f"{kind} {share['value']:.2f}" for kind, share in row["kinds"].items()]
    beyond = [kind for kind in row["kinds"] if kind not in row["able"]]
    left = f"; left out, since it cannot: {', '.join(beyond)}" if beyond else ""
    return f"the model itself answers: {', '.join(shares)}{left}"


def _recall(recipe: list[str], file: Path | None, out: Path | None, **task: Any) -> None:
    """Measure recall, print it, and write the record."""
    from diffcache.eval.kv.recall_cost import KVTask, RecipeSweep, read_sweep, run
    from diffcache.eval.kv.recipe_words import parse_row

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
    from diffcache.eval.kv.recipe_words import names_tables, parse_recipe
    from diffcache.eval.kv.texts import TextModel

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
    """Print where the record is, and its plot, which `draw` draws."""
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


_LONGEST_LINE = 38  # characters of a name in a table


def broken(name: str) -> str:
    """Return a long name on several lines, broken behind commas and the signs |."""
    lines = [""]
    for part in re.findall(r"[^,|]+[,|]?", name):
        if lines[-1] and len(lines[-1]) + len(part) > _LONGEST_LINE:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


def recall_tables(rows: list[dict[str, Any]]) -> tuple[Table, Table]:
    """Return two tables of recall, titles and rows each: the quality, and the cost."""
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
    """Return two tables of texts, titles and rows each: the quality, and the cost."""
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


_SHORTEST = 32  # tokens of a context, so that spans of 16 differ


@guarded
def calibrate(
    recipe: Annotated[
        str,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]", help="A recipe that needs tables, and settings of the measurement."
        ),
    ],
    model: Annotated[str, typer.Option(help="Directory of a causal model, or a Hugging Face model ID.")],
    out: Annotated[Path, typer.Option(help="File of the tables, .safetensors.")],
    texts: Annotated[
        Path | None,
        typer.Option(
            help='A file with a text on each line, a .jsonl file with "text", or a folder of .txt files.',
            show_default="of recall-llama contexts with facts",
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=_SHORTEST, help="Tokens of a context.", show_default="512, of facts 513")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Contexts at most.")] = 16,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Measure the tables that a recipe needs, on your own model and texts.

    Contexts are cut from the texts, and spans of a context are repeated behind it: what repeats is
    what heads retrieve and later queries need. The file holds a digest of the model's weights, and
    is refused for a model of others. Recipes with tables: compresskv, prefixkv, epicache,
    duo_attention, razor_attention, lococo, locret, double_sparsity, a2ats, cskv, kv_heads and
    xquant_latent. Tables of recall-llama are shipped: its contexts have facts, and questions of
    them behind them.

    [bold]Try[/bold]

        diffcache kv calibrate --model DIR --texts FILE --recipe compresskv --out x.safetensors

        diffcache kv --model DIR --texts FILE --recipe compresskv:tables=x.safetensors

        diffcache kv calibrate --model DIR --texts FILE --recipe cskv:steps=50 --out y.safetensors
    """
    check_target("--out", out, (".safetensors",))
    name, settings = read_word(recipe)
    name = name.replace("-", "_")
    quiet()
    from diffcache.eval.kv.contexts import RecallSamples, TextSamples, Work
    from diffcache.eval.kv.recall_cost import SHIPPED, KVTask
    from diffcache.eval.kv.recipe_words import weights_digest
    from diffcache.eval.kv.stages import check, make, shown
    from diffcache.eval.kv.texts import TextModel, windows

    check(name, settings)
    if texts is None and model != SHIPPED:
        raise ValueError(f"--texts is missing: texts of your own, as --model is not {SHIPPED}")
    drawn: RecallSamples | TextSamples
    if texts is None:
        task = KVTask(dtype="float32")
        loaded, weights = task.load(), weights_digest(task.directory)
        drawn = RecallSamples(context or 513, count=samples, seed=seed)
    else:
        chosen = TextModel(model, str(device_of(device)))
        found = windows(chosen, texts, context or 512, samples, seed=seed)
        loaded, weights = chosen.load(), chosen.weights
        drawn = TextSamples(found.ids, found.source | {"model": Path(model).name}, seed)
    with progress(name) as show:
        made = make(name, Work(loaded, drawn, show), out, weights, **settings)
    typer.echo(f"wrote {out}, {out.stat().st_size:,} bytes, of {drawn.count} contexts")
    typer.echo(shown(made))
    each = next((f"#{one[0]}" for one in made.gives.values() if len(one) > 1), "")
    typer.echo(f"take it: diffcache kv --model {model} --recipe {name}:tables={out}{each}")


_HELD_OUT = 8  # contexts at most, on which perplexity is measured


@guarded
def convert(
    model: CausalModel,
    out: Annotated[Path, typer.Option(help="Folder of the new model.")],
    rope: Annotated[
        int | None, typer.Option(help="Rotary channels of a token.", show_default="those of a head")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Channels of a latent.", show_default="as lose nothing")] = None,
    fold: Annotated[int, typer.Option(help="Neighboring frequencies taken for one.")] = 1,
    turned: Annotated[bool, typer.Option("--turned", help="Decompose pairs of channels as complex numbers.")] = False,
    texts: Texts = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a context.")] = 512,
    samples: Annotated[int, typer.Option(min=4, help="Contexts, a quarter held out.")] = 32,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Convert a model of Llama's form into DeepSeek-V3's, which caches small latents (TransMLA).

    Nothing is trained; perplexity of both on contexts held out is printed. All positions and ranks
    (--rope as many channels as all key heads have) lose nothing and save nothing. The new model is
    one of transformers, and takes recipes such as snapkv and kivi.

    [bold]Try[/bold]

        diffcache kv convert --model smollm2 --rope 128 --turned --rank 128 --out smollm2-mla
    """
    from diffcache.eval.kv.text_task import perplexity_of
    from diffcache.eval.kv.texts import TextModel, windows
    from diffcache.kv.hf.transmla import to_mla

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out}: is there already; name a new folder")
    quiet()
    chosen = TextModel(model, str(device_of(device)))
    drawn = windows(chosen, texts, context, samples, least=4, seed=seed).ids
    least = min(max(len(drawn) // 4, 2), _HELD_OUT)
    held_out, read = drawn[:least], drawn[least:]
    old = chosen.load()
    with progress("reading") as show:

        def told() -> Iterator[Tensor]:
            for number, ids in enumerate(read):
                show(number, len(read), "contexts")
                yield ids

        made = to_mla(old, told(), rope=rope, rank=rank, fold=fold, turned=turned)
    nats = [torch.stack([_nats(each, ids) for ids in held_out]) for each in (old, made)]
    made.save_pretrained(out)
    chosen.tokenizer.save_pretrained(out)
    config = made.config
    before = 2 * old.config.num_key_value_heads * config.v_head_dim
    after = config.kv_lora_rank + config.qk_rope_head_dim
    typer.echo(f"wrote {out}: a token is held in {after} channels of a layer, before in {before}")
    was, now, ratio = (
        spread(perplexity_of(mean_interval(part)).to_dict()) for part in (nats[0], nats[1], nats[1] - nats[0])
    )
    typer.echo(f"perplexity of {least} contexts of {context} tokens held out: {was} before, {now} now, x {ratio}")
    typer.echo(f"take it: diffcache kv --model {out}")


@torch.no_grad()
def _nats(model: Any, ids: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of the tokens after the first, float64."""
    logits = model(ids.to(model.device), use_cache=False).logits[0, :-1].float()
    return cross_entropy(logits, ids[0, 1:].to(model.device)).double().cpu()


app.command(epilog=EXIT_LINE)(calibrate)
app.command("choose", epilog=EXIT_LINE)(choose_recipe.command)
app.command("reuse", epilog=EXIT_LINE)(reuse.command)
app.command(epilog=EXIT_LINE)(convert)
