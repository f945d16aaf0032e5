"""StreamDiffusionV2: its history, refresh and noise, and the batch of a stream."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from diffcache.kv.rotary_nd import RotaryND
from diffcache.kv.store import KVStore
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.stream_batch import StreamBatch
from diffcache.video import Cut, FewSteps, Flush, FullHistory, Keep, MotionNoise, StreamDiffusionV2, Window
from tests.internals import cut_off
from tests.video.toys import CHANNELS, CHUNK, SIZE, noted, rollout, text, wan

UNIT, HEADS, WIDTH = 4, 2, 12


def cosine(one: Tensor, other: Tensor) -> float:
    return float((one * other).sum() / (one.norm() * other.norm()))


def by_hand(policy: StreamDiffusionV2, keys: Tensor, values: Tensor) -> list[int]:
    """Return the frames that are held after a film of one row and one layer, sinks first.

    Args:
        policy: The policy.
        keys: Keys, `[F, UNIT, H, D]`.
        values: Values, like them.
    """
    sinks = list(range(policy.sinks))
    window = list(range(policy.sinks, policy.sinks + policy.window))
    for frame in range(policy.sinks + policy.window, len(keys)):
        alike = []
        for sink in sinks:
            pairs = [(x[frame].mean(0).flatten(), x[sink].mean(0).flatten()) for x in (keys, values)]
            alike.append(sum(cosine(*pair) for pair in pairs) / 2)
        below = [number for number, each in enumerate(alike) if each < policy.threshold]
        if policy.replaces == "least" and below:
            below = [alike.index(min(alike))]
        for number in below:
            sinks[number] = frame
        if not below:
            window = [*window[1:], frame]
    return [*sinks, *window]


def frames_of(values: Tensor) -> Tensor:
    """Return random tokens around one mean a frame, `[B, F, UNIT, H, D]`."""
    noise = torch.randn(*values.shape[:2], UNIT, HEADS, WIDTH)
    return values.unflatten(-1, (1, HEADS, WIDTH)) + 0.3 * noise


@pytest.mark.parametrize("replaces", ["all", "least"])
@pytest.mark.parametrize("chunk", [1, 3])
def test_what_is_held_is_what_a_rollout_by_hand_holds(replaces: Any, chunk: int) -> None:
    torch.manual_seed(0)
    policy = StreamDiffusionV2(window=2, sinks=3, threshold=0.3, replaces=replaces)
    count, batch, layers = 18, 2, 2
    means = torch.randn(layers, 2, batch, count, HEADS * WIDTH)
    means[:, :, :, 5:9] = means[:, :, :, :1]  # like the first sink
    rotary = replace(RotaryND.sections((4, 4, 4)), grid=(2, 2))
    store = KVStore(layers, policy.recipe(UNIT), rotary=[rotary] * layers)
    films = [[frames_of(means[layer, part]) for part in (0, 1)] for layer in range(layers)]
    widths = []
    for start in range(0, count, chunk):
        store.begin(chunk * UNIT)
        policy.begin(store, UNIT)
        for layer, film in zip(store.layers, films, strict=True):
            new = [x[:, start : start + chunk].flatten(1, 2).transpose(1, 2) for x in film]
            layer.write(*new)
        widths.append(store.layers[0].held // UNIT)
    policy.begin(store, UNIT)
    assert set(widths[9 // chunk :]) == {5 + chunk}  # constant once the cache is full
    replaced = 0
    for layer, film in zip(store.layers, films, strict=True):
        slots = layer.read()
        for row in range(batch):
            wanted = by_hand(policy, film[0][row], film[1][row])
            assert (slots.pos[row, 0, ::UNIT] // UNIT).tolist() == wanted
            tokens = torch.cat([film[0][row, frame] for frame in wanted]).transpose(0, 1)
            assert torch.equal(slots.k[row], tokens)
            replaced += sum(frame > 4 for frame in wanted[:3])
    assert replaced


def test_like_frames_leave_sinks_alone_and_others_take_their_place() -> None:
    rotary = replace(RotaryND.sections((4, 4, 4)), grid=(2, 2))
    means = torch.eye(HEADS * WIDTH)[[0] * 8 + [1]]
    x = frames_of(means[None]) * 0 + means[None].unflatten(-1, (1, HEADS, WIDTH))
    cases: dict[Any, list[int]] = {"all": [8, 8, 8], "least": [8, 1, 2]}
    for replaces, wanted in cases.items():
        policy = StreamDiffusionV2(replaces=replaces)
        store = KVStore(1, policy.recipe(UNIT), rotary=[rotary])
        held = []
        for frame in range(9):
            store.begin(UNIT)
            store.layers[0].write(*[x[:, frame].transpose(1, 2)] * 2)
            policy.begin(store, UNIT)
            held.append((store.layers[0].meta()["pos"][0, 0, ::UNIT] // UNIT).tolist())
        assert held[7] == [0, 1, 2, 6, 7]  # all alike: the window rolls on
        assert held[8] == [*wanted, 6, 7]  # another picture
        Flush(1).carry_out(store, policy.sinks, UNIT)
        frames = (store.layers[0].meta()["pos"][0, 0, ::UNIT] // UNIT).tolist()
        assert frames == wanted  # of the latest frames, the sinks hold the very last


def test_fast_motion_gets_less_noise() -> None:
    torch.manual_seed(0)
    noise = MotionNoise(low=0.6, high=0.9, scale=0.5, rate=0.75)
    still = torch.zeros(1, 3, 4, 8, 8)
    assert noise.level(still) == noise.high
    level = noise.level(still, still[:, :, :1], before=0.6)
    assert level == pytest.approx(0.75 * 0.9 + 0.25 * 0.6)
    for _ in range(30):
        level = noise.level(still, still[:, :, :1], level)
    assert level == pytest.approx(0.9)  # what does not move comes to the highest level
    levels = []
    for size in (0.0, 0.1, 0.2, 0.4, 0.8, 3.0):
        moving = still.clone()
        moving[:, :, 2] = size  # one picture differs by this root mean square
        levels.append(noise.level(moving, still[:, :, :1], before=0.9))
        wished = 0.9 - 0.3 * min(size / 0.5, 1)
        assert levels[-1] == pytest.approx(0.75 * wished + 0.25 * 0.9)
    assert levels == sorted(levels, reverse=True)
    assert all(0.6 <= each <= 0.9 for each in levels)
    jump = noise.level(still[:, :, :1], torch.ones(1, 3, 1, 8, 8))
    assert jump == pytest.approx(0.6)  # from the last picture of the chunk before


STEPS = FewSteps((1000, 750, 400))


@pytest.fixture(scope="module")
def video() -> Iterator[CausalVideo]:
    with CausalVideo(wan(layers=2), sampler=STEPS) as video:
        yield video


def filmed(stream: StreamBatch, chunks: int, **given: Any) -> list[Tensor]:
    """Return a whole film."""
    found = [stream.next(**{name: next(each) for name, each in given.items()}) for _ in range(chunks)]
    return [chunk for chunk in found if chunk is not None] + stream.finish()


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        (FullHistory(), {}),
        (Window(3, 3), {"negative": text(1, 9), "guidance": 2.0}),
        (StreamDiffusionV2(window=3, sinks=3, threshold=0.99), {}),
    ],
    ids=["full", "guided window", "adaptive sinks"],
)
def test_one_batch_makes_the_film_of_one_level_after_the_other(
    video: CausalVideo, policy: Any, settings: dict[str, Any]
) -> None:
    settings = {"size": SIZE, "policy": policy, "seed": 4, **settings}
    films = [torch.cat(filmed(StreamBatch(video, text(2), rows=rows, **settings), 5), 2) for rows in (None, 2, 1)]
    assert films[0].shape[2] == 5 * CHUNK
    for film in films[1:]:
        torch.testing.assert_close(film, films[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", [None, Flush(1), Cut(5)], ids=repr)
def test_a_switch_takes_effect_with_the_chunk_that_brings_it(video: CausalVideo, mode: Any) -> None:
    """Chunks on their way keep their prompt, however many levels run at once."""
    settings: dict[str, Any] = {"size": SIZE, "policy": Window(3, 3), "seed": 4}
    films, guide = [], {"negative": text(1, 9), "guidance": 2.0}
    block = video.transformer.blocks[1].ffn
    for rows in (None, 2, 1):
        stream = StreamBatch(video, text(1, 2), rows=rows, **settings, **guide)
        done = [stream.next() for _ in range(3)]
        stream.switch(text(1, 7), Cut(50))
        stream.switch(text(1, 3), mode)
        with cut_off([block], error=ZeroDivisionError()):
            stream.next()
        done.append(stream.next())
        stream.switch(text(1, 2), Keep(), negative=text(1, 8))  # while the first is on its way
        done += [*(stream.next() for _ in range(2)), *stream.finish()]
        films.append(torch.cat([each for each in done if each is not None], 2))
        last = torch.cat([text(1, 2), text(1, 8)])
        assert all(torch.equal(level.prompt, last) for level in stream.levels)
    other = StreamBatch(video, text(1, 2), **settings, **guide)
    plain = torch.cat(filmed(other, 6), 2)
    for film in films[1:]:
        torch.testing.assert_close(film, films[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(films[0][:, :, : 3 * CHUNK], plain[:, :, : 3 * CHUNK])
    assert (films[0] - plain)[:, :, 3 * CHUNK : 4 * CHUNK].abs().max() > 1e-3


def test_a_video_is_noised_as_far_as_it_is_told_to(video: CausalVideo) -> None:
    latents = [torch.randn(1, CHANNELS, 2, *SIZE) for _ in range(4)]
    heights = [0.99, 0.97, 0.96, 0.98]
    films = []
    for rows in (3, 1):
        stream = StreamBatch(video, text(), size=SIZE, rows=rows)
        with noted(video.transformer) as calls:
            chunks = filmed(stream, 4, latents=iter(latents), level=iter(heights))
        films.append(torch.cat(chunks, 2))
    torch.testing.assert_close(*films, atol=1e-5, rtol=1e-5)
    entered = [x for x, time, _ in calls[::3]]
    assert [time for _, time, _ in calls[::3]] == pytest.approx([990, 970, 960, 980])
    fresh = StreamBatch(video, text(), size=SIZE).levels[0].noise(2)
    torch.testing.assert_close(entered[0], 0.01 * latents[0] + 0.99 * fresh)


def test_an_error_leaves_the_stream_as_it_was(video: CausalVideo) -> None:
    block = video.transformer.blocks[1].ffn
    for rows in (3, 2, 1):
        settings: dict[str, Any] = {"size": SIZE, "policy": Window(3, 3), "rows": rows}
        stream, other = (StreamBatch(video, text(), **settings) for _ in range(2))
        made, wanted = [], []
        for chunk in range(5):
            if chunk in (1, 4):
                with cut_off([block], error=ZeroDivisionError()):
                    stream.next()
            made.append(stream.next())
            wanted.append(other.next())
            if rows > 1 and chunk == 1:
                with pytest.raises(ValueError, match="frames=1: chunks on their way have 3"):
                    stream.next(frames=1)
        for one, two in zip([*made, *stream.finish()], [*wanted, *other.finish()], strict=True):
            assert (one is None and two is None) or torch.equal(one, two)
        frames = [session.frames for session in stream.levels]
        assert frames == [5 * CHUNK] * 3
        again = StreamBatch(video, text(1, 8), **settings)
        for session, here in zip(stream.levels, again.levels, strict=True):
            here.generator.set_state(session.generator.get_state())
        stream.next()
        stream.switch(text(1, 8))
        stream.next()
        for session, here in zip(stream.levels, again.levels, strict=True):
            here.generator.set_state(session.generator.get_state())
        stream.reset()
        for one, two in zip(filmed(stream, 2), filmed(again, 2), strict=True):
            assert torch.equal(one, two)


def test_finished_chunks_outlive_an_error(video: CausalVideo) -> None:
    stream, other = (StreamBatch(video, text(), size=SIZE) for _ in "ab")
    for each in (stream, other):
        assert [each.next() for _ in range(2)] == [None] * 2
    calls = count()

    def fails(*_: Any) -> None:
        with pytest.raises(ValueError, match="makes a step in another thread"):
            stream.next()
        if next(calls) == 1:
            raise ZeroDivisionError

    handle = video.transformer.blocks[1].register_forward_pre_hook(fails)
    with pytest.raises(ZeroDivisionError):
        stream.finish()
    handle.remove()
    with pytest.raises(ValueError, match=r"call finish\(\) again"):
        stream.next()
    for one, two in zip(stream.finish(), other.finish(), strict=True):
        assert torch.equal(one, two)


def test_frames_that_went_from_one_layer_alone_go_from_all(video: CausalVideo) -> None:
    one, other = (rollout(video, 3, policy=StreamDiffusionV2(2, 3))[0] for _ in "ab")
    with patch.object(one.store.layers[1], "replace", side_effect=MemoryError), pytest.raises(MemoryError):
        one.next()
    assert torch.equal(one.next(), other.next())
