"""FlowCache: what every head keeps, and the masked recompute of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kv.attend import Query
from diffcache.kv.rotary_nd import RotaryND
from diffcache.kv.store import KVStore
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.video import FewSteps, FlowCache
from tests.video.toys import CHUNK, HEAD, HEADS, UNIT, next_noted, text, turned_tokens, wan

TOKENS = 4  # of a frame of the small store


def drawn(frames: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, TOKENS * frames, 12, generator=generator, dtype=torch.float64)


def kept(policy: FlowCache, k: Tensor, q: Tensor, chunk: int = 3) -> Tensor:
    """Return the tokens that are held before a chunk, `[B, H, S]`."""
    rotary = replace(RotaryND.sections((4, 4, 4)), grid=(2, 2))
    store = KVStore(1, policy.recipe(TOKENS), rotary=[rotary])
    layer, count = store.layers[0], chunk * TOKENS
    for start in range(0, k.shape[2], count):
        store.begin(count)
        layer.write(k[:, :, start : start + count], k[:, :, start : start + count])
        at = torch.arange(start, start + count)
        asked = layer.rotate(q[:, :, start : start + count], at)
        store.attend(0, Query(asked, start, 0.3, causal=False))
    store.begin(count)
    return layer.meta()["pos"].expand(2, 2, -1)


@pytest.mark.parametrize("select", ["token", "frame"])
def test_every_head_keeps_the_highest_joint_score(select: Any) -> None:
    policy = FlowCache(window=4, mix=0.5, kernel=3, recent=2, select=select)
    k, q = drawn(6, 1), drawn(6, 2)
    k[:, :, 4:8] = k[:, :, 12:16]  # frames that are alike but for their numbers
    found = kept(policy, k, q, chunk=6)
    at = torch.arange(24)[None, None]
    turn = replace(RotaryND.sections((4, 4, 4)), grid=(2, 2))
    keys, asked = turn.rotate(k, at), turn.rotate(q, at)[:, :, -2 * TOKENS :]
    for row in range(2):
        for head in range(2):
            mean = (asked[row, head] @ keys[row, head].T * 0.3).softmax(-1).mean(0)
            near = [mean[max(i - 1, 0) : i + 2].max() for i in range(24)]
            one = keys[row, head] / keys[row, head].norm(dim=-1, keepdim=True)
            cosine = (one @ one.T).fill_diagonal_(0).mean(0)
            score = 0.5 * torch.stack(near) - 0.5 * cosine.softmax(0)
            if select == "frame":
                frames = score.unflatten(0, (6, TOKENS)).mean(1).topk(4).indices.sort().values
                wanted = (frames[:, None] * TOKENS + torch.arange(TOKENS)).flatten()
            else:
                wanted = score.topk(16).indices.sort().values
            assert found[row, head].tolist() == wanted.tolist()
    assert not torch.equal(found[0, 0], found[0, 1])


def test_limits_are_redundancy_and_importance_alone() -> None:
    k, q = drawn(6, 1), drawn(6, 2)
    k[:, :, :12] = functional.normalize(torch.ones_like(k[:, :, :12]), dim=-1)  # three like frames
    k[:, :, :12, 4:] = drawn(3, 3)[..., 4:] * 0.01
    alike = kept(FlowCache(window=3, mix=0.0), k, q, chunk=6)
    assert (alike >= 12).float().mean() > 0.9  # nearly all of the unlike ones
    planted = k.clone()
    turn = replace(RotaryND.sections((4, 4, 4)), grid=(2, 2))
    asked = turn.rotate(q, torch.arange(24)[None, None])[:, :, -TOKENS:].sum(2, keepdim=True)
    planted[:, :, 5:6] = turn.unrotate(5 * asked, torch.tensor([[[5]]]))
    held = kept(FlowCache(window=3, mix=1.0, kernel=1), planted, q, chunk=6)
    assert (held == 5).any(-1).all()


class ByHead:
    """Attend in one pass: queries of a chunk see, in every head, the tokens that it read.

    Args:
        read: For each chunk, the tokens that each head read, its own last, `[B, H, n]`.
    """

    def __init__(self, read: list[Tensor]) -> None:
        self.read = read

    def __call__(self, attn: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        token = torch.arange(q.shape[1]).expand(len(q), -1)
        q, k, v = (x.unflatten(2, (HEADS, HEAD)) for x in (q, k, attn.to_v(hidden_states)))
        q, k = (turned_tokens(x, token // UNIT, token % UNIT) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        outs = []
        for chunk, tokens in enumerate(self.read):
            index = tokens[..., None].expand(-1, -1, -1, HEAD)
            own = q[:, :, chunk * CHUNK * UNIT : (chunk + 1) * CHUNK * UNIT]
            logits = own @ k.gather(2, index).mT / HEAD**0.5
            outs.append(logits.softmax(-1) @ v.gather(2, index))
        out = torch.cat(outs, 2).transpose(1, 2).flatten(2)
        return attn.to_out[1](attn.to_out[0](out))


@torch.no_grad()
def test_a_rollout_is_the_masked_recompute_of_the_tokens_it_kept() -> None:
    model, prompt, policy = wan(layers=2), text(2), FlowCache(4)
    made, read = [], [[], []]
    with CausalVideo(model, chunk=CHUNK, sampler=FewSteps((1000, 500))) as video:
        session = video.session(prompt, size=(8, 8), policy=policy)
        for _ in range(5):
            chunk, noted = next_noted(session, model)
            made.append(chunk)
            for layer, each in zip(session.store.layers, read, strict=True):
                each.append(layer.meta()["pos"].expand(2, HEADS, -1).long())
    last = read[0][-1]
    assert last.shape[2] == 7 * UNIT and not torch.equal(last[:, 0], last[:, 1])
    for noisy, time, velocity in noted:
        x = torch.cat([*made[:-1], noisy], 2)
        times = torch.zeros(2, x.shape[2] * UNIT)
        times[:, -CHUNK * UNIT :] = time
        before = [block.attn1.processor for block in model.blocks]
        for block, each in zip(model.blocks, read, strict=True):
            block.attn1.processor = ByHead(each)
        out = model(x, times, prompt, return_dict=False)[0][:, :, -CHUNK:]
        for block, processor in zip(model.blocks, before, strict=True):
            block.attn1.processor = processor
        torch.testing.assert_close(velocity, out, atol=1e-5, rtol=1e-5)
