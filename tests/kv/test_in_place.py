"""Eviction where slots stand keeps the slots that sorting all of them keeps, and nothing grows."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv import Recipe, h2o, keyformer, kivi, streaming_llm, tova
from diffcache.kv import store as store_module
from diffcache.kv.attend import Query
from diffcache.kv.rotary import Rotary
from diffcache.kv.store import KVStore
from tests.internals import HostReads
from tests.kv.examples import examples

LAYERS, HEADS, GROUPS, SIZE = 2, 2, 2, 8
ROTARY = Rotary.default(1e4, SIZE)
RECIPES = {
    "h2o": h2o(16),
    "h2o of a share": h2o(0.4),
    "h2o at every fourth": h2o(32, every=4),
    "tova": tova(16),
    "keyformer": keyformer(16),
    "streaming_llm": streaming_llm(16),
    "streaming_llm of a share": streaming_llm(0.4),
    "streaming_llm in place": streaming_llm(16, sinks=0, rotate=False),
}


class Run:
    """A store that is fed the same random tokens as any other."""

    def __init__(self, recipe: Recipe, batch: int = 1, rotary: Any = ROTARY, layers: int = LAYERS, size: int = SIZE):
        self.drawn = torch.Generator().manual_seed(0)
        self.store = KVStore(layers, recipe, rotary=[rotary] * layers)
        self.batch, self.rotary, self.size = batch, rotary, size

    def feed(self, count: int, valid: Tensor | None = None) -> Tensor:
        """Write tokens as a model does, and return what attention gives, [L, B, Hq, n, D]."""
        self.store.begin(count)
        outs = []
        for index, layer in enumerate(self.store.layers):
            k, v, q = (
                torch.randn(self.batch, heads, count, self.size, generator=self.drawn)
                for heads in (HEADS, HEADS, HEADS * GROUPS)
            )
            start = layer.seen
            pos = torch.arange(start, start + count)
            if layer.rotary is None:
                k = self.rotary.rotate(k, pos)
            layer.write(k, v, valid=valid)
            query = Query(self.rotary.rotate(3 * q, pos), start, self.size**-0.5)
            outs.append(self.store.attend(index, query, valid))
        return torch.stack(outs)


@pytest.mark.parametrize(("name", "batch"), [("h2o", 1), *((name, 2) for name in RECIPES)])
def test_what_is_kept_is_what_sorting_all_slots_keeps(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [40] + [1 if step % 7 else 2 for step in range(28)]
    quick, sorting = Run(RECIPES[name], batch), Run(RECIPES[name], batch)
    choose, done = store_module.slots_to_drop, Counter[bool]()

    def counted(*given: Any) -> Any:
        found = choose(*given)
        done[found is not None] += 1
        return found

    for count in chunks:
        monkeypatch.setattr(store_module, "slots_to_drop", counted)
        found = quick.feed(count)
        monkeypatch.setattr(store_module, "slots_to_drop", lambda *given: None)
        torch.testing.assert_close(found, sorting.feed(count), rtol=1e-5, atol=1e-5)
        for one, other in zip(quick.store.layers, sorting.store.layers, strict=True):
            kept, wanted = (layer.meta()["pos"].sort(-1).values for layer in (one, other))
            assert torch.equal(*torch.broadcast_tensors(kept, wanted))
    assert done[True] >= 8 > done[False]


@pytest.mark.parametrize(
    "rotary", [ROTARY, Rotary.default(1e4, 8, interleaved=True), Rotary(Rotary.default(1e4, 4).inv_freq, 1.3)]
)
def test_keys_held_rotated_are_read_as_those_rotated_on_reading(rotary: Rotary) -> None:
    for recipe in (streaming_llm(16), streaming_llm(0.4), streaming_llm(16, sinks=0)):
        for pad in (0, 5):
            valid = torch.ones(2, 40, dtype=torch.bool)
            valid[0, :pad] = False
            held = Run(recipe, 2, rotary)
            read = Run(replace(recipe, space="pre"), 2, rotary)
            for count in (40, 1, 1, 3, *[1] * 3):
                given = valid if count == 40 and pad else None
                one, other = (run.feed(count, given)[:, :, :, -1:] for run in (held, read))
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


ONES = (streaming_llm(16), streaming_llm(16, rotate=False), h2o(16), tova(16), keyformer(16))


@pytest.mark.parametrize("recipe", [*ONES, kivi(2, group=8, residual=64)], ids=lambda recipe: recipe.name)
def test_a_generated_token_reads_nothing_from_the_device(recipe: Recipe) -> None:
    run = Run(recipe)
    for count in (72, 1, 1, 1):
        run.feed(count)
    with HostReads() as reads:
        for _ in range(4):
            run.feed(1)
    assert not reads.found


MADE = {name: make() for name, make in examples().items()}
DECODING = {name: made for name, made in MADE.items() if made.trigger is not None and made.trigger.decoding}


@pytest.mark.parametrize("name", DECODING)
def test_a_recipe_that_bounds_what_is_held_holds_no_more_after_2000_tokens(name: str) -> None:
    recipe = DECODING[name]
    run = Run(recipe, size=16, layers=1 if recipe.bounded else 4)
    run.feed(48)
    held = []
    for _ in range(20 if recipe.bounded else 6):
        for count in (99, 1):
            run.feed(count)
        held.append(run.store.nbytes)
    if recipe.bounded:
        assert run.store.seen == 48 + 2000
        assert max(held[10:]) <= max(held[:10])
    else:
        assert held[-1] > 2 * held[1]


def test_recipes_say_whether_they_bound_what_is_held() -> None:
    bounded = {name for name, make in examples().items() if make().bounded}
    growing = {"duo_attention", "razor_attention", "h2o", "zipcache", "mikv", "staircase"}
    assert bounded == DECODING.keys() - growing  # h2o is that of a share
    assert h2o(16).bounded and not RECIPES["h2o of a share"].bounded
