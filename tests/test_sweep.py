"""The tables of figures, sweeps and comparisons."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from diffcache.cli import app
from diffcache.eval.record import FOLDER
from diffcache.eval.report.record_files import KINDS
from diffcache.eval.runs.compare import changes, crossed, read_limit
from diffcache.eval.runs.measure import evaluate
from diffcache.eval.runs.ranks import Progress
from diffcache.eval.runs.sweep import read_sweep
from diffcache.eval.workshop import figures

TOML = """
model = "sticker-flux"
samples = 12
steps = [5, 7]
rounds = 0
[call]
height = 64
[[method]]
name = "taylorseer"
every = [3, 4]
order = [1, 2]
site = "stack"
[[method]]
name = "first-block"
"""
YAML = """
model: sticker-flux
samples: 12
steps: [5, 7]
rounds: 0
call: {height: 64}
method:
  - {name: taylorseer, every: [3, 4], order: [1, 2], site: stack}
  - first-block
"""


def written(tmp_path: Path, text: str, name: str = "sweep.toml") -> Path:
    file = tmp_path / name
    file.write_text(text)
    return file


@pytest.mark.parametrize(("name", "text"), [("s.toml", TOML), ("s.yaml", YAML)])
def test_every_list_is_swept(tmp_path: Path, name: str, text: str) -> None:
    plans = read_sweep(written(tmp_path, text, name), tmp_path / "runs")
    assert [plan.task.steps for plan in plans] == [5, 7]
    assert len({plan.out for plan in plans}) == 2
    for plan in plans:
        assert plan.task.call == {"height": 64} and plan.rounds == 0
        assert list(plan.methods) == [
            *(f"taylorseer:every={e},order={o},site=stack" for e in (3, 4) for o in (1, 2)),
            "first-block",
        ]
        assert [m.every for m in plan.methods.values() if hasattr(m, "every")] == [3, 3, 4, 4]


def test_a_key_can_be_replaced(tmp_path: Path) -> None:
    file = written(tmp_path, TOML)
    assert read_sweep(file, tmp_path, {"reward": "mine:score"})[0].reward == "mine:score"
    plans = read_sweep(file, tmp_path, {"device": "cuda"})
    assert {plan.task.device for plan in plans} == {"cuda"}
    assert not {plan.out for plan in plans} & {plan.out for plan in read_sweep(file, tmp_path)}


def record(psnr: float = 30.0, low: float = 29.0, high: float = 31.0, steps: int = 28) -> dict:
    task = {"model": "m", "pipeline": "p", "prompts": {}, "samples": 8, "seed": 0, "steps": steps, "call": {}}
    entry = {"value": psnr, "low": low, "high": high, "n": 8}
    row = {"evaluations": 8.0, "held_bytes": 10, "quality": {}}
    return {
        "task": task,
        "rows": [
            {"name": "uncached", "fidelity": {}, **row},
            {"name": "taylorseer", "fidelity": {"psnr_db": entry}, **row},
        ],
    }


def test_changes_and_limits() -> None:
    found = changes(record(), record(psnr=28, low=27, high=28.5))
    (moved,) = [c for c in found if c.metric == "psnr_db"]
    assert (moved.before, moved.after, moved.apart) == (30, 28, True)
    assert crossed(found, [read_limit("psnr_db<-1")])
    assert not crossed(found, [read_limit("psnr_db<-2")])
    assert not crossed(found, [read_limit("psnr_db>+0.5")])
    assert not crossed(changes(record(), record()), [read_limit("psnr_db<-0"), read_limit("psnr_db>0")])


def test_a_row_of_one_record_alone_is_told(tmp_path: Path) -> None:
    files = []
    for count in (1, 2):
        made = record() | {"schema": "diffcache.eval/1", "metrics": {}}
        made["rows"] = [{**row, "kind": kind} for row, kind in zip(made["rows"][:count], KINDS, strict=False)]
        files.append(tmp_path / f"{count}.json")
        files[-1].write_text(json.dumps(made))
    found = CliRunner().invoke(app, ["eval", "compare", *map(str, files)])
    assert found.exit_code == 0 and "alone, and not compared: taylorseer" in found.output


ROOT = Path(__file__).parents[1]
MODELS = figures.models()
SWEEP = """
model = "sticker-flux"
samples = 2
steps = 6
rounds = 0
[call]
height = 32
width = 32
true_cfg_scale = 1.0
[[method]]
name = "interval"
[[method]]
name = "magcache"
threshold = 0.3
tables = "{}"
"""


@pytest.mark.parametrize("model", MODELS)
def test_record_has_the_rows_of_its_sweep(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    if model.startswith("sticker-"):
        pytest.importorskip("cache_dit")  # some of its rows
    sweep = FOLDER / f"eval-{model}-methods.toml"
    (plan,) = read_sweep(sweep, tmp_path)  # its tables are there, and are those of the methods
    record = json.loads(sweep.with_suffix(".json").read_text())
    rows = {row["name"]: row for row in record["rows"] if row["kind"] == "method"}
    assert list(rows) == list(plan.methods)
    assert [row["method"] for row in rows.values()] == [repr(m) for m in plan.methods.values()]
    assert record["task"]["samples"] >= 32 and model.startswith(record["task"]["model"])
    assert all(row["fidelity"]["psnr_db"]["low"] is not None for row in rows.values())
    assert set(rows) <= set(record["timing"]["rows"])
    assert str(ROOT) not in json.dumps(record)


def test_page_is_that_of_the_records() -> None:
    assert (ROOT / "docs" / "figures.md").read_text() == figures.page()


def test_missing_tables_are_calibrated(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    sweep, file = tmp_path / "sweep.toml", tmp_path / "tables" / "magcache.safetensors"
    sweep.write_text(SWEEP.format(file))
    assert figures.missing_tables(sweep) == [("magcache", {"threshold": 0.3}, file)]
    figures.calibrate(sweep, samples=2)
    assert figures.missing_tables(sweep) == []
    (plan,) = read_sweep(sweep, tmp_path)
    assert plan.methods[f"magcache:threshold=0.3,tables={file}"].tables.steps == 6


def test_unknown_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["shapes-none"]) == 2
    assert "no sweep or record of 'shapes-none'" in capsys.readouterr().err


@pytest.mark.usefixtures("no_report")
def test_methods_made_for_a_number_of_steps_can_be_timed(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    sweep, file = tmp_path / "sweep.toml", tmp_path / "magcache.safetensors"
    text = SWEEP.format(file).replace("rounds = 0", "rounds = 1")
    sweep.write_text(text.replace("magcache", "teacache"))
    figures.calibrate(sweep, samples=2)
    (plan,) = read_sweep(sweep, tmp_path / "runs")
    record = evaluate(plan, Progress())
    assert set(plan.methods) <= set(record["timing"]["rows"])
