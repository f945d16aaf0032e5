"""The table of diffusion language models: rows, errors on one trajectory, the page."""

import pytest
import torch

from diffcache.eval.record import Setting
from diffcache.eval.workshop.bench.runner import tables
from diffcache.eval.workshop.dllm import measure as dllm
from diffcache.eval.workshop.dllm import page, steps
from diffcache.eval.workshop.dllm.rows import Row, rows
from diffcache.eval.workshop.parts import Parts

SETTING = Setting(torch.device("cpu"), torch.float32)
PROBE = "chain-llada-probe"
WIDTH, ANSWER, BLOCK, LAYERS = 98, 48, 16, 3  # of the probe


@pytest.mark.parametrize("model", dllm.MODELS)
def test_every_row_stands_behind_the_one_it_is_compared_with(model: str) -> None:
    known = rows(model)
    names = [row.name for row in known]
    assert len(set(names)) == len(names) and names[0] == "uncached"
    for row in known:
        against = known[names.index(row.against)]
        assert names.index(row.against) <= names.index(row.name)
        assert (row.policy == "") == (row.role == "baseline") and against.role == "baseline"
        assert (row.made() is None) == (row.policy == "")
        if row.policy:  # the cache alone is what differs
            assert row.schedule(48, 16) == against.schedule(48, 16)
            assert row.sampler() == against.sampler()


def test_a_measured_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dllm, "replay", lambda *given: {})
    monkeypatch.setattr(dllm, "BATCH", 2)
    found = dllm.measure(
        SETTING, model=PROBE, rounds=1, samples=1, named=["Fast-dLLM dual", "dKV-Cache, no delay", "the guide alone"]
    )
    told = {row["name"]: row for row in found["rows"]}
    assert list(told) == ["uncached", "dKV-Cache, no delay", "Fast-dLLM dual", "the guide alone"]
    uncached, control, dual, alone = told.values()
    assert alone["batch_1"]["token_layers"] == WIDTH - 1 and alone["batch_1"]["forwards"] == ANSWER
    assert uncached["batch_1"]["token_layers"] == WIDTH * ANSWER * LAYERS
    assert dual["batch_2"]["token_layers"] == 3 * (WIDTH + 15 * BLOCK) * LAYERS
    assert uncached["batch_1"]["forwards"] == dual["batch_2"]["forwards"] == ANSWER
    assert uncached["exact_match"]["value"] == dual["exact_match"]["value"] == 1
    assert control["exact_match"]["value"] == 0 and control["change"]["value"] == -1
    assert next(tables({"benchmark": "dllm", **found})).row_count == 4
    with pytest.raises(ValueError, match="no row 'x'; there are uncached"):
        dllm.measure(SETTING, model=PROBE, named=["x"])
    with pytest.raises(ValueError, match="no model 'x'"):
        dllm.measure(SETTING, model="x")


def test_rows_of_steps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MODEL", PROBE)
    found = steps.measure(SETTING, rounds=1, named=["uncached", "Fast-dLLM dual"])
    uncached, dual = found["rows"]
    assert uncached["rows"] == WIDTH and dual["rows"] == (WIDTH + 15 * BLOCK) / BLOCK
    assert uncached["faster"]["median"] == 1
    assert next(tables({"benchmark": "dllm-steps", **found})).row_count == 2


def test_a_cache_that_computes_everything_has_no_error_on_the_trajectory() -> None:
    chosen = [Row("all", "dkv-cache:every=1"), Row("frozen", "dkv-cache:every=8,delay=False")]
    found = dllm.replay(PROBE, chosen, SETTING, 1, Parts(None, {}))
    assert found["all"]["same_argmax"] == found["all"]["same_commit"] == 1
    assert found["all"]["kv_error_by_age"] == {0: 0.0}
    frozen = found["frozen"]
    assert frozen["same_commit"] < 1 and frozen["kv_error_by_age"][0] == 0.0
    assert frozen["kv_error_by_age"][1] < frozen["kv_error_by_age"][6]


def test_the_page_is_that_of_the_docstrings_and_records() -> None:
    assert page.main(["--check"]) == 0
