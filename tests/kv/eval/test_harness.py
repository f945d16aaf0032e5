"""Tasks of lm-evaluation-harness: what is scored was compressed, and an exact cache is stock."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from diffcache import cli
from diffcache.kv import Recipe, cache_for, detach, h2o, kivi, snapkv
from diffcache.pipelines.small.recall import Task, draw
from diffcache.pipelines.small.recall_llama import words

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from diffcache.eval.kv import harness

BATCH = draw(4, Task(129, 16, 2), torch.Generator().manual_seed(1))
WORDS = words()
COMMON = """
task: tiny_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{data}.cache"}}
test_split: test
"""
KINDS = {
    "generate": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["[Q]"], do_sample: false, max_gen_toks: 2}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{short}}"
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
}


def text(ids: Any) -> str:
    return " ".join(WORDS[number] for number in ids.tolist())


def questions() -> list[tuple[str, str]]:
    """Return contexts that end with a question, and the right answers."""
    return [(text(BATCH.aware()[row]), " " + text(BATCH.expected[row, 0])) for row in range(4)]


def scores(lm: HFLM, recipe: Recipe | None, pairs: list[tuple[str, str]]) -> list[Any]:
    if recipe is not None:
        lm.recipe = recipe
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    found: list[Any] = lm.loglikelihood(requests, disable_tqdm=True)
    return found


@pytest.fixture(scope="module")
def loaded() -> harness.RecipeLM:
    return harness.Questions("recall-llama", ("any",), batch=2).load()


@pytest.fixture
def lm(loaded: harness.RecipeLM) -> Iterator[harness.RecipeLM]:
    yield loaded
    detach(loaded.model)


@pytest.fixture(scope="module")
def stock(loaded: harness.RecipeLM) -> HFLM:
    return HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=2)


def test_what_was_dropped_is_missing_when_answers_are_scored(lm: harness.RecipeLM) -> None:
    exact = scores(lm, Recipe(), questions())
    assert all(value > -0.1 and greedy for value, greedy in exact)
    dropped = scores(lm, snapkv(8), questions())
    assert all(value < -5 and not greedy for value, greedy in dropped)
    for row, (value, _) in enumerate(dropped):
        cache, ids = cache_for(lm.model, snapkv(8)), BATCH.ids[row : row + 1, :132]
        with torch.no_grad():
            lm.model(input_ids=ids[:, :130], past_key_values=cache)
            cache.settle()
            logits = lm.model(input_ids=ids[:, 130:132], past_key_values=cache).logits
        known = logits[0].log_softmax(-1)
        wanted = sum(float(known[at, token]) for at, token in enumerate(BATCH.expected[row, 0]))
        assert value == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("recipe", [Recipe(), snapkv(1.0)], ids=["none", "everything"])
def test_what_drops_nothing_scores_as_the_stock_model(lm: harness.RecipeLM, stock: HFLM, recipe: Recipe, monkeypatch):
    short, tail = text(BATCH.context[0, :20]), text(BATCH.context[1, :7])
    pairs = [*questions(), (short, " " + tail), (short, " f1"), (short, " f2"), ("", short)]
    pairs = pairs if recipe == Recipe() else pairs[:-1]
    for length in (8192, 24):  # also where contexts are cut on the left
        monkeypatch.setattr(type(stock), "max_length", length)
        wanted, found = scores(stock, None, pairs), scores(lm, recipe, pairs)
        detach(stock.model)
        for (value, greedy), (other, same) in zip(found, wanted, strict=True):
            assert value == pytest.approx(other, abs=2e-4) and greedy == same


def test_what_acts_while_tokens_come_is_scored_token_by_token(lm: harness.RecipeLM) -> None:
    ids = BATCH.context[0, :36].tolist()
    ((value, _),) = scores(lm, h2o(8), [(text(BATCH.context[0, :20]), " " + text(BATCH.context[0, 20:36]))])
    cache, wanted = cache_for(lm.model, h2o(8)), 0.0
    with torch.no_grad():
        lm.model(input_ids=torch.tensor([ids[:19]]), past_key_values=cache)
        cache.settle()
        for now, following in pairwise(ids[19:]):
            logits = lm.model(input_ids=torch.tensor([[now]]), past_key_values=cache).logits
            wanted += float(logits[0, -1].log_softmax(-1)[following])
    assert value == pytest.approx(wanted, abs=1e-4)


def test_whole_texts_are_scored_where_something_is_compressed(lm: harness.RecipeLM) -> None:
    request = [Instance("loglikelihood_rolling", {}, (text(BATCH.context[0, :70]),), 0)]
    found = {}
    for recipe in (Recipe(), h2o(8), kivi(bits=1, residual=32)):
        lm.recipe = recipe
        (found[recipe.name],) = lm.loglikelihood_rolling(request, disable_tqdm=True)
    assert found[""] > found["kivi"] and found[""] > found["h2o"] + 5
    lm.recipe = snapkv(8)
    with pytest.raises(ValueError, match="'snapkv' compresses once, after a prompt"):
        lm.loglikelihood_rolling(request, disable_tqdm=True)


@pytest.mark.parametrize("recipe", [Recipe(), snapkv(16), h2o(16)], ids=lambda each: each.name)
def test_padded_batches_generate_what_the_model_generates_alone(lm: harness.RecipeLM, recipe: Recipe) -> None:
    lm.recipe = recipe
    contexts = [context for context, _ in questions()]
    contexts[1] = " ".join(contexts[1].split()[40:])  # shorter: padded beside the others
    settings = {"until": ["f0 f0 f0"], "do_sample": False, "max_gen_toks": 4}
    requests = [Instance("generate_until", {}, (each, settings), 0) for each in contexts]
    found = lm.generate_until(requests, disable_tqdm=True)
    for context, answer in zip(contexts, found, strict=True):
        ids = lm.tokenizer(context, return_tensors="pt").input_ids
        cache = cache_for(lm.model, recipe)
        out = lm.model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False, pad_token_id=0)
        alone = lm.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert answer == alone and len(alone.split()) == 4


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    rows = [{"text": context, "answer": answer.strip(), "short": context[:100]} for context, answer in questions()]
    data.write_text("\n".join(map(json.dumps, rows)))
    for kind, said in KINDS.items():
        (folder / f"{kind}.yaml").write_text(COMMON.format(kind=kind, data=data) + said)
    return folder


def call(folder: Path, *given: object) -> Any:
    return CliRunner().invoke(cli.app, ["kv", "--include-path", str(folder), *map(str, given)])


@pytest.mark.slow
def test_the_command_puts_recipes_beside_the_exact_cache(tasks: Path, tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    given = "--recipe", "h2o:budget=8", "--limit", 3, "--out", out
    found = call(tasks, "--tasks", "tiny_generate,tiny_rolling", *given)
    assert found.exit_code == 0, found.output
    record = json.loads(out.read_text())
    rows = {(row["name"], row["metric"]): row for row in record["rows"]}
    exact = rows["none", "exact_match,none"]
    kept = rows["h2o:budget=8", "exact_match,none"]
    assert (exact["value"]["value"], exact["value"]["n"], exact["change"]) == (1, 3, None)
    assert 0 < exact["value"]["low"] < exact["value"]["high"] == 1
    change = kept["value"]["value"] - 1
    assert kept["change"]["value"] == change < 0
    assert -1 <= kept["change"]["low"] <= change < kept["change"]["high"]
    whole = [rows[name, "word_perplexity,none"] for name in ("none", "h2o:budget=8")]
    assert whole[1]["value"]["value"] > whole[0]["value"]["value"]
    assert whole[1]["change"].keys() == {"value"}
    assert record["benchmark"] == "kv-tasks" and record["versions"]["lm_eval"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--tasks", "tiny_rolling", "--recipe", "snapkv:budget=8"], "tasks tiny_rolling: recipe"),
        (["--tasks", "tiny_generate", "--recipe", "kvzip:budget=8"], "by a probe that its user"),
        (["--tasks", "tiny_nothing", "--recipe", "h2o"], "--tasks tiny_nothing: no such task"),
        (["--tasks", "tiny_generate,", "--recipe", "h2o"], "a name is empty"),
        (["--tasks", "tiny_generate", "--recipe", "h2o", "--limit", "1"], "--limit 1: an interval"),
        (["--tasks", "tiny_generate", "--recipe", "h2o", "--batch", "0"], "--batch 0: must be"),
        (["--tasks", "tiny_generate", "--recipe", "h2o", "--facts", "4"], "for --tasks recall alone"),
        (["--tasks", "tiny_generate", "--recipe", "h2o", "--model", "nowhere"], "--model nowhere"),
        (["--recipe", "h2o"], "--include-path"),
    ],
)
def test_what_tasks_cannot_do_is_said_before_anything_runs(tasks: Path, given: list[str], said: str, monkeypatch):
    monkeypatch.setattr(harness.Questions, "load", None)  # no model may be loaded
    # The thousands of files of the harness itself take ten seconds.
    real = harness.TaskManager
    small = lambda include_path, **_: real(include_path=include_path, include_defaults=False)  # noqa: E731
    monkeypatch.setattr(harness, "TaskManager", small)
    found = call(tasks, *given)
    assert found.exit_code == 2, found.output
    assert said in " ".join(found.output.split()) and "Traceback" not in found.output


def test_a_missing_harness_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = CliRunner().invoke(cli.app, ["kv", "--tasks", "gsm8k", "--recipe", "h2o"])
    assert found.exit_code == 3 and "pip install 'diffcache[llm]'" in found.output
