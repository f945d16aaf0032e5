"""`docs/kv.md`, held to docstrings, recipes and records; and the record of time and bytes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.eval.kv import parts
from diffcache.eval.record import ROOT, Setting, check, envelope
from diffcache.eval.workshop.bench import kv as bench
from diffcache.eval.workshop.bench.runner import tables
from diffcache.eval.workshop.kv import held, page
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.catalog import recipe_function, recipes
from diffcache.kv.recipes.eviction import snapkv
from diffcache.kv.recipes.quantized import kivi


def test_the_page_is_up_to_date() -> None:
    assert page.main(["--check", str(ROOT / page.PAGE)]) == 0, "run python -m diffcache.eval.workshop.kv.page --write"


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_says_what_it_does_and_where_it_is_from(name: str) -> None:
    said = page.story(recipe_function(name))
    assert 10 < len(said["what"]) < 200 and said["source"]
    assert parts.composition(parts.example(recipe_function(name)))


def test_equal_to_official_code_is_said_where_a_test_derives_it() -> None:
    equal = page.compared()
    assert {"snapkv", "d2o", "gear", "sentence_kv"} < equal.keys() <= recipes().keys()
    assert all(10 < len(said) < 120 for said in equal.values())
    for name in recipes():
        row = page._recipe(recipe_function(name), name, equal)
        assert row[6] == equal.get(name, "")


@pytest.mark.parametrize(("name", "modes"), [("d2o", "`paper`, `official`"), ("snapkv", "")])
def test_a_row_says_its_modes(name: str, modes: str) -> None:
    assert page._recipe(recipe_function(name), name, {})[4] == modes


def test_a_docstring_is_taken_apart() -> None:
    def one() -> Recipe:
        """Do a thing
        of some kind.

        Args: none.

        Reference: A Paper, arXiv 1, section
        2. Departures: first; second.
        """
        return Recipe()

    said = page.story(one)
    assert list(said) == ["what", "source", "departures"]
    assert list(said.values()) == ["Do a thing of some kind", "A Paper, arXiv 1, section 2", "first; second"]

    def two() -> Recipe:
        """Do nothing."""
        return Recipe()

    with pytest.raises(ValueError, match="two: its docstring has no line 'Reference"):
        page.story(two)


def test_parts_are_spelled_without_defaults_and_tensors() -> None:
    @dataclass(frozen=True)
    class Part:
        size: int
        table: Tensor
        share: float = 0.5
        inner: object = None

    one = Part(3, torch.zeros(2), 0.25, Part(4, torch.zeros(2)))
    assert parts.spelled(one) == "Part(size=3, share=0.25, Part(size=4))"
    assert parts.spelled((one, one)) == parts.spelled(one)
    text = parts.composition(snapkv(0.5) | kivi(bits=4))
    assert "score `Window" in text and "codec `Pair(GroupQuant(bits=4" in text


HITS = ["11 01", "11 11", "00 10"]


def row(name: str, value: float, **changes: Any) -> dict[str, Any]:
    whole = {"value": value, "low": value - 0.1, "high": value + 0.1}
    halves = {"lookup": {"value": 0.25}, "copy": {"value": 0.75}}
    given = {"name": name, "whole": whole, **halves, "share": 0.26, "read": 1.0, "hits": HITS}
    return {**given, **changes}


def test_rows_stand_beside_those_of_kvpress() -> None:
    record = {
        "rows": [
            row("none", 1.0),
            row("snapkv:budget=0.25,window=8", 0.5),
            row("h2o:budget=0.25", 0.3),
            row("snapkv:budget=0.25|kivi:bits=2", 0.1),
            row("quest:budget=0.5", 0.9, read=0.5),
            row("kvpress/snapkv:budget=0.25", 0.4, hits=["11 01", "11 01", "01 10"]),
            row("kvpress/snapkv:budget=0.5", 0.4),
            row("kvpress/observed_attention:budget=0.25", 0.35),
        ],
        "shapes": {"context": 513, "facts": 64, "samples": 3, "queries": 2, "dtype": "bfloat16"},
        "versions": {"transformers": "5"},
        "command": "again",
    }
    found = [(ours["name"], theirs["name"]) for ours, theirs in page.pairs(record)]
    assert [ours for ours, _ in found] == ["snapkv:budget=0.25,window=8", "h2o:budget=0.25"]
    assert [theirs for _, theirs in found] == [f"kvpress/{n}:budget=0.25" for n in ("snapkv", "observed_attention")]
    text = page.results(record)
    # One whole answer of six is ours alone: 0.1 +- 1.96 sqrt(0.44 / 5) over the changes 0, 1/2, 0
    # of the contexts and the pairs 1, -1. Answers that are all the same still leave room.
    assert "| +0.167 (-0.481 to +0.681) |" in text and "| +0.000 (-0.554 to +0.554) |" in text
    assert "snapkv:budget=0.25\\|kivi" in text
    snapkv, quest = (
        page.words().figures("recipe", page.figures_of(record, name)).splitlines()[2:] for name in ("snapkv", "quest")
    )
    assert snapkv == ["| `snapkv:budget=0.25,window=8` | 0.500 (0.400 to 0.600) | 0.250 | 0.750 | 26.0% | 100% |"]
    assert quest[0].endswith(" 50% |")


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


def test_the_page_says_why_a_cache_misses_its_aim() -> None:
    spread = {"median": 1.2, "q1": 1.1, "q3": 1.3}
    row = dict(name="xkv", token_ms=spread, ratio=spread, target=1.0, missed=True, share=0.5, mode="native")
    record = json.loads((ROOT / "assets" / "bench" / "decode.json").read_text()) | {"rows": [row]}
    met = record | {"rows": [row | {"ratio": spread | {"median": 0.5}, "missed": False}]}
    found = page.seconds([record, met])
    assert "| xkv | native | 1.00 | 1.20 (1.10 to 1.30) | 0.50 | 50% | missed 1:" in found
    assert page.SLOW["xkv"] in found
    with pytest.raises(KeyError):  # nothing is missed without a reason
        page.seconds([record | {"rows": [row | {"name": "a cache"}]}])


def test_half_the_memory_is_answered_first() -> None:
    def of(name: str, share: float, value: float, **changes: Any) -> dict[str, Any]:
        found = {"value": value, "low": value - 0.1, "high": value + 0.1}
        kinds = {"needle": found, "values": {**found, "value": 0.0}}
        row = dict(name=name, share=share, share_16=None, whole=found, change=found, ratio=found, aware=None)
        row |= dict(able=["needle"], hits={"needle": ["11"]}, kinds=kinds)
        return row | {"token_ratio": {"median": 1.0, "q1": 0.9, "q3": 1.1}} | changes

    rows = [of("none", 1.0, 0.9), of("a", 0.6, 0.9), of("b", 0.3, 0.2)]
    rows += [of("c", 0.3, 0.7, share_16=0.52), of("d", 0.3, 0.8, share_16=0.7)]
    record = dict(rows=rows, shapes={"samples": 2, "context": 800}, threads=1, device="x", dtype="float32")
    record |= dict(load=2.0, commit="0" * 12, command="diffcache kv")
    said = page.half(record)
    assert said.startswith("Of the recipes that hold about half")
    assert "`c` kept most: 0.700" in said and "with 52% of its bytes" in said
    names = [line.split("`")[1] for line in said.splitlines() if line.startswith("| `")]
    assert names == ["none", "c", "b", "a", "d"]  # what fits first, best first
    assert "needle 0.90, values 0.00" in said and "cannot answer values" in said


def test_a_step_that_is_taken_back_leaves_the_store_as_it_was() -> None:
    setting = Setting(torch.device("cpu"))
    inputs = bench.Inputs.draw(setting, 256)
    for recipe in (Recipe(), snapkv(0.5), kivi(bits=2)):
        with torch.no_grad():
            variant, store = bench.store_variant("x", "", recipe, inputs)
            before = [layer.read().k.clone() for layer in store.layers]
            for _ in range(3):
                variant.step()
                variant.back()
        for layer, k in zip(store.layers, before, strict=True):
            assert torch.equal(layer.read().k, k)


def test_codes_and_ragged_budgets_hold_what_they_promise() -> None:
    rows = held.held_rows(4096)
    assert all(row["share"] <= row["target_share"] for row in rows if row["target_share"])
    exact = 2 * held.HEADS * held.SIZE * 4096 * 2
    assert {row["exact_bytes"] for row in rows} == {exact}
    two, four = rows[0], rows[1]
    # Two bits, a scale and a zero of 16 bits for 32 codes, and what waits to be coded.
    assert 3 / 16 < two["share"] < 3 / 16 + 128 / 4096
    assert four["share"] - two["share"] == pytest.approx(2 / 16, abs=0.01)


def test_errors_are_of_the_trained_model_or_absent(monkeypatch, tmp_path: Path, folder: Path) -> None:
    monkeypatch.setattr(held, "DIRECTORY", tmp_path)
    assert held.trained_rows(33) == []
    monkeypatch.setattr(held, "DIRECTORY", folder)
    cases = {"nothing": (Recipe(), None), **held.cases()}
    monkeypatch.setattr(held, "cases", lambda: cases)
    rows = {row["name"].partition(", ")[2]: row for row in held.trained_rows(513)}
    assert (rows["nothing"]["error"], rows["nothing"]["share"]) == (0.0, 1.0)
    two, four = (rows[f"kivi {bits} bit, group 32, residual 128"] for bits in (2, 4))
    assert 0 < four["error"] < two["error"] < 2 and two["share"] < four["share"] < 1
    assert rows["adakv, a tenth"]["share"] < 0.15
