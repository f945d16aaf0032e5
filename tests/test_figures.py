"""The tables of figures: sweeps that can be drawn, records that are theirs, a page from both."""

import json
from pathlib import Path

import pytest
import torch

from diffcache.eval.record import FOLDER
from diffcache.eval.runs.measure import evaluate
from diffcache.eval.runs.progress import Progress
from diffcache.eval.runs.sweep import read_sweep, read_values
from diffcache.eval.workshop import figures

ROOT = Path(__file__).parents[1]
MODELS = figures.models()
SWEEP = """
model = "shapes-flux"
samples = 2
steps = 6
rounds = 0
[[method]]
name = "interval"
[[method]]
name = "magcache"
threshold = 0.3
tables = "{}"
"""


@pytest.mark.parametrize("model", MODELS)
def test_record_has_the_rows_of_its_sweep(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    if model.startswith("shapes-flux"):
        pytest.importorskip("cache_dit")  # some of its rows
    sweep = FOLDER / f"eval-{model}-methods.toml"
    (plan,) = read_sweep(sweep, tmp_path)  # its tables are there, and are those of the methods
    record = json.loads(sweep.with_suffix(".json").read_text())
    rows = {row["name"]: row for row in record["rows"] if row["kind"] == "method"}
    assert list(rows) == list(plan.methods)
    assert [row["method"] for row in rows.values()] == [repr(m) for m in plan.methods.values()]
    assert record["task"]["samples"] >= 256 and model.startswith(record["task"]["model"])
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


def test_tables_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.toml"
    entry = '[[method]]\nname = "{}"\ntables = "none.safetensors"\n'
    sweep.write_text('model = "shapes-flux"\n' + entry.format("tuned"))
    with pytest.raises(ValueError, match="make it: diffcache tune --out none.safetensors"):
        figures.calibrate(sweep)
    sweep.write_text('model = "shapes-flux"\n' + entry.format("interval"))
    assert read_values(sweep)["method"][0]["name"] == "interval"
    with pytest.raises(ValueError, match="interval takes no tables"):
        figures.calibrate(sweep)


def test_unknown_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["shapes-none"]) == 2
    assert "no sweep of 'shapes-none'" in capsys.readouterr().err


@pytest.mark.usefixtures("no_report")
def test_methods_made_for_a_number_of_steps_can_be_timed(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    sweep, file = tmp_path / "sweep.toml", tmp_path / "magcache.safetensors"
    text = SWEEP.format(file).replace("rounds = 0", "rounds = 1\nsite_errors = false")
    sweep.write_text(text.replace("magcache", "teacache"))
    figures.calibrate(sweep, samples=2)
    (plan,) = read_sweep(sweep, tmp_path / "runs")
    record = evaluate(plan, Progress())
    assert set(plan.methods) <= set(record["timing"]["rows"])
