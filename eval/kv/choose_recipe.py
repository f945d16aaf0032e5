"""Choose the recipe that keeps most of a model's answers on your own texts within a share of the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from diffcache.command import FAILED, Device, Seed, check_target, device_of, fail, guarded
from diffcache.eval.metrics.intervals import Interval, mean_interval, share_change
from diffcache.eval.options import CausalModel, Texts
from diffcache.kv.recipe import Recipe
from diffcache.pipelines.demo.console import print_rows, progress, quiet

_BESIDE = 0.94  # share of the memory for slots; positions, statistics and the last queries take the rest
NO_RECIPES: list[str] = []


def candidates(memory: float) -> list[str]:
    """Return the recipes to try where the caller names none, for a share of exact bytes."""
    slots = max(round(_BESIDE * memory, 3), 0.001)
    more = round(min(2.2 * slots, 0.9), 3)  # share of slots that fit if they are held in four bits
    dropping = [f"{name}:budget={slots}" for name in ("snapkv", "keydiff", "streaming_llm")]
    return ["kivi:bits=4", "kivi:bits=2", *dropping, f"snapkv:budget={more}|kivi:bits=4"]


@dataclass(frozen=True)
class Half:
    """Figures of a recipe on some of the windows, paired with those of the exact cache.

    Attributes:
        change: Difference in the share of whole answers; None where nothing was asked.
        ratio: Perplexity divided by that of the exact cache.
    """

    change: Interval | None
    ratio: Interval

    @property
    def worth(self) -> tuple[float, float]:
        """Rank of a recipe: whole answers first, then perplexity."""
        return (0.0 if self.change is None else self.change.value, -self.ratio.value)


@dataclass(frozen=True)
class Tried:
    """A recipe that was tried.

    Attributes:
        word: The recipe.
        held: Share of the bytes of exact keys and values, of 16 bits where that is known.
        fits: Whether that is within the memory.
        chosen_by: Figures on the windows that the choice is made by.
        held_out: Figures on the others.
    """

    word: str
    held: float
    fits: bool
    chosen_by: Half
    held_out: Half


@dataclass(frozen=True)
class ChosenRecipe:
    """The recipe that was chosen, and the others that were tried.

    Attributes:
        word: The recipe as a command line takes it.
        tried: All that were tried, the best first on the windows that decide.
        failed: Words that could not be measured, with the reason.
    """

    word: str
    tried: tuple[Tried, ...]
    failed: Mapping[str, str]

    @property
    def recipe(self) -> Recipe:
        """The recipe, for `cache_for` and `wrap`."""
        from diffcache.eval.kv.recipe_words import parse_recipe

        return parse_recipe(self.word)

    @property
    def best(self) -> Tried:
        """The best of those that fit on the windows that the choice did not see."""
        return max((one for one in self.tried if one.fits), key=lambda one: one.held_out.worth)


def choose(
    model: str | Path,
    texts: str | Path | None = None,
    memory: float = 0.5,
    *,
    recipes: Sequence[str] = (),
    context: int = 512,
    samples: int = 16,
    seed: int = 0,
    device: str = "cpu",
    out: Path | None = None,
    progress: Callable[..., None] | None = None,
    each: Callable[..., None] | None = None,
) -> ChosenRecipe:
    """Choose the recipe that keeps most within a share of the memory, validated on held-out texts.

    Every recipe is measured on windows of the texts. Every other window decides: among the recipes that hold no more
    than `memory`, the one with the most whole answers wins, and among equals the lowest perplexity. The other windows
    estimate its quality on texts that did not decide.

    Args:
        model: Directory of a causal model, Hugging Face model ID, or `smollm2` once it was fetched.
        texts: File or folder of texts, see `read_texts`; None for Python's reference.
        memory: Share of the bytes of exact keys and values, above 0 and at most 1.
        recipes: Words of recipes to try; `candidates` if it is empty.
        context: Tokens of a context.
        samples: Windows at most, half of them held out.
        seed: Seed of windows and questions.
        device: Device of torch.
        out: JSON file of the record of all that was measured; None to write none.
        progress: Called for the progress, as `text_task.run` calls it.
        each: Called after every row, as `text_task.run` calls it.

    Raises:
        ValueError: If `memory` or a recipe is wrong, texts are too few, or nothing fits.
        DiffcacheError: If the model cannot be used.
    """
    from diffcache.eval.kv.text_task import TextTask, run
    from diffcache.eval.kv.texts import TextModel

    if not 0 < memory <= 1:
        raise ValueError(f"memory={memory}: must be a share above 0 and at most 1, such as 0.5")
    if samples < 4:
        raise ValueError(f"samples={samples}: must be at least 4, two to choose by and two held out")
    place = None if texts is None else Path(texts)
    task = TextTask(TextModel(str(model), device), place, context, samples, seed)
    words = list(recipes) or candidates(memory)
    found = run(task, words, out, progress, each)
    return pick(found.rows, memory, found.failed)


def pick(
    rows: Mapping[str, Mapping[str, Any]], memory: float, failed: Mapping[str, str] | None = None
) -> ChosenRecipe:
    """Choose among measured rows; `choose` says how.

    Args:
        rows: Rows by word, as `text_task.run` returns them.
        memory: Largest share of the exact cache's bytes.
        failed: Words that could not be measured, with the reason.

    Raises:
        ValueError: If there are fewer than four windows, or no row fits.
    """
    from diffcache.eval.kv.recipe_words import NONE
    from diffcache.eval.kv.text_task import held_share

    count = len(rows[NONE]["nats"])
    if count < 4:
        raise ValueError(f"{count} windows: must be at least 4; give more texts or longer ones")
    halves = slice(0, count, 2), slice(1, count, 2)
    tried = []
    for word in [word for word in rows if word != NONE]:
        row, held = rows[word], held_share(rows[word])
        tried.append(Tried(word, held, held <= memory, *(_half(rows[NONE], row, h) for h in halves)))
    fitting = [one for one in tried if one.fits]
    if not fitting:
        least = min(tried, key=lambda one: one.held, default=None)
        said = "nothing could be measured"
        if least is not None:
            said = f"the least is {least.word} with {least.held:.1%}"
        raise ValueError(f"memory={memory}: no recipe that was tried fits; {said}")
    best = max(fitting, key=lambda one: one.chosen_by.worth)
    tried.sort(key=lambda one: (one.fits, one.chosen_by.worth), reverse=True)
    return ChosenRecipe(best.word, tuple(tried), failed or {})


def _half(first: Mapping[str, Any], row: Mapping[str, Any], half: slice) -> Half:
    from diffcache.eval.kv.text_task import hits_of, perplexity_of

    nats = [torch.tensor(one["nats"][half], dtype=torch.float64) for one in (first, row)]
    change = None
    if row["able"]:
        change = share_change(hits_of(first)[half], hits_of({**row, "able": first["able"]})[half])
    return Half(change, perplexity_of(mean_interval(nats[1] - nats[0])))


@guarded
def command(
    model: CausalModel,
    texts: Texts = None,
    memory: Annotated[float, typer.Option(help="Share of the bytes of an exact cache.")] = 0.5,
    recipe: Annotated[list[str], typer.Option("--recipe", help="A recipe to try. May be repeated.")] = NO_RECIPES,
    context: Annotated[int, typer.Option(help="Tokens of a context.")] = 512,
    samples: Annotated[int, typer.Option(help="Contexts at most, half of them held out.")] = 16,
    device: Device = "auto",
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Write the record here (JSON).")] = None,
) -> None:
    """Choose the recipe that keeps most within a share of the memory, on texts of your own.

    Half of the contexts decide, by the questions answered whole and then by perplexity; the other
    half say what the choice is worth on texts that it was not made by. "held" is the share of exact
    keys and values, of 16 bits where the model is of more. A run that was cut off goes on from
    --out.

    [bold]Try[/bold]

        diffcache kv choose --model DIR --texts FILE --memory 0.5
    """
    from diffcache.eval.kv.command import broken, spread, text_line

    if out is not None:
        check_target("--out", out, (".json",))
    quiet()
    with progress("reading") as show:
        made = choose(
            model,
            texts,
            memory,
            recipes=recipe,
            context=context,
            samples=samples,
            seed=seed,
            device=str(device_of(device)),
            out=out,
            progress=show,
            each=lambda so_far, word: typer.echo(text_line(so_far.rows[word]), err=True),
        )
    lines = []
    for one in made.tried:
        cells = [broken(one.word), f"{one.held:.1%}" + ("" if one.fits else ", too much")]
        for half in (one.chosen_by, one.held_out):
            cells.append("" if half.change is None else spread(half.change.to_dict(), "+", 2))
            cells.append(spread(half.ratio.to_dict()))
        lines.append(tuple(cells))
    print_rows(("", "held", "change", "perplexity", "held out: change", "perplexity"), lines)
    typer.echo(f"{made.word} keeps most within {memory:.0%} of the memory")
    if made.best.word != made.word:
        typer.echo(f"on the contexts held out {made.best.word} keeps more")
    typer.echo(f"take it: diffcache.wrap(model, {made.word!r})")
    if made.failed:
        told = "; ".join(f"{word}: {why}" for word, why in made.failed.items())
        fail(f"{len(made.failed)} recipes could not be measured: {told}", FAILED)
