"""Models that a cache would serve wrongly, without a word, if it took them for plain ones."""

from __future__ import annotations

import gc
import warnings
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from diffcache.errors import AttachError, CacheWarning
from diffcache.eval.kv import oracle
from diffcache.foreign import attention_names
from diffcache.kv import (
    criticalkv,
    keydiff,
    kivi,
    look_m,
    quest,
    snapkv,
    streaming_llm,
    xkv,
)
from diffcache.kv.hf.cache import cache_for, detach
from diffcache.kv.hf.refresh import recompute
from diffcache.kv.life import save as life
from diffcache.kv.recipe import Recipe
from diffcache.kv.rotary_nd import RotaryND
from diffcache.kv.rotary_table import RotaryTable
from diffcache.pipelines.zoo.language import build
from tests.kv.tiny import GREEDY, llama, prompts, row, same

ALL = snapkv(1.0, window=4)
IDS = torch.randint(3, 120, (1, 24), generator=torch.Generator().manual_seed(3))
ONE = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


@cache
def zoo(name: str, kind: str) -> Any:
    return build(name, kind)


def paligemma(text: str = "gemma") -> Any:
    more = {"query_pre_attn_scalar": 16, "layer_types": ["full_attention"] * 4}
    return build(
        "PaliGemmaForConditionalGeneration", "paligemma",
        **{"text_config.model_type": text}, **({"text_config.layer_types": more["layer_types"]} if text == "gemma2" else {}),
    )  # fmt: skip


def generate(model: Any, cache: Any = None, inputs: Any = ONE) -> Any:
    return model.generate(**inputs, past_key_values=cache, **GREEDY)


# who sees whom ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["gemma", "gemma2"])
def test_a_prompt_that_sees_itself_in_both_directions_is_stock(text: str) -> None:
    model = paligemma(text)
    expected = generate(model)
    same(generate(model, cache_for(model, ALL)), expected, 1e-4)
    detach(model)
    ours, cache, log = oracle.run(model, snapkv(0.4, window=4), ONE, **GREEDY)
    same(ours, oracle.expected(model, cache, log, ONE, **GREEDY), 1e-4)


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


def test_attention_made_for_eager_alone_is_causal_whatever_its_module_says() -> None:
    model = zoo("BigBirdPegasusForCausalLM", "bigbird_pegasus")
    assert not model.model.decoder.layers[0].self_attn.is_causal
    expected = generate(model)
    same(generate(model, cache_for(model, ALL)), expected, 1e-4)
    detach(model)


def test_causality_that_cannot_be_told_is_refused() -> None:
    model = llama()
    model.model.layers[0].self_attn.is_causal = None
    with pytest.raises(AttachError, match="is_causal=None of LlamaAttention: must be True or"):
        model(**ONE, past_key_values=cache_for(model, ALL))


def test_what_attention_is_given_beside_is_refused_by_name() -> None:
    model = llama()
    cache = cache_for(model, ALL)
    with pytest.raises(AttachError, match="LlamaAttention gives its attention alibi, position_b"):
        model(**ONE, past_key_values=cache, position_bias=torch.zeros(1), alibi=2.0)
    cache.reset()
    model(**ONE, past_key_values=cache, position_bias=None, alibi=False)


# which keys and values -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "what"),
    [
        ("DiffLlamaForCausalLM", "diffllama", "DiffLlamaAttention changes values between"),
        ("JetMoeForCausalLM", "jetmoe", "JetMoeAttention changes keys and values between"),
    ],
)
def test_keys_and_values_changed_after_the_cache_are_refused(
    name: str, kind: str, what: str
) -> None:
    model = zoo(name, kind)
    before = attention_names(model)
    with pytest.raises(AttachError, match=f"{what} .* mode='stock'"):
        cache_for(model, ALL)
    assert attention_names(model) == before
    same(generate(model, cache_for(model, kivi(2, group=8, residual=4096))), generate(model))


@pytest.mark.parametrize("again", ["same queries", "other queries"])
def test_keys_are_attended_to_once_in_a_forward(monkeypatch: Any, again: str) -> None:
    """As in layers that read the keys of another, or attend twice to their own."""
    from transformers.models.llama import modeling_llama as source

    class Twice:
        def get_interface(self, *given: Any) -> Any:
            attend = hf.AttentionInterface()["diffcache"]

            def twice(module: Any, query: Any, *more: Any, **kwargs: Any) -> Any:
                attend(module, query, *more, **kwargs)
                other = query if again == "same queries" else query * 2
                return attend(module, other, *more, **kwargs)

            return twice

    model = llama()
    cache = cache_for(model, ALL)
    monkeypatch.setattr(source, "ALL_ATTENTION_FUNCTIONS", Twice())
    with pytest.raises(AttachError, match="LlamaAttention attends to keys that were attended to"):
        model(**ONE, past_key_values=cache)


def test_other_keys_than_the_cache_was_given_are_refused_in_any_forward(monkeypatch: Any) -> None:
    """As in layers that cannot be tried by themselves beforehand."""
    from transformers.models.llama import modeling_llama as source

    class Changing:
        def get_interface(self, *given: Any) -> Any:
            attend = hf.AttentionInterface()["diffcache"]
            return lambda module, q, k, *more, **kwargs: attend(module, q, k * 1, *more, **kwargs)

    model = llama()
    cache = cache_for(model, ALL)
    monkeypatch.setattr(source, "ALL_ATTENTION_FUNCTIONS", Changing())
    with pytest.raises(AttachError, match="LlamaAttention changes keys between .* call it again"):
        model(**ONE, past_key_values=cache)


def test_a_cache_in_another_model_that_is_set_up_is_refused() -> None:
    model, other = llama(), llama(seed=1)
    cache = cache_for(model, ALL)
    model(**ONE, past_key_values=cache)
    cache_for(other, ALL)
    with pytest.raises(AttachError, match="LlamaAttention is of another model than this cache"):
        other(input_ids=IDS[:, :1], past_key_values=cache)
    model(input_ids=IDS[:, :1], past_key_values=cache)  # nothing was written


# what models are told at the start ---------------------------------------------------------------


@pytest.mark.parametrize("recipe", [ALL, kivi(2)], ids=["native", "stock"])
@pytest.mark.parametrize("name", ["MllamaForConditionalGeneration", "MllamaForCausalLM"])
def test_layers_that_attend_to_an_image_are_refused(name: str, recipe: Recipe) -> None:
    with pytest.raises(AttachError, match=r"layers \[3\] attend to something else than the tokens"):
        cache_for(zoo(name, "mllama"), recipe)


def test_generate_that_hands_all_tokens_over_again_is_refused() -> None:
    model = llama(use_cache=False)
    with pytest.raises(AttachError, match=r"set model\.generation_config\.use_cache = True"):
        cache_for(model, ALL)
    model.generation_config.use_cache = True
    expected = generate(model)
    same(generate(model, cache_for(model, ALL)), expected)


# parts of composite models -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "vision"), [("eager", "sdpa"), ("sdpa", "eager"), ("eager", "eager")]
)
def test_each_part_of_a_composite_model_is_given_back_what_it_had(text: str, vision: str) -> None:
    model = build("LlavaForConditionalGeneration", "llava")
    model.set_attn_implementation({"": "sdpa", "text_config": text, "vision_config": vision})
    before = attention_names(model)
    assert {name for _, name in before} >= {text, vision}
    cache_for(model, ALL)
    assert model.config.vision_config._attn_implementation == vision, "images stay as they were"
    detach(model)
    assert [name for _, name in attention_names(model)] == [name for _, name in before]


def test_paligemma_2_is_given_back_its_eager_text() -> None:
    model = paligemma("gemma2")
    before = [name for _, name in attention_names(model)]
    assert {"eager", "sdpa"} <= set(before)
    cache_for(model, ALL)
    detach(model)
    assert [name for _, name in attention_names(model)] == before


def test_only_the_text_needs_the_interface() -> None:
    model = zoo("GotOcr2ForConditionalGeneration", "got_ocr2")
    expected = generate(model)
    same(generate(model, cache_for(model, ALL)), expected, 1e-6)
    detach(model)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Step3p7ForConditionalGeneration", "step3p7"),
        ("MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl"),
    ],
)
def test_the_rotary_embedding_is_that_of_the_text(name: str, kind: str) -> None:
    model = zoo(name, kind)
    expected = generate(model)
    same(generate(model, cache_for(model, streaming_llm(4096))), expected, 1e-3)
    detach(model)


# windows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("MistralForCausalLM", "mistral"),
        ("Phi3ForCausalLM", "phi3"),
        ("Starcoder2ForCausalLM", "starcoder2"),
        ("MoshiForCausalLM", "moshi"),  # has no window in its mask, but in its cache
    ],
)
@pytest.mark.parametrize("window", [12, 64], ids=["exceeded", "not reached"])
def test_layers_that_all_have_a_window_are_served(name: str, kind: str, window: int) -> None:
    model = build(name, kind, sliding_window=window)
    inputs = {key: value[:2] for key, value in prompts().items()}
    inputs["input_ids"] = inputs["input_ids"] % 120
    inputs = {key: value[:, -36:] for key, value in inputs.items()}
    expected = generate(model, inputs=inputs)
    for recipe in (ALL, kivi(2, group=8, residual=4096)):
        same(generate(model, cache_for(model, recipe), inputs), expected, 1e-4)
        detach(model)
    ours, cache, log = oracle.run(model, snapkv(0.4, window=4), inputs, **GREEDY)
    assert cache.store.layers[0].held < cache.get_seq_length()
    same(ours, oracle.expected(model, cache, log, inputs, **GREEDY), 1e-4)


def test_a_share_that_leaves_nothing_to_choose_is_told_once() -> None:
    model = llama()
    few = quest(0.5, page=16)  # reads the last 16 of 24 tokens, and half of them are 12
    with pytest.warns(CacheWarning, match="budget=0.5: of fewer than 34 tokens .* recent=16"):
        generate(model, cache_for(model, few))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, cache_for(model, quest(0.5, page=4)))


# latents --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [("DeepseekV3ForCausalLM", "deepseek_v3"), ("MiniCPM3ForCausalLM", "minicpm3")],
)
def test_latents_are_dropped_and_chosen_as_a_whole(name: str, kind: str, tmp_path: Path) -> None:
    model = zoo(name, kind)
    expected = generate(model)
    for recipe in (ALL, quest(64, page=4), kivi(2, group=8, residual=4096)):
        same(generate(model, cache_for(model, recipe, mode="native")), expected, 1e-4)
    detach(model)
    for recipe in (snapkv(0.4, window=4), keydiff(0.5)):
        ours, cache, log = oracle.run(model, recipe, ONE, **GREEDY)
        assert cache.store.layers[0].held < cache.get_seq_length()
        same(ours, oracle.expected(model, cache, log, ONE, **GREEDY), 1e-4)
    with torch.no_grad():
        past = hf.DynamicCache(config=model.config)
        model(input_ids=IDS[:, :20], past_key_values=past)
        stock = generate(model, deepcopy(past))
        read = cache_for(model, ALL, past=past, mode="native")
        life.save(tmp_path / "latents", read.store)
        loaded = cache_for(model, ALL)
        life.load(tmp_path / "latents", loaded.store)
        for layer in loaded.layers:
            layer.is_initialized = True
        for each in (read.to_dynamic(), loaded, read):
            same(generate(model, each), stock, 1e-4)
        detach(model)


def test_latents_are_small_and_their_slots_are_half_gone() -> None:
    model = zoo("DeepseekV3ForCausalLM", "deepseek_v3")
    cache = cache_for(model, snapkv(0.5, window=4))
    with torch.no_grad():
        model(**ONE, past_key_values=cache)
    cache.settle()
    detach(model)
    held = cache.store.layers[0].read()
    assert (held.k.shape[1:], held.v.shape[1:]) == ((1, 12, 16), (1, 12, 8))


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (streaming_llm(12), r"streaming_llm reads keys at other positions.*rotate=False"),
        (look_m(0.5), "look_m merges slots"),
        (criticalkv(base=snapkv(0.5)), "reads output projections"),
    ],
)
def test_what_latents_cannot_do_is_refused(recipe: Recipe, why: str) -> None:
    model = zoo("DeepseekV3ForCausalLM", "deepseek_v3")
    with pytest.raises(AttachError, match=f"caches latents, .*{why}"):
        cache_for(model, recipe)
    other = deepcopy(model)
    cache = cache_for(other, ALL)
    for layer in other.model.layers:  # an adapter that its weights do not show
        layer.self_attn.kv_b_proj.register_forward_hook(lambda *given: given[-1] * 1.5)
    with pytest.raises(AttachError, match="makes keys and values from latents otherwise"):
        other(**ONE, past_key_values=cache)


# full attention and a state in one layer ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"), [("FalconH1ForCausalLM", "falcon_h1"), ("ZambaForCausalLM", "zamba")]
)
def test_states_beside_full_attention_go_along(name: str, kind: str) -> None:
    model = zoo(name, kind)
    expected = generate(model)
    cache = cache_for(model, ALL)
    same(generate(model, cache), expected, 1e-4)
    cache.reset()
    same(generate(model, cache), expected, 1e-4)
    with torch.no_grad():
        past = hf.DynamicCache(config=model.config)
        model(input_ids=IDS[:, :20], past_key_values=past)
        read = cache_for(model, ALL, past=past)
        stock = generate(model, deepcopy(past))
        for each in (read.fork(), read.fork(), read.to_dynamic(), read):
            same(generate(model, each), stock, 1e-4)
    beams = {**GREEDY, "num_beams": 2, "max_new_tokens": 4, "output_logits": False}
    ours = model.generate(**ONE, past_key_values=cache_for(model, ALL), **beams)
    detach(model)
    assert torch.equal(ours.sequences, model.generate(**ONE, **beams).sequences)
    ours, cache, log = oracle.run(model, snapkv(0.4, window=4), ONE, **GREEDY)
    assert cache.store.layers[0].held < cache.get_seq_length()
    same(ours, oracle.expected(model, cache, log, ONE, **GREEDY), 1e-4)


def test_windows_drop_slots_themselves_in_stock_mode() -> None:
    model = zoo("MistralForCausalLM", "mistral")
    with pytest.raises(AttachError, match="mode='stock': layers with a window .* mode='native'"):
        cache_for(model, "knorm", mode="stock")


# positions of several axes ------------------------------------------------------------------------


def with_image(model: Any) -> Any:
    """Return two rows of text around an image of four by six tokens, the second one padded."""
    config = model.config
    image = [
        config.vision_start_token_id,
        *[config.image_token_id] * 24,
        config.vision_end_token_id,
    ]
    ids = torch.cat([IDS[:, :8], torch.tensor([image]), IDS[:, 8:20]], 1)
    ids = torch.cat([ids, torch.cat([torch.zeros_like(ids[:, :5]), ids[:, 5:]], 1)])
    mask = (ids != 0).long()
    mask[0] = 1
    vision = config.vision_config
    size = 3 * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(2 * 96, size, generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids, "attention_mask": mask, "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 8, 12]] * 2),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen2VLForConditionalGeneration", "qwen2_vl"),
        ("Qwen3VLForConditionalGeneration", "qwen3_vl"),
    ],
)
def test_unrotated_keys_of_an_image_are_where_the_model_put_them(name: str, kind: str) -> None:
    model = build(name, kind, **({"vision_config.hidden_size": 64} if kind == "qwen2_vl" else {}))
    inputs = with_image(model)
    embedding = model.model.language_model.rotary_emb
    expected = generate(model, inputs=inputs)
    for recipe in (streaming_llm(4096), xkv(1.0, value_rank=1.0, block=16, layers=2)):
        cache = cache_for(model, recipe)
        same(generate(model, cache, inputs), expected, 1e-3)
    table = cache.writer.table
    assert table.shape == (2, 55, 3) and not torch.equal(table[..., 1], table[..., 2])
    hidden = replace(snapkv(0.4, window=4), space="pre")
    ours, kept, log = oracle.run(model, hidden, inputs, **GREEDY)
    assert kept.store.layers[0].held < 55
    same(ours, oracle.expected(model, kept, log, inputs, **GREEDY), 1e-3)
    few = cache_for(model, streaming_llm(20, sinks=4))
    assert generate(model, few, inputs).sequences.shape == (2, 56)
    with pytest.raises(ValueError, match="positions are looked up by token, and have no place"):
        life.save("nowhere", few.store)
    with pytest.raises(ValueError, match="positions up to .* tokens read: positions of several"):
        generate(model, cache_for(model, "expected_attention", queries=8), inputs)
    detach(model)
    with pytest.raises(AttachError, match="past: streaming_llm .*not known of `past`"):
        cache_for(model, streaming_llm(12), past=expected.past_key_values)
    del cache, kept, few, ours
    gc.collect()
    assert not embedding._forward_pre_hooks


def test_gaps_close_on_all_axes_and_images_keep_their_shape() -> None:
    text, image = [(0, 0, 0), (1, 1, 1)], [(2, 2, 2), (2, 2, 3), (2, 3, 2), (2, 3, 3)]
    table = torch.tensor([*text, *image, *[(n, n, n) for n in range(4, 8)]])
    rotary = RotaryTable(torch.tensor([1.0, 0.5, 0.25]), axes=(0, 1, 2), table=table[None])

    def closed(*tokens: int) -> list[list[int]]:
        return rotary.closed(torch.tensor([[tokens]]))[0, 0].tolist()

    assert closed(0, 2, 3, 4, 5, 8, 9) == [
        [3, 3, 3], [4, 4, 4], [4, 4, 5], [4, 5, 4], [4, 5, 5], [6, 6, 6], [7, 7, 7]
    ]  # fmt: skip
    assert closed(9, 8, 0) == [[7, 7, 7], [6, 6, 6], [5, 5, 5]], "in whatever order"
    assert closed(-1, 2, 4, 5, 6)[1:] == table[[2, 4, 5, 6]].tolist(), "holes in an image stay"
    whole = torch.arange(10)[None, None]
    assert torch.equal(rotary.closed(whole)[0, 0], table)
    k = torch.randn(1, 2, 10, 6)
    inner = RotaryND(rotary.inv_freq, axes=(0, 1, 2))
    assert torch.equal(rotary.rotate(k, whole), inner.rotate(k, table))
