"""Benches and timings: what they write and print."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from diffcache.anchor import owner_of
from diffcache.cli import app
from diffcache.eval import record
from diffcache.eval.cost.clock import DenoiserClock
from diffcache.eval.kernels import timing
from diffcache.eval.methods import parse_row
from diffcache.eval.record import FOLDER, ROOT, Setting
from diffcache.eval.runs import measure
from diffcache.eval.runs.evaluate import Plan, start
from diffcache.eval.runs.ranks import Progress
from diffcache.eval.runs.task import Case, Task
from diffcache.eval.workshop.bench import __main__ as bench
from diffcache.eval.workshop.bench import decode, overhead
from diffcache.eval.workshop.bench.overhead import Shape
from diffcache.eval.workshop.bench.runner import Bench, tables, thirds
from diffcache.eval.workshop.bench.telling import FACTORS, STEPS, magcache
from diffcache.eval.workshop.parts import Parts
from diffcache.eval.workshop.shipped.telling_page import RECORD, page
from diffcache.eval.workshop.small import sticker_flux
from diffcache.features.parts.when import steps_of
from diffcache.files import read_json, write_file

SETTING = record.Setting(torch.device("cpu"))
TINY = Shape(double=2, single=3, image_tokens=4, text_tokens=3)


def written(name, body, folder: Path):
    body = {"seconds": 1.0, **body}
    file = record.write(record.envelope(name, SETTING, "python -m ...", body), folder)
    return json.loads(file.read_text())


def test_overhead(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sticker_flux, "CALL", {**sticker_flux.CALL, "height": 32, "width": 32})
    loaded = sticker_flux.load()
    monkeypatch.setattr(sticker_flux, "load", lambda dtype: copy.deepcopy(loaded))
    body = overhead.measure(SETTING, rounds=2, shape=TINY, batches=[1], length=6)
    runs = {run["name"]: run for run in body["runs"]}
    assert runs["uncached"]["efficiency"]["median"] == runs[overhead.HOLLOW]["efficiency"]["median"] == 1
    assert {name: run["computed_steps"] for name, run in runs.items() if "/" not in name} == {
        "uncached": 6,
        **dict.fromkeys((overhead.HOLLOW, "TaylorSeer", "Interval"), 2),
    }
    found = written("overhead", body, tmp_path)
    rows = {row["name"]: row for row in found["rows"]}
    assert {"TaylorSeer stack", "TaylorSeer block", "TaylorSeer module"} <= set(rows)
    assert {"diffusers MagCache", "diffusers FirstBlockCache", "0 blocks", "1 block"} <= set(rows)
    assert rows["TaylorSeer module"]["sites"] == 3 * TINY.double + TINY.single
    assert rows["TaylorSeer attention"]["sites"] == TINY.double + TINY.single
    calls = {name: row["step_us"]["n"] for name, row in rows.items()}
    assert calls["TaylorSeer stack"] == calls["0 blocks"] == 10 and calls["full step"] == 4
    assert next(tables(found)).row_count == len(found["rows"])


def test_decode(tmp_path: Path):
    sizes = {"rounds": 1, "layers": 2, "prompt": 256}
    body = decode.measure(SETTING, **sizes, recipes=["full", "streaming_llm 25 %"])
    found = written("decode", body, tmp_path)
    stock, full, evicting = found["rows"]
    assert [row["name"] for row in found["rows"]] == ["DynamicCache", "full", "streaming_llm 25 %"]
    assert stock["ratio"]["median"] == stock["share"] == 1 and stock["missed"] is None
    # 256 tokens, the first after them, two of warm-up, and one; keys and values of two layers.
    assert stock["bytes"] == 2 * 2 * 4 * 64 * 4 * (256 + 1 + 2 + 1) <= full["bytes"]
    assert evicting["share"] < 0.35 and evicting["target"] == 0.85
    assert evicting["missed"] == (evicting["ratio"]["median"] > 0.85)


def test_capacity(tmp_path: Path):
    body = decode.capacity(SETTING, tokens=9)
    found = written("capacity", body, tmp_path)
    stock, *bounded = found["rows"]
    # 512 tokens of the prompt and a third of 9 each time, of one layer
    assert stock["bytes"] == [2 * 4 * 64 * 4 * (512 + 3 * n) for n in (1, 2, 3)]
    assert {row["name"] for row in bounded} == {
        "streaming_llm",
        "h2o",
        "tova",
        "scissorhands",
        "keyformer",
        "lazy_eviction",
        "d2o",
        "elastic_cache",
        "chelsea",
    }
    told = thirds([1.0, 1, 1, 2, 2, 2, 6, 6, 9], [1.0] * 6 + [2.0] * 3, [2, 4, 5])
    assert (told["time_ratio"], told["bytes_ratio"]) == (1.5, 1.25)


def test_command_line(tmp_path: Path, capsys, monkeypatch):
    def measure(setting: Setting, rounds: int, shape: Shape) -> dict[str, Any]:
        assert shape == TINY
        return {"shapes": {}, "rounds": rounds, "rows": [{"name": "TaylorSeer stack"}]}

    monkeypatch.setitem(bench.BENCHMARKS, "overhead", Bench(measure, "", quick={"rounds": 2, "shape": TINY}))
    assert bench.main(["overhead", "--quick", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "overhead.json").read_text())
    assert found["command"] == (
        "python -m diffcache.eval.workshop.bench overhead --device cpu --dtype float32 --threads 1 --rounds 2 --quick"
    )
    assert str(tmp_path) not in json.dumps(found)
    assert "TaylorSeer stack" in capsys.readouterr().out


def test_command_line_says_what_is_wrong(capsys):
    for words in (["speeed"], ["overhead", "--rounds", "0"]):
        assert bench.main(words) == 2
    error = capsys.readouterr().err
    assert "no benchmark 'speeed'; there are overhead" in error and "'--rounds'" in error


def test_every_way_to_a_kernels_result_is_right(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda run: run)  # compiling takes a minute
    found = written("kernels", timing.measure(SETTING, rounds=1), tmp_path)
    for row in found["rows"]:
        assert row["ways"]["kernel"]["error"] == row["ways"]["plain"]["error"] == 0  # both plain here
        assert all("us" in way for way in row["ways"].values()), row
    assert found["choices"] == {} and next(tables(found)).row_count == len(found["rows"])


def test_parts_are_kept_until_the_end(tmp_path: Path) -> None:
    file = tmp_path / "a.unfinished"
    first = Parts(file, {"samples": 2})
    assert first.take("one", lambda: [1.5, None]) == [1.5, None]
    with pytest.raises(KeyboardInterrupt):
        first.take("two", interrupted)

    again = Parts(file, {"samples": 2})
    assert again.take("one", interrupted) == [1.5, None]
    assert again.take("two", lambda: {"a": 1}) == {"a": 1}
    assert set(again.end()) == {"one", "two"} and not file.exists()


def interrupted() -> None:
    raise KeyboardInterrupt


STACK = "taylorseer:every=2,warmup=1,site=stack"
PEER = "diffusers/taylorseer:cache_interval=2,disable_cache_before_step=1,use_lite_mode=True"
WORDS = ["sticker-flux", "--device", "cpu", "--steps", "4", "--rounds", "2", "--batch-size", "2"]
WORDS += ["--call", "height=32", "--call", "width=32"]
LATENCY_SETTING = Setting(torch.device("cpu"))


def call(*words):
    return CliRunner().invoke(app, ["eval", "latency", *words])


def turns_of(tmp_path, method):
    task = Task("sticker-flux", samples=1, batch_size=1, steps=4)
    run = start(Plan(task, {}, tmp_path / "run"), Progress())
    return run, measure._Turns(run, Case(method, "method", 4, parse_row(method)), LATENCY_SETTING)


def test_the_record_of_a_run(tmp_path, monkeypatch):
    asked = []

    def peak_bytes(model, method, call, place):
        asked.append((Path(model).name, method and method.partition(":")[0], place.device))
        return 3000

    monkeypatch.setattr(measure, "peak_bytes", peak_bytes)
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
    with DenoiserClock(model, LATENCY_SETTING) as clock:
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


@pytest.mark.parametrize("factor", FACTORS)
def test_the_gate_computes_as_few_steps_as_the_others(factor: int):
    ratios = [1 + 0.2 / step for step in range(1, STEPS)]
    method = magcache(ratios, factor)
    steps = steps_of(method.parts().when, STEPS)
    assert steps[0] == 0 and 2 <= len(steps) <= -(-STEPS // factor)
    assert len(steps) >= -(-STEPS // factor) - 2  # no coarser than it has to be


def test_the_page_is_that_of_its_record():
    text = (ROOT / "docs" / "telling_power.md").read_text(encoding="utf-8")
    assert text == page(read_json(FOLDER / RECORD))


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_file(tmp_path / "folder", "text")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]
