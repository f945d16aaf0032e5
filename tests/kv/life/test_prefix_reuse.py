"""A prefix tree in front of a model: held prefixes need not be computed, and nothing changes."""

from __future__ import annotations

import pytest
import torch

from diffcache.kv.hf.cache import cache_for
from diffcache.kv.life.prefix import PrefixTree
from diffcache.kv.recipe import Recipe
from diffcache.kv.reuse.piece import Piece, cut, joined, lay_out
from tests.kv.tiny import llama

torch.set_num_threads(1)
CHUNK = 8
GREEDY = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("space", ["post", "pre"])
def test_a_held_prefix_goes_on_bit_for_bit(space: str) -> None:
    model = llama()
    drawn = torch.Generator().manual_seed(0)
    text, ending = (torch.randint(3, 256, (n,), generator=drawn) for n in (37, 6))
    cache = cache_for(model, Recipe(space=space), mode="native")
    with torch.no_grad():
        model(input_ids=text[None], past_key_values=cache)
    pieces = [
        cut(cache.store, text[start : start + CHUNK], start)
        for start in range(0, 37 // CHUNK * CHUNK, CHUNK)
    ]
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
    ours = model.generate(input_ids=other[None], past_key_values=again, **GREEDY)
    assert torch.equal(ours, model.generate(input_ids=other[None], **GREEDY))
