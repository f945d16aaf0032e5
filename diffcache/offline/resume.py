"""State from which interrupted work goes on: a file of sums."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from diffcache.errors import TablesError


def write_state(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a state, tensors of any kind and text by name, atomically; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        save_file(held, new, metadata)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def read_state(path: Path, *wanted: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a state, which must have the wanted names.

    Raises:
        TablesError: If the file is damaged, or no state.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from error
    missing = [name for name in wanted if name not in metadata]
    if missing:
        raise _damaged(path, f"it has no {missing[0]!r}")
    return tensors, metadata


def _damaged(path: Path, why: str) -> TablesError:
    return TablesError(
        f"{path}: not the state of a training or calibration, or damaged ({why}); delete it, or pass resume=False"
    )
