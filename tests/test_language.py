"""Exact match, perplexity and the harness adapter, against numbers worked out by hand."""

import json
import math
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from diffcache.errors import DiffcacheError
from diffcache.eval.language import harness
from diffcache.eval.language.exact_match import (
    FLEXIBLE_EXTRACT,
    STRICT_MATCH,
    Normalise,
    accuracy,
    exact_match,
)
from diffcache.eval.language.models import CausalLanguage, DiffusionLanguage, encode_pair
from diffcache.eval.language.perplexity import (
    causal_perplexity,
    diffusion_nats,
    diffusion_perplexity,
    text_nats,
    windows,
)

WORDS = ["<pad>", "<s>", "</s>", "<mask>", "####", "what", "is", "plus", "answer", *"0123456789"]


@pytest.fixture(scope="module")
def tokenizer():
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<mask>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class Table(nn.Module):
    """A causal model that knows the next token from this one only."""

    def __init__(self, table):
        super().__init__()
        self.table = nn.Parameter(table.log())

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.table[input_ids])


def bigrams(size=7):
    return torch.rand(size, size, generator=torch.Generator().manual_seed(0)).softmax(-1)


def by_hand(table, ids):
    return -sum(math.log(table[a, b]) for a, b in pairwise(ids))


# exact match ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so 2 + 3 = 5.\n#### 5", "5", "5"),
        ("#### 1,234", "1234", "1234"),
        ("it costs $18.", None, "18"),
        ("#### -7 and then 9", "-7", "9"),
        ("no number", None, None),
    ],
)
def test_the_two_conventions_of_gsm8k(text, strict, flexible):
    assert STRICT_MATCH.answer(text) == strict
    assert FLEXIBLE_EXTRACT.answer(text) == flexible


def test_exact_match_counts_and_normalises():
    outputs = ["a #### 5", "b #### 6", "c 7", "#### 1,000."]
    targets = ["x #### 5", "#### 7", "7", "1000"]
    strict = exact_match(outputs, targets)
    assert (strict.value, strict.n, strict.missing) == (0.5, 4, 1)
    assert exact_match(outputs, targets, FLEXIBLE_EXTRACT).value == 0.75
    assert exact_match([" Paris "], ["paris"], Normalise(lower=True)).value == 1
    assert exact_match([" Paris "], ["Paris"], Normalise(strip=False)).value == 0
    assert exact_match(["p: a, p: b"], ["b"], Normalise("p: (.)", "last"), Normalise()).value == 1


def test_wilson_interval_solves_its_own_equation():
    """Its ends are the shares p at which |observed - p| is 1.96 standard errors of p."""
    for right, n in ((3, 10), (50, 100), (1, 7)):
        result = accuracy(right, n)
        for end in (result.low, result.high):
            z = abs(right / n - end) / math.sqrt(end * (1 - end) / n)
            assert z == pytest.approx(1.959964, rel=1e-6)
        assert result.low < result.value < result.high
    nothing, all_right = accuracy(0, 5), accuracy(5, 5)
    assert nothing.low == 0 and all_right.high == 1
    assert nothing.high == pytest.approx(1 - all_right.low)
    assert accuracy(1, 1).stderr is None
    assert accuracy(3, 10).stderr == pytest.approx(math.sqrt(0.3 * 0.7 / 9))
    json.dumps(accuracy(0, 1).to_dict(), allow_nan=False)


def test_exact_match_refuses_what_cannot_be_compared():
    with pytest.raises(ValueError, match="2 outputs for 1 targets"):
        exact_match(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="no answers to compare"):
        exact_match([], [])
    with pytest.raises(ValueError, match="outputs is one string"):
        exact_match("a", "a")
    with pytest.raises(ValueError, match=r"outputs\[1\]=None: must be a string"):
        exact_match(["#### 1", None], ["1", "2"])
    with pytest.raises(ValueError, match=r"targets\[0\]=' ' has no answer"):
        exact_match(["a"], [" "], Normalise())
    with pytest.raises(ValueError, match="does not compile"):
        Normalise("(")
    with pytest.raises(ValueError, match="match='all'"):
        Normalise(match="all")


# perplexity ----------------------------------------------------------------------------------


def test_a_uniform_model_is_as_perplexed_as_its_vocabulary_is_large(tokenizer):
    size = len(WORDS)
    model = Table(torch.full((size, size), 1 / size))
    texts = ["what is 1 plus 2", "answer 3"]
    result = causal_perplexity(model, tokenizer, texts, window=4, stride=2, batch_size=3)
    assert result.value == pytest.approx(size, rel=1e-6)
    assert result.tokens == 7  # every token once, from the beginning-of-sequence token on
    assert result.bits_per_byte == pytest.approx(7 * math.log2(size) / 24)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize(("window", "stride"), [(64, 32), (5, 4), (5, 1), (2, 1)])
def test_a_bigram_table_by_hand(window, stride, batch_size):
    table = bigrams()
    texts = [[0, 1, 2, 3, 4, 5, 6, 0, 3], [4, 4], [6, 5, 4, 3, 2, 6]]
    found = text_nats(Table(table), texts, window=window, stride=stride, batch_size=batch_size)
    assert found == pytest.approx([by_hand(table, ids) for ids in texts], rel=1e-6)


def test_padding_does_not_reach_a_real_model(llama):
    torch.manual_seed(0)
    texts = [torch.randint(4, 19, (n,)).tolist() for n in (30, 5, 17)]
    alone = text_nats(llama, texts)
    assert text_nats(llama, texts, batch_size=3) == pytest.approx(alone, rel=1e-5)
    cached = text_nats(llama, texts, cache=lambda: DynamicCache(config=llama.config))
    assert cached == pytest.approx(alone, rel=1e-6)
    with torch.no_grad():
        loss = llama(torch.tensor([texts[0]]), labels=torch.tensor([texts[0]])).loss
    assert alone[0] / 29 == pytest.approx(float(loss), rel=1e-5)


def test_a_stride_of_one_gives_every_token_a_full_window(llama):
    ids = torch.randint(4, 19, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    total = 0.0
    with torch.no_grad():
        for place in range(1, 12):
            given = ids[max(0, place - 4) : place]
            total -= float(llama(torch.tensor([given])).logits[0, -1].log_softmax(-1)[ids[place]])
    assert text_nats(llama, [ids], window=5, stride=1) == pytest.approx([total], rel=1e-5)


def test_windows_score_every_token_once():
    for size in range(2, 20):
        for length in range(2, 9):
            for stride in range(1, length):
                scored = []
                for window in windows(range(size), length, stride):
                    assert len(window.tokens) <= length and window.first >= 1
                    scored += window.tokens[window.first :]
                assert scored == list(range(1, size))


def test_perplexity_says_what_is_wrong(tokenizer):
    model = Table(bigrams())
    with pytest.raises(ValueError, match="stride=5: must be 1 to window - 1 = 4"):
        text_nats(model, [[1, 2]], window=5, stride=5)
    with pytest.raises(ValueError, match=r"text 1 has 1 token\(s\)"):
        text_nats(model, [[1, 2], [1]])
    with pytest.raises(ValueError, match=r"texts=\[\]"):
        causal_perplexity(model, tokenizer, [])


def ignorant(probabilities):
    """A diffusion model whose prediction is the same at every place."""
    return lambda ids: probabilities.log().expand(*ids.shape, -1)


def test_the_diffusion_bound_is_exact_without_context():
    uniform = ignorant(torch.full((9,), 1 / 9))
    for mc_num in (1, 7, 64):  # equal tokens: every draw alike
        nats = diffusion_nats(uniform, torch.arange(8), 8, mc_num=mc_num, batch_size=5)
        assert nats == pytest.approx(8 * math.log(9), rel=1e-6)
    one = diffusion_nats(uniform, torch.arange(8), 8, prompt=5, mc_num=4)
    assert one == pytest.approx(3 * math.log(9), rel=1e-6)
    probabilities = torch.tensor([0.5, 0.2, 0.2, 0.05, 0.05])
    ids = torch.tensor([0, 1, 3, 0, 2, 4])
    true = -float(probabilities[ids].log().sum())
    found = diffusion_nats(ignorant(probabilities), ids, 4, mc_num=3000, batch_size=1000)
    assert found == pytest.approx(true, rel=0.02)
    assert found == diffusion_nats(ignorant(probabilities), ids, 4, mc_num=3000, batch_size=1000)
    whole = diffusion_perplexity(uniform, [torch.arange(8), torch.arange(3)], 8, mc_num=3)
    assert whole.value == pytest.approx(9, rel=1e-6) and whole.tokens == 11


def test_the_diffusion_bound_weighs_noise_levels_as_their_integral():
    """A model that is right exactly when some other token is left: the bound is the last's share.

    With m of L tokens masked only m = L costs, so the mean over m is `log V` for uniform guesses.
    """
    size, mask = 6, 5
    ids = torch.tensor([0, 1, 2, 3])

    def logits(noisy):
        uniform = torch.zeros(*noisy.shape, size)
        sure = torch.nn.functional.one_hot(ids, size).float() * 200
        known = (noisy != mask).any(1)
        return torch.where(known[:, None, None], sure.expand_as(uniform), uniform)

    for mc_num in (4, 40):  # stratified: each of the four levels gets its equal share
        assert diffusion_nats(logits, ids, mask, mc_num=mc_num) == pytest.approx(math.log(size))
    with pytest.raises(ValueError, match="more tokens than prompt"):
        diffusion_nats(logits, ids, mask, prompt=4)


# models and the harness ----------------------------------------------------------------------


def log_likelihood(llama, context, continuation):
    """Token by token, without batch or cache."""
    ids, total = list(context), 0.0
    with torch.no_grad():
        for token in continuation:
            scores = llama(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
            total += float(scores[token])
            ids.append(token)
    return total


def test_pairs_are_parted_at_the_white_space(tokenizer):
    assert encode_pair(tokenizer, "what is ", "1 plus") == ([1, 5, 6], [10, 7])
    assert encode_pair(tokenizer, "", "1") == ([1], [10])
    with pytest.raises(ValueError, match="has no token of its own"):
        encode_pair(tokenizer, "what", " ")


def test_causal_generation_in_a_batch_equals_one_by_one(llama, tokenizer):
    prompts = ["what is 1 plus 2", "answer", "3 4 5"]
    alone = CausalLanguage(llama, tokenizer).generate(prompts, 6, [])
    made = []

    def cache():
        made.append(DynamicCache(config=llama.config))
        return made[-1]

    batch = CausalLanguage(llama, tokenizer, cache, batch_size=2)
    assert batch.generate(prompts, 6, []) == alone
    assert len(made) == 2 and made[0].get_seq_length() > 6  # a fresh one a call, and used
    for prompt, text in zip(prompts, alone, strict=True):
        ids = [1, *tokenizer.encode(prompt, add_special_tokens=False)]
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(llama(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == 2:
                break
        begin = 1 + len(prompt.split())
        assert text == tokenizer.decode(ids[begin:], skip_special_tokens=True)
    assert harness.cut("a b Q: c", ["Q:", "b"]) == "a "


def test_causal_generation_ends_at_a_stop_string(llama, tokenizer):
    language = CausalLanguage(llama, tokenizer)
    prompts = [f"{a} plus {b}" for a in range(10) for b in range(3)]
    texts = dict(zip(prompts, language.generate(prompts, 12, []), strict=True))
    prompt = max(texts, key=lambda key: len(set(texts[key].split())))
    words = texts[prompt].split()
    stop = next(word for word in words[1:] if word != words[0])
    (text,) = language.generate([prompt], 12, [stop])
    assert text.split() == words[: words.index(stop) + 1] != words
    with pytest.raises(ValueError, match="leaves no room for a prompt"):
        language.generate(["what"], 64, [])


def test_diffusion_language_scores_and_counts(tokenizer):
    probabilities = torch.full((len(WORDS),), 1 / len(WORDS))
    probabilities[10] += 0.5
    probabilities /= probabilities.sum()
    model = SimpleNamespace(logits=ignorant(probabilities), generate=lambda p, n, s: ["1"])
    language = DiffusionLanguage(model, tokenizer, mask_id=3, mc_num=8)
    value, greedy = language.score([5, 6], [10, 10])
    assert value == pytest.approx(2 * math.log(probabilities[10]), rel=1e-6) and greedy
    assert not language.score([5, 6], [10, 11])[1]
    assert language.rolling([10]) == pytest.approx(math.log(probabilities[10]), rel=1e-6)
    with pytest.raises(DiffcacheError, match="1 texts for 2 prompts"):
        language.generate(["a", "b"], 4, [])


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
