"""Classes of transformers with code paths of their own, and the page that lists all of them."""

import re
from pathlib import Path

import pytest
import transformers

from diffcache.eval.workshop.kv import class_coverage
from diffcache.eval.workshop.kv.class_coverage import row_of
from diffcache.kv.hf import attention
from tests.zoo.language import kinds

PAGE = (Path(__file__).parents[2] / class_coverage.PAGE).read_text(encoding="utf-8")
LISTED = {line.split(" | ")[0].removeprefix("| "): line for line in PAGE.splitlines()}
SAME = f"transformers {transformers.__version__}:" in PAGE
KINDS = {name: kind for kind, name in kinds()}
SPECIAL = [  # one for each way a model differs from Llama
    "BambaForCausalLM",  # layers of states beside full attention
    "BertLMHeadModel",  # modules called self
    "Cohere2ForCausalLM",  # windows beside full attention
    "DogeForCausalLM",  # masks of its own
    "EvollaForProteinText2Text",  # asked to generate without a cache
    "GPT2LMHeadModel",  # positions that are added
    "Gemma2ForCausalLM",  # soft caps, eager
    "Gemma3nForCausalLM",  # embeddings of each layer
    "Glm4ForCausalLM",  # some channels turned, in adjacent pairs
    "GptOssForCausalLM",  # sinks
    "HrmTextForCausalLM",  # layers run several times
    "Idefics2ForConditionalGeneration",  # text whose layers all have a window
    "Llama4ForCausalLM",  # chunks, and layers without positions
    "Qwen3_5ForCausalLM",  # positions of three axes
    "RecurrentGemmaForCausalLM",  # windows beside states
    "Zamba2ForCausalLM",  # states and attention in one layer
]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate three tokens; the page takes six."""
    for setting in ("max_new_tokens", "min_new_tokens"):
        monkeypatch.setitem(class_coverage.GREEDY, setting, 3)


@pytest.mark.parametrize("name", SPECIAL)
def test_a_class_is_served_exactly_or_refused(name: str) -> None:
    row = row_of(name, KINDS[name])
    if not row.verdicts and not SAME:
        pytest.skip(row.why)
    assert {verdict.word for verdict in row.verdicts} <= {"exact", "refused"}, row
    if SAME:
        words = re.findall(r"\| (exact|refused)", LISTED[name])
        assert [verdict.word for verdict in row.verdicts] == words, "write the page anew"


def test_the_page_lists_every_class_and_nothing_wrong() -> None:
    assert not re.search(r"\| (wrong|crash)", PAGE)
    if SAME:
        assert set(KINDS) <= set(LISTED)
    tried = [line for line in LISTED.values() if re.search(r"\| (exact|refused)", line)]
    assert len(tried) > 200


def test_a_cache_that_is_off_is_found_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself: attention that leaves something out is seen in every column."""
    asked = attention.Query
    less = lambda q, start, scale, *rest, **more: asked(q, start, 0.9 * scale, *rest, **more)  # noqa: E731
    monkeypatch.setattr(attention, "Query", less)
    words = [verdict.word for verdict in row_of("LlamaForCausalLM", "llama").verdicts]
    assert words == ["wrong"] * 5 + ["exact"], "the last goes through stock attention"
