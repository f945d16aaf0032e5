"""Recomputing tokens in place: which ones, that all of them is a prefill, and that more are closer."""

from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.errors import AttachError
from diffcache.kv import Piece, Recipe, cacheblend, cut, kvshare, pie, quest
from diffcache.kv.hf.cache import KVCache, cache_for, detach
from diffcache.kv.hf.refresh import recompute
from diffcache.kv.refresh import align, most_changed
from diffcache.kv.reuse.cachecraft import Chunk, cachecraft, chunks_of, to_fix
from tests.kv.tiny import llama

SPACES = ("pre", "post")


def text(length: int, seed: int) -> Tensor:
    return torch.randint(3, 256, (length,), generator=torch.Generator().manual_seed(seed))


def fresh(model: Any, ids: Tensor, space: str = "pre") -> KVCache:
    """Return a cache that a prefill filled."""
    cache = empty(model, space)
    with torch.no_grad():
        model(input_ids=ids.view(-1, ids.shape[-1]), past_key_values=cache)
    return cache


def empty(model: Any, space: str = "pre") -> KVCache:
    return cache_for(model, Recipe(space=space), mode="native")


def rotations(cache: KVCache) -> list[Any]:
    return [layer.rotary for layer in cache.store.layers]  # as a cache that holds unrotated keys knows


def apart(one: KVCache, two: KVCache) -> list[float]:
    """Return how far values of each layer are apart, relative."""
    found = []
    for mine, other in zip(one.store.layers, two.store.layers, strict=True):
        a, b = mine.read().v, other.read().v
        found.append(float((a - b).norm() / b.norm()))
    return found


def alike(one: KVCache, two: KVCache, tolerance: float) -> None:
    for mine, other in zip(one.store.layers, two.store.layers, strict=True):
        a, b = mine.read(), other.read()
        assert torch.equal(a.pos, b.pos)
        torch.testing.assert_close(a.k, b.k, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(a.v, b.v, atol=tolerance, rtol=tolerance)


def pieces(model: Any, space: str = "pre") -> list[Piece]:
    chunks = [text(20, 1), text(16, 2), text(24, 3)]
    return [cut(fresh(model, chunk, space).store, chunk) for chunk in chunks]


@pytest.mark.parametrize("space", SPACES)
def test_cacheblend_is_exact_at_one_and_closer_with_more(model: Any, space: str) -> None:
    parts = pieces(model, space)
    whole = fresh(model, torch.cat([part.ids for part in parts]), space)
    rotary = rotations(fresh(model, parts[0].ids))
    errors = []
    for share in (0.0, 0.15, 0.5, 1.0):
        cache = empty(model, space)
        index = cacheblend(model, cache, parts, share=share, rotary=rotary)
        assert len(index) == share * 60
        errors.append(sum(apart(cache, whole)))
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[3] < 1e-5
    alike(cache, whole, 1e-5)


def test_generation_goes_on_after_cacheblend_and_after_an_edit(model: Any) -> None:
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    parts, before, blended = pieces(model), text(30, 0), empty(model)
    cacheblend(model, blended, parts, share=1.0)
    after, edited = torch.cat([before[:25], text(6, 5)]), fresh(model, before)
    pie(model, edited, before, after[:-1])  # all that follows the kept start is new
    for ids, cache in ((torch.cat([*(part.ids for part in parts), text(5, 9)]), blended), (after, edited)):
        ours = model.generate(input_ids=ids[None], past_key_values=cache, **settings)
        assert torch.equal(ours, model.generate(input_ids=ids[None], **settings))


@pytest.mark.parametrize("space", SPACES)
def test_pie_moves_keys_and_encodes_what_was_put_in(model: Any, space: str) -> None:
    before = text(30, 0)
    after = torch.cat([before[:9], text(4, 5), before[12:]])
    cache = fresh(model, before, space)
    held = cut(cache.store, before)
    new = pie(model, cache, before, after, rotary=rotations(fresh(model, before)))
    assert new.tolist() == [9, 10, 11, 12]
    whole = fresh(model, after, space)
    first, exact = cache.store.layers[0].read(), whole.store.layers[0].read()
    kept = [i for i in range(31) if i not in new]
    if space == "pre":  # moved without arithmetic
        stayed = [i for i in range(30) if i not in (9, 10, 11)]
        assert torch.equal(first.k[:, :, kept], held.layers[0].k[:, :, stayed])
    torch.testing.assert_close(first.k, exact.k, atol=2e-5, rtol=1e-5)
    last = cache.store.layers[-1].read()
    assert torch.equal(last.v[:, :, 13:], held.layers[-1].v[:, :, 12:])  # untouched
    alike_prefix = [layer.read().v[:, :, :13] for layer in whole.store.layers]
    for layer, wanted in zip(cache.store.layers, alike_prefix, strict=True):
        torch.testing.assert_close(layer.read().v[:, :, :13], wanted, atol=1e-5, rtol=1e-5)


def test_pie_leaves_a_cache_alone_without_an_edit_or_where_it_is_refused(model: Any) -> None:
    ids = text(30, 0)
    cache = fresh(model, ids, "post")
    before = [tensor.clone() for tensor in cache.store.tensors()]
    assert len(pie(model, cache, ids, ids.clone())) == 0
    with pytest.raises(ValueError, match="give the rotation of each layer"):
        pie(model, cache, ids, ids[2:])
    assert all(map(torch.equal, before, cache.store.tensors())) and cache.store.seen == 30


def test_kvshare_computes_the_difference_and_what_deviates(model: Any) -> None:
    before = text(40, 0)
    ids = torch.cat([before[:10], text(5, 7), before[12:35]])
    piece = cut(fresh(model, before).store, before)
    whole = fresh(model, ids)
    cache = empty(model)
    index = kvshare(model, cache, piece, ids, share=0.0)
    assert index.tolist() == [10, 11, 12, 13, 14]
    few = sum(apart(cache, whole))
    cache = empty(model)
    assert len(kvshare(model, cache, piece, ids, share=0.5)) == 5 + 17
    assert sum(apart(cache, whole)) < few
    cache = empty(model)
    kvshare(model, cache, piece, ids, share=1.0)
    alike(cache, whole, 1e-5)


def test_cachecraft_owes_nothing_in_the_same_context(model: Any) -> None:
    texts = [text(12, 1), text(16, 2), text(10, 3)]
    chunks = chunks_of(model, empty(model), texts, ["a", "b", "c"])
    whole = fresh(model, torch.cat(texts))
    cache = empty(model)
    assert len(cachecraft(model, cache, chunks)) == 0
    alike(cache, whole, 1e-5)
    cache = empty(model)
    order = [chunks[2], chunks[0], chunks[1]]
    index = cachecraft(model, cache, order, alpha=2.0)
    assert torch.equal(index.unique(), index)
    other = empty(model)
    assert len(cachecraft(model, other, order, alpha=0.0)) == 0
    whole = fresh(model, torch.cat([texts[2], texts[0], texts[1]]))
    assert sum(apart(cache, whole)) < sum(apart(other, whole))


def test_what_chunks_owe_is_the_attention_of_the_model(model: Any) -> None:
    texts = [text(6, 1), text(9, 2)]
    chunks = chunks_of(model, empty(model), texts, ["a", "b"])
    eager = llama(attn_implementation="eager")
    with torch.no_grad():
        found = eager(input_ids=torch.cat(texts)[None], output_attentions=True).attentions
    mean = torch.stack(found).mean((0, 1, 2)).double()
    assert float(chunks[1].inter[0]) == pytest.approx(float(mean[6:, :6].sum()), rel=1e-4)
    assert chunks[1].intra == pytest.approx(float(mean[6:, 6:].sum()), rel=1e-4)
    torch.testing.assert_close(chunks[1].owed, mean[6:, :6].sum(1), atol=1e-5, rtol=1e-4)
    assert chunks[0].before == () and chunks[0].intra == pytest.approx(6.0, rel=1e-5)


def test_impact_and_overlap_follow_their_formulas() -> None:
    piece = Piece(torch.arange(4), (), False)
    inter = torch.tensor([3.0, 1.0, 4.0], dtype=torch.float64)
    owed = torch.tensor([0.1, 0.9, 0.5, 0.9], dtype=torch.float64)
    chunk = Chunk("d", piece, ("a", "b", "c"), (2, 4, 8), inter, 2.0, owed)
    outside, inside = 3 / 8 + 1 / 16 + 4 / 32, 2 / 16
    assert chunk.impact == pytest.approx(1 / (1 + 2.718281828459045 ** (-outside / inside)))
    assert chunk.overlap(["a", "b", "c"]) == 1
    assert chunk.overlap(["c", "x"]) == 0.5
    assert chunk.overlap(["c", "b", "a"]) == 0  # every pair the other way round
    assert chunk.overlap(["b", "a", "c"]) == pytest.approx(2 / 3)
    assert to_fix(chunk, ["a", "b", "c"], 1.0).tolist() == []
    assert to_fix(chunk, ["c", "x"], 1.0).tolist() == [1, 3]
    assert to_fix(chunk, [], 100.0).tolist() == [0, 1, 2, 3]


def test_few_tokens_read_everything_whatever_a_retriever_chooses(model: Any) -> None:
    ids, cache = text(40, 0), cache_for(model, quest(8, page=4, skip=0))
    with torch.no_grad():
        model(input_ids=ids[None], past_key_values=cache)
    before = cache.store.layers[-1].read().v.clone()
    recompute(model, cache, ids[None], torch.tensor([5, 20]))
    torch.testing.assert_close(cache.store.layers[-1].read().v, before, atol=1e-5, rtol=1e-5)


def test_a_model_that_was_released_is_refused() -> None:
    model, ids = llama(), text(12, 0)
    cache = fresh(model, ids)
    recompute(model, cache, ids[None], torch.arange(12))
    detach(model)
    with pytest.raises(AttachError, match="LlamaForCausalLM uses the attention function"):
        recompute(model, cache, ids[None], torch.arange(12))
    assert cache.writer.refreshing is None


PAD = 3  # tokens of padding in row 1


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 1.0])
def test_tokens_that_changed_most_are_those_of_loops(share: float) -> None:
    old, new = torch.randn(2, 2, 2, 10, 4, generator=torch.Generator().manual_seed(0))
    valid = torch.arange(10) >= torch.tensor([[0], [PAD]])
    found = most_changed(old, new, valid, share)
    for row, allowed in enumerate((range(10), range(PAD, 10))):
        worth = [float((old[row, :, i] - new[row, :, i]).square().sum()) for i in range(10)]
        count = -(-round(share * len(allowed) * 1000) // 1000)
        wanted = sorted(sorted(allowed, key=lambda i: -worth[i])[:count])
        assert found[row].nonzero()[:, 0].tolist() == wanted


def test_edits_are_what_is_not_in_the_text_before() -> None:
    assert align([1, 2, 3, 4], [1, 9, 3, 4]).tolist() == [0, -1, 2, 3]
    assert align([1, 2, 3, 4], [3, 4]).tolist() == [2, 3]
    assert align([], [5]).tolist() == [-1]
    before, after = torch.randint(0, 9, (2, 10), generator=torch.Generator().manual_seed(0))
    source = align(before[:8], after)
    kept = source[source >= 0]
    assert bool((kept[1:] > kept[:-1]).all())  # in order
    assert torch.equal(before[kept], after[source >= 0])
