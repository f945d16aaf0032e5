"""Layers that keep latents, or a state beside full attention."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from diffcache.errors import AttachError
from diffcache.eval.workshop.kv import oracle
from diffcache.kv import cache_for, detach, keydiff, kivi, quest, snapkv
from diffcache.kv.life import save as life
from tests.kv.tiny import ALL, IDS, ONE, SHORT, generate, same, zoo


@pytest.mark.parametrize("model", ["DeepseekV3ForCausalLM deepseek_v3", "MiniCPM3ForCausalLM minicpm3"])
def test_latents_are_dropped_and_chosen_as_a_whole(model: Any, tmp_path: Path) -> None:
    model = zoo(*model.split())
    expected = generate(model)
    for recipe in (ALL, quest(64, page=4), kivi(2, group=8, residual=4096)):
        same(generate(model, cache_for(model, recipe, mode="native")), expected, 1e-4)
    detach(model)
    for recipe in (snapkv(0.4, window=4), keydiff(0.5)):
        ours, cache, log = oracle.run(model, recipe, ONE, **SHORT)
        assert cache.store.layers[0].held < cache.get_seq_length()
        same(ours, oracle.expected(model, cache, log, ONE, **SHORT), 1e-4)
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


def test_an_adapter_between_latents_and_keys_is_noticed() -> None:
    other = deepcopy(zoo("DeepseekV3ForCausalLM", "deepseek_v3"))
    cache = cache_for(other, ALL)
    for layer in other.model.layers:  # an adapter that its weights do not show
        layer.self_attn.kv_b_proj.register_forward_hook(lambda *given: given[-1] * 1.5)
    with pytest.raises(AttachError, match="makes keys and values from latents otherwise"):
        other(**ONE, past_key_values=cache)


@pytest.mark.parametrize(("name", "kind"), [("FalconH1ForCausalLM", "falcon_h1"), ("ZambaForCausalLM", "zamba")])
def test_states_beside_full_attention_go_along(name: str, kind: str, tmp_path: Path) -> None:
    model = zoo(name, kind)
    expected = generate(model)
    cache, other = cache_for(model, ALL), cache_for(model, ALL)
    same(generate(model, cache), expected, 1e-4)
    life.save(tmp_path / "store", cache.store)
    life.load(tmp_path / "store", other.store)
    with pytest.raises(ValueError, match="layers beside the store hold nothing of its 27 tokens"):
        model(input_ids=IDS[:, :1], past_key_values=other)
    cache.reset()
    same(generate(model, cache), expected, 1e-4)
    with torch.no_grad():
        past = hf.DynamicCache(config=model.config)
        model(input_ids=IDS[:, :20], past_key_values=past)
        read = cache_for(model, ALL, past=past)
        stock = generate(model, deepcopy(past))
        for each in (read.fork(), read.fork(), read.to_dynamic(), read):
            same(generate(model, each), stock, 1e-4)
    beams = {**SHORT, "num_beams": 2, "max_new_tokens": 4, "output_logits": False}
    ours = model.generate(**ONE, past_key_values=cache_for(model, ALL), **beams)
    detach(model)
    assert torch.equal(ours.sequences, model.generate(**ONE, **beams).sequences)
    ours, cache, log = oracle.run(model, snapkv(0.4, window=4), ONE, **SHORT)
    assert cache.store.layers[0].held < cache.get_seq_length()
    same(ours, oracle.expected(model, cache, log, ONE, **SHORT), 1e-4)
