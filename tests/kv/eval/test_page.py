"""`docs/kv.md`, held to docstrings, recipes and records; and the record of time and bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diffcache.eval.kv import recipe_parts
from diffcache.eval.record import ROOT, Setting, check, envelope
from diffcache.eval.workshop.bench import kv as bench
from diffcache.eval.workshop.bench.runner import tables
from diffcache.eval.workshop.kv import page
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.by_name import recipe_function, recipes


def test_the_page_is_up_to_date() -> None:
    assert page.main(["--check", str(ROOT / page.PAGE)]) == 0, "run python -m diffcache.eval.workshop.kv.page --write"


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_says_what_it_does_and_where_it_is_from(name: str) -> None:
    said = page.story(recipe_function(name))
    assert 10 < len(said["what"]) < 200 and said["source"]
    assert recipe_parts.composition(recipe_parts.example(recipe_function(name)))


HITS = ["11 01", "11 11", "00 10"]


def row(name: str, value: float, **changes: Any) -> dict[str, Any]:
    whole = {"value": value, "low": value - 0.1, "high": value + 0.1}
    halves = {"lookup": {"value": 0.25}, "copy": {"value": 0.75}}
    given = {"name": name, "whole": whole, **halves, "share": 0.26, "read": 1.0, "hits": HITS}
    return {**given, **changes}


def test_a_benchmark_makes_a_whole_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "trained_rows", lambda tokens: [])
    setting = Setting(torch.device("cpu"))
    body = bench.measure(setting, rounds=1, slots=256)
    record = json.loads(json.dumps(envelope("kv", setting, "again", {"seconds": 1.0, **body})))
    check(record)
    assert {row["floor"] for row in record["rows"]} >= {"arithmetic", None}
    assert next(tables(record)).row_count == len(record["rows"])
    text = page.words().timing(record)
    assert "transformers DynamicCache" in text and "adakv, a tenth" in text


def test_codes_and_ragged_budgets_hold_what_they_promise() -> None:
    rows = bench.held_rows(4096)
    assert all(row["share"] <= row["target_share"] for row in rows if row["target_share"])
    exact = 2 * bench.HELD[0] * bench.HELD[2] * 4096 * 2
    assert {row["exact_bytes"] for row in rows} == {exact}
    two, four = rows[0], rows[1]
    # Two bits, a scale and a zero of 16 bits for 32 codes, and what waits to be coded.
    assert 3 / 16 < two["share"] < 3 / 16 + 128 / 4096
    assert four["share"] - two["share"] == pytest.approx(2 / 16, abs=0.01)


def test_errors_are_of_the_trained_model_or_absent(monkeypatch, tmp_path: Path, folder: Path) -> None:
    monkeypatch.setattr(bench, "DIRECTORY", tmp_path)
    assert bench.trained_rows(33) == []
    monkeypatch.setattr(bench, "DIRECTORY", folder)
    cases = {"nothing": (Recipe(), None), **bench.cases()}
    monkeypatch.setattr(bench, "cases", lambda: cases)
    rows = {row["name"].partition(", ")[2]: row for row in bench.trained_rows(513)}
    assert (rows["nothing"]["error"], rows["nothing"]["share"]) == (0.0, 1.0)
    two, four = (rows[f"kivi {bits} bit, group 32, residual 128"] for bits in (2, 4))
    assert 0 < four["error"] < two["error"] < 2 and two["share"] < four["share"] < 1
    assert rows["adakv, a tenth"]["share"] < 0.15
