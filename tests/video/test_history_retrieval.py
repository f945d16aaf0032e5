"""Retrieval of frames that are alike: the choice by hand, and the recompute over it."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from diffcache.pipelines.causal_video import CausalVideo, Session
from diffcache.video import HistoryRetrieval
from tests.video.toys import CHANNELS, CHUNK, SIZE, UNIT, by_frames, check_calls, frames, rollout, text, wan


@torch.no_grad()
def marks(model: Any, latents: Tensor, prompt: Tensor) -> Tensor:
    """Return the mean value of each frame in the first layer, `[B, F, E]`; it sees no other."""
    found: list[Tensor] = []
    handle = model.blocks[0].attn1.to_v.register_forward_hook(lambda *call: found.append(call[2]))
    try:
        for frame in latents.split(1, 2):
            model(frame, torch.zeros(len(frame)), prompt, return_dict=False)
    finally:
        handle.remove()
    return torch.stack([each.mean(1) for each in found], 1)


def alike(policy: HistoryRetrieval, means: Tensor, start: int) -> list[int]:
    """Return the frames that a chunk reads of its pool, most alike first."""
    earlier = list(range(start - policy.window))
    latest = earlier[policy.sinks :][-(policy.pool - policy.sinks) :]
    pool = [*earlier[: policy.sinks], *latest]
    like = {f: float(functional.cosine_similarity(means[f], means[start - 1], 0)) for f in pool}
    return sorted(pool, key=lambda frame: -like[frame])[: policy.count]


@pytest.mark.parametrize("numbers", ["before", "after"])
def test_a_rollout_is_the_recompute_over_what_is_alike(
    video: CausalVideo, numbers: Literal["before", "after"]
) -> None:
    chunks, policy = 7, HistoryRetrieval(3, 5, 1, 2, numbers)
    session, made, calls = rollout(video, chunks, policy=policy)
    means = marks(wan(layers=2), torch.cat(made, 2), text())[0]
    kept, places, chosen = [], [], []
    for start in range(0, chunks * CHUNK, CHUNK):
        chosen.append(alike(policy, means, start))
        latest = list(range(max(start - 3, 0), start))
        number = {frame: frame for frame in range(chunks * CHUNK)}
        for rank, frame in enumerate(chosen[-1]):
            place = sorted(chosen[-1]).index(frame) - len(chosen[-1])
            number[frame] = start + CHUNK + rank if numbers == "after" else start - 3 + place
        kept.append([*chosen[-1], *latest])
        places.append(number)
    assert any(sorted(each) != each for each in chosen)  # not always the order of time
    assert any(max(each) < 15 for each in chosen[-1:])  # nor the latest of the pool
    check_calls(video.transformer, made[:-1], calls[-1], text(), by_frames(kept, places))
    assert session.store.layers[0].held == (3 + 5 + CHUNK) * UNIT


def test_of_frames_that_were_shown_the_same_ones_are_found_in_every_row(video: CausalVideo) -> None:
    """The pool is bounded and has the first frame; what is not chosen says nothing."""
    film = torch.randn(2, CHANNELS, 15, *SIZE, generator=torch.Generator().manual_seed(5))
    film = film + 2 * torch.randn(2, CHANNELS, 15, 1, 1, generator=torch.Generator().manual_seed(6))
    film[0, :, 14], film[1, :, 14] = film[0, :, 9], film[1, :, 0]
    policy = HistoryRetrieval(window=3, pool=4, count=1)

    def shown() -> Session:
        session = video.session(text(2), size=SIZE, policy=policy)
        session.take(film)
        return session

    plain = shown().next()
    for frame, rows in ((0, [False, True]), (9, [True, False]), (11, [False, False])):
        session = shown()
        for layer in session.store.layers:
            slot = frames(session).index(frame) * UNIT
            there = layer.read().narrow(slot, slot + UNIT)
            values = 3 * there.v if layer.index else there.v  # the choice stays as it was
            layer.overwrite(range(slot, slot + UNIT), there.k + 1, values)
        made = session.next()
        assert [not torch.equal(made[row], plain[row]) for row in range(2)] == rows
    assert sorted(frames(session)) == [0, *range(9, 18)]
