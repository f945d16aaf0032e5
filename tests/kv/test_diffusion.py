"""KV caches on stock models, behind the door to attention: equal to computing all they hold."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from diffcache.attach.attention import Door, attention_sites
from diffcache.kv.attend import Query, attend
from diffcache.kv.layer import KVLayer
from diffcache.kv.rotary_nd import RotaryND
from tests.kv.tiny import llama
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


@torch.no_grad()
def test_rows_of_a_masked_language_model_are_refreshed():
    model, every = llama(num_hidden_layers=2, is_causal=False), torch.arange(12)
    held = SimpleNamespace(layers=[KVLayer(0), KVLayer(1)], rows=every)
    ids = torch.arange(1, 25).view(2, 12)
    after = ids + 30 * (every == 5)
    with Door(model, SimpleNamespace(attend=lambda *given: cached(held, *given))):
        model(ids, use_cache=False)
        old, held.rows = [layer.read().k.clone() for layer in held.layers], every[5:6]
        model(after[:, 5:6], position_ids=every[None, 5:6], use_cache=False)
        new, held.rows = [layer.read().k.clone() for layer in held.layers], every
        full = model(after, use_cache=False).logits  # refreshing all is a plain forward
    assert torch.equal(full, model(after).logits)
    for one, other in zip(old, new, strict=True):  # refreshing one leaves the others
        assert torch.equal((one != other).any(3).any(1), after != ids)
    # one layer deep, a changed token's own row is what a plain forward gives it
    torch.testing.assert_close(new[1][:, :, 5], held.layers[1].read().k[:, :, 5])
