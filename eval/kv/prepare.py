"""Make the tables that recipes need, of any model: `diffcache kv calibrate`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffcache.eval.kv import offline_bases as bases
from diffcache.eval.kv import offline_gates as gates
from diffcache.eval.kv import offline_heads as heads
from diffcache.eval.kv.offline import Prepared, Work
from diffcache.eval.kv.tables import write_table
from diffcache.eval.methods import naming
from diffcache.kv.hf.cache import detach

# Recipe -> what finds its tables: called with its work, and settings.
_STAGES = (
    gates.duo_attention,
    heads.razor_attention,
    heads.compresskv,
    heads.prefixkv,
    heads.epicache,
    gates.lococo,
    gates.locret,
    heads.double_sparsity,
    bases.a2ats,
    bases.cskv,
    bases.kv_heads,
    bases.xquant_latent,
)
MAKERS: dict[str, Callable[..., Prepared]] = {stage.__name__: stage for stage in _STAGES}


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

    The model is in the state that it is used in; the digest of its weights is checked where the tables are read.

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
    gives = {setting: list(entries) for setting, entries in found.gives.items()}
    about: dict[str, Any] = {"kind": found.kind, "recipe": name, "weights": weights}
    about |= {"samples": work.samples.about(), "gives": gives}
    about |= {"settings": settings_of(name) | settings, **found.about}
    write_table(file, found.tensors, about)
    return found


def shown(found: Prepared) -> str:
    """Return small tables as text, and the shapes of large ones."""
    parts = []
    for name, value in found.tensors.items():
        small = value.numel() <= 32
        parts.append(f"{name}={value.tolist() if small else list(value.shape)}")
    return ", ".join(parts[:4]) + (", ..." if len(parts) > 4 else "")
