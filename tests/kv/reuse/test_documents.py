"""Prompts put together from documents that were read before, beside computing them again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from transformers import AutoTokenizer
from typer.testing import CliRunner

from diffcache import cli, kv
from diffcache.kv.hf import documents as module
from diffcache.kv.hf.documents import Answers, Documents, methods
from tests.kv.eval import small
from tests.kv.tiny import llama

RHINE, SEA, ROME = "The Rhine rises in the Alps.", "The North Sea is cold.", "Rome is old."
TEXTS = {"generate": {"max_new_tokens": 3}}
QUESTIONS = ("Why?", "Where is it cold?")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(small.save_with_words(tmp_path_factory.mktemp("words")))


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(vocab_size=260, num_hidden_layers=3)


def ask(shelf: Documents, *documents: str, count: int = 1) -> Answers:
    return shelf.ask(QUESTIONS[:count], iter(documents), **TEXTS)


EXACT: dict[str, dict[str, Any]] = {"prefix": {"chunk": 8}, "hydragen": {}, "cachecraft": {"alpha": 0.0}}
EXACT |= {name: {"share": 1.0} for name in ("cacheblend", "kvshare")}


@pytest.mark.parametrize(("method", "settings"), EXACT.items())
def test_answers_are_those_of_recomputation(model: Any, tokenizer: Any, method: str, settings: dict[str, Any]) -> None:
    full, shelf = (Documents(model, tokenizer, "recompute"), Documents(model, tokenizer, method, **settings))
    # cachecraft computes all of a prompt where a document is new, whatever is held of others
    for some in ((RHINE, SEA), (SEA, RHINE, ROME), (RHINE, SEA)):
        if method == "cachecraft" and some == (RHINE, SEA) and shelf.nbytes:
            continue
        wanted = ask(full, *some, count=2)
        assert ask(shelf, *some, count=2).texts == wanted.texts
        assert wanted.computed == wanted.tokens and wanted.first_seconds <= wanted.seconds


def test_keys_of_frequencies_that_change_with_the_length_are_turned_when_they_are_read(tokenizer: Any) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0, 6.0, 8.0, 8.0, 10.0, 10.0, 12.0, 12.0]}
    # Of a single layer, whose keys and values depend on nothing but their tokens.
    model = llama(vocab_size=260, num_hidden_layers=1, rope_parameters=rope, max_position_embeddings=128)
    full, shelf = (Documents(model, tokenizer, method) for method in ("recompute", "concatenate"))
    shelf.read([RHINE[:20], SEA])
    assert ask(shelf, RHINE[:20], SEA).texts == ask(full, RHINE[:20], SEA).texts


def test_a_beginning_that_is_held_is_not_computed(model: Any, tokenizer: Any) -> None:
    shelf = Documents(model, tokenizer, "prefix", chunk=8)
    first, again, other = (ask(shelf, *x) for x in ((RHINE, SEA), (RHINE, SEA), (RHINE, ROME)))
    assert first.computed == first.tokens == 1 + 30 + 24  # the first token, documents of bytes
    assert again.computed == first.tokens % 8 and other.computed == other.tokens - 24


def test_the_first_document_read_alone_is_what_it_is_in_a_prompt(model: Any, tokenizer: Any) -> None:
    wanted = ask(Documents(model, tokenizer, "recompute"), SEA, count=2).texts
    for method in ("concatenate", "cacheblend"):
        shelf = Documents(model, tokenizer, method)
        shelf.read([RHINE, SEA])
        assert ask(shelf, SEA, count=2).texts == wanted
    apart = Documents(model, tokenizer, "ape", temperature=1.0, scale=1.0)
    assert ask(apart, SEA, count=2).texts == wanted
    assert ask(apart, SEA, RHINE).texts == ask(apart, RHINE, SEA).texts  # side by side


def test_few_tokens_are_computed(model: Any, tokenizer: Any) -> None:
    counts = {}
    for method in methods():
        shelf = Documents(model, tokenizer, method)
        ask(shelf, RHINE, SEA, ROME)
        found = ask(shelf, RHINE, ROME)
        counts[method] = found.computed
        assert found.tokens == 1 + 30 + 14
    assert counts["recompute"] == counts["hydragen"] == 45
    assert counts["concatenate"] == counts["ape"] == counts["pie"] == 0
    assert counts["cacheblend"] == counts["kvshare"] == 7  # 15 %, rounded up
    assert 0 < counts["cachecraft"] < 45


def test_the_least_recently_used_go(model: Any, tokenizer: Any) -> None:
    ample = Documents(model, tokenizer, "cacheblend")
    ask(ample, SEA)
    one = ample.nbytes
    shelf = Documents(model, tokenizer, "cacheblend", budget_bytes=one)
    ask(shelf, SEA)
    ask(shelf, RHINE)  # what a prompt needs stays, whatever the budget
    assert one < shelf.nbytes < 1.5 * one
    shelf.read([SEA])
    assert shelf.nbytes == one


def test_an_edit_that_is_cut_off_leaves_nothing_to_go_on_from(model: Any, tokenizer: Any, monkeypatch) -> None:
    shelf = Documents(model, tokenizer, "pie")
    ask(shelf, RHINE, SEA)

    def cut_off(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "pie", cut_off)
        with pytest.raises(KeyboardInterrupt):
            ask(shelf, SEA, ROME)
    assert shelf.nbytes == 0
    wanted = ask(Documents(model, tokenizer, "recompute"), SEA, ROME)
    assert ask(shelf, SEA, ROME).texts == wanted.texts


def test_a_question_that_is_refused_reads_nothing(model: Any, tokenizer: Any) -> None:
    shelf = Documents(model, tokenizer)
    with pytest.raises(ValueError, match=r"documents\[1\]=' ': must be a text, and not empty"):
        shelf.ask("Why?", [SEA, " "])
    assert shelf.nbytes == 0


@pytest.mark.parametrize("method", ["cacheblend", "prefix", "cachecraft"])
def test_what_other_weights_made_is_forgotten(tokenizer: Any, method: str) -> None:
    model: Any = llama(vocab_size=260, num_hidden_layers=3)
    settings = {"chunk": 8} if method == "prefix" else {}
    shelf = Documents(model, tokenizer, method, **settings)
    adapter = LoraConfig(target_modules=["v_proj"], init_lora_weights=False)
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    changes = (
        lambda: [weight.data.mul_(1.5) for weight in model.parameters()],  # as merging an adapter
        lambda: model.get_input_embeddings().weight.detach()[tokenizer("e").input_ids[-1]].add_(1),
        lambda: inject_adapter_in_model(adapter, model),
        lambda: first.v_proj.set_scale("default", 9.0),
        lambda: second.v_proj.enable_adapters(False),
        lambda: model.double(),
    )
    ask(shelf, RHINE, SEA)
    for change in changes if method == "cacheblend" else changes[:1]:  # noticed by one object for all methods
        change()
        fresh = Documents(model, tokenizer, method, **settings)
        found, wanted = ask(shelf, RHINE, SEA), ask(fresh, RHINE, SEA)
        assert (found.texts, found.computed) == (wanted.texts, wanted.computed)
        assert shelf.nbytes == fresh.nbytes


def test_a_released_model_is_as_before(tokenizer: Any) -> None:
    model = llama(vocab_size=260, num_hidden_layers=3)
    ids = torch.randint(3, 256, (1, 9), generator=torch.Generator().manual_seed(0))

    def logits() -> Tensor:
        with torch.no_grad():
            found: Tensor = model(ids).logits
        return found

    before, used = logits(), model.config._attn_implementation
    for method in methods():
        ask(Documents(model, tokenizer, method), RHINE, SEA)
    kv.detach(model)
    assert model.config._attn_implementation == used and torch.equal(logits(), before)


def test_the_command_measures_methods_in_turn(tmp_path: Path) -> None:
    folder, out = small.save_with_words(tmp_path / "model"), tmp_path / "x.json"
    found = CliRunner().invoke(cli.app, [
        "kv", "reuse", "--model", str(folder), "--texts", str(small.texts(tmp_path)),
        "--documents", "2", "--length", "40", "--requests", "2", "--questions", "1",
        "--method", "prefix", "--method", "cacheblend:share=0.5", "--out", str(out),
    ])  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "2 prompts of 2 documents of 40 tokens" in found.output
    first, prefix, blend = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert first["name"] == "recompute" and first["first_ratio"]["median"] == 1
    assert first["change"] is None and prefix["change"]["value"] == 0  # it is exact
    assert blend["name"] == "cacheblend:share=0.5" and 0.5 <= blend["computed"] < 0.52
    assert first["answers"]["n"] == 2 and blend["bytes"] > 0
