"""Ways into a cache: code that gives none, questions about a context, recipes of single layers."""

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from diffcache import kv
from diffcache.errors import AttachError
from diffcache.eval.workshop.kv import oracle
from diffcache.foreign import attention_names
from diffcache.kv.per_layer import per_layer
from diffcache.kv.recipe import Recipe
from tests.kv.tiny import GREEDY, gemma, llama, prompts, row, same
from tests.zoo.language import build

ROWS = prompts()
ONE = row(ROWS, 1)
SNAP = kv.snapkv(12, window=4)


@pytest.fixture
def model() -> Iterator[Any]:
    model = llama()
    with torch.no_grad():
        yield model
    kv.detach(model)


def left_of(model: Any) -> Any:
    names = [name for _, name in attention_names(model)]
    return names, dict(vars(model)), dict(model._forward_pre_hooks)


def test_calls_that_give_no_cache_get_one_each_and_the_model_is_given_back(model: Any) -> None:
    before, stock = left_of(model), model.generate(**ROWS, **GREEDY)
    expected = model.generate(**ROWS, past_key_values=kv.cache_for(model, SNAP), **GREEDY)
    kv.detach(model)
    assert not torch.equal(expected.sequences, stock.sequences), "dropping slots must show"
    with kv.caching(model, "snapkv", budget=12, window=4) as used:
        assert used.cache is None
        for _ in range(2):
            same(model.generate(**ROWS, **GREEDY), expected)
        assert used.count == 2 and used.cache.store.layers[0].held < 48
        own = kv.cache_for(model, Recipe(), mode="native")
        same(model.generate(**ROWS, past_key_values=own, **GREEDY), stock, 1e-5)
        same(model.generate(**ROWS, use_cache=False, **GREEDY), stock, 1e-4)
        out = model(**ONE)
        assert out.past_key_values is used.cache and used.count == 3
        model(input_ids=ONE["input_ids"][:, :1], past_key_values=out.past_key_values)
        assert used.cache.get_seq_length() == 49 and model(**ONE, use_cache=False) is not None
        with pytest.raises(ValueError, match="cache_implementation='static': the cache is"):
            model.generate(**ONE, cache_implementation="static", **GREEDY)
        assert used.count == 3
    assert left_of(model) == before
    same(model.generate(**ROWS, **GREEDY), stock)


def test_a_block_that_ends_in_an_error_gives_the_model_back(model: Any) -> None:
    before = left_of(model)

    def stopped() -> None:
        with kv.caching(model, SNAP):
            model.generate(**ONE, **GREEDY)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    with pytest.raises(ValueError, match="budget=0"), kv.caching(model, "snapkv", budget=0):
        pass
    assert left_of(model) == before
    kv.cache_for(model, SNAP)
    model.generate = own = model.generate
    before = left_of(model)
    with kv.caching(model, SNAP):
        assert model.generate is not own
    assert left_of(model) == before, "it was set up before, and had a generate of its own"


def test_a_block_serves_other_threads_and_is_alone(model: Any) -> None:
    with kv.caching(model, SNAP) as used:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(model.generate(**ONE, **GREEDY)))
        thread.start()
        thread.join()
        assert used.count == 1 and len(found) == 1
        with pytest.raises(AttachError, match="already runs under Recipe"), kv.caching(model, SNAP):
            pass
        same(model.generate(**ONE, **GREEDY), found[0])


class Words:
    """A tokenizer of bytes, as small as can be."""

    bos_token, pad_token_id, chat_template = "\x01", 0, None

    def __call__(self, text: str, return_tensors: str = "", **_: Any) -> dict[str, Any]:
        ids = list(text.encode())
        return {"input_ids": torch.tensor([ids]) if return_tensors else ids}

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return bytes(i for i in ids.tolist() if i > 2).decode("latin1")

    def apply_chat_template(self, messages: Any, **settings: Any) -> str:
        return f"[{messages[0]['content']}]"


CONTEXT = "The quick brown fox jumps over the lazy dog, twice."


def test_questions_are_asked_of_one_compressed_context(model: Any) -> None:
    tokenizer, long = Words(), {"max_new_tokens": 6, "eos_token_id": None}
    answers = kv.ask(model, tokenizer, CONTEXT, ["who?", "why?"], SNAP, generate=long)
    cache = kv.cache_for(model, SNAP)
    ids = torch.tensor([list(f"\x01{CONTEXT}".encode())])
    model(input_ids=ids, past_key_values=cache)
    cache.settle()
    assert {layer.held for layer in cache.store.layers} == {12}
    for question, answer in zip(("who?", "why?"), answers, strict=True):
        fork, mine = cache.fork(), torch.tensor([list(f"{question}\n".encode())])
        tokens = []
        for _ in range(6):  # token by token, so that nothing is compressed again before the first
            logits = model(input_ids=mine, past_key_values=fork).logits
            fork.store._fresh = False
            mine = logits[:, -1:].argmax(-1)
            tokens.append(mine[0])
        assert answer == tokenizer.decode(torch.cat(tokens))
    assert kv.ask(model, tokenizer, CONTEXT, "why?", SNAP, generate=long) == answers[1]
    assert answers[0] != answers[1]


def test_a_template_goes_around_context_and_question(model: Any) -> None:
    seen: list[str] = []

    class Chatting(Words):
        chat_template = "a template"

        def __call__(self, text: str, return_tensors: str = "", **_: Any) -> dict[str, Any]:
            seen.append(text)
            return super().__call__(text)

    with pytest.raises(ValueError, match="context='': there is nothing"):
        kv.ask(model, Chatting(), "", "why?", SNAP)
    seen.clear()
    text = f"{CONTEXT} <question>"
    kv.ask(model, Chatting(), text, "why?", "kvzip", answer_prefix=" As", budget=0.4)
    assert seen == [f"[{text}\n", "\n\nRepeat the text above:\n", "why?] As"]


def slots(model: Any, recipe: Any) -> list[Any]:
    """Return what each layer holds after a prompt and three tokens, the same for all recipes."""
    cache, mask = kv.cache_for(model, recipe, mode="native"), ROWS["attention_mask"]
    model(**ROWS, past_key_values=cache)
    for token in (7, 9, 11):
        mask = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], 1)
        ids = torch.full((3, 1), token)
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    return [layer.read() for layer in cache.store.layers]


ALONE = {
    "scored and coded": kv.snapkv(0.5, window=8) | kv.kivi(4, group=8, residual=8),
    "statistics": kv.h2o(12),
    "heads, output projections": kv.criticalkv(base=kv.adakv(base=kv.snapkv(16, window=4))),
    "merged": kv.look_m(0.5),
    "retrieved": kv.quest(16, page=4, skip=0),
    "unrotated": kv.streaming_llm(12),
}


@pytest.mark.parametrize("recipe", ALONE.values(), ids=ALONE.keys())
def test_layers_do_what_their_recipe_does_alone(model: Any, recipe: Recipe) -> None:
    alone, mixed = slots(model, recipe), slots(model, dict.fromkeys(range(3), recipe))
    for one, other in zip(alone[:3], mixed[:3], strict=True):
        assert torch.equal(one.pos, other.pos)
        assert torch.equal(one.k, other.k) and torch.equal(one.v, other.v)
    assert mixed[3].width == 51 and (recipe.score is None) == (alone[3].width == 51)


def test_layers_of_different_recipes_are_the_masked_full_cache(model: Any) -> None:
    recipes = [kv.snapkv(0.25, window=4), "knorm", Recipe(), kv.tova(0.6, every=64)]
    with pytest.raises(ValueError, match=r"layers differ in trigger \(knorm: AfterPrefill"):
        kv.cache_for(model, recipes)
    recipes[3] = kv.value_norm(0.7)
    ours, cache, log = oracle.run(model, recipes, ROWS, **GREEDY)
    held = [layer.read().valid.sum(-1)[1].tolist() for layer in cache.store.layers]
    assert held == [[17, 17], [29, 29], [53], [38, 38]], "of 48 tokens, and 5 that came"
    same(ours, oracle.expected(model, cache, log, ROWS, **GREEDY), 1e-4)
    assert cache.store.recipe.name == "per layer: snapkv, knorm, as it is, value_norm"
    assert per_layer([SNAP] * 4) is SNAP


CUT = 20
windowed = partial(build, "MistralForCausalLM", "mistral", sliding_window=24)


def in_two(model: Any, cache: Any, inputs: Any, cut: int = CUT) -> Any:
    """Read the first tokens of prompts with a cache, then the rest."""
    mask = inputs["attention_mask"][:, :cut]
    pos = (mask.cumsum(-1) - 1).clamp_min(0)  # as generate has them
    input_ids = inputs["input_ids"][:, :cut]
    model(input_ids=input_ids, attention_mask=mask, position_ids=pos, past_key_values=cache)
    return cache


@pytest.mark.parametrize(
    ("make", "recipe", "inputs"),
    [
        (llama, kv.keydiff(0.5), ROWS),
        (gemma, SNAP, ROWS),
        (llama, kv.streaming_llm(12), ROWS),
        (gemma, kv.kivi(4, group=8, residual=8), ONE),
        (llama, kv.xkv(block=16), ONE),
    ],
    ids=["by keys", "by last queries", "unrotated", "coded", "low rank"],
)
def test_what_is_taken_over_was_read(make: Any, recipe: Recipe, inputs: Any) -> None:
    """A past goes on as if the cache had read it, and stays as it is."""
    model = make().double()
    with torch.no_grad():
        past = in_two(model, DynamicCache(config=model.config), inputs)
        before = [layer.keys.clone() for layer in past.layers]
        cache = kv.cache_for(model, recipe, past=past, past_mask=inputs["attention_mask"][:, :CUT])
        read = in_two(model, kv.cache_for(model, recipe), inputs)
        ours = model.generate(**inputs, past_key_values=cache, **GREEDY)
        same(ours, model.generate(**inputs, past_key_values=read, **GREEDY), 1e-9)
        kv.detach(model)
    assert all(torch.equal(a, b.keys) for a, b in zip(before, past.layers, strict=True))


@pytest.mark.parametrize(
    ("make", "recipe"),
    [(llama, SNAP), (gemma, kv.streaming_llm(64)), (llama, kv.kivi(8, group=8, residual=8)), (windowed, SNAP)],
    ids=["plain", "hybrid", "coded", "windows"],
)
def test_what_is_handed_out_goes_on_as_stock(make: Any, recipe: Recipe) -> None:
    model = make()
    inputs = {**ROWS, "input_ids": ROWS["input_ids"] % 120}
    with torch.no_grad():
        stock = in_two(model, DynamicCache(config=model.config), inputs)
        cache = in_two(model, kv.cache_for(model, recipe), inputs)
        out = cache.to_dynamic()
        assert type(out) is DynamicCache and out.get_seq_length() == CUT
        expected = model.generate(**inputs, past_key_values=stock, **GREEDY)
        same(model.generate(**inputs, past_key_values=out, **GREEDY), expected, 0.5 if "kivi" in recipe.name else 1e-4)
        cache.settle()
        again = kv.cache_for(model, kv.Recipe(), past=expected.past_key_values, mode="native")
        assert again.get_seq_length() == again.to_dynamic().get_seq_length() == 53
        if recipe is SNAP:
            with pytest.raises(ValueError, match="12 slots of 20 tokens.* go on with this cache"):
                cache.to_dynamic()
        kv.detach(model)


class QuantizedLike(Cache):
    """A cache of other layers; those of transformers need packages of their own."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
