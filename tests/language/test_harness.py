"""The harness adapter, on an oracle and on likelihoods token by token."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from diffcache.errors import DiffcacheError
from diffcache.eval.language import harness
from diffcache.eval.language.exact_match import (
    accuracy,
)
from diffcache.eval.language.models import CausalLanguage


def log_likelihood(llama, context, continuation):
    """Token by token, without batch or cache."""
    ids, total = list(context), 0.0
    with torch.no_grad():
        for token in continuation:
            scores = llama(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
            total += float(scores[token])
            ids.append(token)
    return total


SUMS = [(1, 2), (3, 4), (2, 2), (5, 1)]
GENERATE = """
task: tiny_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{data}.cache"}}
test_split: test
output_type: generate_until
doc_to_text: "what is {{{{a}}}} plus {{{{b}}}} answer"
doc_to_target: "{{{{c}}}}"
generation_kwargs: {{until: ["what"], do_sample: false, max_gen_toks: 8}}
filter_list:
  - name: strict-match
    filter: [{{function: regex, regex_pattern: "#### (-?[0-9.,]+)"}}, {{function: take_first}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOOSE = """
task: tiny_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}, cache_dir: "{data}.cache"}}
test_split: test
output_type: multiple_choice
doc_to_text: "what is {{{{a}}}} plus {{{{b}}}} answer"
doc_to_choice: ["3", "7", "4", "6"]
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


class Oracle:
    """Adds; gets every question right but those it is told to miss."""

    def __init__(self, tokenizer, missed=()):
        self.tokenizer, self.missed, self.calls = tokenizer, missed, []

    def generate(self, prompts, max_new_tokens, stop):
        self.calls.append((len(prompts), max_new_tokens, stop))
        sums = [sum(int(w) for w in prompt.split() if w.isdigit()) for prompt in prompts]
        wrong = [total + (n in self.missed) for n, total in enumerate(sums)]
        return [f"so #### {total} what is 9" for total in wrong]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "sums.jsonl"
    rows = [{"a": a, "b": b, "c": a + b, "label": n} for n, (a, b) in enumerate(SUMS)]
    data.write_text("\n".join(map(json.dumps, rows)))
    (folder / "sums.yaml").write_text(GENERATE.format(data=data))
    (folder / "choices.yaml").write_text(CHOOSE.format(data=data))
    return folder


@pytest.mark.slow
def test_the_harness_marks_an_oracle_right(tokenizer, tasks):
    right = Oracle(tokenizer)
    entries = harness.run_tasks(right, ["tiny_sums"], tasks)
    found = entries["quality"]["tiny_sums"]["exact_match,strict-match"]
    assert found == {"value": 1, "stderr": 0, "n": 4, "low": accuracy(4, 4).low, "high": 1}
    assert right.calls == [(4, 8, ["what"])]  # all questions in one call
    assert entries["timing"]["tokens"] == 4 * len(tokenizer.encode("so #### 3 what is 9"))
    half = harness.run_tasks(Oracle(tokenizer, {0}), ["tiny_sums"], tasks, limit=2)
    found = half["quality"]["tiny_sums"]["exact_match,strict-match"]
    expected = accuracy(1, 2)
    assert (found["value"], found["n"]) == (0.5, 2)
    assert found["stderr"] == pytest.approx(expected.stderr)
    assert (found["low"], found["high"]) == (expected.low, expected.high)
    json.dumps(half, allow_nan=False)


@pytest.mark.slow
def test_the_harness_ranks_choices_by_the_models_likelihood(llama, tokenizer, tasks):
    model = CausalLanguage(llama, tokenizer, lambda: DynamicCache(config=llama.config))
    lm = harness.lm_class()(model)
    chosen = []
    for a, b in SUMS:
        context = f"what is {a} plus {b} answer"
        ids = [1, *tokenizer.encode(context, add_special_tokens=False)]
        answers = [tokenizer.encode(c, add_special_tokens=False) for c in "3746"]
        expected = [log_likelihood(llama, ids, answer) for answer in answers]
        requests = [SimpleNamespace(args=(context, f" {c}")) for c in "3746"]
        found = lm.loglikelihood(requests)
        assert [value for value, _ in found] == pytest.approx(expected, rel=1e-5)
        with torch.no_grad():
            best = int(llama(torch.tensor([ids])).logits[0, -1].argmax())
        assert [greedy for _, greedy in found] == [answer == [best] for answer in answers]
        chosen.append(max(range(4), key=expected.__getitem__))
    rolling = lm.loglikelihood_rolling([SimpleNamespace(args=("what is 1",))])
    assert rolling == pytest.approx([log_likelihood(llama, [1], [5, 6, 10])], rel=1e-5)
    entries = harness.run_tasks(model, ["tiny_choices"], tasks)["quality"]["tiny_choices"]
    assert entries["acc,none"]["value"] == sum(c == n for n, c in enumerate(chosen)) / 4
    from lm_eval.api.registry import get_model

    assert get_model("diffcache") is harness.lm_class()


def test_runs_are_refused_before_anything_is_imported(tokenizer, tmp_path, monkeypatch):
    model = Oracle(tokenizer)
    with pytest.raises(ValueError, match="at least one task name"):
        harness.run_tasks(model, [])
    with pytest.raises(FileNotFoundError, match="no such folder of task files"):
        harness.run_tasks(model, ["a"], tmp_path / "none")
    with pytest.raises(ValueError, match="limit=0"):
        harness.run_tasks(model, ["a"], tmp_path, limit=0)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(DiffcacheError, match=r"pip install 'diffcache\[llm\]'"):
        harness.lm_class.__wrapped__()
