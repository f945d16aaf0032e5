"""Task of a run, its cases, and the hashes that keep them apart."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import Tensor, nn

import diffcache
from diffcache.eval.runs.peers import Peer
from diffcache.features.base import Method
from diffcache.pipelines.demo.saved import check_dtype
from diffcache.pipelines.load import Loading
from diffcache.ranges import Count, Range, Settings

Kind = Literal["uncached", "method", "fewer steps"]
_PACKAGE = Path(diffcache.__file__).parent
_CODE = ("step.py", "digest.py", "features", "attach", "kernels", "quant")
_SMALL_BYTES = 1 << 20
_SOME_VALUES = 64
_ADAPTERS = ("scaling", "active_adapters", "disable_adapters", "merged_adapters")
MOST_SEED = 2**62  # of a generator, with room for those of the batches


@dataclass(frozen=True)
class Task(Settings):
    """Samples that every case of a run draws."""

    model: str  # directory of a saved pipeline, name of a shipped model, or a Hugging Face model ID
    # Built-in list or file (`diffcache.eval.samples.prompts`); "" is the model's own; or the prompts themselves
    prompts: str | tuple[str, ...] = ""
    # Number of samples; sample `i` is drawn from prompt `i` (the list is repeated) and from noise with seed `seed
    # + i`
    samples: Annotated[int, Range(1, 10_000_000)] = 256
    seed: Annotated[int, Range(0, MOST_SEED)] = 0  # seed of the first sample
    # Prompts a call. Part of what is drawn: a batch is one computation, and a method may decide by its mean.
    batch_size: Count = 8
    steps: Count | None = None  # sampling steps; None is the pipeline's default
    call: Mapping[str, Any] = field(default_factory=dict)  # more arguments of the pipeline's call
    dtype: str = "auto"  # dtype of the model, or `auto` (`diffcache.pipelines.demo.saved.dtype_of`)
    device: str = "auto"  # device of the run: `auto`, or as torch names it
    threads: Count = 1  # CPU threads of torch; they change the order of sums
    # Frames per second of films on disk; None is the pipeline's own
    fps: Annotated[float, Range(0.01, 1000)] | None = None
    loading: Loading = field(default_factory=Loading)  # options for loading the model; a mapping of its fields will do

    def __post_init__(self) -> None:
        if isinstance(self.loading, Mapping):
            object.__setattr__(self, "loading", Loading(**self.loading))
        super().__post_init__()

    def check(self) -> None:
        """Raise ValueError unless the call has arguments by name, and the dtype is one."""
        if not isinstance(self.call, Mapping):
            raise ValueError(f"call={self.call!r}: must be arguments by name")
        check_dtype(self.dtype)


@dataclass(frozen=True)
class Case:
    """One row of the table: the task under a method, uncached, or uncached with fewer steps."""

    name: str  # name in tables; unique in a run
    kind: Kind  # kind of row, one of the three
    steps: int
    method: Method | Peer | None = None  # the cache, ours or one of another library, None for the other two
    matches: tuple[str, ...] = ()  # names of the methods whose evaluations a case of fewer steps has

    def digest(self, about: Mapping[str, Any]) -> str:
        """Return 16 hexadecimal digits that change with anything that changes the samples.

        `about` are facts that all cases of the run share (`Drawer.about`).
        """
        mine = {**about, "steps": self.steps, "method": None}
        if self.method is not None:
            mine |= {"method": repr(self.method), "code": code_sha256()}
        return digest(mine)

    def folder(self, about: Mapping[str, Any]) -> str:
        """Return the name of its folder."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return f"{slug[:48]}-{self.digest(about)[:8]}"


def digest(data: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of plain data."""
    text = json.dumps(data, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Return the versions of the libraries that draw."""
    names = ("torch", "diffusers", "transformers")
    return {name: importlib.metadata.version(name) for name in names}


@lru_cache(maxsize=1)
def code_sha256() -> str:
    """Return the SHA-256 of the code that caches, so that a changed method is drawn again."""
    found = hashlib.sha256()
    for name in _CODE:
        place = _PACKAGE / name
        files = [place] if place.is_file() else sorted(place.rglob("*.py"))
        for file in files:
            found.update(file.relative_to(_PACKAGE).as_posix().encode() + file.read_bytes())
    return found.hexdigest()


def weights_sha256(pipe: Any) -> str:
    """Return a SHA-256 that tells live pipelines apart: configurations, some of all weights, switches and adapters.

    Switches are the numbers and words among modules' attributes, such as those of tiles and of FreeU.
    Of every parameter and buffer the shape, the dtype, the sum and 64 values are read. Where some
    cannot be read it is another every time, so that nothing is taken for drawn already.
    """
    found = hashlib.sha256()
    for name, part in sorted(pipe.components.items()):
        config: Any = getattr(part, "config", None) or {}
        known = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        found.update(f"{name}:{type(part).__name__}:{digest(known)}".encode())
        if not isinstance(part, nn.Module):
            continue
        for key, tensor in part.state_dict().items():
            found.update(f"{key}:{tuple(tensor.shape)}:{tensor.dtype}:{_values(tensor)}".encode())
        for key, module in part.named_modules():
            plain = {n: x for n, x in vars(module).items() if isinstance(x, (int, float, str)) and n[0] != "_"}
            found.update(f"{key}:{digest(plain)}".encode())
            if isinstance(getattr(module, "scaling", None), dict):  # a layer of peft
                found.update(f"{key}:{[getattr(module, name, None) for name in _ADAPTERS]}".encode())
    return found.hexdigest()


def _values(tensor: Tensor) -> list[float] | str:
    """Return some values of a tensor; where they cannot be read, a text that is never the same.

    So it is with weights that accelerate holds elsewhere, and with some that are quantized.
    """
    try:
        flat = tensor.detach().flatten()
        some = flat[:: max(1, len(flat) // _SOME_VALUES)].double()
        return [*some.cpu().tolist(), float(flat.double().sum())]
    except (NotImplementedError, RuntimeError, TypeError, AttributeError):
        return uuid.uuid4().hex


def directory_sha256(directory: Path) -> str:
    """Return a SHA-256 that tells saved pipelines apart.

    Of files above 1 MiB the size and the first and last MiB are read, so that tens of gigabytes
    of weights take no time; text such as a model card does not count.
    """
    found = hashlib.sha256()
    for file in sorted(directory.rglob("*")):
        if not file.is_file() or file.suffix in (".md", ".jsonl", ".png", ".lock"):
            continue
        if any(part.startswith(".") for part in file.relative_to(directory).parts):
            continue
        size = file.stat().st_size
        found.update(f"{file.relative_to(directory).as_posix()}:{size}\n".encode())
        with file.open("rb") as data:
            found.update(data.read(_SMALL_BYTES))
            if size > _SMALL_BYTES:
                data.seek(max(size - _SMALL_BYTES, _SMALL_BYTES))
                found.update(data.read())
    return found.hexdigest()
