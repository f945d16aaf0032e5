"""Recipes on texts of the user's own: an exact cache is stock, rows that fail are told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from diffcache import cli
from diffcache.errors import AttachError
from diffcache.eval.kv import text_run, text_task
from diffcache.eval.kv.text_task import CUE, SPAN, Needles, TextTask, measure, spans, spells
from diffcache.eval.kv.texts import TextModel
from diffcache.kv.hf.cache import cache_for
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.eviction import snapkv
from diffcache.kv.recipes.streaming import streaming_llm
from diffcache.pipelines.demo import console

CONTEXT = 48


@pytest.fixture(scope="module")
def task(reader: Path, texts: Path) -> TextTask:
    return TextTask(TextModel(str(reader)), texts, CONTEXT, 2)


@pytest.fixture(scope="module")
def model(task: TextTask) -> Any:
    return task.model.load()


def test_an_exact_cache_scores_as_the_stock_model(
    task: TextTask, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_task, "spells", lambda tokenizer: False)
    drawn = task.windows()
    found = measure(model, Recipe(), task, drawn)
    nats, copies = [], []
    with torch.no_grad():
        for number, ids in enumerate(drawn.ids):
            known = model(input_ids=ids).logits[0, CONTEXT - 1 : -1].log_softmax(-1)
            nats.append(-known.gather(1, ids[0, CONTEXT:, None]).mean())
            for span in spans(ids[0, : CONTEXT - 1], number):
                whole = torch.tensor([ids[0, :CONTEXT].tolist() + span])
                said = model(input_ids=whole).logits[0, CONTEXT - 1 : -1].argmax(-1)
                copies.append((said == torch.tensor(span))[CUE:])
    assert found["perplexity"]["value"] == pytest.approx(float(torch.stack(nats).mean().exp()))
    assert found["copy"]["value"] == pytest.approx(float(torch.cat(copies).float().mean()))
    assert (found["share"], found["mode"], found["needle"]) == (1.0, "stock", None)
    everything = measure(model, snapkv(1.0), task, drawn)
    assert everything["nats"] == pytest.approx(found["nats"], abs=1e-5)
    assert everything["copy"] == found["copy"]
    dropped = measure(model, streaming_llm(8, rotate=False), task, drawn)
    assert dropped["share"] < 0.3 and dropped["nats"] != pytest.approx(found["nats"], abs=1e-5)
    assert model.config._attn_implementation == "sdpa"


def test_a_log_is_told_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "SECONDS", 0.01)
    told = ""
    with console.progress("reading") as show:
        show(1, 3, "none, perplexity 7.00 so far")
        while "reading none, perplexity 7.00 so far: 1 of 3, 0 s\n" not in told:
            told += capsys.readouterr().err


def test_spans_are_of_the_context() -> None:
    context = torch.arange(100, 148)
    found = list(spans(context, 0))
    assert found == list(spans(context, 0)) != list(spans(context, 1))
    for span in found:
        assert len(span) == CUE + SPAN
        assert span == list(range(span[0], span[0] + len(span))) and 101 <= span[0] < 148


def test_needles_stand_at_their_depths_and_are_found_by_their_numbers() -> None:
    words = [f"w{number}" for number in range(40)]
    needles = Needles.draw(" ".join(words), 3)
    for depth, number in zip(text_task.DEPTHS, needles.numbers, strict=True):
        before = needles.text.split(f" {number}.")[0].split(" ")
        assert sum(word.startswith("w") for word in before) == round(depth * 40)
    assert [q.removesuffix(" is") in needles.text for q in needles.questions] == [True] * 5
    assert needles.text == Needles.draw(" ".join(words), 3).text
    right = list(needles.numbers)
    assert needles.hits([f" {right[0]}.", f"{right[1]}9", "no", "", f"\n{right[4]} and"]) == [
        True, False, False, False, True
    ]  # fmt: skip


def test_questions_are_asked_of_the_text_with_the_sentences(
    task: TextTask, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def knows(_: Any, __: Any, context: str, questions: Any, *given: Any, **more: Any) -> list[str]:
        said = [context.split(question + " ")[1][:5] for question in questions]
        return [*said[:4], "12"]

    monkeypatch.setattr(text_task, "ask", knows)
    found = measure(model, Recipe(), task, task.windows())
    assert found["needle"]["value"] == 0.8 and found["needle_by_depth"] == [1, 1, 1, 1, 0]


def test_a_tokenizer_that_cannot_write_them_is_asked_for_no_needles(reader: Path) -> None:
    assert spells(TextModel(str(reader)).tokenizer)
    assert not spells(TextModel("recall-llama").tokenizer)


def call(*given: object) -> Any:
    return CliRunner().invoke(cli.app, ["kv", *map(str, given)])


def test_a_row_that_fails_is_told_and_the_others_go_on(
    reader: Path, texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "record.json"
    wrong = "duo_attention:heads=((True,False),)"  # of one layer, and there are three
    found = call(
        "--model", reader, "--texts", texts, "--context", CONTEXT, "--samples", 2,
        "--recipe", wrong, "--recipe", "snapkv:budget=0.25", "--out", out,
    )  # fmt: skip
    said = " ".join(found.output.split())
    assert found.exit_code == 1 and "1 of 2 recipes could not be measured" in said
    assert "table of heads is of 1 layers" in said and "2 windows of 2 x 48 tokens" in said
    record = json.loads(out.read_text())
    assert record["benchmark"] == "kv-text" and set(record["failed"]) == {wrong}
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ["none", "snapkv:budget=0.25"]
    assert rows["none"]["ratio"]["value"] == 1 and rows["snapkv:budget=0.25"]["share"] < 0.3
    for row in rows.values():
        assert row["token_ratio"]["n"] == text_run.ROUNDS * min(text_run.CALLS, 47 // 6)
        assert row["token_ratio"]["median"] > 0
        for name in ("perplexity", "needle", "copy", "ratio"):
            assert row[name]["low"] <= row[name]["value"] <= row[name]["high"]
    assert record["shapes"]["texts"] == "texts.txt" and record["shapes"]["parameters"] > 0


def test_a_cache_no_recipe_serves_is_refused_before_texts_are_scored(
    task: TextTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: TextModel) -> Any:
        model = self_load(self)
        model.generation_config.use_cache = False
        return model

    self_load = TextModel.load
    monkeypatch.setattr(TextModel, "load", broken)
    monkeypatch.setattr(text_run, "measure", None)
    with pytest.raises(AttachError, match="use_cache"):
        text_run.run(replace(task), ["snapkv"])


def test_timing_shares_the_weights(task: TextTask, model: Any) -> None:
    found = text_run.Measured(rows={"snapkv": {}}, count=2)
    before = {id(weight) for weight in model.parameters()}
    seen: list[Any] = []
    recipes = {"snapkv": snapkv(8)}
    original = cache_for

    def spy(other: Any, recipe: Recipe) -> Any:
        seen.append(other)
        return original(other, recipe)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_run, "cache_for", spy)
        text_run._time(found, recipes, model, task, task.windows())
    assert {id(weight) for weight in seen[0].parameters()} == before
    assert seen[0] is not model and model.config._attn_implementation == "sdpa"
