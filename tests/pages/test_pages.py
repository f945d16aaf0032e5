"""Every fenced block of the pages does what it says, with tiny models under the names of real ones.

Python runs, page by page. Commands run where that takes seconds; of the others options and values
are read, up to the place where hours would begin.
"""

import importlib
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from diffusers import DiffusionPipeline, FluxPipeline
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import diffcache
from diffcache.catalog import method_class
from diffcache.cli import app
from diffcache.eval.runs.sweep import read_sweep, read_values
from diffcache.registry import rows_of
from tests.pages import stand_ins
from tests.pages.blocks import PAGES, ROOT, Block, blocks
from tests.real_models import as_real

# Blocks that do not run -> why.
NOT_RUN = {
    "CONTRIBUTING.md": {"kernels <- step": "the order of imports: tests/test_layers.py holds it"},
    "docs/evaluation.md": {"runs/sticker-flux-<hash>/": "files: tests/test_runs.py looks for them"},
    "docs/predict.md": {"MagCache(threshold=": "what the command above it, which runs, prints"},
}
# Commands that take longer than a test may, or need what is not here -> where they are stopped: a
# function that is called once all that was written has been read.
STOPPED = {
    "diffcache serve": "diffcache.pipelines.demo.serve.free_port",
    "accelerate launch --multi_gpu --num_processes 8 -m diffcache eval --model": "diffcache.eval.commands.show",
    "accelerate launch --multi_gpu --num_processes 8 -m diffcache eval vbench draw": "diffcache.eval.vbench.film_names.find_info",
    "diffcache eval vbench wan/films --backend official": "diffcache.eval.vbench.driver.run",
    "diffcache eval vbench score": "diffcache.eval.vbench.suite.read_results",
    "diffcache kernels measure": "diffcache.eval.kernels.command.device_of",
}
# Commands that run -> words behind them that make them short.
SHORT = {
    "diffcache demo --method": "--model my-pipeline --prompt ring --samples 1 --steps 6",
    "diffcache calibrate --method": "--samples 2 --batch-size 2",
    "diffcache tune --model": "--samples 4 --batch-size 2 --steps 8 --method interval:every=8,site=model",
    "diffcache eval --model": "--samples 2 --rounds 0 --prompts pictures",
    "diffcache eval latency": "--rounds 1 --steps 6",
    "diffcache kv --recipe": "--samples 2 --context 65 --facts 8",
    "diffcache kv --model": "--samples 2 --context 64",
    "diffcache kv calibrate": "--samples 2 --context 64",
    "diffcache kv convert": "--samples 4 --context 64",
    "diffcache kv choose": "--samples 4 --context 64 --recipe snapkv:budget=0.3",
}


# Page -> text of its blocks -> what stands there in the test.
SMALLER = {"docs/causal_video.md": {"chunks=7": "chunks=1"}}
# Page -> names that its reader has, besides those of the blocks before.
READER = {
    "README.md": lambda: {"prompts": ["a red ring", "a cat", "two roads"]},
    "docs/choosing.md": lambda: {"pipe": FluxPipeline.from_pretrained("my-pipeline")},
    "docs/kv.md": lambda: reader_of_kv(),
    "docs/presets.md": lambda: reader_of_presets(),
    "docs/kv_guide.md": lambda: reader_of_kv(),
}


class Stopped(BaseException):
    """All that was written has been read; no error, which a command line would print."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_ins.make(tmp_path_factory.mktemp("pages"))


@pytest.fixture(autouse=True)
def small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work among the stand-ins, and leave out what takes a large model or a GPU."""
    monkeypatch.chdir(folder)
    only = [diffcache.Interval(every=8, site="model")]
    monkeypatch.setattr(diffcache, "tune", partial(diffcache.tune, batch_size=1, steps=8, methods=only))
    quick = {"samples": 2, "steps": 6, "rounds": 0, "quiet": True}
    monkeypatch.setattr(diffcache, "evaluate", partial(diffcache.evaluate, **quick))
    begin = FluxPipeline.__init__
    encode = FluxPipeline.encode_prompt

    @wraps(begin)  # from_pretrained reads its parameters
    def begin_small(self: Any, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        self.default_sample_size = 8  # 16 x 16 pixels, where nobody says

    def encode_few(self: Any, *given: Any, **named: Any) -> Any:
        return encode(self, *given, **{**named, "max_sequence_length": 24})  # not 512

    monkeypatch.setattr(FluxPipeline, "__init__", begin_small)
    monkeypatch.setattr(FluxPipeline, "encode_prompt", encode_few)
    for cls in (nn.Module, DiffusionPipeline):
        monkeypatch.setattr(cls, "to", on_the_cpu(cls.to))


def on_the_cpu(move: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `to` that moves nothing to a GPU."""

    def to(self: Any, *given: Any, **named: Any) -> Any:
        kept = [value for value in given if value != "cuda"]
        return move(self, *kept, **named) if kept or named else self

    return to


def reader_of_presets() -> dict[str, Any]:
    """Return what a reader of the page about presets has: a pipeline that says it is FLUX.1-dev."""
    pipe = FluxPipeline.from_pretrained("my-pipeline")
    with as_real("flux.1-dev") as model:
        pipe.transformer.register_to_config(**dict(model.config))
    return {"pipe": pipe}


def reader_of_kv() -> dict[str, Any]:
    """Return what a reader of the pages about key-value caches has."""
    model = AutoModelForCausalLM.from_pretrained("my-llm")
    model.generation_config.max_new_tokens = 4
    tokenizer = AutoTokenizer.from_pretrained("my-llm")
    inputs = tokenizer("The Rhine rises in the Alps and flows north.", return_tensors="pt")
    return {"model": model, "tokenizer": tokenizer, "inputs": {**inputs}}


def test_every_block_says_its_language() -> None:
    assert {block.language for page in PAGES for block in blocks(page)} == {
        "python",
        "sh",
        "diff",
        "toml",
        "bibtex",
        "json",
        "text",
    }


def test_what_does_not_run_is_there() -> None:
    """Lists of exceptions name nothing that the pages no longer say."""
    every = [block for page in PAGES for block in blocks(page)]
    commands = {command for block in every if block.language == "sh" for command in block.commands}
    for begin in (*STOPPED, *SHORT):
        assert any(said.startswith(begin) for said in commands), begin
    texts = [(block.page, block.text) for block in every if block.language == "text"]
    left_out = [(page, begin) for page, found in NOT_RUN.items() for begin in found]
    assert len(texts) == len(left_out)
    assert all(any(p == page and text.startswith(b) for p, text in texts) for page, b in left_out)


# Pages whose blocks tests/pages/test_contributing.py and tests/test_serving.py write into files.
FILES = ("CONTRIBUTING.md", "docs/serving.md")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in FILES and any(block.language == "python" for block in blocks(page))]
)
def test_python_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block after block, in one module."""
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # where dataclasses look
    names = vars(module)
    names |= {"print": lambda *said: list(map(str, said)), **READER.get(page, dict)()}
    found = [block for block in blocks(page) if block.language == "python"]
    for large, small in SMALLER.get(page, {}).items():
        assert sum(block.text.count(large) for block in found) == 1
        found = [replace(block, text=block.text.replace(large, small)) for block in found]
    for block in found:
        exec(compile(block.text, block.place, "exec"), names)


@pytest.mark.parametrize(
    "block", [b for page in PAGES for b in blocks(page) if b.language == "sh"], ids=lambda block: block.place
)
def test_commands_run(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in block.commands:
        place, more = (
            next((value for begin, value in table.items() if command.startswith(begin)), "")
            for table in (STOPPED, SHORT)
        )
        if place:
            stop(place, monkeypatch)
        with pytest.raises(Stopped) if place else nullcontext():
            carry_out(shlex.split(f"{command} {more}"))


def stop(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop where a function would be called, on a machine that seems to have a GPU."""

    def stopped(*given: Any, **named: Any) -> None:
        raise Stopped

    module, _, name = place.rpartition(".")
    monkeypatch.setattr(importlib.import_module(module), name, stopped)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def carry_out(words: list[str]) -> None:
    """Run a command, or check what it names."""
    if "&&" in words:
        at = words.index("&&")
        carry_out(words[:at])
        words = words[at + 1 :]
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, words = words[0].partition("=")[0], words[1:]
        assert any(name in file.read_text() for file in (ROOT / "kernels").glob("*.py")), name
    COMMANDS[words[0]](words[1:])


def run_diffcache(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"diffcache {shlex.join(words)}: {done.output}"


def run_python(words: list[str]) -> None:
    if words == ["..."]:  # any program of the reader's
        return
    option, name, *rest = words
    assert option == "-m"
    if name == "diffcache":
        run_diffcache(rest)
        return
    module = importlib.import_module(name)
    if not hasattr(module, "main"):
        module = importlib.import_module(f"{name}.__main__")
    assert module.main(rest) == 0


def run_accelerate(words: list[str]) -> None:
    found = launch_command_parser().parse_args(words[1:])
    assert words[0] == "launch" and found.module
    run_python(["-m", found.training_script, *found.training_script_args])


def check_pip(words: list[str]) -> None:
    extras = set(read_project()["optional-dependencies"])
    assert words[0] == "install"
    for name in words[1:]:
        package, _, wanted = name.removesuffix("]").partition("[")
        assert package in (".", "diffcache") and set(filter(None, wanted.split(","))) <= extras


def read_project() -> dict[str, Any]:
    return read_values(ROOT / "pyproject.toml")["project"]


def check_make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    for word in words:
        assert word.startswith("ARGS=") or re.search(rf"^{word}:", text, re.MULTILINE), word


def check_pre_commit(words: list[str]) -> None:
    assert (ROOT / ".pre-commit-config.yaml").is_file()
    assert any("pre-commit" in name for name in read_project()["optional-dependencies"]["dev"])


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "diffcache": run_diffcache,
    "python": run_python,
    "accelerate": run_accelerate,
    "pip": check_pip,
    "make": check_make,
    ".venv/bin/pre-commit": check_pre_commit,
    "git": lambda words: None,
    "cd": lambda words: None,
}


def test_sweeps_are_read(tmp_path: Path) -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "toml":
                file = tmp_path / "sweep.toml"
                file.write_text(block.text)
                assert read_sweep(file, tmp_path)


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= 12_000
    assert len(re.findall(r"^!\[", text, re.MULTILINE)) == 1 == text.count("\n|---|")
    example = next(block.text for block in blocks("README.md") if block.language == "python")
    assert "diffcache.wrap(pipe)  #" in example


def test_citations_are_those_of_the_methods() -> None:
    known = {method_class(name).bibtex.strip() for name in rows_of("method")}
    said = {b.text.strip() for page in PAGES for b in blocks(page) if b.language == "bibtex"}
    assert said == known
