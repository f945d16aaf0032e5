"""Models that a cache would serve wrongly, without a word, if it took them for plain ones."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.models.llama import modeling_llama

from diffcache.errors import AttachError, CacheWarning
from diffcache.eval.workshop.kv import oracle
from diffcache.foreign import attention_names
from diffcache.kv import Recipe, cache_for, detach, kivi, quest, snapkv, streaming_llm
from diffcache.kv.hf.refresh import recompute
from tests.kv.tiny import ALL, IDS, ONE, SHORT, generate, llama, prompts, row, same, zoo
from tests.zoo.language import build


def paligemma(text: str = "gemma") -> Any:
    more = {"text_config.layer_types": ["full_attention"] * 4} if text == "gemma2" else {}
    return build("PaliGemmaForConditionalGeneration", "paligemma", **{"text_config.model_type": text}, **more)


@pytest.mark.parametrize("text", ["gemma", "gemma2"])
def test_a_prompt_that_sees_itself_in_both_directions_is_stock(text: str) -> None:
    model = paligemma(text)
    expected = generate(model)
    same(generate(model, cache_for(model, ALL)), expected, 1e-4)
    detach(model)
    ours, cache, log = oracle.run(model, snapkv(0.4, window=4), ONE, **SHORT)
    same(ours, oracle.expected(model, cache, log, ONE, **SHORT), 1e-4)


@pytest.mark.parametrize("said", ["in the configuration", "by the module"])
def test_a_bidirectional_llama_is_stock_and_recomputed_as_a_prefill(said: str) -> None:
    model = llama().double()
    if said == "by the module":
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
    else:
        model.config.is_causal = False
    inputs = row(prompts(), 1)
    expected = model(**inputs).logits
    cache = cache_for(model, Recipe(), mode="native")
    assert torch.allclose(model(**inputs, past_key_values=cache).logits, expected, atol=1e-12)
    ids = inputs["input_ids"]
    for layer in cache.store.layers:  # what is held is stale, and computed anew in full
        layer.tail.read().k.mul_(0.5)
    anew = recompute(model, cache, ids, torch.arange(ids.shape[1])).logits
    detach(model)
    assert torch.allclose(anew, expected, atol=1e-9)


def test_what_attention_is_given_beside_is_refused_by_name() -> None:
    model = llama()
    cache = cache_for(model, ALL)
    with pytest.raises(AttachError, match="LlamaAttention gives its attention alibi, position_b"):
        model(**ONE, past_key_values=cache, position_bias=torch.zeros(1), alibi=2.0)
    cache.reset()
    model(**ONE, past_key_values=cache, position_bias=None, alibi=False)


@pytest.mark.parametrize(("name", "what"), [("DiffLlama", "values"), ("JetMoe", "keys and values")])
def test_keys_and_values_changed_after_the_cache_are_refused(name: str, what: str) -> None:
    model = zoo(f"{name}ForCausalLM", name.lower())
    before = attention_names(model)
    with pytest.raises(AttachError, match=f"{name}Attention changes {what} between .* mode='stock'"):
        cache_for(model, ALL)
    assert attention_names(model) == before
    same(generate(model, cache_for(model, kivi(2, group=8, residual=4096))), generate(model))


TWICE = "LlamaAttention attends to keys that were attended to"


@pytest.mark.parametrize(
    ("queries", "keys", "said"),
    [([1, 1], 1, TWICE), ([1, 2], 1, TWICE), ([1], 1.0, "LlamaAttention changes keys between .* call it again")],
    ids=["same queries", "other queries", "other keys"],
)
def test_layers_that_read_the_keys_of_another_or_attend_twice_are_refused_in_any_forward(
    queries: list[int], keys: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(module: Any, q: Any, k: Any, *more: Any, **kwargs: Any) -> Any:
        k = k * keys if isinstance(keys, float) else k  # other memory
        return [attend(module, q if n == 1 else q * n, k, *more, **kwargs) for n in queries][-1]

    model = llama()
    cache = cache_for(model, ALL)
    interface = SimpleNamespace(get_interface=lambda *_: wrong)
    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", interface)
    attend = hf.AttentionInterface()["diffcache"]
    with pytest.raises(AttachError, match=said):
        model(**ONE, past_key_values=cache)


def test_a_cache_in_another_model_that_is_set_up_is_refused() -> None:
    model, other = llama(), llama(seed=1)
    cache = cache_for(model, ALL)
    model(**ONE, past_key_values=cache)
    cache_for(other, ALL)
    with pytest.raises(AttachError, match="LlamaAttention is of another model than this cache"):
        other(input_ids=IDS[:, :1], past_key_values=cache)
    model(input_ids=IDS[:, :1], past_key_values=cache)  # nothing was written


def test_generate_that_hands_all_tokens_over_again_is_refused() -> None:
    model = llama(use_cache=False)
    with pytest.raises(AttachError, match=r"set model\.generation_config\.use_cache = True"):
        cache_for(model, ALL)
    model.generation_config.use_cache = True
    expected = generate(model)
    same(generate(model, cache_for(model, ALL)), expected)


@pytest.mark.parametrize(("text", "vision"), [("eager", "sdpa"), ("sdpa", "eager")])
def test_each_part_of_a_composite_model_is_given_back_what_it_had(text: str, vision: str) -> None:
    model = build("LlavaForConditionalGeneration", "llava")
    model.set_attn_implementation({"": "sdpa", "text_config": text, "vision_config": vision})
    before = attention_names(model)
    assert {name for _, name in before} >= {text, vision}
    cache_for(model, ALL)
    assert model.config.vision_config._attn_implementation == vision, "images stay as they were"
    detach(model)
    assert [name for _, name in attention_names(model)] == [name for _, name in before]


@pytest.mark.parametrize(
    "name", ["Step3p7ForConditionalGeneration step3p7", "MiniMaxM3SparseForConditionalGeneration minimax_m3_vl"]
)
def test_the_rotary_embedding_is_that_of_the_text(name: str) -> None:
    model = zoo(*name.split())
    expected = generate(model)
    same(generate(model, cache_for(model, streaming_llm(4096))), expected, 1e-3)
    detach(model)


# Moshi has no window in its mask, but in its cache.
@pytest.mark.parametrize("name", ["Mistral", "Phi3", "Starcoder2", "Moshi"])
def test_layers_that_all_have_a_window_are_served(name: str) -> None:
    model = build(f"{name}ForCausalLM", name.lower(), sliding_window=12)
    inputs = {key: value[:2] for key, value in prompts().items()}
    inputs["input_ids"] = inputs["input_ids"] % 120
    inputs = {key: value[:, -36:] for key, value in inputs.items()}
    expected = generate(model, inputs=inputs)
    # The second reads 16 slots, which are all that a window of 12 shows.
    for recipe in (ALL, quest(16, page=4, skip=0), kivi(2, group=8, residual=4096)):
        same(generate(model, cache_for(model, recipe), inputs), expected, 1e-4)
        detach(model)
    ours, cache, log = oracle.run(model, snapkv(0.4, window=4), inputs, **SHORT)
    assert cache.store.layers[0].held < cache.get_seq_length()
    same(ours, oracle.expected(model, cache, log, inputs, **SHORT), 1e-4)


def test_a_share_that_leaves_nothing_to_choose_is_told_once() -> None:
    model = llama()
    few = quest(0.5, page=16)  # reads the last 16 of 24 tokens, and half of them are 12
    with pytest.warns(CacheWarning, match="budget=0.5: of fewer than 34 tokens .* recent=16"):
        generate(model, cache_for(model, few))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, cache_for(model, quest(0.5, page=4)))
