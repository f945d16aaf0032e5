"""`diffcache kv calibrate`: the tables of a recipe, measured on a model and texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diffcache.command import Device, Seed, check_target, device_of, guarded
from diffcache.pipelines.demo.console import progress, quiet
from diffcache.registry import read_word

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
    from diffcache.eval.kv.offline import RecallSamples, TextSamples, Work
    from diffcache.eval.kv.recall import SHIPPED, KVTask
    from diffcache.eval.kv.stages import check, make, shown
    from diffcache.eval.kv.tables import weights_digest
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
