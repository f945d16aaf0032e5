"""Wrong requests on the command line, the rows of `refused_requests.txt`: a line each."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import diffusers
import pytest
import torch
from typer.testing import CliRunner

from diffcache import cli
from diffcache.eval.kv.recall import KVTask
from diffcache.eval.kv.texts import TextModel
from diffcache.pipelines import load
from tests.kv.eval import small

TEXT = Path(__file__).with_name("refused_requests.txt").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
FIND = importlib.util.find_spec


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
