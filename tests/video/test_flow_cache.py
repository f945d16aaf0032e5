"""FlowCache: what every head keeps, by hand, at limits, and the masked recompute."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.rotary_nd import RotaryND
from diffcache.kv.store import KVStore
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.video import FlowCache
from tests.video.toys import HEADS, SIZE, UNIT, check_calls, noted, text

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


def test_a_rollout_is_the_masked_recompute_of_the_tokens_it_kept(video: CausalVideo) -> None:
    prompt, made, read = text(2), [], [[], []]
    session = video.session(prompt, size=SIZE, policy=FlowCache(4))
    for _ in range(5):
        with noted(video.transformer) as calls:
            made.append(session.next())
        for layer, each in zip(session.store.layers, read, strict=True):
            tokens = layer.meta()["pos"].expand(2, HEADS, -1).long()
            each.append((tokens, tokens // UNIT))
    last = read[0][-1][0]
    assert last.shape[2] == 7 * UNIT and not torch.equal(last[:, 0], last[:, 1])
    check_calls(video.transformer, made[:-1], calls, prompt, read)
