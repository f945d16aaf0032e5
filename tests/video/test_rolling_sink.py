"""Rolling Sink: the recompute over a cache that is overwritten as the authors' code does."""

import pytest
import torch

from diffcache.pipelines.causal_video import CausalVideo
from diffcache.video import Flush, FullHistory, RollingSink
from tests.video.toys import CHUNK, UNIT, by_frames, check_calls, frames, rollout, text

Pair = tuple[int, int]  # frame, and the number that it is rotated under


def overwritten(chunks: int, sinks: int) -> list[list[Pair]]:
    """Return what is read before each chunk, from a cache of `sinks` and a chunk more.

    After the clean pass of a chunk the one before it is overwritten, once the cache is full.
    """
    cache: list[Pair] = []
    found = []
    for chunk in range(chunks):
        start = chunk * CHUNK
        cache = [*cache, *((frame, frame) for frame in range(start, start + CHUNK))]
        cache = cache[-sinks - CHUNK :]
        found.append(cache[:-CHUNK])
        if start < sinks + CHUNK:
            continue
        before = start - CHUNK
        turn, at = divmod(before, sinks)
        first = sinks - at - CHUNK if turn % 2 else at
        frames = list(range(first, first + CHUNK))
        frames = frames[::-1] if turn % 2 else frames
        cache[-2 * CHUNK : -CHUNK] = zip(frames, range(before, start), strict=True)
    return found


@pytest.mark.parametrize("sinks", [6, 9])
def test_a_rollout_is_the_recompute_over_an_overwritten_cache(video: CausalVideo, sinks: int) -> None:
    chunks = 9
    session, made, calls = rollout(video, chunks, policy=RollingSink(sinks, 3))
    kept = overwritten(chunks, sinks)
    read = [[frame for frame, _ in each] for each in kept]
    assert any(len(set(each)) < len(each) for each in read) == (sinks == 9)  # twice at a turn
    last = {6: [5, 4, 3, 21, 22, 23], 9: [2, 1, 0, 0, 1, 2, 21, 22, 23]}
    assert read[-1] == last[sinks]
    numbers = [{frame: frame for frame in range(chunks * CHUNK)}] * chunks
    check_calls(video.transformer, made[:-1], calls[-1], text(), by_frames(kept, numbers))
    assert session.store.layers[0].held == (sinks + 2 * CHUNK) * UNIT


def test_until_the_sinks_are_full_it_is_the_whole_history_and_then_sinks_speak(video: CausalVideo) -> None:
    full, rolling = (rollout(video, 5, policy=each)[1] for each in (FullHistory(), RollingSink(6, 3)))
    torch.testing.assert_close(rolling[:3], full[:3], atol=1e-5, rtol=1e-5)
    assert (rolling[3] - full[3]).abs().max() > 1e-3


def test_a_flush_leaves_sinks_in_the_place_of_what_goes(video: CausalVideo) -> None:
    session, _, _ = rollout(video, 5, policy=RollingSink(6, 3))
    session.switch(text(seed=4), Flush(1))
    session.next()
    assert frames(session) == [0, 1, 2, 3, 4, 5, 14, 15, 16, 17]
    assert session.next().isfinite().all()
