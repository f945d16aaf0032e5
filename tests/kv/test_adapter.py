"""Faults around a cache: it says so, and the model and other caches are none the worse."""

import copy
import gc
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers as hf

from diffcache.errors import AttachError
from diffcache.kv.attend import Query
from diffcache.kv.budget import Uniform
from diffcache.kv.hf import remat_cache_for
from diffcache.kv.hf.cache import KVCache, cache_for, detach
from diffcache.kv.layer import KVLayer
from diffcache.kv.plan import TopK
from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes import eviction, quantized, streaming
from diffcache.kv.score.recency import Recency
from diffcache.kv.trigger import EveryStep
from tests.internals import cut_off
from tests.kv.examples import examples, variants
from tests.kv.test_generate import Lots
from tests.kv.tiny import ALL, GREEDY, SHORT, gemma, llama, prompts, row, same
from tests.zoo.language import build

TOKEN = torch.tensor([[7]])
ROWS = prompts()
ONE = row(ROWS, 1)


@pytest.fixture
def model() -> Iterator[Any]:
    model = llama().double()
    with torch.no_grad():
        yield model
    detach(model)


def keep(budget: int | float, **changes: Any) -> Recipe:
    plan = TopK(sinks=2, recent=4)
    return Recipe("keep", score=Recency(), budget=Uniform(budget), plan=plan, **changes)


def filled(model: Any, recipe: Recipe | None = None, inputs: Any = ONE, mode: Any = "native") -> Any:
    cache = cache_for(model, keep(12) if recipe is None else recipe, mode=mode)
    model(**inputs, past_key_values=cache)
    return cache


def stepped(model: Any, cache: Any) -> Any:
    return model(input_ids=TOKEN, past_key_values=cache).logits


@pytest.mark.parametrize(
    ("error", "layer", "mode"),
    [
        (RuntimeError("out of memory"), 0, "native"),
        (KeyboardInterrupt(), 2, "stock"),
        (KeyboardInterrupt(), 2, "native"),
    ],
)
def test_a_cut_off_forward_is_noticed(model: Any, layer: int, error: Any, mode: Any) -> None:
    recipe = keep(12) if mode == "native" else Recipe()
    cache, intact = (filled(model, recipe, mode=mode) for _ in range(2))
    spare = cache.fork()
    with cut_off([model.model.layers[layer].self_attn.o_proj], error=error):
        stepped(model, cache)
    expected = stepped(model, intact)
    assert torch.equal(stepped(model, spare), expected), "a fork made before goes on"
    with pytest.raises(ValueError, match="cut off and left the cache half changed: reset it"):
        stepped(model, cache)
    cache.reset()
    model(**ONE, past_key_values=cache)
    assert torch.equal(stepped(model, cache), expected)


def test_a_cut_off_forward_of_a_hybrid_is_noticed_and_its_sliding_layers_are_not_cropped_alone() -> None:
    model = gemma().double()
    cache, other = filled(model), filled(model)
    with cut_off([model.model.layers[1].mlp]):
        stepped(model, cache)
    with pytest.raises(ValueError, match="cut off"):
        stepped(model, cache)
    other.activate_past_recording()
    with pytest.raises(ValueError, match="48 tokens can be taken back"):
        other.crop(-49)
    assert {layer.get_seq_length() for layer in other.layers} == {48}


def test_settling_that_was_cut_off_is_noticed(model: Any, monkeypatch: Any) -> None:
    cache = filled(model)
    keep_slots = KVLayer.keep

    def stop(self: KVLayer, *given: Any, **named: Any) -> None:
        if self.index == 2:
            raise KeyboardInterrupt
        keep_slots(self, *given, **named)

    monkeypatch.setattr(KVLayer, "keep", stop)
    with pytest.raises(KeyboardInterrupt):
        cache.settle()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="cut off"):
        stepped(model, cache)


@pytest.mark.parametrize("make", [llama, gemma])
def test_a_cache_of_a_released_model_is_refused(make: Any) -> None:
    model = make().double()
    with torch.no_grad():
        cache = filled(model)
        detach(model)
        with pytest.raises(AttachError, match="released and uses 'sdpa'.*cache_for"):
            stepped(model, cache)
        cache_for(model, keep(12), mode="native")
        assert torch.equal(stepped(model, cache), stepped(model, filled(model)))


def test_a_cache_of_another_model_is_refused(model: Any) -> None:
    cache = cache_for(model, keep(12), mode="native")
    with pytest.raises(AttachError, match="layer 0 never reached .* not the model"):
        llama(seed=1).double()(**ONE, past_key_values=cache)
    model(**ONE, past_key_values=hf.DynamicCache(config=model.config))  # nothing is left behind


def test_copies_of_a_model_have_what_it_had_before(model: Any) -> None:
    model.set_attn_implementation("eager")
    cache_for(model, keep(12), mode="native")
    other = copy.deepcopy(model)
    assert other.config._attn_implementation == "eager"
    assert pickle.loads(pickle.dumps(model.config._attn_implementation)) == "eager"
    sharing = hf.LlamaForCausalLM(model.config)
    cache_for(sharing, keep(12), mode="native")
    detach(sharing)
    assert model.config._attn_implementation == "eager"


def test_threads_and_turns_do_not_meet(model: Any) -> None:
    expected = model.generate(**ONE, past_key_values=cache_for(model, keep(12)), **GREEDY)

    def work(_: int) -> Any:
        return model.generate(**ONE, past_key_values=cache_for(model, keep(12)), **GREEDY)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, range(2)))
    same(found[0], expected)
    same(found[1], expected)
    one, two = filled(model), filled(model, inputs=row(ROWS, 0))
    stepped(model, two)
    assert torch.equal(stepped(model, one), stepped(model, filled(model)))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, KVCache.fork])
def test_a_copy_is_a_fork(model: Any, copied: Any) -> None:
    cache = filled(model)
    other = copied(cache)
    expected = stepped(model, other)
    assert (cache.get_seq_length(), other.get_seq_length()) == (48, 49)
    assert torch.equal(stepped(model, cache), expected)
    with pytest.raises(TypeError, match=r"use diffcache\.kv\.save"):
        pickle.dumps(cache)


def test_a_fork_of_inputs_outlives_its_cache(model: Any) -> None:
    cache = remat_cache_for(model, None)
    model(**ONE, past_key_values=cache)
    fork = cache.fork()
    del cache
    gc.collect()
    expected = model(input_ids=torch.cat([ONE["input_ids"], TOKEN], 1)).logits[:, -1:]
    assert torch.allclose(stepped(model, fork), expected, atol=1e-6)
    del fork
    gc.collect()
    assert not model.model.layers[0].self_attn.k_proj._forward_pre_hooks


@pytest.mark.parametrize("recipe", [Recipe(), eviction.h2o(12), streaming.streaming_llm(12)], ids=repr)
def test_a_cache_that_was_filled_in_inference_mode_goes_on_outside(model: Any, recipe: Recipe) -> None:
    with torch.no_grad():
        expected = filled(model, recipe)
        for _ in range(3):
            wanted = stepped(model, expected)
    with torch.inference_mode():
        cache = filled(model, recipe)
        stepped(model, cache)
        stepped(model, cache)
    with torch.no_grad():
        assert torch.equal(stepped(model, cache), wanted)


@pytest.mark.parametrize(
    "recipe", [quantized.kivi(2, group=8, residual=16), quantized.vidkv(group=8, residual=16)], ids=repr
)
def test_codes_are_appended_within_autocast(recipe: Recipe) -> None:
    model, inputs = llama(), row(prompts(), 1)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        cache = cache_for(model, recipe)
        model(**inputs, past_key_values=cache)
        for _ in range(20):
            assert stepped(model, cache).isfinite().all()
    assert cache.store.layers[0].tail.length < 40


@pytest.mark.parametrize("name", ["cake", "compactor", "d2o", "gear", "quest", "snapkv | kivi"])
def test_autocast_changes_neither_scores_nor_codes_nor_choices(name: str) -> None:
    model = llama()
    cache = cache_for(model, (examples() | variants())[name]())
    with torch.no_grad():
        model(**ROWS, past_key_values=cache)
    other, q = cache.fork(), 3 * torch.randn(4, 3, 4, 1, 16, generator=torch.Generator().manual_seed(0))
    for each in (cache, other):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=each is other):
            each.settle()
            for layer in each.store.layers:
                each.store.views(layer.index, Query(q[layer.index], layer.seen - 1, 1.0))
    for one, two in zip(cache.store.layers, other.store.layers, strict=True):
        assert all(map(torch.equal, one.tensors(), two.tensors()))


def test_a_reset_forgets_what_became_of_tags_and_of_what_was_taken_over(model: Any) -> None:
    tags = torch.tensor([[1], [2]]).expand(2, 48)
    cache = cache_for(model, ALL, tags=tags)
    given = {name: value[:2] for name, value in prompts().items()}
    model(**given, past_key_values=cache)
    cache.batch_select_indices(torch.tensor([1, 1]))
    for each in (cache.fork(), cache):
        assert each.writer.tags[:, 0].tolist() == [2, 2]
        each.reset()
        model(**given, past_key_values=each)
        assert each.store.layers[0].meta()["tag"][:, 0, -1].tolist() == [1, 2]
    full = hf.DynamicCache(config=model.config)
    model(input_ids=TOKEN, past_key_values=full)
    cache = cache_for(model, ALL, past=full)
    cache.reset()
    model(**given, past_key_values=cache)  # padding is none of what was taken over


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_what_is_settled_cannot_be_taken_back(model: Any, layout: Any) -> None:
    lots = Recipe("lots", score=Lots(), budget=Uniform(12), plan=TopK(), layout=layout, skip=1)
    cache = filled(model, lots)
    stepped(model, cache)
    held = [layer.held for layer in cache.store.layers]
    with pytest.raises(ValueError, match="count=2: 1 tokens can be taken back"):
        cache.crop(-2)
    assert [layer.held for layer in cache.store.layers] == held, "no layer is cropped alone"
    cache.crop(-1)
    assert cache.get_seq_length() == 48


@pytest.mark.parametrize("recipe", [eviction.h2o(0.3), eviction.snapkv(12, window=4)], ids=repr)
def test_what_scorers_noted_is_taken_back_only_where_that_was_announced(model: Any, recipe: Recipe) -> None:
    ids = row(prompts(), 1)["input_ids"]
    cache, short = cache_for(model, recipe), cache_for(model, recipe)
    model(input_ids=ids, past_key_values=cache)
    with pytest.raises(AttachError, match=r"took note of .* call cache.activate_past_recording"):
        cache.crop(-10)
    assert cache.get_seq_length() == 48, "nothing was taken back"
    cache.reset()
    for each, given in ((cache, ids), (short, ids[:, :38])):
        each.activate_past_recording()
        model(input_ids=given, past_key_values=each)
    cache.crop(-10)
    for _ in range(2):  # slots are dropped before the first
        assert torch.equal(stepped(model, cache), stepped(model, short))


def test_assisted_decoding_does_not_read_tokens_a_second_time(model: Any) -> None:
    one = row(prompts(), 1)
    cache = filled(model, inputs=one)
    before = [layer.read().k.clone() for layer in cache.store.layers]
    with pytest.raises(AttachError, match="holds 48 tokens, and assisted decoding would read them"):
        model.generate(**one, past_key_values=cache, prompt_lookup_num_tokens=3, **SHORT)
    assert not cache.store.speculative
    for layer, k in zip(cache.store.layers, before, strict=True):
        assert torch.equal(layer.read().k, k)


@pytest.mark.parametrize("mode", ["native", "stock"])
def test_rows_and_dtypes_stay_what_they_were(model: Any, mode: Any) -> None:
    recipe = keep(12) if mode == "native" else Recipe()
    with pytest.raises(ValueError, match=r"\[1, 2, 16, 16\].* do not fit the \[3, 2, 16, 16\]"):
        stepped(model, filled(model, recipe, ROWS, mode))
    cache = filled(model, recipe, mode=mode)
    with pytest.raises(ValueError, match=r"\[3, 2, 16, 16\].* do not fit the \[1, 2, 16, 16\]"):
        model(input_ids=TOKEN.expand(3, 1), past_key_values=cache)
    stepped(model, cache)  # nothing was written
    model.float()
    with pytest.raises(ValueError, match=r"float32 on cpu do not fit .* in torch\.float64"):
        stepped(model, cache)


def test_masks_are_of_positions_and_bool(model: Any) -> None:
    mask = torch.ones(48, 48, dtype=torch.bool).tril()[None, None]
    cache = cache_for(model, keep(12), mode="native")
    ours = model(input_ids=ONE["input_ids"], attention_mask=mask, past_key_values=cache)
    assert torch.equal(ours.logits, model(**ONE).logits)
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e300)
    for wrong in (added, mask[..., :40]):
        cache.reset()
        with pytest.raises(AttachError, match=r"attention_mask=.*T=48 being all tokens ever seen"):
            model(input_ids=ONE["input_ids"], attention_mask=wrong, past_key_values=cache)


def test_a_stock_mask_is_for_the_slots_there_are(model: Any) -> None:
    cache = filled(model, keep(12, trigger=EveryStep()), mode="stock")
    with pytest.raises(AttachError, match=r"call settle\(\) of the cache before"):
        model(input_ids=TOKEN.expand(1, 4), past_key_values=cache.fork())
    cache.settle()
    model(input_ids=TOKEN.expand(1, 4), past_key_values=cache)


def test_decoders_that_look_like_encoders_are_served() -> None:
    size: Any = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    for decoder in (
        hf.BertLMHeadModel(hf.BertConfig(**size, is_decoder=True)),
        hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**size)),  # whose settings deny it
    ):
        assert cache_for(decoder, keep(12)).setup.owned == (0,)


def test_attention_modules_are_found_by_either_name() -> None:
    model, inputs = build("GPTNeoXForCausalLM", "gpt_neox").double(), {**ROWS, "input_ids": ROWS["input_ids"] % 120}
    expected = model.generate(**inputs, **GREEDY)
    for recipe in (keep(1.0, space="pre"), eviction.criticalkv(base=eviction.snapkv(1.0))):
        cache = cache_for(model, recipe, mode="native")
        same(model.generate(**inputs, past_key_values=cache, **GREEDY), expected, 1e-9)
