"""Prepacking: packed and taken apart again is as if every prompt had been alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv.hf.cache import cache_for
from diffcache.kv.life.pack import fill, pack
from diffcache.kv.recipe import Recipe
from tests.kv.tiny import llama

torch.set_num_threads(1)
LENGTHS = (5, 12, 3, 9, 7, 12)


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


def prompts() -> list[Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(3, 256, (n,), generator=drawn) for n in LENGTHS]


def test_rows_are_few_and_hold_every_prompt_once() -> None:
    found = pack(prompts(), 16)
    assert found.ids.shape == (4, 16)  # 12 + 3, 12, 9 + 7, 5
    rows, last = found.last
    for number, prompt in enumerate(prompts()):
        here = found.tags == number
        assert torch.equal(found.ids[here], prompt)
        assert found.position_ids[here].tolist() == list(range(len(prompt)))
        assert found.ids[rows[number], last[number]] == prompt[-1]
    assert pack([torch.arange(4)], pad=7).ids.tolist() == [[0, 1, 2, 3]]
    assert pack([torch.arange(4), torch.arange(2)], pad=7).ids.tolist() == [
        [0, 1, 2, 3],
        [0, 1, 7, 7],
    ]


def test_the_mask_is_block_diagonal() -> None:
    found = pack(prompts(), 20)
    mask = found.mask
    for row in range(len(found.ids)):
        for i in range(20):
            for j in range(20):
                same = found.tags[row, i] == found.tags[row, j] >= 0
                assert bool(mask[row, 0, i, j]) == (bool(same) and j <= i)


@pytest.mark.parametrize("space", ["post", "pre"])
def test_packed_and_unpacked_is_each_prompt_alone(model: Any, space: str) -> None:
    found = pack(prompts(), 16)
    cache = cache_for(model, Recipe(space=space), mode="native")
    with torch.no_grad():
        out = model(
            input_ids=found.ids, position_ids=found.position_ids, attention_mask=found.mask,
            past_key_values=cache,
        )  # fmt: skip
    rows, last = found.last
    apart = found.unpack(cache.store)
    for number, prompt in enumerate(prompts()):
        alone = cache_for(model, Recipe(space=space), mode="native")
        with torch.no_grad():
            logits = model(input_ids=prompt[None], past_key_values=alone).logits
        packed = out.logits[rows[number], last[number]]
        torch.testing.assert_close(packed, logits[0, -1], atol=2e-5, rtol=1e-5)
        for slots, layer in zip(apart[number], alone.store.layers, strict=True):
            wanted = layer.read()
            assert torch.equal(slots.pos, wanted.pos)
            torch.testing.assert_close(slots.k, wanted.k, atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(slots.v, wanted.v, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("space", ["post", "pre"])
def test_generation_goes_on_as_a_padded_batch(model: Any, space: str) -> None:
    found = pack(prompts(), 16)
    cache = cache_for(model, Recipe(space=space), mode="native")
    with torch.no_grad():
        model(
            input_ids=found.ids, position_ids=found.position_ids, attention_mask=found.mask,
            past_key_values=cache,
        )  # fmt: skip
    batch = cache_for(model, Recipe(space=space), mode="native")
    fill(
        batch.store,
        [[x.narrow(0, x.width - 1) for x in each] for each in found.unpack(cache.store)],
    )
    ids = torch.stack(
        [torch.cat([torch.zeros(12 - len(p), dtype=torch.long), p]) for p in prompts()]
    )
    mask = torch.stack([torch.arange(12) >= 12 - len(p) for p in prompts()]).long()
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ours = model.generate(input_ids=ids, attention_mask=mask, past_key_values=batch, **settings)
    wanted = model.generate(input_ids=ids, attention_mask=mask, **settings)
    assert torch.equal(ours, wanted)
