"""Wrong requests and calls: rows of `refused_requests.txt` and `refused_calls.txt`, a line each."""

from __future__ import annotations

import builtins
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from diffcache import cli, errors
from diffcache.eval.kv.recall import KVTask
from diffcache.eval.kv.texts import TextModel
from diffcache.pipelines import load
from tests.kv.eval import small

TEXT, CALLS = (
    Path(__file__).with_name(name).read_text(encoding="utf-8")
    for name in ("refused_requests.txt", "refused_calls.txt")
)
ROWS = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
FIND = importlib.util.find_spec


def calls() -> list[Any]:
    """List what comes before a wrong call, the call, its error and what is said, by section."""
    found = []
    for section in CALLS.split("\n## ")[1:]:
        name, *lines = section.splitlines()
        before = "\n".join(line for line in lines if " => " not in line)
        for line in lines:
            if " => " in line:
                call, kind, said = re.fullmatch(r"(.+?) => (?:(\w+Error): )?(.*)", line).groups()
                found.append(
                    pytest.param(before, call, kind or "ValueError", said, id=f"{name}: {call}")
                )
    return found


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("places")
    for name in ("reader", "recall"):
        (made / name).mkdir()
    (made / "short.txt").write_text("Hello.")
    return {
        "reader": small.save_with_words(made / "reader"), "recall": small.save(made / "recall"),
        "texts": small.texts(made), "short": made / "short.txt",
    }  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_a_wrong_request_is_refused_in_one_line(
    row: str, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    typed, said = row.split(" => ")
    code, message = (3, said[2:]) if said.startswith("3 ") else (2, said)
    if "no CUDA" in message and torch.cuda.is_available():
        pytest.skip("has CUDA")
    monkeypatch.chdir(tmp_path)
    for owner in (TextModel, KVTask, load):  # nothing may be loaded
        monkeypatch.setattr(owner, "load", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(
        diffusers.DiffusionPipeline, "from_pretrained", lambda *_, **__: pytest.fail("loaded")
    )
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "torchao" else FIND(name, *rest),
    )
    done = CliRunner().invoke(cli.app, shlex.split(typed.format(**places)))
    told = " ".join(done.stderr.replace("│", "").split())
    assert done.exit_code == code and message in told, done.output
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert told.startswith("Usage") or done.stderr.count("\n") == 1
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


@pytest.mark.parametrize(("before", "call", "kind", "said"), calls())
def test_a_wrong_call_is_refused(
    before: str, call: str, kind: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def file(name: str, data: str | bytes) -> Path:
        (tmp_path / name).write_bytes(data.encode() if isinstance(data, str) else data)
        return tmp_path / name

    names = {
        "torch": torch,
        "np": np,
        "folder": tmp_path,
        "file": file,
        "patch": monkeypatch.setattr,
    }
    exec(before, names)
    error = getattr(builtins, kind, None) or getattr(errors, kind)
    words = ".*".join(map(re.escape, said.split("...")))
    with pytest.raises(error, match=f"(?s){words}"):
        eval(call, names)
