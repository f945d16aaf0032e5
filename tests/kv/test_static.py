"""First and latest tokens in memory of a fixed size, and their compiled graph."""

from typing import Any

import pytest
import torch

from diffcache.eval.workshop.kv import oracle
from diffcache.kv import Recipe, static_cache_for
from diffcache.kv.budget import Uniform
from diffcache.kv.hf.static import StaticWindow
from diffcache.kv.plan import TopK
from diffcache.kv.score.recency import Recency
from diffcache.kv.trigger import EveryStep
from tests.kv.tiny import GREEDY, gemma, llama, prompts, row, same


def window(capacity: int, sinks: int) -> Recipe:
    """Return what the static window does, one token later: its newest token is in the budget."""
    return Recipe(score=Recency(), budget=Uniform(capacity - 1), plan=TopK(sinks=sinks), trigger=EveryStep())


@pytest.mark.parametrize(("capacity", "sinks"), [(12, 4), (40, 1), (47, 0)])
def test_it_holds_what_streaming_holds(capacity: int, sinks: int) -> None:
    model = llama().double()
    inputs = row(prompts(), 1)
    theirs, _, _ = oracle.run(model, window(capacity, sinks), inputs, **GREEDY)
    cache = static_cache_for(model, capacity, sinks=sinks)
    ours = model.generate(**inputs, past_key_values=cache, **GREEDY)
    same(ours, theirs, 1e-6)
    assert cache.layers[0].keys.shape[2] == capacity


@pytest.mark.parametrize("model", [llama().double(), gemma().double()], ids=["llama", "gemma"])
def test_nothing_is_lost_while_there_is_room(model: Any) -> None:
    inputs = row(prompts(), 1)
    for way in ({}, {"num_beams": 3}):
        ours = model.generate(**inputs, past_key_values=static_cache_for(model, 128), **GREEDY, **way)
        same(ours, model.generate(**inputs, **GREEDY, **way), 1e-6)


def test_last_tokens_are_taken_back_while_there_is_room() -> None:
    model, ids = llama().double(), row(prompts(), 1)["input_ids"]
    cache = static_cache_for(model, 64)
    with torch.no_grad():  # a prompt may be read compiled
        expected = torch.compile(model.forward, backend="eager")(input_ids=ids, past_key_values=cache).logits
        cache.crop(-5)
        again = model(input_ids=ids[:, 43:], past_key_values=cache).logits
    torch.testing.assert_close(again, expected[:, 43:])


def test_a_chunk_later_on_sees_what_is_held() -> None:
    core = StaticWindow(6, 2)
    k = torch.arange(20.0).view(1, 1, 20, 1)
    core.update(k[:, :, :9], k[:, :, :9])
    seen, _ = core.update(k[:, :, 9:12], k[:, :, 9:12])
    assert seen.flatten().tolist() == [0, 1, 5, 6, 7, 8, 9, 10, 11]
    held, _ = core.update(k[:, :, 12:13], k[:, :, 12:13])
    assert sorted(held.flatten().tolist()) == [0, 1, 9, 10, 11, 12]
    assert core.get_mask_sizes(1) == (6, 0) and core.get_mask_sizes(3) == (9, 7)
    core.reset()
    assert int(core.seen) == 0


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 cannot trace transformers' own wrappers")
def test_one_graph_serves_every_step() -> None:
    model = llama(num_hidden_layers=1)
    inputs = row(prompts(), 1)
    token = torch.tensor([[5]])
    plain, compiled = static_cache_for(model, 12), static_cache_for(model, 12)
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    step = torch.compile(model.forward, backend=count, fullgraph=True)
    with torch.no_grad():
        model(**inputs, past_key_values=plain)
        model(**inputs, past_key_values=compiled)
        for number in range(14):
            at = torch.tensor([[48 + number]])
            expected = model(input_ids=token, position_ids=at, past_key_values=plain).logits
            found = step(input_ids=token, position_ids=at, past_key_values=compiled).logits
            torch.testing.assert_close(found, expected)
    assert len(graphs) == 1
