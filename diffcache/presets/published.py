"""Models that numbers were published for, and the numbers: a file of TOML for each family.

| table of a file | holds |
|---|---|
| `[models.NAME]` | how a model is recognized: the fields of `Published` |
| `[teacache.NAME]`, `[magcache.NAME]` | settings of that method, published for the model |
| `[regione.NAME]` | ratios and thresholds of RegionE, by its own names of models |
| `[presets.NAME]` | presets of the model, see `diffcache.presets.choose` |

Each number stands beside the file and line that it is from. Polynomials of TeaCache are those of
github.com/ali-vilab/TeaCache at 7c10efc, ratios of MagCache those of github.com/Zehong-Ma/MagCache at df81cb1 without
that of the first step, which is 1; both Apache-2.0. Thresholds beside them are the defaults of the scripts, or for Wan
those of the commands on their pages. "None" is None. Sizes of Wan, CogVideoX 2B and 5B and HunyuanVideo are those of
the scripts of diffusers that convert their checkpoints, most others the defaults of its classes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from diffcache.errors import AttachError


@dataclass(frozen=True)
class Published:
    """A model that numbers were published for.

    Attributes:
        model: Class name of its denoiser.
        sizes: Entries of its configuration: depth, width, channels.
        pipeline: Pattern of its pipelines' class names, which tells models of one size apart.
        word: Word in the folders it is loaded from, in lower case, where nothing else tells it.
        without: Reason why it has no presets, where people would expect some.
        rest: Further entries of its configuration, those that are not the defaults of its class.
        compression: Pixels of a latent row and frames of a latent frame of its autoencoder; None
            for those of most models of its class.
    """

    model: str
    sizes: Mapping[str, Any]
    pipeline: str = ".*"
    word: str = ""
    without: str = ""
    rest: Mapping[str, Any] = field(default_factory=dict)
    compression: tuple[int, int] | None = None

    @property
    def built(self) -> dict[str, Any]:
        """Configuration of its denoiser, without the defaults of the class."""
        return {**self.sizes, **self.rest}

    def differs(self, facts: Mapping[str, Any]) -> list[str]:
        """Return in words how a model differs; a bare one has no pipeline to compare."""
        if facts["model"] != self.model:
            return [f"it is no {self.model}"]
        own = facts["settings"]
        found = [
            f"{name}={own.get(name)!r} instead of {value!r}"
            for name, value in self.sizes.items()
            if own.get(name) != value
        ]
        pipeline = facts["pipeline"]
        if pipeline is not None and not re.fullmatch(self.pipeline, pipeline):
            found.append(f"its pipeline is {pipeline}")
        return found


def fitting(names: Iterable[str], facts: Mapping[str, Any]) -> list[str]:
    """Return the published models that a model may be, by its configuration and folder.

    Names are those of `models()`; `-ret` after one is another set of numbers for the same model.
    """
    known = models()
    found = {name: known[name.removesuffix("-ret")] for name in names}
    fit = [name for name, model in found.items() if not model.differs(facts)]
    folder = str(facts["folder"]).lower()
    return [name for name in fit if found[name].word and found[name].word in folder] or fit


def check_published(field: str, model: str, names: Iterable[str], facts: Mapping[str, Any]) -> None:
    """Raise AttachError unless numbers were published for a model, by the facts of `Method.check_model`.

    `field` is the setting that holds the numbers, `model` the name in `models()` that they are for, empty
    for any, `names` are all models that such numbers were published for.
    """
    right = fitting(names, facts) if model else []
    if not model or model in right:
        return
    known = models().get(model.removesuffix("-ret"))
    if known is None:
        raise AttachError(f"model={model!r}: published are {', '.join(names)}")
    why = "; ".join(known.differs(facts)) or f"it was loaded from {facts['folder']}"
    take = " or ".join(f"model={name!r}" for name in right)
    raise AttachError(
        f"{field} for {model}, and this {facts['model']} is another: {why}; "
        + (f"take those of {take}, or " if right else "")
        + "calibrate on this pipeline"
    )


@cache
def models() -> Mapping[str, Published]:
    """Return the models of all families by their names."""
    return {name: Published(**entry) for name, entry in _tables("models").items()}


def published_settings(method: str) -> dict[str, dict[str, Any]]:
    """Return what was published for a method: name of a model -> settings."""
    return _tables(method)


def _tables(kind: str) -> dict[str, dict[str, Any]]:
    """Return the tables of a kind in the files of all families, by the names of models."""
    return {name: entry for family in families().values() for name, entry in family.get(kind, {}).items()}


@cache
def families() -> Mapping[str, dict[str, Any]]:
    """Return the tables of every family, by the name of its file."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    files = sorted(Path(__file__).parent.glob("*.toml"))
    return {file.stem: _read(tomllib.loads(file.read_text("utf-8"))) for file in files}


def _read(value: Any) -> Any:
    """Return what a value of a file stands for: tuples for arrays, None for its name."""
    if isinstance(value, dict):
        return {name: _read(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return tuple(map(_read, value))
    return None if value == "None" else value
