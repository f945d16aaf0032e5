"""Every benchmark runs at a tiny size and writes a whole record; nothing here is about time."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel, TaylorSeerCacheConfig

from diffcache.eval import bench, compiled, memory, overhead, peers, record, speed
from diffcache.eval.contender import psnr
from diffcache.eval.tiny import Shape, build, emptied, inputs
from diffcache.pipelines.small.flux import build_autoencoder, build_pipeline

SETTING = record.Setting(torch.device("cpu"))
TINY = Shape(double=2, single=3, image_tokens=4, text_tokens=3)


def written(name, body, folder: Path):
    file = record.write(record.envelope(name, SETTING, "python -m ...", body), folder)
    return json.loads(file.read_text())


@pytest.fixture
def pipe():
    autoencoder = build_autoencoder()
    autoencoder.register_to_config(shift_factor=0.0, scaling_factor=1.0)
    made = build_pipeline(autoencoder)
    sizes = {**made.transformer.config, "num_layers": 2, "num_single_layers": 2}
    made.transformer = FluxTransformer2DModel.from_config(sizes)
    made.set_progress_bar_config(disable=True)
    return made


def test_overhead(tmp_path: Path):
    body = overhead.measure(SETTING, rounds=2, shape=TINY)
    found = written("overhead", body, tmp_path)
    rows = {row["name"]: row for row in found["rows"]}
    assert {"TaylorSeer stack", "TaylorSeer block", "TaylorSeer module"} <= set(rows)
    assert {"diffusers MagCache", "diffusers FirstBlockCache", "0 blocks", "1 block"} <= set(rows)
    assert rows["TaylorSeer module"]["sites"] == 3 * TINY.double + TINY.single
    assert rows["TaylorSeer attention"]["sites"] == TINY.double + TINY.single
    assert all(row["step_us"]["n"] > 0 for row in found["rows"])
    assert len(overhead.tables(found)) == 2


def test_memory_equals_the_formula(tmp_path: Path):
    found = written("memory", memory.measure(SETTING, shape=TINY), tmp_path)
    assert [row["name"] for row in found["rows"] if not row["equal"]] == []
    assert len(found["rows"]) == 2 * (3 * len(memory.SITES) + 2)
    assert memory.tables(found)[0].row_count == len(found["rows"])


@pytest.mark.slow
def test_compile(tmp_path: Path, monkeypatch):
    names = ("uncached", "TaylorSeer stack", "diffusers FirstBlockCache")
    chosen = {name: compiled.subjects()[name] for name in names}
    monkeypatch.setattr(compiled, "subjects", lambda: chosen)
    found = written("compile", compiled.measure(SETTING, shape=Shape(double=2, single=2)), tmp_path)
    rows = {row["name"]: row for row in found["rows"]}
    for name, row in rows.items():
        if not name.startswith("diffusers"):
            assert (row["graphs"], row["breaks"]) == (rows["uncached"]["graphs"], 0)
            assert row["error"] is None and row["difference"] < 1e-5
    assert compiled.tables(found)[0].row_count == len(rows)


@pytest.mark.slow
def test_speed(tmp_path: Path, pipe, monkeypatch):
    monkeypatch.setattr(speed, "threshold_for", lambda wanted, count: 0.1 + 0 * count(0.1))
    body = speed.measure(SETTING, pipe=pipe, rounds=1, steps=6, batches=[1])
    found = written("speed", body, tmp_path)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["uncached"]["computed_steps"] == [6]
    assert rows["uncached"]["psnr_db"] is None and rows["uncached"]["held_bytes"] == 0
    assert rows["TaylorSeer stack"]["computed_steps"] == [3]
    assert rows["TaylorSeer module"]["computed_steps"] == [3]
    assert rows["TaylorSeer module"]["held_bytes"] > rows["TaylorSeer stack"]["held_bytes"] > 0
    assert rows["diffusers TaylorSeer lite"]["held_bytes"] > 0
    assert found["split"][0]["milliseconds"]["computed step"]["n"] == 4
    assert len(speed.tables(found)) == 4
    assert not pipe.transformer.is_cache_enabled


@pytest.mark.parametrize(
    ("interval", "before", "computed"),
    [(4, 3, [0, 1, 2, 4, 8]), (5, 2, [0, 1, 3, 8]), (1, 1, list(range(10)))],
)
def test_diffusers_schedule_is_known(interval, before, computed):
    assert peers.taylor_schedule(interval, before, 10) == computed
    model, call = (
        build(TINY, SETTING.device, SETTING.dtype),
        inputs(TINY, SETTING.device, SETTING.dtype),
    )
    model.enable_cache(TaylorSeerCacheConfig(interval, before, taylor_factors_dtype=torch.float32))
    ran = []
    last = model.single_transformer_blocks[-1].attn.to_q
    last.register_forward_hook(lambda *given: ran.append(step))
    for step in range(10):  # noqa: B007
        with torch.no_grad(), model.cache_context("cond"):
            model(**call)
    assert ran == computed


def test_thresholds_are_searched():
    assert peers.threshold_for(10, lambda at: round(1 / at)) == pytest.approx(0.1, rel=0.1)
    assert peers.taylor_config(10, 50, False, torch.float32).cache_interval == 7


def test_emptied_gives_the_blocks_back():
    model = build(TINY, SETTING.device, SETTING.dtype)
    blocks = model.transformer_blocks
    with emptied(model, keep=1):
        assert len(model.transformer_blocks) == 1 and len(model.single_transformer_blocks) == 0
    assert model.transformer_blocks is blocks and len(model.single_transformer_blocks) == 3


def test_psnr():
    pictures = torch.zeros(2, 8, 8, 3, dtype=torch.uint8).numpy()
    others = pictures.copy()
    others[1] += 255
    assert psnr(pictures, others) == [None, pytest.approx(0.0)]


def test_stats():
    assert record.stats([3, 1, 2, 4, 5], 10) == {
        "median": 30, "q1": 20, "q3": 40, "p10": pytest.approx(14), "n": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rows": []}, "rows"),
        ({"threads": "1"}, "threads='1'"),
        ({"seconds": float("nan")}, "JSON"),
    ],
)
def test_broken_records_are_refused(change, text):
    body = {"shapes": {}, "rounds": 1, "seconds": 1.0, "rows": [{"name": "a"}]}
    whole = record.envelope("memory", SETTING, "python -m ...", body)
    record.check(whole)
    with pytest.raises(ValueError, match=text):
        record.check({**whole, **change})
    with pytest.raises(ValueError, match="the record has no 'device'"):
        record.check({key: value for key, value in whole.items() if key != "device"})


def test_command_line(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "cases", lambda shape, cases=memory.cases: cases(shape)[:2])
    assert bench.main(["memory", "--quick", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "memory.json").read_text())
    assert found["command"].startswith("python -m diffcache.eval.bench memory --device cpu")
    assert str(tmp_path) not in json.dumps(found)
    assert "Interval model" in capsys.readouterr().out


def test_command_line_says_what_is_wrong(tmp_path: Path, capsys):
    assert bench.main(["speed", "--model", str(tmp_path)]) == 1
    assert "no pipeline in" in capsys.readouterr().out
    for words in (["speeed"], ["memory", "--rounds", "0"]):
        with pytest.raises(SystemExit, match="2"):
            bench.main(words)
    error = capsys.readouterr().err
    assert "no benchmark 'speeed'; there are overhead" in error and "must be at least 1" in error
