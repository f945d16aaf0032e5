"""Published polynomials of TeaCache and ratios of MagCache, and the models that they are for."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffcache.errors import AttachError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Published:
    """A model that numbers were published for.

    Attributes:
        model: Class name of its denoiser.
        sizes: Entries of its configuration: depth, width, channels.
        pipeline: Pattern of its pipelines' class names, which tells models of one size apart.
        word: Word in the folders it is loaded from, in lower case, where nothing else tells it.
    """

    model: str
    sizes: Mapping[str, Any]
    pipeline: str = ".*"
    word: str = ""

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

    Args:
        names: Names in `MODELS`; `-ret` after one is another set of numbers for the same model.
        facts: Facts about the model, as in `Method.check_model`.
    """
    found = {name: MODELS[name.removesuffix("-ret")] for name in names}
    fit = [name for name, model in found.items() if not model.differs(facts)]
    folder = str(facts["folder"]).lower()
    return [name for name in fit if found[name].word and found[name].word in folder] or fit


def check_published(field: str, model: str, names: Iterable[str], facts: Mapping[str, Any]) -> None:
    """Raise AttachError unless numbers were published for a model.

    Args:
        field: The setting that holds them.
        model: Name in `MODELS` of the model that they are for; empty for any.
        names: Names of all models that such numbers were published for.
        facts: Facts about the model that they are put on, as in `Method.check_model`.
    """
    right = fitting(names, facts) if model else []
    if not model or model in right:
        return
    known = MODELS.get(model.removesuffix("-ret"))
    if known is None:
        raise AttachError(f"model={model!r}: published are {', '.join(names)}")
    why = "; ".join(known.differs(facts)) or f"it was loaded from {facts['folder']}"
    take = " or ".join(f"model={name!r}" for name in right)
    raise AttachError(
        f"{field} for {model}, and this {facts['model']} is another: {why}; "
        + (f"take those of {take}, or " if right else "")
        + "calibrate on this pipeline"
    )


def _read(value: Any) -> Any:
    """Return what a value of the table stands for: tuples for arrays, None for its name."""
    if isinstance(value, dict):
        return {name: _read(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return tuple(value)
    return None if value == "None" else value


_TABLE = _read(tomllib.loads(Path(__file__).with_name("published.toml").read_text("utf-8")))
MODELS = {name: Published(**entry) for name, entry in _TABLE["models"].items()}
TEACACHE: dict[str, dict[str, Any]] = _TABLE["teacache"]  # model -> fields of `TeaCache`
MAGCACHE: dict[str, dict[str, Any]] = _TABLE["magcache"]  # model -> fields of `MagCache`
