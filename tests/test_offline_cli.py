"""`diffcache calibrate` and `diffcache tune`: what they write is what `run` and methods read."""

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from diffcache import Tables
from diffcache.cli import app
from diffcache.features.bac import BAC
from diffcache.features.tuned import Tuned

PROMPT = "a large red ring in the center, on a white background"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def diffcache(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def test_calibrate_then_run() -> None:
    done = diffcache(
        "calibrate",
        "--method",
        "fitted-forecast:computed=2",
        "--model",
        "sticker-flux",
        "--steps",
        "4",
        "--samples",
        "2",
    )
    assert done.exit_code == 0, done.stderr
    assert "wrote fitted-forecast.safetensors" in done.stdout
    method = "fitted-forecast:computed=2,tables=fitted-forecast.safetensors"
    run = ["run", "sticker-flux", PROMPT, "--method", method, "--compare"]
    again = diffcache(*run, "--steps", "4")
    assert again.exit_code == 0, again.stderr
    assert "PSNR" in again.stdout
    other = diffcache(*run, "--steps", "5")
    assert other.exit_code == 2
    assert "made for runs of 4 steps, this one has 5" in other.stderr


def test_tune_then_load(tmp_path: Path) -> None:
    done = diffcache(
        "tune", "--model", "sticker-flux", "--speedup", "1.5", "--steps", "4",
        "--samples", "2", "--batch-size", "1", "--trials", "3",
        "--method", "interval:every=2", "--method", "taylorseer:every=2,warmup=1,site=model",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    best = Tuned(tmp_path / "tuned.safetensors")
    assert repr(best.method) in done.stdout
    held_out = f"{best.validation['psnr_db']:.1f} dB [{best.validation['low_db']:.1f}, "
    assert held_out in done.stdout and "on 1 samples not searched on" in done.stdout
    assert best.total == 4 and best.front


def test_models_that_take_more_than_prompts(tmp_path: Path) -> None:
    done = diffcache(
        "calibrate",
        "--method",
        "bac:count=3",
        "--model",
        "reach-policy",
        "--steps",
        "6",
        "--samples",
        "4",
        "--out",
        "bac.safetensors",
    )
    assert done.exit_code == 0, done.stderr
    assert Tables.load(tmp_path / "bac.safetensors").steps == 6
    assert BAC(count=3, tables=str(tmp_path / "bac.safetensors")).parts().when.total == 6
