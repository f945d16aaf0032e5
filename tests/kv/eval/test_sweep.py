"""Recipes in one word, sweeps of them, and the recipe that keeps most within the memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diffcache import kv
from diffcache.errors import TablesError
from diffcache.eval.kv import peer, recall_cost, recipe_words, text_task
from diffcache.eval.kv.choose_recipe import candidates, pick
from diffcache.eval.kv.recipe_words import parse_recipe
from diffcache.eval.record import ROOT
from diffcache.kv import Recipe, adakv, keydiff, snapkv, streaming_llm
from diffcache.kv.learn.cskv import Bases
from diffcache.kv.recipes import merging
from diffcache.kv.score.learned import RetainingHeads
from diffcache.pipelines.small.recall_llama import DIRECTORY
from tests.kv.eval.small import call, task

TEXT = """
context = 33
facts = 4
samples = 4
budgets = [0.5, 0.25]

[family.a]
recipes = ["keydiff:budget={}", "knorm:budget={}"]

[family.b]
recipes = ["keydiff:budget=0.5", "random:budget=0.5"]
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "sweep.toml"
    file.write_text(text)
    return file


def test_budgets_are_filled_in_and_rows_measured_once(tmp_path: Path) -> None:
    found = recall_cost.read_sweep(written(tmp_path, TEXT))
    words = [f"{name}:budget={size}" for name in ("keydiff", "knorm") for size in (0.5, 0.25)]
    assert found.families["a"] == words and found.task.samples == 4
    assert len(found.words()) == 6 and found.words()[0] == "none"


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = recall_cost.measure

    def spy(model: Any, row: Any, *given: Any) -> dict[str, Any]:
        asked.append(row.name)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(model, row, *given)

    monkeypatch.setattr(recall_cost, "measure", spy)
    wanted = recall_cost.RecipeSweep(task(folder), {"a": ["keydiff:budget=0.5", "random:budget=0.5"]})
    out = tmp_path / "record.json"
    with pytest.raises(KeyboardInterrupt):
        recall_cost.run(wanted, out)
    rows = recall_cost.run(wanted, out)
    assert asked == ["", "keydiff", "random", "random"]
    assert [row["name"] for row in rows] == wanted.words()
    record = json.loads(out.read_text())
    assert record["benchmark"] == "kv-recall" and record["families"] == dict(wanted.families)
    recall_cost.run(wanted, out)
    assert len(asked) == 4
    other = recall_cost.RecipeSweep(task(folder, seed=1), wanted.families)
    recall_cost.run(other, out)
    assert len(asked) == 7  # of another task nothing is kept
    monkeypatch.setattr(recall_cost, "tables_digest", lambda word: "other" if "random" in word else None)
    recall_cost.run(other, out)
    assert asked[7:] == ["random"]  # nor is a row of other tables
    monkeypatch.setattr(recall_cost, "weights_digest", lambda directory: "other")
    recall_cost.run(other, out)
    assert len(asked) == 11  # nor anything of other weights


def test_the_digest_of_tables_is_of_what_the_files_hold(tmp_path: Path) -> None:
    file, word = tmp_path / "t.safetensors", "duo_attention:heads=@{0}#heads,sinks=4|cskv:tables={0}"
    digest = lambda: recipe_words.tables_digest(word.format(file))  # noqa: E731
    missing = digest()
    file.write_bytes(b"one")
    assert missing != digest() == recipe_words.tables_digest(f"cskv:tables=@{file}|cskv:bases=@{file}")
    assert recipe_words.tables_digest("snapkv:budget=0.5|kivi") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('budgets = 0.5\n[family.a]\nrecipes = ["keydiff:budget={}"]', "budgets=0.5: must be a list"),
        ('[family.a]\nrecipes = ["keydiff:budget={}"]', r"budgets = \[...\], which {} takes in turn, is missing"),
        ('[family.a]\nrecipes = "keydiff"', "recipes='keydiff': must be a list of words"),
        ('[family.a]\nrecip = ["keydiff"]', "recipes=None: must be a list of words"),
        ("family = 3", "family=3 tables"),
    ],
)
def test_a_sweep_that_would_measure_less_than_it_says_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recall_cost.read_sweep(written(tmp_path, text))


def test_the_command_prints_a_table_and_writes_a_record(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "found.json"
    shape = ["--tasks", "recall", "--model", folder, "--context", 33, "--facts", 4, "--samples", 4]
    found = call(*shape, "--recipe", "keydiff:budget=0.25", "--out", out)
    assert found.exit_code == 0, found.output
    assert "keydiff:budget=0.25" in found.output and "none" in found.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["slots"] for row in rows] == [33, 8]
    for row in rows:  # 4 contexts of 4 questions, two tokens each; intervals of some width
        hits = recall_cost.hits_of(row)
        assert hits.shape == (4, 4, 2)
        for name, right in zip(("whole", "lookup", "copy"), (hits.all(-1), *hits.unbind(-1)), strict=True):
            share = row[name]
            assert share["value"] == right.double().mean()
            assert 0 <= share["low"] < share["high"] <= 1


SHIPPED = ROOT / "assets" / "bench" / "kv-recall.toml"


@pytest.mark.skipif(not (DIRECTORY / "config.json").exists(), reason="recall-llama is not there")
def test_the_shipped_sweep_can_be_read(tmp_path: Path) -> None:
    text = SHIPPED.read_text()
    if peer.installed() is None:
        text = text[: text.index("[family.kvpress]")]
    found = recall_cost.read_sweep(written(tmp_path, text))
    assert len(found.words()) > 200
    assert all(found.families.values())


def test_words_are_recipes() -> None:
    assert recipe_words.parse_recipe("none") == Recipe()
    assert recipe_words.parse_recipe("snapkv:budget=0.25,window=8") == snapkv(0.25, window=8)
    assert recipe_words.parse_recipe(" streaming-llm:budget=64 ") == streaming_llm(64)
    assert recipe_words.parse_recipe("none|keydiff:budget=7") == keydiff(7)
    based = recipe_words.parse_recipe("adakv:floor=0.1,base='snapkv:budget=0.5,window=8'")
    assert based == adakv(floor=0.1, base=snapkv(0.5, window=8))


def test_a_table_is_read_by_the_name_of_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_words, "FOLDER", tmp_path)
    heads = torch.tensor([[True, False], [False, True]])
    recipe_words.write_table(tmp_path / "two.safetensors", {"heads": heads}, {"kind": "table"})
    expected = ((True, False), (False, True))
    assert recipe_words.read_table("@two", "heads") == expected
    assert recipe_words.read_table("@two#heads", "other") == expected
    assert recipe_words.read_table(f"@{tmp_path}/two.safetensors", "heads") == expected
    with pytest.raises(TablesError, match="two.safetensors has heads"):
        recipe_words.read_table("@two", "weights")
    with pytest.raises(TablesError, match=r"are: two; `diffcache kv calibrate .*another model"):
        recipe_words.parse_recipe("snapkv:budget=@three")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(TablesError, match="is no file of tables"):
        recipe_words.read_table("@bad", "heads")


def test_weights_come_back_as_what_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_words, "FOLDER", tmp_path)
    heads = RetainingHeads(torch.randn(2, 6, 4), torch.randn(2, 4, 2))
    recipe_words.write_table(tmp_path / "locret.safetensors", vars(heads), {"kind": "RetainingHeads"})
    found = recipe_words.parse_recipe("locret:budget=0.5,heads=@locret,stabilizers=2").score
    wanted = merging.locret(heads, 0.5, stabilizers=2).score
    assert torch.equal(found.heads.first, wanted.heads.first)  # type: ignore[union-attr]
    bases = [Bases(*(torch.randn(4, 2).half().float() for _ in range(4))) for _ in range(3)]
    given = recipe_words.basis_tensors("2", bases) | recipe_words.basis_tensors("1", bases[:1])
    recipe_words.write_table(tmp_path / "bases.safetensors", given, {"kind": "Bases"})
    back = recipe_words.read_table("@bases#2", "bases")
    assert len(back) == 3 and torch.equal(back[2].value_up, bases[2].value_up)
    with pytest.raises(TablesError, match="bases.safetensors has 1, 2; say #entry"):
        recipe_words.read_table("@bases", "bases")


def row(held: float, answers: str, nats: list[float], **changes: Any) -> dict[str, Any]:
    """Return a row of one question a window."""
    hits = {"needle": [*answers]}
    return {"share": held, "share_16": None, "able": ["needle"], "hits": hits, "nats": nats, **changes}


FLAT = [2.0] * 6
ROWS = {
    "none": row(1.0, "111111", FLAT),
    "first": row(0.5, "111011", FLAT),  # wrong in a window that is held out
    "second": row(0.5, "111111", [2.1] * 6),
    "third": row(0.4, "110111", FLAT),  # wrong in a window that decides
    "all": row(0.9, "111111", FLAT),
}


def test_of_those_that_fit_the_most_answers_and_then_perplexity_decide() -> None:
    made = pick(ROWS, 0.5)
    assert made.word == "first"  # as many answers as the second where it is chosen, less perplexity
    assert [one.word for one in made.tried] == ["first", "second", "third", "all"]
    first, second, third, everything = made.tried
    assert (first.chosen_by.change.value, first.held_out.change.value) == (0, pytest.approx(-1 / 3))
    assert first.held_out.ratio.value == 1 and second.held_out.ratio.value > 1.1
    assert third.chosen_by.change.value == pytest.approx(-1 / 3) and not everything.fits
    assert made.best.word == "third"  # on what was held out, which the choice does not see
    assert pick(ROWS, 0.45).word == "third" and pick(ROWS, 1.0).word == "first"


def test_what_is_tried_fits_by_its_own_words() -> None:
    for memory in (0.0001, 0.25, 0.5):
        for word in candidates(memory):
            parse_recipe(word)
    with pytest.raises(ValueError, match="--tasks recall alone asks it"):
        parse_recipe("kvpress/snapkv:budget=0.25")
    assert "snapkv:budget=0.47" in candidates(0.5)


def test_a_choice_on_texts_of_ones_own_is_a_recipe(reader: Path, texts: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(text_task, "ROUNDS", 2)
    given = {"recipes": ["snapkv:budget=0.4", "keydiff:budget=0.9"], "context": 48, "samples": 4}
    out = tmp_path / "record.json"
    made = kv.choose(reader, texts, 0.6, out=out, **given)
    assert made.word == "snapkv:budget=0.4" and made.recipe == snapkv(0.4)
    assert [one.fits for one in made.tried] == [True, False] and made.best is made.tried[0]
    given = ["--model", reader, "--texts", texts, "--memory", 0.6, "--context", 48, "--samples", 4, "--out", out]
    found = call("choose", *given, "--recipe", "snapkv:budget=0.4", "--recipe", "keydiff:budget=0.9")
    said = " ".join(found.output.split())
    assert found.exit_code == 0 and "held out" in said
    assert "snapkv:budget=0.4 keeps most within 60% of the memory" in said
