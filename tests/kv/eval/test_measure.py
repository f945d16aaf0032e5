"""What is measured of a recipe: the same each time, with honest bytes, and peers alike."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffcache.eval.kv import peer, recall_cost
from diffcache.kv import Recipe, cache_for, detach, keydiff, kvzip, quest, streaming_llm
from tests.kv.eval.small import CONTEXT, task


@pytest.fixture(scope="module")
def model(folder: Path) -> nn.Module:
    return task(folder).load()


def measured(model: nn.Module, row: Any, folder: Path, **changes: object) -> dict[str, Any]:
    found = recall_cost.measure(model, row, task(folder, **changes))
    return {name: value for name, value in found.items() if name != "seconds"}


def test_an_exact_cache_holds_all_and_reads_all(model: nn.Module, folder: Path) -> None:
    found = measured(model, Recipe(), folder)
    assert (found["share"], found["read"], found["slots"]) == (1.0, 1.0, CONTEXT)
    assert found["bytes"] == 2 * 2 * 2 * 16 * 4 * CONTEXT  # k and v, layers, heads, D, float32
    assert found["mode"] == "stock" and found["name"] == "none" and len(found["hits"]) == 4


def test_measuring_again_gives_the_same(model: nn.Module, folder: Path) -> None:
    row = keydiff(0.5)
    assert measured(model, row, folder) == measured(model, row, folder)
    assert measured(model, row, folder)["perplexity"] != measured(model, row, folder, seed=1)["perplexity"]


def test_the_answers_are_those_of_the_whole_text(model: nn.Module, folder: Path) -> None:
    asked = task(folder)
    hits = []
    for batch in asked.batches():
        for number in range(asked.queries):
            ids = torch.cat([batch.context, batch.queries[:, number]], 1)
            with torch.no_grad():
                said = model(input_ids=ids).logits[:, CONTEXT + 1 : CONTEXT + 3].argmax(-1)
            hits.append(said == batch.expected[:, number])
    wanted = torch.stack(hits).view(2, 2, 2, 2).transpose(1, 2).flatten(0, 1)
    assert recall_cost.hits_of(measured(model, Recipe(), folder)).equal(wanted)


def test_dropped_slots_are_not_counted_and_what_single_queries_read_is(model: nn.Module, folder: Path) -> None:
    found = measured(model, streaming_llm(16, rotate=False), folder)
    assert found["slots"] == 16 and found["mode"] == "native"
    assert 16 / CONTEXT < found["share"] < 20 / CONTEXT  # keys, values, and positions
    whole = measured(model, kvzip(0.5), folder)  # asked by the context itself
    assert whole["slots"] == CONTEXT // 2
    found = measured(model, quest(0.25, page=4, skip=0), folder)
    assert found["slots"] == CONTEXT and 0.2 < found["read"] < 0.35
    assert measured(model, quest(1.0, page=4, skip=0), folder)["read"] == 1.0


def test_the_model_is_as_before_whatever_happens(model: nn.Module, folder: Path) -> None:
    before = model.config._attn_implementation  # type: ignore[union-attr]
    measured(model, keydiff(0.5), folder)
    assert model.config._attn_implementation == before  # type: ignore[union-attr]

    class Failing(peer.PressPeer):
        def recipe(self, model: nn.Module, ids: Tensor) -> Recipe:
            cache_for(model, keydiff(0.5))
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        measured(model, Failing("knorm"), folder)
    assert model.config._attn_implementation == before  # type: ignore[union-attr]


def test_what_a_press_keeps_is_what_our_store_holds(model: nn.Module, folder: Path, monkeypatch) -> None:
    drawn = torch.Generator().manual_seed(0)
    said: list[Tensor] = []

    def kept(seen: peer.Seen, make: object, attentions: bool) -> Tensor:
        assert seen.attentions.shape[-1] == CONTEXT and hasattr(seen.module, "rotary_emb")
        mask = torch.rand(seen.k.shape[:3], generator=drawn) < 0.3
        mask[..., -1] = True
        said.append(mask)
        return mask

    monkeypatch.setattr(peer, "kept", kept)
    ids = next(task(folder).batches()).context
    recipe = peer.PressPeer("adakv", 0.25).recipe(model, ids)
    assert not hasattr(model.model.layers[0].self_attn, "rotary_emb")  # type: ignore[union-attr]
    try:
        cache = cache_for(model, recipe)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
        cache.settle()
    finally:
        detach(model)
    for layer, mask in zip(cache.store.layers, said, strict=True):
        pos = layer.read().pos
        for row in range(len(ids)):
            for head in range(2):
                held = pos[row, head][pos[row, head] >= 0]
                assert held.tolist() == mask[row, head].nonzero()[:, 0].tolist()
    found = measured(model, peer.PressPeer("adakv", 0.25), folder)
    wanted = torch.stack(said[2:]).double().mean() * CONTEXT
    assert found["slots"] == pytest.approx(float(wanted)) and found["name"] == "kvpress/adakv"


@pytest.mark.skipif(peer.installed() is None, reason="kvpress is not installed")
@pytest.mark.parametrize("name", peer.PRESSES)
def test_kvpress_answers_for_every_press(name: str, model: nn.Module, folder: Path) -> None:
    found = measured(model, peer.peer(f"kvpress/{name}", 0.5), folder, samples=2)
    assert 0.2 * CONTEXT < found["slots"] < 0.7 * CONTEXT
    assert not hasattr(model.model.layers[0].self_attn, "masked_key_indices")  # type: ignore[union-attr]
    assert "kvpress" not in sys.modules  # the stub would be what a later import finds


@pytest.mark.skipif(peer.installed() is None, reason="kvpress is not installed")
def test_settings_go_to_the_press_that_has_them() -> None:
    assert dict(peer.peer("kvpress/adakv", 0.5, window_size=4).settings) == {"window_size": 4}
    with pytest.raises(ValueError, match="KnormPress has no setting 'window'"):
        peer.peer("kvpress/knorm", 0.5, window=4)
    for wrong in ("compression_ratio", "press"):  # the budget says it, and the name
        with pytest.raises(ValueError, match=f"SnapKVPress has no setting '{wrong}'"):
            peer.peer("kvpress/adakv", 0.5, **{wrong: 0.9})
