"""KV caches on stock models, behind the door to attention: equal to computing all they hold."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from diffcache.attach.attention import Door, attention_sites
from diffcache.kv.attend import Query, attend
from diffcache.kv.layer import KVLayer
from diffcache.kv.rotary_nd import RotaryND
from tests.zoo.catalog import cases


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
