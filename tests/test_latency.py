"""The latency command: its record, its tables, its errors. No time is asserted."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from diffcache.anchor import owner_of
from diffcache.cli import app
from diffcache.eval import record
from diffcache.eval.cost.clock import DenoiserClock
from diffcache.eval.methods import parse_row
from diffcache.eval.record import Setting
from diffcache.eval.runs import cost
from diffcache.eval.runs.evaluate import Plan, start
from diffcache.eval.runs.progress import Progress
from diffcache.eval.runs.task import Case, Task

STACK = "taylorseer:every=2,warmup=1,site=stack"
PEER = "diffusers/taylorseer:cache_interval=2,disable_cache_before_step=1,use_lite_mode=True"
WORDS = ["sticker-flux", "--device", "cpu", "--steps", "4", "--rounds", "2", "--batch-size", "2"]
SETTING = Setting(torch.device("cpu"))


def call(*words):
    return CliRunner().invoke(app, ["eval", "latency", *words])


def turns_of(tmp_path, method):
    task = Task("sticker-flux", samples=1, batch_size=1, steps=4)
    run = start(Plan(task, {}, tmp_path / "run"), Progress())
    return run, cost._Turns(run, Case(method, "method", 4, parse_row(method)), SETTING)


def test_the_record_of_a_run(tmp_path, monkeypatch):
    asked = []

    def peak_bytes(model, method, call, place):
        asked.append((Path(model).name, method and method.partition(":")[0], place.device))
        return 3000

    monkeypatch.setattr(cost, "peak_bytes", peak_bytes)
    monkeypatch.setenv("COLUMNS", "250")  # long times must not wrap the cells
    file = tmp_path / "new" / "latency.json"
    gate = "first-block:threshold=1e-9"
    methods = [word for name in (STACK, gate, PEER) for word in ("--method", name)]
    done = call(*WORDS, *methods, "--memory", "--json", str(file))
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text(encoding="utf-8"))
    record.check(found)
    uncached, stack, gated, peer = found["rows"]
    assert [row["name"] for row in found["rows"]] == ["uncached", STACK, gate, PEER]
    assert (uncached["steps"], uncached["evaluations"], uncached["flops_ratio"]) == (4, 4, 1)
    assert (stack["steps"], stack["computed_steps"]) == (4, 2) and 2 < stack["evaluations"] < 2.05
    assert stack["flops"] == pytest.approx(uncached["flops"] * stack["evaluations"] / 4)
    assert stack["flops_ratio"] == pytest.approx(4 / stack["evaluations"])
    assert gated["evaluations"] == 4 and uncached["held_bytes"] == 0 < stack["held_bytes"]
    assert peer["computed_steps"] == 2 and peer["held_bytes"] > 0 and "peak_bytes" not in peer
    for row in found["rows"]:
        assert row["seconds"]["n"] == row["cpu_ratio"]["n"] == row["denoiser_seconds"]["n"] == 2
        assert 0 < row["denoiser_seconds"]["median"] < row["seconds"]["median"]
        assert row["throughput"] == pytest.approx(2 / row["seconds"]["median"])
    assert uncached["ratio"]["median"] == uncached["denoiser_ratio"]["median"] == 1
    assert uncached["peak_bytes"] == stack["peak_bytes"] == 3000
    assert asked == [("sticker-flux", name, "cpu") for name in (None, "taylorseer", "first-block")]
    assert f"{gate} skipped nothing" in found["warnings"]
    assert found["shapes"]["num_inference_steps"] == 4 and found["shapes"]["batch_size"] == 2
    assert "2.9 KiB" in done.output and "Samples a second" in done.output
    assert "note: " in done.output


def test_json_alone_on_standard_output():
    done = call("sticker-flux", "--steps", "1", "--rounds", "1", "--json", "-", "--quiet")
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["name"], row["steps"]) == ("uncached", 1)


def test_the_pipeline_is_free_again_when_a_turn_fails(tmp_path):
    run, turns = turns_of(tmp_path, "step-mask")
    model = run.drawer.pipe.transformer
    before = set(vars(model))

    def fail():
        with turns.turn().within():
            turns.prepare()  # all steps: its masks are for four or more
            assert owner_of(model) is not None
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert owner_of(model) is None and set(vars(model)) == before and not model._forward_hooks


def test_the_clock_counts_denoiser_calls_only():
    model = nn.Linear(2, 2)
    with DenoiserClock(model, SETTING) as clock:
        for _ in range(3):
            model(torch.ones(1, 2))
        assert clock.calls == 3 and clock.seconds > 0
        clock.reset()
        assert clock.calls == 0 and clock.seconds == 0
    model(torch.ones(1, 2))
    assert clock.calls == 0 and not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.gpu
def test_on_an_accelerator():
    words = ["sticker-flux", "--device", "cuda", "--steps", "4", "--rounds", "2", "--memory"]
    done = call(*words, "--method", STACK, "--json", "-", "--quiet")
    for row in json.loads(done.stdout)["rows"]:
        assert 0 < row["denoiser_seconds"]["median"] < row["seconds"]["median"]
        assert row["peak_bytes"] > 0
