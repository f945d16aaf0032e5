"""First frames that are swept to and fro, against a cache that is overwritten by hand."""

from __future__ import annotations

import pytest
import torch

from diffcache.pipelines.causal_video import CausalVideo
from diffcache.video import FewSteps, Flush, FullHistory, RollingSink
from tests.video.toys import CHUNK, SIZE, UNIT, recomputed, rollout, text, wan

ONE = FewSteps((1000,))
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
def test_a_rollout_is_the_recompute_over_an_overwritten_cache(sinks: int) -> None:
    model, prompt, chunks = wan(layers=2), text(), 9
    with CausalVideo(model, chunk=CHUNK, sampler=ONE) as video:
        session, made, calls = rollout(video, chunks, policy=RollingSink(sinks, 3), prompt=prompt)
    kept = overwritten(chunks, sinks)
    read = [[frame for frame, _ in each] for each in kept]
    assert any(len(set(each)) < len(each) for each in read) == (sinks == 9)  # twice at a turn
    last = {6: [5, 4, 3, 21, 22, 23], 9: [2, 1, 0, 0, 1, 2, 21, 22, 23]}
    assert read[-1] == last[sinks]
    numbers = [{frame: frame for frame in range(chunks * CHUNK)}] * chunks
    noisy, time, velocity = calls[-1][0]
    wanted = recomputed(model, made[:-1], noisy, time, prompt, kept, numbers)
    torch.testing.assert_close(velocity, wanted, atol=1e-5, rtol=1e-5)
    assert session.store.layers[0].held == (sinks + 2 * CHUNK) * UNIT


def test_until_the_sinks_are_full_it_is_the_whole_history_and_then_sinks_speak() -> None:
    films = {}
    with CausalVideo(wan(layers=2), chunk=CHUNK, sampler=ONE) as video:
        for policy in (FullHistory(), RollingSink(6, 3)):
            films[type(policy)] = rollout(video, 5, policy=policy)[1]
        one, other = (rollout(video, 5, policy=RollingSink(6, 3))[0] for _ in range(2))
        for layer in other.store.layers:  # the next chunk reads sinks 0 to 2 and three latest
            held = layer.read().narrow(3 * UNIT, 6 * UNIT)
            layer.overwrite(range(3 * UNIT, 6 * UNIT), held.k + 1, 3 * held.v)
        assert torch.equal(one.next(), other.next())
        for layer in other.store.layers:
            held = layer.read().narrow(0, UNIT)
            layer.overwrite(range(UNIT), held.k + 1, 3 * held.v)
        assert not torch.equal(one.next(), other.next())
    for chunk in range(3):
        torch.testing.assert_close(
            films[RollingSink][chunk], films[FullHistory][chunk], atol=1e-5, rtol=1e-5
        )
    assert (films[RollingSink][3] - films[FullHistory][3]).abs().max() > 1e-3


def test_a_flush_leaves_sinks_in_the_place_of_what_goes() -> None:
    with CausalVideo(wan(layers=2), chunk=CHUNK, sampler=ONE) as video:
        session = video.session(text(), size=SIZE, policy=RollingSink(6, 3))
        for _ in range(5):
            session.next()
        session.switch(text(seed=4), Flush(1))
        session.next()
        layer = session.store.layers[0]
        frames = (layer.meta()["pos"][0, 0, ::UNIT] // UNIT).tolist()
        assert frames == [0, 1, 2, 3, 4, 5, 14, 15, 16, 17]
        assert session.next().isfinite().all()
