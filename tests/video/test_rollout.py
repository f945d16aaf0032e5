"""Rollouts over a cache against one masked pass over everything that was ever made."""

from __future__ import annotations

import pytest
import torch

from diffcache.pipelines.causal_video import CausalVideo
from diffcache.video import FullHistory, VideoPolicy, Window
from tests.video.toys import CHUNK, UNIT, recomputed, rollout, text, wan

CASES: dict[str, tuple[VideoPolicy, int | None, int]] = {  # policy, window, sinks
    "full": (FullHistory(), None, 0),
    "window": (Window(6, 0, "absolute"), 6, 0),
    "window by slot": (Window(6, 0), 6, 0),
    "sinks": (Window(3, 3, "absolute"), 3, 3),
    "sinks by slot": (Window(3, 3), 3, 3),
    "loose frames": (Window(4, 1), 4, 1),
}


def held(chunk: int, window: int | None, sinks: int) -> list[int]:
    """Return the frames that are held before a chunk."""
    before = list(range(chunk * CHUNK))
    if window is None or len(before) <= sinks + window:
        return before
    return before[:sinks] + before[-window:]


def numbers(chunk: int, frames: list[int], by_slot: bool) -> dict[int, int]:
    """Return the number of every frame that a chunk sees."""
    seen = [*frames, *range(chunk * CHUNK, (chunk + 1) * CHUNK)]
    return {frame: place if by_slot else frame for place, frame in enumerate(seen)}


@pytest.mark.parametrize("name", CASES)
def test_a_rollout_is_the_masked_recompute(name: str) -> None:
    policy, window, sinks = CASES[name]
    by_slot = isinstance(policy, Window) and policy.positions == "slot"
    model, prompt = wan(), text(2)
    with CausalVideo(model, chunk=CHUNK) as video:
        session, made, calls = rollout(video, 7, policy=policy, prompt=prompt)
    kept = [held(chunk, window, sinks) for chunk in range(7)]
    named = [numbers(chunk, frames, by_slot) for chunk, frames in enumerate(kept)]
    assert session.frames == 7 * CHUNK
    assert session.store.layers[0].held == (len(kept[-1]) + CHUNK) * UNIT
    for chunk in (0, 3, 6):
        parts = kept[: chunk + 1], named[: chunk + 1]
        for noisy, time, velocity in (calls[chunk][0], calls[chunk][3], calls[chunk][4]):
            wanted = recomputed(model, made[:chunk], noisy, time, prompt, *parts)
            torch.testing.assert_close(velocity, wanted, atol=1e-5, rtol=1e-5)
