"""Make the tables that recipes need, of any model; as a script those shipped for recall-llama.

    python -m diffcache.eval.kv.prepare             # all that are not there yet, minutes
    python -m diffcache.eval.kv.prepare locret --again

Each is one file in assets/tables/recall-llama; `diffcache kv --recipe` reads it by `@name`. For
another model there is `diffcache kv calibrate`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from diffcache.command import script
from diffcache.eval.kv import offline_bases as bases
from diffcache.eval.kv import offline_gates as gates
from diffcache.eval.kv import offline_heads as heads
from diffcache.eval.kv.offline import Prepared, RecallSamples, Work
from diffcache.eval.kv.recall import SHIPPED, KVTask
from diffcache.eval.kv.tables import FOLDER, weights_digest, write_table
from diffcache.eval.methods import naming
from diffcache.kv.hf.cache import detach

# Recipe -> what finds its tables: called with its work, and settings.
_STAGES = (
    gates.duo_attention, heads.razor_attention, heads.compresskv, heads.prefixkv, heads.epicache,
    gates.lococo, gates.locret, heads.double_sparsity, bases.a2ats, bases.cskv, bases.kv_heads,
    bases.xquant_latent,
)  # fmt: skip
MAKERS: dict[str, Callable[..., Prepared]] = {stage.__name__: stage for stage in _STAGES}
ALL: list[str] = []
SHIPPED_TABLES = tuple(
    name for name in MAKERS if name not in ("epicache", "a2ats", "xquant_latent")
)


def check(name: str, settings: dict[str, Any]) -> None:
    """Check that there are tables of a name, and settings of what finds them.

    Raises:
        ValueError: If there are not; the message lists those that there are.
    """
    if name not in MAKERS:
        raise ValueError(f"no table {name!r}; there are {', '.join(MAKERS)}")
    known = settings_of(name)
    wrong = sorted(set(settings) - set(known))
    if wrong:
        taken = ", ".join(f"{key}={value!r}" for key, value in known.items()) or "none"
        raise ValueError(f"{name}: measuring has no setting {wrong[0]!r}; it has {taken}")


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of what finds the tables of a recipe, with their defaults."""
    parameters = inspect.signature(MAKERS[name]).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def make(name: str, work: Work, file: Path, weights: str, **settings: Any) -> Prepared:
    """Find the tables of a recipe on a model, and write them.

    Args:
        name: Key of `MAKERS`.
        work: Model in the state that it is used in, and contexts.
        file: File to write.
        weights: Digest of the model's weights, which is checked where the tables are read.
        settings: Settings of what finds them.

    Raises:
        AttachError: If the model has no such tables.
        ValueError: If there is no such name or setting, or one is out of its range.
    """
    check(name, settings)
    try:
        with naming(f"tables of {name}"):
            found = MAKERS[name](work, **settings)
    finally:
        detach(work.model)
    about = {
        "kind": found.kind, "recipe": name, "weights": weights, "samples": work.samples.about(),
        "gives": {setting: list(entries) for setting, entries in found.gives.items()},
        "settings": settings_of(name) | settings, **found.about,
    }  # fmt: skip
    write_table(file, found.tensors, about)
    return found


def prepare(
    names: Sequence[str], work: Work, folder: Path, weights: str, again: bool = False
) -> list[Path]:
    """Make tables and return their files; those that are there are left as they are.

    Args:
        names: Keys of `MAKERS`; none for those that are shipped.
        work: recall-llama in float32, and contexts.
        folder: Folder of the files.
        weights: Digest of the model's weights.
        again: Make them anew.

    Raises:
        ValueError: If there is no such name.
    """
    for name in names:
        check(name, {})
    files = []
    for name in names or SHIPPED_TABLES:
        file = folder / f"{name}.safetensors"
        files.append(file)
        if file.exists() and not again:
            continue
        print(f"{name} ...", file=sys.stderr)
        found = make(name, work, file, weights)
        print(f"wrote {file.name}, {file.stat().st_size:,} bytes: {shown(found)}")
    return files


def quiet_report(done: int, total: int, what: str) -> None:
    """Print the quarters of what is being done on standard error."""
    if done and done % max(total // 4, 1) == 0:
        print(f"  {what}: {done} of {total}", file=sys.stderr)


def shown(found: Prepared) -> str:
    """Return small tables as text, and the shapes of large ones."""
    parts = []
    for name, value in found.tensors.items():
        small = value.numel() <= 32
        parts.append(f"{name}={value.tolist() if small else list(value.shape)}")
    return ", ".join(parts[:4]) + (", ..." if len(parts) > 4 else "")


def command(
    names: Annotated[list[str], typer.Argument(help=f"{', '.join(MAKERS)} (those shipped).")] = ALL,
    model: Annotated[str, typer.Option(help="Directory, or recall-llama.")] = SHIPPED,
    again: Annotated[bool, typer.Option("--again", help="Make those anew that are there.")] = False,
    context: Annotated[int, typer.Option(help="Tokens of a context.")] = 513,
    facts: Annotated[int, typer.Option(help="Facts in a context.")] = 64,
    count: Annotated[int, typer.Option(help="Contexts.")] = 16,
    folder: Annotated[Path, typer.Option(help="Folder of the files.")] = FOLDER,
) -> None:
    """Make the tables that recipes need, on recall-llama."""
    torch.set_num_threads(1)
    task = KVTask(model, dtype="float32")
    work = Work(task.load(), RecallSamples(context, facts, count), quiet_report)
    prepare(names, work, folder, weights_digest(task.directory), again)


main = script(command)

if __name__ == "__main__":
    sys.exit(main())
