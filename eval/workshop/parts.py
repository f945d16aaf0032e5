"""Results of a long benchmark that are kept as they come, so that it goes on where it ended."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from diffcache.eval.record import commit
from diffcache.files import read_json, write_json

Value = TypeVar("Value")


class Parts:
    """Named results in a file, each with the commit that it was made at.

    Only what does not depend on time belongs here: what is timed takes turns in one process.

    Args:
        file: File that keeps them, None to keep nothing.
        key: Settings that decide the results, as JSON has them; a file of others is not read.
    """

    def __init__(self, file: Path | None, key: Mapping[str, Any]) -> None:
        self.file, self.key = file, dict(key)
        found = (None if file is None else read_json(file)) or {}
        self.found: dict[str, dict[str, Any]] = {}
        if found.get("key") == self.key:
            self.found = found["parts"]

    def take(self, name: str, make: Callable[[], Value]) -> Value:
        """Return a part, made now unless it was kept.

        Args:
            name: Name of the part.
            make: Returns what JSON holds.
        """
        if name not in self.found:
            self.found[name] = {"value": make(), "commit": commit()}
            if self.file is not None:
                write_json(self.file, {"key": self.key, "parts": self.found})
        value: Value = self.found[name]["value"]
        return value

    def end(self) -> dict[str, str]:
        """Remove the file, and return the commit of every part."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)
        return {name: part["commit"] for name, part in self.found.items()}


def digest_of(model: nn.Module) -> str:
    """Return a short digest of a model's weights, by name, shape and value."""
    found = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        found.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        found.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()[:16]
