"""Rolling Sink: the recompute over a cache that is overwritten as the authors' code does."""

import pytest

from diffcache.pipelines.causal_video import CausalVideo
from diffcache.video import RollingSink
from tests.video.toys import CHUNK, UNIT, by_frames, check_calls, rollout, text

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
