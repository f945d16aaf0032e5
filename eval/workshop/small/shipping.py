"""Write trained models to the directories that are shipped, in bfloat16, and load pipelines from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import DiffusionPipeline
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from diffcache.files import write_json
from diffcache.pipelines.shipped_models import present

P = TypeVar("P", bound=DiffusionPipeline)


def save_pipeline(pipe: DiffusionPipeline, directory: Path, call: Mapping[str, Any] | None = None) -> int:
    """Save a pipeline in bfloat16; files are replaced one by one, each whole.

    Args:
        pipe: Pipeline with trained weights, which are converted in place.
        directory: Directory for `from_pretrained`; its other files stay.
        call: Arguments that every call needs; the command line reads them from `diffcache.json`.

    Returns:
        The size of the directory in bytes.
    """
    part = _beside(directory)
    if call is not None:
        write_json(part / "diffcache.json", {"call": dict(call)})
    for model in pipe.components.values():
        if isinstance(model, nn.Module):
            nn.Module.to(model, torch.bfloat16)
    pipe.save_pretrained(part)
    return _replace(part, directory)


def save_language_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> int:
    """Save a language model in bfloat16 with its tokenizer; files are replaced one by one.

    Args:
        model: Model with trained weights, which are converted in place.
        tokenizer: Tokenizer of the model.
        directory: Directory for `from_pretrained`; its other files stay.

    Returns:
        The size of the directory in bytes.
    """
    part = _beside(directory)
    nn.Module.to(model, torch.bfloat16).save_pretrained(part)
    tokenizer.save_pretrained(part)
    # Version 5 of transformers has a new name for the tokenizer's class, and knows the old one.
    _change(part / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    return _replace(part, directory)


def _beside(directory: Path) -> Path:
    part = directory.with_name(f".{directory.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    return part


def _replace(part: Path, directory: Path) -> int:
    """Move a saved model's files to a directory, and return its size in bytes."""
    for config in part.rglob("config.json"):
        values = json.loads(config.read_text(encoding="utf-8"))
        # transformers 5 loads in the dtype of the file, diffusers in float32; a plain
        # `from_pretrained` would mix the two.
        _change(config, **{key: "float32" for key in ("dtype", "torch_dtype") if key in values})
    for file in sorted(path for path in part.rglob("*") if path.is_file()):
        target = directory / file.relative_to(part)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.chmod(0o644)
        file.replace(target)
    shutil.rmtree(part)
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _change(path: Path, **values: Any) -> None:
    """Change values of a JSON file, without the folder that its part was loaded from."""
    kept = json.loads(path.read_text(encoding="utf-8")) | values
    kept.pop("_name_or_path", None)
    write_json(path, kept)


def loader(kind: type[P], directory: Path, side: int | None = None) -> Callable[..., P]:
    """Return what loads the pipeline of a model with plain `from_pretrained`, without progress bar.

    It takes `dtype`, of every model in it (float32 by default, the files hold bfloat16), and
    `directory`, of another saved pipeline.

    Args:
        kind: The class of the pipeline.
        directory: Directory of the shipped pipeline.
        side: Default height and width in pixels; None leaves those of the class.
    """

    def load(dtype: torch.dtype = torch.float32, directory: str | Path = directory) -> P:
        pipe: P = kind.from_pretrained(present(directory))
        for part in pipe.components.values():
            if isinstance(part, nn.Module):
                nn.Module.to(part, dtype)
        pipe.set_progress_bar_config(disable=True)
        if side is not None:
            pipe.default_sample_size = side // pipe.vae_scale_factor
        return pipe

    return load
