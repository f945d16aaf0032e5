"""Measured tables of a method: tensors and the facts of their measurement, in one file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from diffcache.digest import bits_of
from diffcache.errors import TablesError
from diffcache.features.schema import Schema, header_fault, shown, tensors_fault

FORMAT = "diffcache.tables/1"


class Tables:
    """Tensors by name, with a header; never changed once made.

    Args:
        header: Plain data: `method`, `diffcache`, `model`, `config`, `scheduler`,
            `scheduler_config`, `steps`, `shape`, `date`, and the method's own settings.
        tensors: Tensors by name, on the CPU.
        path: The file they were read from or written to.
    """

    __slots__ = ("_header", "_tensors", "digest", "path")

    def __init__(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path | None = None) -> None:
        self._header = MappingProxyType(dict(header))
        with torch.inference_mode(False):  # copies that may be used in any mode
            copies = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
        self._tensors = MappingProxyType(copies)
        self.path = path
        try:
            found = hashlib.sha256(json.dumps(self._plain(), sort_keys=True).encode())
        except RecursionError:
            raise TablesError("the header of tables is nested without end") from None
        for name, tensor in sorted(self._tensors.items()):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(bits_of(tensor).numpy().tobytes())
        self.digest = found.hexdigest()[:16]

    @property
    def header(self) -> Mapping[str, Any]:
        """Model, scheduler and settings of the calibration."""
        return self._header

    @property
    def steps(self) -> int:
        """Number of steps of the runs they were measured in."""
        return int(self._header["steps"])

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor; raise TablesError if there is none of that name."""
        if name not in self._tensors:
            raise TablesError(f"{self!r}: no table {name!r}; it has {', '.join(self._tensors) or 'none'}")
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """Return the tensors' names."""
        return list(self._tensors)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tables) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        """Return the path of the file as Python text, so that a method's `repr` is valid."""
        return repr(str(self.path)) if self.path else f"<Tables {self.digest}, not saved>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how copies and pickles are made, which read-only views cannot be."""
        return Tables, (dict(self._header), dict(self._tensors), self.path)

    def _plain(self) -> dict[str, Any]:
        return dict(self._header)

    def save(self, path: str | Path) -> Tables:
        """Write one safetensors file, header in its metadata; return the tables of that file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # not `.part`: that is what an interrupted calibration goes on from until this is written
        new = path.with_name(path.name + ".tmp")
        metadata = {"format": FORMAT, "header": json.dumps(self._plain(), sort_keys=True)}
        try:
            save_file(dict(self._tensors), new, metadata=metadata)
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)
        return Tables(self._header, self._tensors, path)

    @classmethod
    def load(cls, path: str | Path) -> Tables:
        """Read a file that `save` wrote.

        They are checked against the method of their header where they are given to it. Raises
        TablesError if there is none, or it is another kind of file.
        """
        path = Path(path)
        if not os.path.isfile(path):  # Path.is_file raises where a name is too long
            what = "is a folder; name a file in it" if os.path.isdir(path) else "no such file"
            raise TablesError(f"tables={str(path)[:500]!r}: {what}; diffcache.calibrate and diffcache.tune write them")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if metadata.get("format") != FORMAT:
                raise ValueError(f"its format is {metadata.get('format')!r}")
            header = json.loads(metadata["header"])
            fault = header_fault(header)
            if fault:
                raise ValueError(fault)
            return cls(header, tensors, path)
        except (SafetensorError, ValueError, KeyError, RecursionError) as error:
            raise TablesError(f"tables={str(path)!r}: not a file of tables that diffcache wrote ({error})") from error

    @classmethod
    def of(cls, value: Tables | str | Path | None, method: str) -> Tables | None:
        """Return tables of a method by name, given as themselves or as a file; None stays None.

        Raises TablesError if the file cannot be read, or they belong to another method, ValueError for anything else.
        """
        if value is None:
            return None
        if isinstance(value, (str, Path)):
            value = cls.load(value)
        if not isinstance(value, Tables):
            raise ValueError(f"tables={value!r}: must be Tables, a file, or None")
        if value.header.get("method") != method:
            raise TablesError(f"tables={value!r}: made for method {shown(value.header.get('method'))}, not {method!r}")
        return value

    def fit(self, schema: Schema) -> None:
        """Raise TablesError unless header and tensors are just those that a method needs."""
        fault = header_fault(self._header, schema)
        fault = fault or tensors_fault(self._header, self._tensors, schema)
        if fault:
            raise TablesError(f"tables={self!r}: {fault}; calibrate again")

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raise TablesError unless they were measured on this model and scheduler, by facts as of `check_model`.

        A bare model has no scheduler, which is then not compared.
        """
        for key in ("model", "config", "scheduler", "scheduler_config"):
            if key.startswith("scheduler") and facts.get("scheduler") is None:
                continue
            mine = self._header.get(key)
            theirs = json.loads(json.dumps(facts.get(key), default=repr))
            if mine != theirs:
                if isinstance(mine, dict) and isinstance(theirs, dict):  # only what differs
                    apart = {k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)}
                    mine, theirs = ({k: d.get(k) for k in sorted(apart)} for d in (mine, theirs))
                was, this = (
                    _model_of(about) + ("" if key == "model" else f" with {key}={shown(value)}")
                    for about, value in ((self._header, mine), (facts, theirs))
                )
                raise TablesError(
                    f"tables={self!r}: measured on {was}, this is {this}; calibrate on this "
                    "pipeline: diffcache.calibrate(pipe, method, prompts=[...])"
                )


def _model_of(facts: Mapping[str, Any]) -> str:
    """Return the class of a model, and the folder it was loaded from where that is known."""
    model, folder = facts.get("model"), facts.get("folder")
    name = model if isinstance(model, str) else "an unknown model"
    return shown(f"{name} ({folder})" if folder else name).strip("'")
