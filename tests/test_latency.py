"""The latency command: its record, its tables, its errors. No time is asserted."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from diffcache.attach.anchor import owner_of
from diffcache.eval import latency, record
from diffcache.eval.cost import turns
from diffcache.eval.cost.clock import DenoiserClock
from diffcache.eval.cost.energy import Joules
from diffcache.eval.cost.interleave import measure
from diffcache.eval.cost.memory import Peak, Place
from diffcache.eval.record import Setting

STACK = "taylorseer:every=2,warmup=1,site=stack"
WORDS = [
    "shapes-flux",
    "--device",
    "cpu",
    "--steps",
    "4",
    "--rounds",
    "2",
    "--warmup",
    "0",
    "--batch-size",
    "2",
]


def test_the_record_of_a_run(capsys, tmp_path, monkeypatch):
    asked = []

    def peak_bytes(model, method, call, place):
        asked.append((model, method, place.device))
        json.dumps(call)
        return Peak(3000, 2000)

    monkeypatch.setattr(turns, "peak_bytes", peak_bytes)
    monkeypatch.setenv("COLUMNS", "200")  # long times must not wrap the cells
    file = tmp_path / "new" / "latency.json"
    methods = ["--method", STACK, "--method", "first-block:threshold=1e-9"]
    assert latency.main([*WORDS, *methods, "--memory", "--json", str(file)]) == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    record.check(found)
    uncached, stack, gated = found["rows"]
    assert [row["name"] for row in found["rows"]] == ["uncached", STACK, methods[-1]]
    assert (uncached["steps"], uncached["evaluations"], uncached["flops_ratio"]) == (4, 4, 1)
    assert (stack["steps"], stack["computed_steps"]) == (4, 2) and 2 < stack["evaluations"] < 2.05
    assert stack["flops"] == pytest.approx(uncached["flops"] * stack["evaluations"] / 4)
    assert stack["flops_ratio"] == pytest.approx(4 / stack["evaluations"])
    assert gated["evaluations"] == 4 and uncached["held_bytes"] == 0 < stack["held_bytes"]
    for row in found["rows"]:
        assert row["seconds"]["n"] == row["ratio"]["n"] == row["denoiser_seconds"]["n"] == 2
        assert 0 < row["denoiser_seconds"]["median"] < row["seconds"]["median"]
        assert row["throughput"] == pytest.approx(2 / row["seconds"]["median"])
        assert row["peak_bytes"] == 3000 and "joules" not in row
    assert uncached["ratio"]["median"] == uncached["denoiser_ratio"]["median"] == 1
    assert asked == [("shapes-flux", name, "cpu") for name in (None, STACK, methods[-1])]
    assert f"{methods[-1]} skipped nothing" in found["warnings"]
    assert found["shapes"]["num_inference_steps"] == 4 and found["shapes"]["batch_size"] == 2
    assert not file.with_name("latency.json.tmp").exists()
    shown = capsys.readouterr().out
    assert "2.93 KiB" in shown and "2/4" in shown and "note: " in shown


def test_json_alone_on_standard_output(capsys):
    words = ["shapes-flux", "--steps", "1", "--rounds", "1", "--warmup", "0", "--json", "-"]
    assert latency.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["rows"]] == ["uncached"]
    assert found["rows"][0]["steps"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "no pipeline at 'nowhere'"),
        (["shapes-flux", "--rounds", "0"], "rounds=0: must be at least 1"),
        (["shapes-flux", "--steps", "0"], "num_inference_steps=0: must be at least 1"),
        (["shapes-flux", "--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["shapes-flux", "--threads", "0"], "threads=0: must be at least 1"),
        (["shapes-flux", "--method", "teacach"], "unknown method 'teacach'"),
        (["shapes-flux", "--method", "interval:evry=4"], "has no setting 'evry'"),
        (["shapes-flux", *["--method", "interval"] * 2], "--method interval: is a row already"),
        (["shapes-flux", "--frames", "9"], "FluxPipeline takes no num_frames"),
        (["shapes-flux", "--device", "moon"], "--device 'moon'"),
        (["shapes-flux", "--dtype", "int8"], "dtype='int8'"),
        ([], "the following arguments are required: model"),
    ],
)
def test_errors_are_one_line(words, message, capsys):
    assert latency.main(words) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and message in lines[0] and printed.out == ""


@pytest.mark.parametrize(("error", "code"), [(ImportError("no x"), 3), (RuntimeError("ran"), 1)])
def test_exit_codes(monkeypatch, capsys, error, code):
    def run(*given):
        raise error

    monkeypatch.setattr(turns, "run", run)
    assert latency.main(["shapes-flux"]) == code
    assert str(error) in capsys.readouterr().err


def test_the_pipeline_is_free_again_when_a_turn_fails(monkeypatch):
    bench = turns.Bench(turns.Plan("shapes-flux", (STACK,), {"num_inference_steps": 2}))
    before = set(vars(bench.pipe.transformer))
    turn = bench.turn(STACK)

    def fail():
        with turn.within():
            assert owner_of(bench.pipe.transformer) is not None
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert owner_of(bench.pipe.transformer) is None
    assert set(vars(bench.pipe.transformer)) == before
    assert not bench.pipe.transformer._forward_hooks


def test_the_clock_counts_denoiser_calls_only():
    model = nn.Linear(2, 2)
    with DenoiserClock(model, Setting(torch.device("cpu"))) as clock:
        for _ in range(3):
            model(torch.ones(1, 2))
        assert clock.calls == 3 and clock.seconds > 0
        clock.reset()
        assert clock.calls == 0 and clock.seconds == 0
    model(torch.ones(1, 2))
    assert clock.calls == 0 and not model._forward_hooks and not model._forward_pre_hooks


def test_plans_of_command_lines():
    plan, out = latency.plan_of([*WORDS, "--height", "32", "--json", "-"])
    assert plan.call == {"num_inference_steps": 4, "height": 32} and out == "-"
    assert plan.place == Place("cpu", "auto", 1) and plan.batch_size == 2 and not plan.memory


def test_energy_has_its_column():
    number = {"median": 2.0, "q1": 1.0, "q3": 3.0, "n": 3}
    row = {
        "name": "a", "computed_steps": 4, "steps": 4, "seconds": number, "cpu_seconds": number,
        "denoiser_seconds": number, "ratio": number, "denoiser_ratio": number, "throughput": 1.0,
        "flops_ratio": None, "held_bytes": 0, "joules": number,
    }  # fmt: skip
    _, (titles, rows) = latency.tables({"rows": [row]})
    assert dict(zip(titles, rows[0], strict=True))["energy"] == "2 J"
    assert dict(zip(titles, rows[0], strict=True))["FLOPs"] == "n/a"
    assert Joules("cpu").joules is None


def test_energy_is_read_around_every_timed_call(monkeypatch):
    bench = turns.Bench(turns.Plan("shapes-flux", (), {"num_inference_steps": 1}))
    log = []
    fake = SimpleNamespace(
        start=lambda: log.append("start"), stop=lambda: log.append("stop"), joules=5.0
    )
    monkeypatch.setattr(bench, "_energy", fake)
    monkeypatch.setattr(bench, "draw", lambda short=False: log.append("short" if short else "draw"))
    timings = measure({"uncached": bench.turn("uncached")}, 1, 0, bench.setting)
    assert timings.readings["uncached"]["joules"] == [5.0]
    assert log == ["short", "start", "draw", "stop", "stop"]


@pytest.mark.gpu
def test_on_an_accelerator(capsys):
    words = ["shapes-flux", "--device", "cuda", "--steps", "4", "--rounds", "2", "--memory"]
    assert latency.main([*words, "--method", STACK, "--json", "-"]) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        assert 0 < row["denoiser_seconds"]["median"] < row["seconds"]["median"]
        assert row["reserved_bytes"] >= row["peak_bytes"] >= row["loaded_bytes"] > 0
