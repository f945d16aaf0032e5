"""Calls and requests that are refused: the rows of refused.txt and refused_requests.txt."""

import builtins
import importlib
import importlib.util
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import diffcache
from diffcache import cli, errors
from diffcache.eval.kv.recall_cost import KVTask
from diffcache.eval.kv.texts import TextModel
from diffcache.pipelines import load
from tests.dllm import test_command
from tests.kv.eval import small
from tests.zoo.catalog import cases

TABLE = Path(__file__).with_name("refused.txt")
NAMES: dict[str, Any] = {"cases": cases, "diffcache": diffcache, "math": math, "nn": nn, "np": np, "torch": torch}


@dataclass
class Section:
    """Modules whose names calls use, and lines that come before each of the calls."""

    modules: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)


def rows() -> Iterator[Any]:
    """Yield section, call, error and pattern of every row."""
    section = Section()
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = Section(line.strip("[]").split())
        elif " :: " in line and not line.startswith("#"):
            call, _, said = line.partition(" :: ")
            error, _, pattern = said.partition(": ")
            yield pytest.param(section, call, error, pattern, id=call)
        elif line and not line.startswith("#"):
            section.before.append(line)


@pytest.mark.parametrize(("section", "call", "error", "pattern"), list(rows()))
def test_a_call_is_refused(
    section: Section, call: str, error: str, pattern: str, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    lines = "\n".join(section.before)
    # Few calls need a folder, and to make one takes longer than most of them.
    folder = request.getfixturevalue("tmp_path") if re.search(r"\b(file\(|folder\b)", lines + call) else Path("none")

    def file(name: str, data: str | bytes) -> Path:
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
        return folder / name

    names = dict(NAMES)
    for module in section.modules:
        names.update(vars(importlib.import_module(module)))
    names.update(file=file, folder=folder, patch=monkeypatch.setattr)
    exec(lines, names)
    kind = getattr(errors, error, None) or getattr(builtins, error, None) or names[error]
    with pytest.raises(kind) as raised:
        eval(call, names)
    assert re.search(pattern, str(raised.value), re.DOTALL), str(raised.value)


TEXT = Path(__file__).with_name("refused_requests.txt").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
FIND = importlib.util.find_spec


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("places")
    for name in ("reader", "recall", "decoder"):
        (made / name).mkdir()
    (made / "short.txt").write_text("Hello.")
    return {
        "reader": small.save_with_words(made / "reader"),
        "recall": small.save(made / "recall"),
        "decoder": test_command.save(made / "decoder"),
        "texts": small.texts(made),
        "short": made / "short.txt",
    }


@pytest.mark.parametrize("row", ROWS)
def test_a_wrong_request_is_refused_in_one_line(
    row: str, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    typed, said = row.split(" => ")
    code, message = (3, said[2:]) if said.startswith("3 ") else (2, said)
    if "no CUDA" in message and torch.cuda.is_available():
        pytest.skip("has CUDA")
    monkeypatch.chdir(tmp_path)
    importlib.import_module("diffcache.eval.demo")  # before, as it takes `load` by its name
    for owner in (TextModel, KVTask, load):  # nothing may be loaded
        monkeypatch.setattr(owner, "load", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else FIND(name, *rest)
    )
    done = CliRunner().invoke(cli.app, shlex.split(typed.format(**places)))
    told = " ".join(done.stderr.replace("│", "").split())
    assert done.exit_code == code and message in told, done.output
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert told.startswith("Usage") or done.stderr.count("\n") == 1
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]
