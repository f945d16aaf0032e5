"""Contract of the recipes of the catalogue, inside `generate` of a small random model."""

import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.errors import AttachError
from diffcache.eval.workshop.kv import oracle
from diffcache.kv import Recipe, a2ats, load, save
from diffcache.kv.hf.cache import KVCache, cache_for, detach
from diffcache.kv.recipes.by_name import recipe_function, recipes
from tests.kv import tiny
from tests.kv.examples import APART, examples, lossless, variants
from tests.kv.tiny import GREEDY, SHORT, given, llama, prompts, row, same, second_turn

NAMES = [name for name in recipes() if name not in APART]
EVERY = {**examples(), **variants()}
ROWS = prompts()
WAYS = {way: (GREEDY if way == "assisted" else SHORT) | more for way, more in tiny.WAYS.items() if more}


@pytest.fixture(scope="module")
def model() -> Any:
    """Use our attention from the first cache on."""
    return llama().double()


@pytest.fixture(scope="module")
def plain() -> Any:
    """Be given back after each test."""
    return llama().double()


@pytest.fixture(scope="module")
def assistant() -> Any:
    return llama(seed=1, num_hidden_layers=1).double()


@pytest.fixture(scope="module")
def stock(plain: Any) -> Callable[[Recipe], Any]:
    made = [plain.generate(**ROWS, **settings) for settings in (SHORT, GREEDY)]
    return lambda recipe: made[length(recipe) is GREEDY]


First = Callable[[str], tuple[Recipe, Any, KVCache, oracle.Log]]


@pytest.fixture(scope="module")
def first(model: Any) -> First:
    """Run each recipe on the prompts once for all tests: recipe, output, cache, and what queries found."""

    @functools.cache
    def made(name: str) -> tuple[Recipe, Any, KVCache, oracle.Log]:
        recipe = EVERY[name]()
        with oracle.logged() if only_drops(recipe) else nullcontext({}) as log:
            return recipe, *generate(model, recipe), log

    return made


def length(recipe: Recipe) -> dict[str, Any]:
    """Return settings of few new tokens, or of more for a recipe that does something while they come."""
    acts = recipe.trigger is not None and recipe.trigger.decoding
    return GREEDY if acts or recipe.retrieve is not None or in_blocks(recipe) else SHORT


def only_drops(recipe: Recipe) -> bool:
    more = recipe.merge or in_blocks(recipe) or recipe.retrieve or recipe.positions
    return recipe.evicts and not more


@pytest.fixture(scope="module")
def alone(model: Any, first: First) -> Callable[[str], tuple[dict[str, Tensor], Any, KVCache]]:
    """Run each recipe on one row alone: the prompt, the output and the cache.

    It is the row with the most padding, or the one without where tokens are coded together in
    blocks, which begin elsewhere where a row is padded.
    """

    @functools.cache
    def made(name: str) -> tuple[dict[str, Tensor], Any, KVCache]:
        recipe, _, cache, _ = first(name)
        inputs = row(ROWS, int(in_blocks(recipe)))
        return inputs, *generate(model, recipe, inputs, mode=cache.mode)

    return made


def in_blocks(recipe: Recipe) -> bool:
    return bool(recipe.codec or recipe.ladder)


def generate(model: Any, recipe: Recipe, inputs: Any = ROWS, **changes: Any) -> tuple[Any, KVCache]:
    cache = cache_for(model, recipe, **changes)
    return model.generate(**inputs, past_key_values=cache, **length(recipe)), cache


def held(thing: object) -> Iterator[Tensor]:
    """Find every tensor that an object keeps alive, by walking what it refers to."""
    seen: set[int] = set()
    todo = [thing]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, (type, str, int, float)) or inspect.ismodule(item):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, dict):  # from Python 3.13 on that of an object has no referents
            todo += [*item, *item.values()]
        elif isinstance(item, (list, tuple, set)) or type(item).__module__.startswith("diffcache.kv"):
            todo += [*gc.get_referents(item), getattr(item, "__dict__", None)]


@pytest.mark.parametrize("name", NAMES)
def test_it_has_an_example_and_explains_its_settings(name: str) -> None:
    assert name in examples()
    text = inspect.getdoc(recipe_function(name)) or ""
    assert "Args:" in text, "settings are explained"
    assert text.split("\n")[0].endswith("."), "the first line is a sentence"


@pytest.mark.parametrize("name", NAMES)
def test_padded_rows_later_turns_fresh_starts_and_what_was_saved(model: Any, first: First, name: str, tmp_path: Any):
    recipe, once, cache, _ = first(name)
    assert once.sequences.shape == (3, ROWS["input_ids"].shape[1] + length(recipe)["max_new_tokens"])
    assert all(torch.isfinite(logits).all() for logits in once.logits)
    again = cache.fork()
    save(tmp_path / "cache", again.store)
    turn = second_turn(ROWS, once.sequences)
    more = model.generate(**turn, past_key_values=again, **SHORT)
    assert again.get_seq_length() == more.sequences.shape[1] - 1
    again.reset()
    same(model.generate(**ROWS, past_key_values=again, **length(recipe)), once)
    loaded = cache_for(model, recipe, mode=cache.mode)
    load(tmp_path / "cache", loaded.store)
    assert loaded.get_seq_length() == cache.get_seq_length()
    same(model.generate(**turn, past_key_values=loaded, **SHORT), more)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_all_storages(model: Any, first: First, name: str) -> None:
    recipe, _, cache, _ = first(name)
    config = {id(tensor) for tensor in held(recipe)}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found = [tensor for tensor in held(cache.store.__dict__) if id(tensor) not in config]
    found = [x for x in found if x.untyped_storage().data_ptr() not in weights and not _is_frequency(cache, x)]
    assert cache.nbytes == sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}.values())


def _is_frequency(cache: KVCache, tensor: Tensor) -> bool:
    """Return whether a tensor is the rotary frequencies, which are no part of a cache."""
    layers = cache.store.layers
    rotations = [x.rotary if x.mover is None else x.mover.rotation for x in layers]
    return any(each is not None and tensor is each.inv_freq for each in rotations)


@pytest.mark.parametrize("name", lossless())
def test_losing_nothing_is_stock(model: Any, stock: Any, name: str) -> None:
    make, tolerance = lossless()[name]
    recipe = make()
    ours, cache = generate(model, recipe)
    same(ours, stock(recipe), tolerance)
    for layer in cache.store.layers:
        assert layer.held == cache.store.seen and "logn" not in layer.read().meta


@pytest.fixture(scope="module")
def stock_ways(plain: Any) -> dict[str, Any]:
    """Return the outputs of the model without a cache of ours, by way."""
    return {way: plain.generate(**given(way), **settings) for way, settings in WAYS.items()}


@pytest.mark.parametrize("name", [name for name in lossless() if lossless()[name][0]().retrieve])
def test_reading_all_is_stock_in_every_way(model: Any, stock_ways: Any, name: str) -> None:
    make, tolerance = lossless()[name]
    for way, settings in WAYS.items():
        cache = cache_for(model, make())
        same(model.generate(**given(way), past_key_values=cache, **settings), stock_ways[way], tolerance)


@pytest.mark.parametrize("name", [name for name in EVERY if only_drops(EVERY[name]())])
def test_what_only_drops_is_what_hides(plain: Any, stock: Any, first: First, name: str) -> None:
    recipe, ours, cache, log = first(name)
    same(ours, oracle.expected(plain, cache, log, ROWS, **length(recipe)), 1e-6)
    assert not torch.equal(ours.logits[-1], stock(recipe).logits[-1]), "dropping slots must show"


@pytest.mark.parametrize("name", EVERY)
def test_a_row_alone_is_the_row_in_a_batch(first: First, alone: Any, name: str) -> None:
    recipe, together, cache, _ = first(name)
    if recipe.name.startswith("random"):
        pytest.skip("lots are drawn for places, and padding moves them")
    number, new = int(in_blocks(recipe)), length(recipe)["max_new_tokens"]
    _, output, single = alone(name)
    assert torch.equal(output.sequences[0, -new:], together.sequences[number, -new:])
    if in_blocks(recipe):
        return
    for one, two in zip(output.logits, together.logits, strict=True):
        torch.testing.assert_close(one[0], two[0], rtol=0, atol=1e-4)
    pad = int((ROWS["attention_mask"][0] == 0).sum())
    for one, two in zip(single.store.layers, cache.store.layers, strict=True):
        pos = [places(layer.read().pos[0]) for layer in (one, two)]
        assert torch.equal(pos[0], pos[1] - pad)


def places(pos: Tensor) -> Tensor:
    """Return the positions of each head, one head after the other."""
    return torch.cat([head[head >= 0].sort().values for head in pos.expand(2, -1)])


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_guesses_that_are_taken_back(model: Any, assistant: Any, first: First, alone: Any, name: str):
    recipe, _, cache, _ = first(name)
    inputs, greedy, _ = alone(name)
    chunked = cache_for(model, recipe, mode=cache.mode)
    parts = model.generate(**ROWS, past_key_values=chunked, **{**SHORT, "max_new_tokens": 2, "prefill_chunk_size": 16})
    assert torch.stack(parts.logits).isfinite().all()
    if recipe.codec is not None:
        assert any(segment.coded for segment in chunked.store.layers[-1].segments)
    guessing = cache_for(model, recipe, mode=cache.mode)
    guessed = model.generate(**inputs, past_key_values=guessing, assistant_model=assistant, **length(recipe))
    if length(recipe) is SHORT:
        assert torch.equal(guessed.sequences, greedy.sequences)
    assert guessed.sequences.shape == greedy.sequences.shape


def placed(rows: Tensor) -> dict[str, Tensor]:
    return {"attention_mask": rows, "position_ids": rows.sum(-1, keepdim=True) - 1}


@pytest.mark.parametrize("name", EVERY)
def test_rows_that_are_taken_go_on_as_they_were(model: Any, first: First, name: str) -> None:
    """Statistics of slots stay in step with them, even where the longest rows are gone."""
    cache = first(name)[2]
    every, some, index = cache.fork(), cache.fork(), torch.arange(3)
    mask = torch.nn.functional.pad(ROWS["attention_mask"], (0, cache.get_seq_length() - 48), value=1)
    with torch.no_grad():
        for token, kept in ((7, [2, 0]), (9, [1, 1])):
            some.reorder_cache(torch.tensor(kept))
            index, mask = index[kept], torch.nn.functional.pad(mask, (0, 1), value=1)
            wanted, found = (
                model(input_ids=torch.full((len(rows), 1), token), **placed(rows), past_key_values=each).logits
                for rows, each in ((mask, every), (mask[index], some))
            )
            torch.testing.assert_close(found, wanted[index], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_taken_back_and_forwards_cut_off_are_exact_or_refused(plain: Any, name: str) -> None:
    ids = torch.cat([row(ROWS, 1)["input_ids"], row(ROWS, 1)["input_ids"]], 1)
    drafts = ids.flip(1)
    recipe, start = examples()[name](), 48
    if name == "a2ats":  # a codebook is fitted from 32 tokens on: with the drafts, not before
        recipe, start = a2ats(24, codes=32, far=4, recent=4), 30
    later = ids[:, start : start + 3].split(1, 1)
    begun = cache_for(plain, recipe)
    begun.activate_past_recording()

    def read(cache: KVCache, tokens: Tensor) -> Tensor:
        return plain(input_ids=tokens, past_key_values=cache).logits[:, -1]

    with torch.no_grad():
        read(begun, ids[:, :start])
        caches = [begun.fork() for _ in range(2)]
        expected = [read(begun, token) for token in later]
        for cache, parts in zip(caches, ([3], [1, 1, 1]), strict=True):
            for part in drafts[:, :3].split(parts, 1):
                read(cache, part)
            try:
                cache.crop(-3)
            except (AttachError, ValueError):
                assert len(parts) > 1, "the last forward can be taken back"
                continue
            assert all(map(torch.equal, [read(cache, token) for token in later], expected))
        handle = plain.lm_head.register_forward_pre_hook(cut)
        with pytest.raises(KeyboardInterrupt):
            read(begun, later[0])
        handle.remove()
        for again in (lambda: read(begun, later[0]), lambda: begun.crop(-1)):
            with pytest.raises(ValueError, match="cut off and left the cache half changed"):
                again()
    begun.reset()
    plain.generate(ids[:, :start], past_key_values=begun, **{**SHORT, "max_new_tokens": 1})
    if any(layer.held < layer.seen for layer in begun.store.layers):  # it expects no crop since its reset
        with pytest.raises(ValueError, match="count=5: 0 tokens can be taken back, .* a fork of"):
            begun.crop(-5)
    detach(plain)
    assert not plain._forward_hooks and not plain.model._forward_hooks


def cut(*_: Any) -> None:
    raise KeyboardInterrupt
