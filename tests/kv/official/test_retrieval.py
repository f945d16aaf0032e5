"""Slots that queries read against the algorithms of the authors' code, one query head a key head."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from diffcache.kv.recipe import Recipe
from diffcache.kv.recipes.retrieval import double_sparsity, sentence_kv, tidal_decode
from diffcache.kv.store import KVStore
from tests.kv.official.prompt import Prompt


def last(text: Prompt, recipe: Recipe, prompt: int) -> list[Tensor]:
    """Return what the last query of every layer gets, [H, D], tokens coming one by one."""
    store = KVStore(text.layers, recipe)
    edges = [0, prompt, *range(prompt + 1, text.tokens + 1)]
    for start, stop in pairwise(edges):
        found = text.feed(store, start, stop)
    return [out[0, :, -1] for out in found]


def read(text: Prompt, layer: int, head: int, slots: list[int]) -> Tensor:
    """Return what the last query gets of some slots."""
    weight = text.logits(layer)[head, 0, -1, slots].softmax(-1)
    return weight @ text.v[layer, 0, head, slots]


def coded(x: Tensor) -> Tensor:
    """Round a vector to four bits between its ends."""
    low, span = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
    scale = (span / 15).half().float()
    return ((x - low.half()) / scale).round().clamp(0, 15) * scale + low.half()


@pytest.mark.parametrize("bits", [None, 4])
def test_official_double_sparsity(bits: int | None) -> None:
    """Slots read beside the token itself, one query head to a key-value head."""
    text, size = Prompt(60, layers=4), 12
    channels = ((0, 2, 5), (1, 6, 7))
    found = last(text, double_sparsity((channels,) * 4, size, bits=bits), 50)
    for layer in range(4):
        for head in range(2):
            q = text.q[layer, 0, head, -1, channels[head]]
            k = text.k[layer, 0, head][:, channels[head]]
            if bits:
                q, k = coded(q), coded(k)
            few = (k @ q)[:-1].topk(size - 1).indices.tolist()
            slots = list(range(60)) if layer < 2 else [*few, 59]
            torch.testing.assert_close(found[layer][head], read(text, layer, head, slots))


def test_official_tidal_decode() -> None:
    """Slots read beside the token itself, one query head to a key-value head."""
    text, size = Prompt(60, layers=5), 12
    found = last(text, tidal_decode(size, select=(1, 3)), 50)
    for layer in range(5):
        lead = {2: 1, 4: 3}.get(layer)
        for head in range(2):
            slots = list(range(60))
            if lead is not None:
                best = text.logits(lead)[head, 0, -1, :-1].topk(size - 1).indices
                slots = [*best.tolist(), 59]
            torch.testing.assert_close(found[layer][head], read(text, layer, head, slots))


@pytest.mark.parametrize("tokens", [52, 55, 56, 58])
def test_official_sentence_kv(tokens: int) -> None:
    """The query and the order of sentences, without the pruning of the prompt."""
    prompt, sinks, recent, block, size = 48, 2, 4, 8, 24
    text = Prompt(tokens)
    tags = torch.zeros(tokens, dtype=torch.int32)
    tags[:prompt] = torch.arange(prompt) // 6 + 1
    recipe = sentence_kv(size, sinks=sinks, recent=recent, block=block)
    text.tags = tags
    (found,) = last(text, recipe, prompt)
    sentences = [list(range(start, start + 6)) for start in range(0, prompt, 6)]
    sentences += [list(range(start, min(start + block, tokens))) for start in range(prompt, tokens, block)]
    since = prompt + (tokens - 1 - prompt) // block * block
    for head in range(2):
        k = text.k[0, 0, head]
        asked = text.q[0, 0, head, since:].mean(0)
        ranked = sorted(sentences, key=lambda one: -float(k[one].mean(0) @ asked))
        always = {*range(sinks), *range(tokens - recent, tokens)}
        room, slots = size - len(always), set(always)
        for sentence in ranked:
            fresh = [slot for slot in sentence if slot not in always]
            if len(fresh) > room:
                break
            room -= len(fresh)
            slots |= set(fresh)
        torch.testing.assert_close(found[head], read(text, 0, head, sorted(slots)))
