"""Drafts of assisted decoding that read little of a prompt."""

from typing import Any

import pytest
import torch

from diffcache.foreign import with_cache
from diffcache.kv import Recipe, cache_for, kivi, rapid, snapkv, triforce
from diffcache.kv.hf.rapid import overlap
from tests.kv.tiny import GREEDY, llama

IDS = torch.randint(3, 250, (1, 120), generator=torch.Generator().manual_seed(1))
SETTINGS = {**GREEDY, "max_new_tokens": 12}


def said(model: Any, cache: Any, **settings: Any) -> list[int]:
    out = model.generate(IDS, **with_cache(model, cache), **{**SETTINGS, **settings})
    return out.sequences[0, IDS.shape[1] :].tolist()


def forwards(model: Any, cache: Any, draft: Any) -> tuple[list[int], int]:
    """Return the tokens with a draft, and how many forwards read the cache."""
    name, count = next(iter(with_cache(model, cache))), 0

    def note(_: Any, args: Any, given: Any) -> None:
        nonlocal count
        count += given.get(name) is cache

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    tokens = said(model, cache, assistant_model=draft)
    hook.remove()
    return tokens, count


# 96 of the 120 tokens are coded, and none of those that are generated.
CODED = kivi(bits=4, group=16, residual=48)


@pytest.mark.parametrize("recipe", [CODED, snapkv(0.5)], ids=lambda each: each.name)
def test_drafts_change_no_token(recipe: Recipe) -> None:
    model = llama().double()
    expected = said(model, cache_for(model, recipe))
    cache = cache_for(model, recipe)
    assert forwards(model, cache, triforce(model, cache, budget=16))[0] == expected
    cache = cache_for(model, recipe)
    assert forwards(model, cache, triforce(model, cache, budget=120))[0] == expected
    draft = rapid(model, IDS, 16, keep=64, chunk=8)
    assert draft.prompt.shape[1] == 80
    for _ in range(2):  # a draft of a prompt serves several calls
        cache = cache_for(model, recipe)
        assert forwards(model, cache, draft)[0] == expected


@pytest.mark.parametrize("length", [1, 5])
def test_a_prompt_without_a_whole_chunk_is_read_whole(length: int) -> None:
    model, ids = llama().double(), IDS[:, :length]
    caches = [cache_for(model, Recipe()) for _ in range(2)]
    alone, drafted = (
        model.generate(ids, **with_cache(model, cache), assistant_model=draft, **SETTINGS).sequences
        for cache, draft in zip(caches, (None, triforce(model, caches[1])), strict=True)
    )
    assert alone.tolist() == drafted.tolist()


def test_samples_pass_through_the_same_processors() -> None:
    model = llama().double()
    cache = cache_for(model, Recipe())
    draft = triforce(model, cache, budget=64)
    one = {"do_sample": True, "top_k": 1, "output_logits": False}
    expected = said(model, cache_for(model, Recipe()))
    assert said(model, cache, assistant_model=draft, **one) == expected
    cache = cache_for(model, Recipe())  # a draft that reads what the model reads is right each time
    assert forwards(model, cache, triforce(model, cache, budget=120)) == (expected, 4)  # 1, 3, 5 and 3 tokens


def test_models_learn_from_a_draft_as_much_as_they_are_told() -> None:
    model, other = llama().double(), llama(seed=1).double()
    expected = said(model, cache_for(model, Recipe()))
    draft = rapid(other, IDS, 16, keep=64, chunk=8)
    for strength, same in ((0.0, True), (1e6, False)):
        learns = {"assistant_model": draft, "logits_processor": [draft.transfer(strength)]}
        assert (said(model, cache_for(model, Recipe()), **learns) == expected) is same
    scores, drafted = torch.randn(2, 1, 9, generator=torch.Generator().manual_seed(0))
    draft.said = {3: drafted}
    moved = draft.transfer(2.0)(IDS[:, :3], scores)
    assert torch.allclose(moved, scores + 2 * (drafted.softmax(-1) - scores.softmax(-1)))
    assert draft.transfer(2.0)(IDS[:, :4], scores) is scores


def test_rapid_reads_the_chunks_that_the_question_is_about() -> None:
    ids = torch.full((1, 90), 5)
    ids[0, 40:44] = torch.tensor([11, 12, 13, 14])
    ids[0, -4:] = torch.tensor([11, 12, 13, 14])
    draft = rapid(llama(), ids, 4, keep=10, chunk=10, before=2)
    assert draft.prompt[0].tolist() == [5, 5, *ids[0, 32:42].tolist(), *ids[0, -4:].tolist()]
    worth = overlap(ids[0, :40].split(20), torch.tensor([5]))
    assert worth[0] == worth[1] > 0
