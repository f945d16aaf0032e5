"""A loaded pipeline is evaluated and timed as it stands, from Python and the command line."""

import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig
from PIL import Image
from typer.testing import CliRunner

import diffcache
from diffcache import Interval, TaylorSeer
from diffcache.cli import app
from diffcache.eval.live import Evaluation
from diffcache.eval.runs import measure
from diffcache.eval.runs.folder import RunError
from diffcache.eval.runs.task import weights_sha256
from diffcache.pipelines.load import load, made_by

SMALL: dict[str, Any] = {"height": 32, "width": 32, "max_sequence_length": 12, "num_inference_steps": 6, "quiet": True}
QUICK: dict[str, Any] = {**SMALL, "rounds": 0, "reference": None}
PROMPTS = ["a red ring", "a blue square", "a green disk"]


@pytest.fixture(scope="module")
def pipe() -> Any:
    return load("sticker-flux")[0]


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    return Image.new("RGB", (32, 32), "orange")


def cases_of(found: Evaluation) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in found.record["rows"] if row["kind"] != "fewer steps"}


def test_a_pipeline_is_evaluated_as_it_stands(pipe: Any, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    bars, threads = dict(getattr(pipe, "_progress_bar_config", {})), torch.get_num_threads()
    methods = {"mine": TaylorSeer(every=2, warmup=1), "off": "interval:every=1"}
    found = diffcache.evaluate(pipe, methods, PROMPTS, out=tmp_path / "run", **QUICK)
    rows = cases_of(found)
    assert list(rows) == ["uncached", "mine", "off"]
    assert rows["mine"]["computed_steps"] == 3 and rows["off"]["computed_steps"] == 6
    apart, same = (rows[name]["fidelity"]["psnr_db"]["value"] for name in ("mine", "off"))
    assert apart < same == 100
    assert found.record["task"]["prompts"]["source"] == "given"
    assert found.record["task"]["samples"] == found.record["task"]["batch_size"] == 3
    assert (found.folder, found.page) == (tmp_path / "run", tmp_path / "run/report/report.html")
    found.print()
    printed = capsys.readouterr().out
    for text in (printed, str(found), found._repr_html_()):
        assert "mine" in text and "FLOPs ratio" in text
    assert "note: off skipped nothing" in printed and "report.html" in printed
    assert dict(getattr(pipe, "_progress_bar_config", {})) == bars
    assert torch.get_num_threads() == threads
    # the same call goes on with what is there
    drawn = {file: file.stat().st_mtime_ns for file in (tmp_path / "run/cases").rglob("*.png")}
    monkeypatch.setattr(measure, "write_report", lambda *given: [])
    diffcache.evaluate(pipe, methods, PROMPTS, out=tmp_path / "run", **QUICK)
    assert {file: file.stat().st_mtime_ns for file in drawn} == drawn


def adapted(pipe: Any) -> None:
    torch.manual_seed(0)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))


def compiled(pipe: Any) -> None:
    pipe.transformer.compile_repeated_blocks(backend="eager")


def offloaded(pipe: Any) -> None:
    cpu_offload(pipe.transformer, torch.device("cpu"))  # the weights are on `meta` between calls


@pytest.fixture(scope="module")
def plain(pipe: Any, tmp_path_factory: Any) -> Evaluation:
    folder = tmp_path_factory.mktemp("plain") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "write_report", lambda *given: [])
        return diffcache.evaluate(pipe, ["interval"], PROMPTS[:1], out=folder, **QUICK)


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("change", [adapted, compiled, offloaded])
def test_adapters_compiled_blocks_and_offload_stay(change: Any, plain: Evaluation, tmp_path: Path) -> None:
    pipe = load("sticker-flux")[0]
    change(pipe)
    if change is not compiled:  # whose weights are the same
        with pytest.raises(RunError, match="holds a run with another model"):
            diffcache.evaluate(pipe, ["interval"], PROMPTS[:1], out=plain.folder, **QUICK)
    found = diffcache.evaluate(pipe, ["interval"], PROMPTS[:1], out=tmp_path / "run", **QUICK)
    assert found.record["task"]["call"]["max_sequence_length"] == 12  # of the folder that it was loaded from
    before, after = (cases_of(one)["interval"]["fidelity"]["psnr_db"]["value"] for one in (plain, found))
    assert (before == after) is (change is not adapted)


@pytest.mark.usefixtures("no_report")
def test_pictures_go_to_the_call_of_an_editing_pipeline(pipe: Any, picture: Image.Image, tmp_path: Path) -> None:
    edits = diffusers.FluxImg2ImgPipeline.from_pipe(pipe)
    given = {**QUICK, "strength": 0.5}
    with pytest.raises(ValueError, match=r"needs image.*--image.*evaluate\(pipe, .*image=\.\.\.\)"):
        diffcache.evaluate(edits, ["interval"], PROMPTS[:2], out=tmp_path / "none", **given)
    drawn = []
    for color, prompts in (("orange", PROMPTS[:2]), ("blue", PROMPTS[:1])):
        image = Image.new("RGB", (32, 32), color)
        found = diffcache.evaluate(edits, ["interval:every=2"], prompts, image=image, out=tmp_path / color, **given)
        assert cases_of(found)["interval:every=2"]["computed_steps"] == 2  # of three
        assert found.record["task"]["batch_size"] == 1
        (case,) = (tmp_path / color / "cases").glob("uncached-????????")
        drawn.append((case / "samples" / "00000.png").read_bytes())
    assert drawn[0] != drawn[1]


def test_a_pipeline_is_timed_as_it_stands_and_settings_files_are_rows_too(pipe: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "cache.yaml")
    diffcache.save(diffcache.wrap(pipe, Interval(every=3)), path)
    diffcache.unwrap(pipe)
    methods = {"saved": path, "same": "interval:every=3"}
    (tmp_path / "prompts.txt").write_text(PROMPTS[0])
    found = diffcache.latency(pipe, methods, tmp_path / "prompts.txt", rounds=1, **SMALL)
    assert [row["evaluations"] for row in found.record["rows"]] == [6, *[pytest.approx(2, abs=0.1)] * 2]
    assert "same" in str(found) and found.folder is None


def test_weights_that_cannot_be_read_are_never_the_same() -> None:
    """As those that accelerate holds elsewhere: nothing is taken for drawn already."""
    with torch.device("meta"):
        part = torch.nn.Linear(2, 2)
    pipe = type("Pipe", (), {"components": {"transformer": part}})()
    assert weights_sha256(pipe) != weights_sha256(pipe)


MINE = """
from diffcache.pipelines.load import load
from diffusers import FluxImg2ImgPipeline

def pipeline(): return load("sticker-flux")[0]
def edits(): return FluxImg2ImgPipeline.from_pipe(pipeline())
def needs(name): return pipeline()
def nothing(): return None
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: Any) -> Path:
    (tmp_path / "mine_live.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine_live", raising=False)
    return tmp_path


@pytest.mark.usefixtures("no_report")
def test_the_command_line_takes_a_function_and_a_picture(mine: Path, picture: Any) -> None:
    picture.save(mine / "cat.png")
    small = ["--call=height=32", "--call=width=32", "--call=max_sequence_length=12", "--steps=6", "--quiet"]
    words = ["eval", "--model", "mine_live:edits", "--image", "cat.png", "--method", "interval",
             "--samples", "2", "--batch-size", "1", "--rounds", "0",
             "--out", "run", *small]  # fmt: skip
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "interval" in done.output and (mine / "run" / "record.json").exists()
    words = ["eval", "latency", "mine_live:pipeline", "--method", "first-block:threshold=9", "--rounds", "1", *small]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "first-block:threshold=9" in done.output
    words = ["eval", "--model", "mine_live:pipeline", "--image", "cat.png"]
    assert "FluxPipeline takes no image" in CliRunner().invoke(app, words).output


def test_run_and_calibrate_take_them_too(mine: Path, picture: Any) -> None:
    picture.save(mine / "cat.png")
    words = ["run", "mine_live:edits", "a red ring", "--image", "cat.png", "--method", "interval",
             "--steps", "6", "--height", "32", "--width", "32", "--out", "ring.png"]  # fmt: skip
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "computed" in done.output and Image.open(mine / "ring.png").size == (32, 32)
    for option in (["--device", "cpu"], ["--compile"]):
        assert "leave it out" in (said := CliRunner().invoke(app, [*words, *option]).output) or (
            "is loaded already" in said
        )
    words = ["calibrate", "--method", "magcache", "--model", "mine_live:edits", "--image",
             "cat.png", "--steps", "6", "--samples", "2", "--batch-size", "1", "--call",
             "height=32", "--call", "width=32", "--call", "strength=0.5"]  # fmt: skip
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "2 prompts, 3 steps; wrote magcache.safetensors" in done.output
    assert made_by("sticker-flux") is made_by("black-forest-labs/FLUX.1-dev") is None
