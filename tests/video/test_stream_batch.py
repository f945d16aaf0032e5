"""Levels that run in one batch make the film of levels that run one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.stream_batch import StreamBatch
from diffcache.video import Cut, DeepForcing, FewSteps, FlowCache, Flush, FullHistory, Keep, StreamDiffusionV2, Window
from tests.video.toys import CHANNELS, CHUNK, SIZE, by_frames, check_calls, noted, text, wan

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


def test_each_level_reads_what_was_made_at_its_level(video: CausalVideo) -> None:
    model, prompt = video.transformer, text()
    stream = StreamBatch(video, prompt, size=SIZE, policy=Window(3, 0))
    with noted(model) as calls:
        done = [stream.next() for _ in range(5)]
    held = [session.store.layers[0].held for session in stream.levels]
    assert [chunk is not None for chunk in done] == [False, False, True, True, True]
    assert [len(x) for x, _, _ in calls] == [1, 2, 3, 3, 3]  # one call a chunk
    assert held == [6 * 16] * 3
    kept = [list(range(max(CHUNK * c - 3, 0), CHUNK * c)) for c in range(5)]
    numbers = [{f: f for f in range(CHUNK * (c + 1))} for c in range(5)]
    read = by_frames(kept, numbers)
    for level, height in enumerate(STEPS.levels):
        here = [(x[level][None], time, out[level][None]) for x, time, out in calls[level:]]
        for chunk in (0, len(here) - 1):
            noisy, _, velocity = here[chunk]
            made = [x for x, _, _ in here[:chunk]]
            call = noisy, 1000 * height, velocity
            check_calls(model, made, [call], prompt, read[: chunk + 1], 1000 * height)


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
        stop = block.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stream.next()
        stop.remove()
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
    for policy in (DeepForcing(), FlowCache(3)):
        said = f"policy={type(policy).__name__}.*queries of finished frames"
        with pytest.raises(ValueError, match=said):
            StreamBatch(video, text(), size=SIZE, policy=policy)
    for given, said in (
        ({"level": 0.95}, "level=0.95: is for latents"),
        ({"latents": latents[0], "level": 0.5}, "level=0.5: must be above .* second step, 0.93"),
        ({"latents": latents[0][:, :1]}, r"latents=\[1, 1, 2, 8, 8\]: must be"),
        ({"frames": 0}, "frames=0"),
    ):
        with pytest.raises(ValueError, match=said):
            stream.next(**given)


def test_an_error_leaves_the_stream_as_it_was(video: CausalVideo) -> None:
    block = video.transformer.blocks[1].ffn
    for rows in (3, 2, 1):
        settings: dict[str, Any] = {"size": SIZE, "policy": Window(3, 3), "rows": rows}
        stream, other = (StreamBatch(video, text(), **settings) for _ in range(2))
        made, wanted = [], []
        for chunk in range(5):
            if chunk in (1, 4):
                stop = block.register_forward_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    stream.next()
                stop.remove()
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
