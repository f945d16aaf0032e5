"""Recipes on texts of the user's own: an exact cache is stock, rows that fail are told."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from diffcache.errors import AttachError
from diffcache.eval.kv import text_task
from diffcache.eval.kv.asked import DEPTHS, Asked, Spelled, score
from diffcache.eval.kv.text_task import CUE, FOLLOWING, TextTask, measure, spans
from diffcache.eval.kv.texts import TextModel
from diffcache.kv import Recipe, cache_for, kivi, snapkv, streaming_llm
from diffcache.kv.hf.questions import feed, read_context
from diffcache.pipelines.demo import console
from tests.kv.eval.small import call

CONTEXT = 48


@pytest.fixture(scope="module")
def task(reader: Path, texts: Path) -> TextTask:
    return TextTask(TextModel(str(reader)), texts, CONTEXT, 2)


@pytest.fixture(scope="module")
def model(task: TextTask) -> Any:
    return task.model.load()


def test_an_exact_cache_scores_as_the_stock_model(task: TextTask, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert (found["share"], found["mode"], found["whole"]) == (1.0, "stock", None)
    everything = measure(model, snapkv(1.0), task, drawn)
    assert everything["nats"] == pytest.approx(found["nats"], abs=1e-5)
    assert everything["copy"] == found["copy"]
    dropped = measure(model, streaming_llm(8, rotate=False), task, drawn)
    assert dropped["share"] < 0.3 and dropped["nats"] != pytest.approx(found["nats"], abs=1e-5)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_can_answer_nothing_is_asked_nothing_first(task: TextTask, model: Any) -> None:
    found = measure(model, snapkv(0.5, window=4), replace(task, aware=True), task.windows(), kinds=[])
    assert found["aware"] is None and found["whole"] is None


def test_a_log_is_told_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console, "SECONDS", 0.01)
    told = ""
    with console.progress("reading") as show:
        show(1, 3, "none, perplexity 7.00 so far")
        while "reading none, perplexity 7.00 so far: 1 of 3, 0 s\n" not in told:
            told += capsys.readouterr().err


def test_a_context_that_is_too_long_with_what_is_hidden_is_refused(reader: Path, texts: Path) -> None:
    long = TextTask(TextModel(str(reader)), texts, 600, 2)
    with pytest.raises(ValueError, match=r"--context 600: 1\d+ tokens with .* takes 1024"):
        measure(long.model.load(), Recipe(), long, long.windows())


def test_what_is_asked_for_stands_in_the_text() -> None:
    words = [f"w{number}" for number in range(80)]
    asked = Asked.draw(" ".join(words), 3)
    assert asked == Asked.draw(" ".join(words), 3) != Asked.draw(" ".join(words), 4)
    by_kind: dict[str, list[Any]] = {}
    for one in asked.questions:
        by_kind.setdefault(one.kind, []).append(one)
    counts = {"needle": 5, "values": 1, "pair": 4, "variables": 1, "frequent": 1}
    assert {kind: len(some) for kind, some in by_kind.items()} == counts
    for one, depth in zip(by_kind["needle"], DEPTHS, strict=True):
        before, found, _ = asked.text.partition(f"{one.start}{one.answer}.")
        assert found and sum(word[1:].isdigit() for word in before.split() if word[0] == "w") == round(depth * 80)
    for one in by_kind["pair"]:
        assert f'{{{one.start}{one.answer}"}}' in asked.text
    (several,) = by_kind["values"]
    first, second = several.answer.split(" and ")
    assert asked.text.index(f"is{first}.") < asked.text.index(f"is {second}.")
    (chain,) = by_kind["variables"]
    *names, number = f"{chain.start}{chain.answer}".split(" = ")
    for name, value in zip(names, [*names[1:], number], strict=True):
        assert f"{name} = {value}." in asked.text
    (often,) = by_kind["frequent"]
    said = [asked.text.count(f"Take the {word}.") for word in asked_words(asked.text)]
    assert max(said) == asked.text.count(f"Take the{often.answer}.") > sorted(said)[-2]


def asked_words(text: str) -> set[str]:
    return {part.partition(".")[0] for part in text.split("Take the ")[1:]}


@pytest.mark.parametrize(
    "recipe", [snapkv(0.5), streaming_llm(24), kivi(bits=2, group=8, residual=8)], ids=lambda r: r.name
)
def test_whole_answers_are_those_of_greedy_generation(reader: Path, recipe: Recipe) -> None:
    chosen = TextModel(str(reader))
    model, tokenizer = chosen.load(), chosen.tokenizer
    ids = tokenizer("the red ring runs near a road " * 4, return_tensors="pt").input_ids
    question = tokenizer("who?", return_tensors="pt", add_special_tokens=False).input_ids
    cache = cache_for(model, recipe)
    read_context(model, tokenizer, cache, ids[:, :-1])
    whole = torch.cat([ids, question], 1)
    out = model.generate(whole, past_key_values=cache.fork(), max_new_tokens=12, do_sample=False)
    said = out[0, whole.shape[1] :].tolist()
    given = [int(ids[0, -1]), *question[0].tolist()]
    assert score(model, cache.fork(), given, said, recipe)[1].all() and len(said) > 2
    other = [*said[:-1], said[-1] ^ 1]
    assert score(model, cache.fork(), given, other, recipe)[1].tolist() == [True] * (len(said) - 1) + [False]


def test_a_question_that_is_known_decides_what_is_kept(reader: Path) -> None:
    """The scores of snapkv come from the last queries: of the question, where it is known."""
    chosen = TextModel(str(reader))
    model, tokenizer = chosen.load(), chosen.tokenizer
    spelled = Spelled.of(tokenizer, Asked.draw("the red ring runs near a road " * 6, 0), ["pair"])
    recipe, whole = snapkv(1.0), Recipe()
    raw, exact = cache_for(model, recipe), cache_for(model, whole)
    for cache in (raw, exact):
        feed(model, cache, spelled.ids[:, :-1])
    seen = raw.store.seen
    assert spelled.aware_hits(model, tokenizer, raw, recipe) == spelled.hits(model, exact, whole)
    assert raw.store.seen == seen  # every question had a fork


def test_a_row_that_fails_is_told_and_the_others_go_on(reader: Path, texts: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(text_task, "ROUNDS", 2)
    out = tmp_path / "record.json"
    wrong = "duo_attention:heads=((True,False),)"  # of one layer, and there are three
    found = call(
        "--model", reader, "--texts", texts, "--context", CONTEXT, "--samples", 2,
        "--recipe", wrong, "--recipe", "snapkv:budget=0.25", "--out", out,
    )  # fmt: skip
    said = " ".join(found.output.split())
    assert found.exit_code == 1 and "1 of 2 recipes could not be measured" in said
    assert "table of heads is of 1 layers" in said and "2 windows of 48 tokens" in said
    record = json.loads(out.read_text())
    assert record["benchmark"] == "kv-text" and set(record["failed"]) == {wrong}
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ["none", "snapkv:budget=0.25"]
    assert rows["none"]["ratio"]["value"] == 1 and rows["snapkv:budget=0.25"]["share"] < 0.3
    for row in rows.values():
        assert row["token_ratio"]["n"] == text_task.ROUNDS * min(text_task.CALLS, (FOLLOWING - 1) // 6)
        assert row["token_ratio"]["median"] > 0
        assert row["able"] == rows["none"]["able"]
        for name in ("perplexity", "copy", "ratio", *(["whole"] if row["able"] else [])):
            assert row[name]["low"] <= row[name]["value"] <= row[name]["high"]
    assert record["shapes"]["texts"] == "texts.txt" and record["shapes"]["parameters"] > 0
    assert out.with_suffix(".png").stat().st_size > 10_000
    many = [{**record["rows"][1], "name": f"a_recipe_with_a_long_name_{number}:budget=0.5"} for number in range(20)]
    text_task.draw({"rows": [record["rows"][0], *many]}, tmp_path / "many.png")
    edges = np.asarray(Image.open(tmp_path / "many.png").convert("L"))[:, [0, 1, -2, -1]]
    assert (edges == 255).all()  # no name is cut off


def test_a_cache_no_recipe_serves_is_refused_before_texts_are_scored(task: TextTask, monkeypatch) -> None:
    def broken(self: TextModel) -> Any:
        model = self_load(self)
        model.generation_config.use_cache = False
        return model

    self_load = TextModel.load
    monkeypatch.setattr(TextModel, "load", broken)
    monkeypatch.setattr(text_task, "measure", None)
    with pytest.raises(AttachError, match="use_cache"):
        text_task.run(replace(task), ["snapkv"])


def test_a_model_is_converted_without_loss_into_a_folder_of_its_own(reader: Path, texts: Path, tmp_path: Path) -> None:
    config = TextModel(str(reader)).config
    rope = config.num_key_value_heads * config.head_dim
    words = ["convert", "--model", reader, "--texts", texts, "--context", CONTEXT, "--samples", 4,
             "--rope", rope, "--out", tmp_path / "mla"]  # fmt: skip
    done = call(*words)
    assert done.exit_code == 0, done.output
    told = re.search(r"held out: (\S+) .* before, (\S+) .* now", " ".join(done.output.split()))
    assert told and float(told[1]) == pytest.approx(float(told[2]), rel=1e-3)
    made = TextModel(str(tmp_path / "mla"))
    assert made.tokenizer and type(made.load()).__name__ == "DeepseekV3ForCausalLM"
    again = call(*words)
    assert again.exit_code == 2 and "name a new folder" in " ".join(again.output.split())
