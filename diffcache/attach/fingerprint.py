"""Facts about a model and its scheduler, by which tables are matched to them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import nn

from diffcache.foreign import folder_of


def facts_of(model: nn.Module, scheduler: Any, pipeline: Any = None) -> dict[str, Any]:
    """Return the facts of a model for `Method.check_model`, as plain data; of a bare one none of a pipeline.

    The folder is the last two names of where the model was loaded from, for people to read, and
    before them the name of the model in the cache of the Hugging Face hub; empty where it is not
    known. Without a diffusers configuration its parameters' shapes stand for that.
    """
    config = getattr(model, "config", None)
    folder = ""
    if isinstance(config, dict):
        known, folder = _plain(config), folder_of(config)
    else:
        known = {name: list(p.shape) for name, p in model.named_parameters()}
    parts = Path(folder).parts
    text = json.dumps(known, sort_keys=True, default=repr)
    cls = None if scheduler is None else type(scheduler).__name__
    name = None if pipeline is None or pipeline is model else type(pipeline).__name__
    if getattr(pipeline, "transformer_2", None) is not None:
        name = f"{name} with transformer_2"
    return {
        "model": type(model).__name__,
        "config": hashlib.sha256(text.encode()).hexdigest()[:16],
        "scheduler": cls,
        "scheduler_config": _plain(getattr(scheduler, "config", {})),
        "folder": "/".join([*filter(_names_model, parts[:-2]), *parts[-2:]]),
        "settings": known if isinstance(config, dict) else {},
        "pipeline": name,
    }


def _names_model(part: str) -> bool:
    """Return whether a part of a path names a model in the cache of the Hugging Face hub."""
    return part.startswith("models--")


def _plain(config: Any) -> dict[str, Any]:
    """Return a diffusers configuration without its private entries."""
    return {k: v for k, v in dict(config).items() if not k.startswith("_")}
