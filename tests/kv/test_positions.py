"""Positions of frames and of images: tokens keep their place in the grid."""

import gc
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.attach.attention import Door, attention_sites
from diffcache.errors import AttachError
from diffcache.eval.workshop.kv import oracle
from diffcache.kv import cache_for, detach, snapkv, streaming_llm, xkv
from diffcache.kv.attend import Query, attend
from diffcache.kv.layer import KVLayer
from diffcache.kv.life import save as life
from diffcache.kv.positions import Absolute, BlockRelativistic, Cyclic, PositionMap, Refresh, Slot
from diffcache.kv.rotary_nd import RotaryND, RotaryTable
from tests.kv.tiny import IDS, SHORT, generate, same
from tests.zoo.catalog import cases
from tests.zoo.language import build

GRID, UNIT = (2, 3), 6
MAPS: dict[str, PositionMap | None] = {
    "none": None,
    "absolute": Absolute(),
    "slot": Slot(),
    "relativistic": BlockRelativistic(7),
    "refresh": Refresh(8, 3),
    "official refresh": Refresh(8, 3, official=True),
    "cyclic": Cyclic(5),
}


def number(name: str, frame: int, held: list[int]) -> int:
    """The number of one frame, written out from the papers."""
    newest = max(held)
    count = list(range(8))
    while len(count) <= newest:  # counting begins anew from 3 when it comes to 8
        count.append(3 if count[-1] == 7 else count[-1] + 1)
    if name == "slot":
        return newest - len({other for other in held if other > frame})
    if name == "relativistic":
        return frame if newest < 7 else max(frame - (newest - 6), 0)
    if name == "refresh":
        return max(count[newest] - (newest - frame), 0)
    if name == "official refresh":
        return count[frame]
    return frame % 5 if name == "cyclic" else frame


def turned(x: Tensor, places: list[tuple[int, int, int]]) -> Tensor:
    """Rotate [B, H, n, 12] by time, height and width, four channels each, pair by pair."""
    out = x.clone()
    for token, place in enumerate(places):
        for axis, pair in product(range(3), range(2)):
            angle = torch.tensor(place[axis] * 10000.0 ** (-pair / 2))
            one, two = x[:, :, token, 4 * axis + 2 * pair], x[:, :, token, 4 * axis + 2 * pair + 1]
            out[:, :, token, 4 * axis + 2 * pair] = one * angle.cos() - two * angle.sin()
            out[:, :, token, 4 * axis + 2 * pair + 1] = two * angle.cos() + one * angle.sin()
    return out


def at(token: int, name: str, held: list[int]) -> tuple[int, int, int]:
    row = token % UNIT
    return (number(name, token // UNIT, held), row // GRID[1], row % GRID[1])


@pytest.mark.parametrize("name", MAPS)
def test_a_token_sparse_keep_is_the_masked_recompute(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 2, 2, 14 * UNIT, 12, generator=generator)
    rotary = replace(RotaryND.sections((4, 4, 4)), grid=GRID)
    layer = KVLayer(rotary=rotary, positions=MAPS[name])
    layer.write(k[:, :, : 10 * UNIT], v[:, :, : 10 * UNIT])
    loose = [20, 21, 37, 50]  # between a frame of the first tokens and the last two frames
    kept = [*range(UNIT), *loose, *range(8 * UNIT, 10 * UNIT)]
    layer.replace(layer.read().gather(torch.tensor(kept).expand(2, 2, -1)))
    for first in (10, 12):  # two chunks, each written as noise and then as it is
        if first == 12:  # settled slots and new ones are numbered together
            layer.settle_tail()
        tokens = list(range(first * UNIT, (first + 2) * UNIT))
        layer.write(torch.ones_like(k[:, :, tokens]), v[:, :, tokens])
        run = range(layer.held - len(tokens), layer.held)
        layer.overwrite(run, k[:, :, tokens], v[:, :, tokens])
        kept += tokens
        asked = layer.rotate(q[:, :, tokens], torch.tensor(tokens))
        out = attend(Query(asked, tokens[0], 0.3, causal=False), layer.views())
        held = [token // UNIT for token in kept]
        there = turned(k[:, :, kept], [at(token, name, held) for token in kept])
        here = turned(q[:, :, tokens], [at(token, name, held) for token in tokens])
        wanted = (here @ there.mT * 0.3).softmax(-1) @ v[:, :, kept]
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
        order = torch.randperm(len(kept), generator=generator)
        mixed = layer.fork()
        mixed.replace(layer.read().gather(order.expand(2, 2, -1)))
        again = attend(Query(asked, tokens[0], 0.3, causal=False), mixed.views())
        torch.testing.assert_close(again, wanted, atol=1e-5, rtol=1e-5)


def with_image(model: Any) -> Any:
    """Return two rows of text around an image of four by six tokens, the second one padded."""
    config = model.config
    image = [config.vision_start_token_id, *[config.image_token_id] * 24, config.vision_end_token_id]
    ids = torch.cat([IDS[:, :8], torch.tensor([image]), IDS[:, 8:20]], 1)
    ids = torch.cat([ids, torch.cat([torch.zeros_like(ids[:, :5]), ids[:, 5:]], 1)])
    mask = (ids != 0).long()
    mask[0] = 1
    vision = config.vision_config
    size = 3 * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(2 * 96, size, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == config.image_token_id).int()}
    return inputs | {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 8, 12]] * 2)}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("Qwen2VLForConditionalGeneration", "qwen2_vl"), ("Qwen3VLForConditionalGeneration", "qwen3_vl")],
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
    assert table.shape == (2, 49, 3) and not torch.equal(table[..., 1], table[..., 2])
    hidden = replace(snapkv(0.4, window=4), space="pre")
    ours, kept, log = oracle.run(model, hidden, inputs, **SHORT)
    assert kept.store.layers[0].held < 49
    same(ours, oracle.expected(model, kept, log, inputs, **SHORT), 1e-3)
    few = cache_for(model, streaming_llm(20, sinks=4))
    assert generate(model, few, inputs).sequences.shape == (2, 50)
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

    assert closed(0, 2, 3, 4, 5, 8, 9) == [[3, 3, 3], [4, 4, 4], [4, 4, 5], [4, 5, 4], [4, 5, 5], [6, 6, 6], [7, 7, 7]]
    assert closed(9, 8, 0) == [[7, 7, 7], [6, 6, 6], [5, 5, 5]], "in whatever order"
    assert closed(-1, 2, 4, 5, 6)[1:] == table[[2, 4, 5, 6]].tolist(), "holes in an image stay"
    whole = torch.arange(10)[None, None]
    assert torch.equal(rotary.closed(whole)[0, 0], table)
    k = torch.randn(1, 2, 10, 6)
    inner = RotaryND(rotary.inv_freq, axes=(0, 1, 2))
    assert torch.equal(rotary.rotate(k, whole), inner.rotate(k, table))


def cached(held, site, call):  # over all that a layer holds, the call's rows at `held.rows`
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    layer, rows = held.layers[site.layer], held.rows
    layer.write(k, v) if rows[-1] >= layer.held else layer.overwrite(rows, k, v)
    q = layer.rotary.rotate(q, rows) if layer.rotary else q
    return attend(Query(q, 0, call.scale, causal=False), layer.views()).transpose(1, 2)


@torch.no_grad()
def test_a_video_model_with_cached_chunks_is_the_whole():
    model = cases()["WanTransformer3DModel"].build(0)
    sites = [site for site in attention_sites(model) if site.kind == "self"]
    rotary = replace(RotaryND.sections((4, 4, 4)), grid=(3, 4))
    held = SimpleNamespace(layers=[KVLayer(rotary=rotary) for _ in sites])
    frames, text, time = torch.randn(2, 4, 6, 6, 8), torch.randn(2, 5, 24), torch.full((2,), 500)
    ends = torch.tensor([24, 24, 36, 72, 72, 72]).repeat_interleave(12)  # of each token's chunk
    mask = torch.arange(72) < ends[:, None]
    with Door(model, SimpleNamespace(attend=lambda _, c: c.attend(*c.rotated(), c.v, mask)), sites):
        expected = model(frames, time, text)[0].split([2, 1, 3], 2)
    parts = zip(frames.split([2, 1, 3], 2), torch.arange(72).split([24, 12, 36]), strict=True)
    with Door(model, SimpleNamespace(attend=lambda *given: cached(held, *given)), sites):
        for (part, held.rows), wanted in zip(parts, expected, strict=True):
            model(part + torch.randn_like(part), time, text)  # a denoising step before the last
            torch.testing.assert_close(model(part, time, text)[0], wanted, rtol=1e-5, atol=1e-5)
    assert held.layers[3].seen == held.layers[3].held == 72
