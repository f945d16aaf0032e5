"""Positions of several axes, as images have them."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from diffcache.errors import AttachError
from diffcache.eval.workshop.kv import oracle
from diffcache.kv import (
    snapkv,
    streaming_llm,
    xkv,
)
from diffcache.kv.hf.cache import cache_for, detach
from diffcache.kv.life import save as life
from diffcache.kv.rotary_nd import RotaryND, RotaryTable
from tests.kv.tiny import GREEDY, IDS, generate, same
from tests.zoo.language import build


def with_image(model: Any) -> Any:
    """Return two rows of text around an image of four by six tokens, the second one padded."""
    config = model.config
    image = [
        config.vision_start_token_id,
        *[config.image_token_id] * 24,
        config.vision_end_token_id,
    ]
    ids = torch.cat([IDS[:, :8], torch.tensor([image]), IDS[:, 8:20]], 1)
    ids = torch.cat([ids, torch.cat([torch.zeros_like(ids[:, :5]), ids[:, 5:]], 1)])
    mask = (ids != 0).long()
    mask[0] = 1
    vision = config.vision_config
    size = 3 * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(2 * 96, size, generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids, "attention_mask": mask, "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 8, 12]] * 2),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen2VLForConditionalGeneration", "qwen2_vl"),
        ("Qwen3VLForConditionalGeneration", "qwen3_vl"),
    ],
)
def test_unrotated_keys_of_an_image_are_where_the_model_put_them(name: str, kind: str) -> None:
    model = build(name, kind, **({"vision_config.hidden_size": 64} if kind == "qwen2_vl" else {}))
    inputs = with_image(model)
    embedding = model.model.language_model.rotary_emb
    expected = generate(model, inputs=inputs)
    for recipe in (streaming_llm(4096), xkv(1.0, value_rank=1.0, block=16, layers=2)):
        cache = cache_for(model, recipe)
        same(generate(model, cache, inputs), expected, 1e-3)
    table = cache.writer.table
    assert table.shape == (2, 55, 3) and not torch.equal(table[..., 1], table[..., 2])
    hidden = replace(snapkv(0.4, window=4), space="pre")
    ours, kept, log = oracle.run(model, hidden, inputs, **GREEDY)
    assert kept.store.layers[0].held < 55
    same(ours, oracle.expected(model, kept, log, inputs, **GREEDY), 1e-3)
    few = cache_for(model, streaming_llm(20, sinks=4))
    assert generate(model, few, inputs).sequences.shape == (2, 56)
    with pytest.raises(ValueError, match="positions are looked up by token, and have no place"):
        life.save("nowhere", few.store)
    with pytest.raises(ValueError, match="positions up to .* tokens read: positions of several"):
        generate(model, cache_for(model, "expected_attention", queries=8), inputs)
    detach(model)
    with pytest.raises(AttachError, match="past: streaming_llm .*not known of `past`"):
        cache_for(model, streaming_llm(12), past=expected.past_key_values)
    del cache, kept, few, ours
    gc.collect()
    assert not embedding._forward_pre_hooks


def test_gaps_close_on_all_axes_and_images_keep_their_shape() -> None:
    text, image = [(0, 0, 0), (1, 1, 1)], [(2, 2, 2), (2, 2, 3), (2, 3, 2), (2, 3, 3)]
    table = torch.tensor([*text, *image, *[(n, n, n) for n in range(4, 8)]])
    rotary = RotaryTable(torch.tensor([1.0, 0.5, 0.25]), axes=(0, 1, 2), table=table[None])

    def closed(*tokens: int) -> list[list[int]]:
        return rotary.closed(torch.tensor([[tokens]]))[0, 0].tolist()

    assert closed(0, 2, 3, 4, 5, 8, 9) == [
        [3, 3, 3], [4, 4, 4], [4, 4, 5], [4, 5, 4], [4, 5, 5], [6, 6, 6], [7, 7, 7]
    ]  # fmt: skip
    assert closed(9, 8, 0) == [[7, 7, 7], [6, 6, 6], [5, 5, 5]], "in whatever order"
    assert closed(-1, 2, 4, 5, 6)[1:] == table[[2, 4, 5, 6]].tolist(), "holes in an image stay"
    whole = torch.arange(10)[None, None]
    assert torch.equal(rotary.closed(whole)[0, 0], table)
    k = torch.randn(1, 2, 10, 6)
    inner = RotaryND(rotary.inv_freq, axes=(0, 1, 2))
    assert torch.equal(rotary.rotate(k, whole), inner.rotate(k, table))
