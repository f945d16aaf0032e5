"""Prefix tree: hashes of a chain, what is forgotten first, what is pinned; and in front of a model."""

import pytest
import torch

from diffcache.kv import Piece, PrefixTree, Recipe, cache_for, cut, joined, lay_out, time_to_live
from tests.kv.tiny import llama


def test_texts_share_what_they_begin_with() -> None:
    tree: PrefixTree[str] = PrefixTree("m", 100, chunk=2)
    assert tree.insert([1, 2, 3, 4], ["a", "b"], [10, 10]) == 2
    assert tree.insert([1, 2, 5, 6, 7], ["other", "c"], [10, 10]) == 2
    assert len(tree) == 3 and tree.nbytes == 30
    assert tree.match([1, 2, 5, 6, 9, 9]) == ["a", "c"]
    assert tree.match([1, 2, 9, 9]) == ["a"]
    assert tree.match([2, 1]) == []


def test_the_least_recent_leaf_goes_first() -> None:
    tree: PrefixTree[str] = PrefixTree("m", 30, chunk=1)
    tree.insert([1, 2], ["a", "b"], [10, 10])
    tree.insert([3], ["c"], [10])
    tree.match([1, 2])
    tree.insert([4], ["d"], [10])
    assert tree.match([3]) == []
    tree.match([4])
    tree.insert([5], ["e"], [10])  # "b" goes before its parent
    assert tree.match([1, 2]) == ["a"] and tree.nbytes == 30
    assert tree.insert([6, 7, 8, 9], list("wxyz"), [10] * 4) == 3
    assert tree.match([6, 7, 8, 9]) == ["w", "x", "y"] and len(tree) == 3


def test_a_pin_holds_until_its_time_has_come() -> None:
    now = [0.0]
    tree: PrefixTree[str] = PrefixTree("m", 20, chunk=1, clock=lambda: now[0])
    tree.insert([1, 2], ["a", "b"], [10, 10])
    assert tree.pin([1, 2, 3], 5.0) == 2
    assert tree.insert([3], ["c"], [10]) == 0
    now[0] = 4.9
    assert tree.insert([3], ["c"], [10]) == 0
    now[0] = 5.0
    assert tree.insert([3], ["c"], [10]) == 1
    assert tree.match([1, 2]) == ["a"]
    tree.pin([1], 100.0)
    tree.pin([1], 0.0)
    assert tree.insert([4, 5], ["d", "e"], [10, 10]) == 2


def test_time_to_live_weighs_reloading_against_holding() -> None:
    durations = [1.0, 2.0, 3.0, 60.0]

    def gain(seconds: float) -> float:
        return sum(d <= seconds for d in durations) / 4 * 10 - seconds

    best = time_to_live(durations, 10.0)
    assert best == 3.0
    assert gain(best) == max(gain(i / 100) for i in range(7000))
    assert time_to_live(durations, 0.5) == 0.0
    assert time_to_live(durations, 1000.0) == 60.0
    assert time_to_live([], 10.0) == 0.0


CHUNK, FIVE = 8, {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("space", ["post", "pre"])
def test_a_held_prefix_goes_on_bit_for_bit(space: str) -> None:
    model = llama()
    drawn = torch.Generator().manual_seed(0)
    text, ending = (torch.randint(3, 256, (n,), generator=drawn) for n in (37, 6))
    cache = cache_for(model, Recipe(space=space), mode="native")
    with torch.no_grad():
        model(input_ids=text[None], past_key_values=cache)
    pieces = [cut(cache.store, text[start : start + CHUNK], start) for start in range(0, 37 // CHUNK * CHUNK, CHUNK)]
    tree: PrefixTree[Piece] = PrefixTree("tiny", 10**6, CHUNK)
    tree.insert(text.tolist(), pieces, [piece.nbytes for piece in pieces])

    other = torch.cat([text[:20], ending])
    found = tree.match(other.tolist())
    assert len(found) == 2  # the third chunk is another
    again = cache_for(model, Recipe(space=space), mode="native")
    lay_out(again.store, joined(found), torch.arange(16))
    assert again.get_seq_length() == 16
    for layer, held in zip(again.store.layers, cache.store.layers, strict=True):
        assert torch.equal(layer.read().k, held.read().k[:, :, :16])
    ours = model.generate(input_ids=other[None], past_key_values=again, **FIVE)
    assert torch.equal(ours, model.generate(input_ids=other[None], **FIVE))
