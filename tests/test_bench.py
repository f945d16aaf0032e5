"""Benchmarks at their smallest size, and that long ones go on where they ended."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from diffcache.eval import record
from diffcache.eval.workshop.bench import __main__ as bench
from diffcache.eval.workshop.bench import capacity, decode, full_size, kernels, overhead
from diffcache.eval.workshop.bench.models import Shape
from diffcache.eval.workshop.bench.runner import Bench, cell, tables, thirds
from diffcache.eval.workshop.parts import Parts, digest_of

SETTING = record.Setting(torch.device("cpu"))
TINY = Shape(double=2, single=3, image_tokens=4, text_tokens=3)


def written(name, body, folder: Path):
    body = {"seconds": 1.0, **body}
    file = record.write(record.envelope(name, SETTING, "python -m ...", body), folder)
    return json.loads(file.read_text())


def test_overhead(tmp_path: Path):
    body = overhead.measure(SETTING, rounds=2, shape=TINY, batches=[1], length=11)
    runs = {run["name"]: run for run in body["runs"]}
    assert runs["uncached"]["efficiency"]["median"] == runs[overhead.HOLLOW]["efficiency"]["median"] == 1
    assert {name: run["computed_steps"] for name, run in runs.items() if "/" not in name} == {
        "uncached": 11,
        **dict.fromkeys((overhead.HOLLOW, "TaylorSeer", "Interval"), 3),
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
    with pytest.raises(ValueError, match=r"no cache 'h3o' is timed; there are full, snapkv"):
        decode.measure(SETTING, **sizes, recipes=["h3o"])


def test_capacity(tmp_path: Path):
    body = capacity.measure(SETTING, tokens=9)
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


def test_cells_are_short():
    quartiles, interval = ({"median": 1.5, "q1": 1.0, "q3": 2.0, "n": 3}, dict(value=9, low=1, high=3))
    assert cell(quartiles) == "1.5 [1, 2]" and cell(interval) == "9 [1, 3]"
    assert cell([1, 2.0, None]) == "1, 2, " and cell({"a": 12345}) == "a 12,345"
    assert cell(True) == "True" and len(cell("long " * 20)) == 44


def test_stats():
    assert record.stats([3, 1, 2, 4, 5], 10) == {"median": 30, "q1": 20, "q3": 40, "p10": pytest.approx(14), "n": 5}


def test_command_line(tmp_path: Path, capsys, monkeypatch):
    little = Bench(overhead.measure, "", quick={"rounds": 2, "shape": TINY})
    monkeypatch.setitem(bench.BENCHMARKS, "overhead", little)
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
    found = written("kernels", kernels.measure(SETTING, rounds=1), tmp_path)
    for row in found["rows"]:
        assert row["ways"]["kernel"]["error"] == row["ways"]["plain"]["error"] == 0  # both plain here
        assert all("us" in way for way in row["ways"].values()), row
    assert found["choices"] == {} and next(tables(found)).row_count == len(found["rows"])


def test_full_size_counts_what_is_computed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(full_size, "STEPS", 6)
    found = written("full-size", full_size.measure(SETTING, rounds=1), tmp_path)
    rows = {row["name"]: row for row in found["rows"]}
    for model in ("FLUX.1-dev", "Wan2.1-1.3B"):
        assert rows[f"{model}, uncached"]["computed"] == 6
        for name in ("Interval", *(f"TaylorSeer {s}" for s in ("stack", "model", "block", "module"))):
            assert rows[f"{model}, {name}"]["computed"] == 2
    assert next(tables(found)).row_count == len(rows)


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


def test_parts_of_other_settings_are_made_again(tmp_path: Path) -> None:
    file = tmp_path / "a.unfinished"
    Parts(file, {"samples": 2}).take("one", lambda: 1)
    assert Parts(file, {"samples": 3}).take("one", lambda: 2) == 2
    assert Parts(None, {}).take("one", lambda: 3) == 3


def interrupted() -> None:
    raise KeyboardInterrupt


def test_a_digest_is_of_names_shapes_and_values() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert digest_of(one) != digest_of(other)
    other.load_state_dict(one.state_dict())
    assert digest_of(one) == digest_of(other)
    assert digest_of(nn.Sequential(one)) != digest_of(one)
    assert digest_of(one.to(torch.bfloat16)) != digest_of(other)
