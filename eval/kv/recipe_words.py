"""Recipes in one word of a command line: `snapkv:budget=0.25|kivi:bits=2`; tables that they need.

Tables are found offline. `compresskv:tables=FILE` gives a recipe all the settings that the file was made for. A
single setting is read by `heads=@FILE`, of the tensor that is named as the setting, or as what stands behind a `#`:
`cskv:bases=@cskv#24`. A name without an ending is one of the shipped tables of recall-llama.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from diffcache.errors import TablesError
from diffcache.eval.kv.peer import PREFIX, PressPeer, peer
from diffcache.eval.methods import naming
from diffcache.eval.record import ROOT
from diffcache.files import write_file
from diffcache.kv.learn.codebook import Codebook
from diffcache.kv.learn.cskv import Bases
from diffcache.kv.merging.lococo import MixWeights
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.by_name import read_recipe
from diffcache.kv.score.learned import RetainingHeads
from diffcache.registry import read_word

NONE = "none"
BASE = "base"  # a setting that is a recipe, in quotes
TABLES = "tables"  # a file that gives several settings


def parse_row(text: str, weights: str | None = None) -> Recipe | PressPeer:
    """Return the contender that a row of a sweep describes: a recipe, or a press of kvpress.

    A press is `kvpress/name:budget=0.25,...`; the rest is as in `parse_recipe`.

    Raises:
        UnknownMethodError: If there is no such name.
        MissingPackageError: If kvpress is asked for and is not installed.
        ValueError: If a setting is wrong, as in `parse_recipe`, or a press stands beside `|`.
    """
    if not text.strip().startswith(PREFIX):
        return parse_recipe(text, weights)
    if "|" in text:
        raise ValueError(f"recipe {text!r}: kvpress does not compose with |; ask for it alone")
    name, settings = read_word(text.strip())
    with naming(f"recipe {text!r}"):
        return peer(name, **settings)


def parse_recipe(text: str, weights: str | None = None) -> Recipe:
    """Return the recipe that a word describes.

    Args:
        text: `none`, a name, or `name:key=value,...`; several joined by `|` act together. A value `@file` is read from
            tables, and `tables=file` reads all settings that the file has; a base is a word in quotes,
            `adakv:base='snapkv:budget=0.5,window=8'`.
        weights: Digest of the weights of its model, which its tables must have been made for; None checks nothing.

    Raises:
        UnknownMethodError: If there is no such name.
        TablesError: If a table is not there.
        ValueError: If a setting cannot be read, is unknown, or does not go with the others.
    """
    if not text.strip():
        raise ValueError("recipe '': a name is missing; `diffcache kv --list` lists them")
    if text.strip().startswith(PREFIX):
        raise ValueError(f"recipe {text!r}: kvpress is no recipe; --tasks recall alone asks it for slots to keep")

    def settled(name: str, given: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if TABLES in given:
            found = settings_of(given.pop(TABLES), name.replace("-", "_"), weights)
        return found | {key: _value(key, value, weights) for key, value in given.items()}

    with naming(f"recipe {text!r}"):
        return read_recipe(text, settled)


def names_tables(text: str) -> bool:
    """Return whether a word refers to tables, which must have been made for its model."""
    return f"{TABLES}=" in text or f"={MARK}" in text


def tables_digest(text: str) -> str | None:
    """Return 16 hexadecimal digits of the files of tables that a word refers to; None where it refers to none."""
    names = re.findall(rf"(?:\b{TABLES}={MARK}?|={MARK})([^,#|'\"]+)", text)
    files = [Path(name) if name.endswith(".safetensors") else FOLDER / f"{name}.safetensors" for name in names]
    contents = b"".join(file.read_bytes() for file in files if file.is_file())
    return hashlib.sha256(contents).hexdigest()[:16] if names else None


def _value(key: str, value: Any, weights: str | None) -> Any:
    if isinstance(value, str) and value.startswith(MARK):
        return read_table(value, key, weights)
    if isinstance(value, str) and key == BASE:
        return parse_recipe(value, weights)
    return value


MARK = "@"
FOLDER = ROOT / "assets" / "tables" / "recall-llama"
MAKE = "diffcache kv calibrate --model DIR --texts FILE --recipe {} --out {}.safetensors"
# What tensors stand for together -> their names; in files of another kind each tensor is a table.
_WHOLE: Mapping[str, tuple[type[Any], tuple[str, ...]]] = {
    "MixWeights": (MixWeights, ("weight", "bias", "gate")),
    "RetainingHeads": (RetainingHeads, ("first", "second")),
    "Codebook": (Codebook, ("vectors", "weight")),
}
_BASES = ("key_down", "key_up", "value_down", "value_up")
_CHUNK_BYTES = 1 << 22


def weights_digest(directory: Path) -> str:
    """Return 16 hexadecimal digits of the weight files of a saved model.

    Raises FileNotFoundError if there are none.
    """
    endings = (".safetensors", ".bin")
    files = sorted(file for file in directory.iterdir() if file.suffix in endings)
    if not files:
        raise FileNotFoundError(f"{directory}: no weights, files that end in {', '.join(endings)}")
    found = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                found.update(chunk)
    return found.hexdigest()[:16]


def write_table(file: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tables.

    `about` are plain values: `kind`, `"table"` or the name of a class; `recipe`, `gives` (setting -> entries)
    and `weights`, see `weights_digest`; how they were found.
    """
    ready = {name: value.contiguous() for name, value in tensors.items()}
    write_file(file, save(ready, metadata={"about": json.dumps(dict(about), sort_keys=True)}))


def basis_tensors(entry: str, bases: Sequence[Bases]) -> dict[str, Tensor]:
    """Return the bases of all layers as tensors by name, behind `entry`."""
    return {
        f"{entry}.{number}.{name}": getattr(each, name).half() for number, each in enumerate(bases) for name in _BASES
    }


def read_table(word: str, setting: str, weights: str | None = None) -> Any:
    """Return the value of a setting that is stored in a file: nested tuples, or the weights that tensors stand for.

    `word` is `@name`, `@name#entry` or `@path.safetensors`; without an entry, the setting names the tensor. A digest
    of None checks nothing. Raises TablesError if there is no such file or tensor, or it was made for another model;
    the message says how to get it.
    """
    name, _, entry = word.removeprefix(MARK).partition("#")
    file = _file(name, f"{setting}={word}")
    tensors, about = _read(file, f"{setting}={word}", weights)
    return _entry(tensors, about.get("kind", ""), entry or setting, f"{setting}={word}: {file.name}")


def settings_of(word: str, recipe: str, weights: str | None = None) -> dict[str, Any]:
    """Return all settings of a recipe that a file has.

    `word` is `name`, `path.safetensors`, or either with `#entry` where the file has several. A digest of None checks
    nothing. Raises TablesError if there is no such file, or it was made for another recipe or model.
    """
    name, _, entry = str(word).removeprefix(MARK).partition("#")
    said = f"tables={word}"
    file = _file(name, said)
    tensors, about = _read(file, said, weights)
    theirs = about.get("recipe")
    if theirs != recipe:
        raise TablesError(
            f"{said}: {file.name} has tables of {theirs or 'no recipe that it names'}; "
            f"`{MAKE.format(recipe, recipe)}` makes those of {recipe}"
        )
    found = {}
    for setting, entries in about.get("gives", {}).items():
        chosen = entries[0] if len(entries) == 1 else entry
        if chosen not in entries:
            raise TablesError(
                f"{said}: {file.name} has {setting} for {', '.join(entries)}; say which behind a "
                f"#, as in tables={name}#{entries[0]}"
            )
        found[setting] = _entry(tensors, about.get("kind", ""), chosen, f"{said}: {file.name}")
    return found


def _file(name: str, said: str) -> Path:
    file = Path(name) if name.endswith(".safetensors") else FOLDER / f"{name}.safetensors"
    if not file.is_file():
        known = ", ".join(sorted(each.stem for each in FOLDER.glob("*.safetensors"))) or "none"
        raise TablesError(
            f"{said}: no file {file.name}; shipped for recall-llama are: {known}; "
            f"`{MAKE.format('NAME', 'NAME')}` makes those of another model"
        )
    return file


def _read(file: Path, said: str, weights: str | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a file and its facts.

    Raises TablesError if it is no such file, or was made for a model with other weights.
    """
    try:
        with safe_open(file, "pt") as found:
            tensors = {key: found.get_tensor(key) for key in found.keys()}  # noqa: SIM118 - no dict
            about = json.loads((found.metadata() or {}).get("about", "{}"))
    except (SafetensorError, json.JSONDecodeError) as error:
        raise TablesError(f"{said}: {file.name} is no file of tables: {error}") from error
    theirs = about.get("weights")
    if weights is not None and theirs != weights:
        raise TablesError(
            f"{said}: {file.name} was measured on a model of other weights (digest {theirs}, this "
            f"model has {weights}); `{MAKE.format(about.get('recipe', 'NAME'), 'NAME')}` measures "
            "it on this one"
        )
    return tensors, about


def _entry(tensors: Mapping[str, Tensor], kind: str, entry: str, said: str) -> Any:
    """Return what an entry of a file stands for."""
    if kind in _WHOLE:
        make, names = _WHOLE[kind]
        return make(*(tensors[each].float() for each in names))
    if kind == "Bases" and f"{entry}.0.{_BASES[0]}" in tensors:
        return _bases(entry, tensors)
    if entry not in tensors:
        entries = sorted({key.partition(".")[0] if kind == "Bases" else key for key in tensors})
        raise TablesError(f"{said} has {', '.join(entries)}; say #entry")
    return nested(tensors[entry].tolist())


def _bases(entry: str, tensors: Mapping[str, Tensor]) -> tuple[Bases, ...]:
    layers = {key.split(".")[1] for key in tensors if key.partition(".")[0] == entry}
    return tuple(
        Bases(*(tensors[f"{entry}.{number}.{name}"].float() for name in _BASES)) for number in range(len(layers))
    )


def nested(value: Any) -> Any:
    """Return nested lists as nested tuples."""
    return tuple(map(nested, value)) if isinstance(value, list) else value
