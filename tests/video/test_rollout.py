"""Rollouts over a cache against one masked pass over everything that was ever made."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from diffcache.kv.life.save import SavedCacheError, read, write
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.saved_stream import CACHE, STREAM
from diffcache.pipelines.stream_batch import StreamBatch
from diffcache.video import FewSteps, Flush, FullHistory, Recache, Switch, VideoPolicy, Window
from tests.video.cases import POLICIES
from tests.video.toys import CHUNK, ONE, SIZE, UNIT, by_frames, check_calls, rollout, text, wan

CASES: dict[str, tuple[VideoPolicy, int | None, int]] = {  # policy, window, sinks
    "full": (FullHistory(), None, 0),
    "window": (Window(6, 0, "absolute"), 6, 0),
    "sinks by slot": (Window(3, 3), 3, 3),
    "loose frames": (Window(4, 1), 4, 1),
}


def held_before(chunk: int, window: int | None, sinks: int) -> list[int]:
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
        session, made, calls = rollout(video, 5, policy=policy, prompt=prompt)
    kept = [held_before(chunk, window, sinks) for chunk in range(5)]
    named = [numbers(chunk, frames, by_slot) for chunk, frames in enumerate(kept)]
    assert session.frames == 5 * CHUNK
    assert session.store.layers[0].held == (len(kept[-1]) + CHUNK) * UNIT
    for chunk in (0, 2, 4):
        parts = kept[: chunk + 1], named[: chunk + 1]
        some = [calls[chunk][step] for step in (0, 3, 4)]
        check_calls(model, made[:chunk], some, prompt, by_frames(*parts))


def test_a_stream_is_not_copied(video: CausalVideo) -> None:
    for stream in (video.session(text(), size=SIZE), StreamBatch(video, text(), size=SIZE), video):
        said = f"{type(stream).__name__}: cannot be copied .* save\\(folder\\)"
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=said):
                make(stream)


def test_a_stream_ends_with_its_video() -> None:
    video = CausalVideo(wan(layers=2), sampler=ONE)
    session, _, _ = rollout(video, 1)
    video.transformer.blocks[0].register_forward_hook(lambda *_: (session._clean and video.close()) or None)
    for _ in range(2):  # closed in the middle of a chunk, and before one
        with pytest.raises(ValueError, match="this CausalVideo was closed.* make another"):
            session.next()
    assert session.frames == CHUNK


def test_two_threads_do_not_make_chunks_of_one_stream_at_once(video: CausalVideo, tmp_path: Path) -> None:
    inside, go_on = Event(), Event()
    session, other = (video.session(text(), size=SIZE) for _ in range(2))
    commit = session._commit

    def waits(clean: Tensor) -> None:
        inside.set()
        assert go_on.wait(60)
        commit(clean)

    with patch.object(session, "_commit", waits), ThreadPoolExecutor(1) as pool:
        chunk = pool.submit(session.next)
        assert inside.wait(60)
        for call in (session.next, session.reset, lambda: session.save(tmp_path)):
            with pytest.raises(ValueError, match="is making a chunk in another thread: wait"):
                call()
        go_on.set()
        assert torch.equal(chunk.result(), other.next())
    assert torch.equal(session.next(), other.next())


def test_a_reset_stream_goes_on_as_a_new_one(video: CausalVideo) -> None:
    session, _, _ = rollout(video, 4, policy=Window(6, 1))
    stop = patch("diffcache.kv.store.carry_out", side_effect=KeyboardInterrupt)
    with stop, pytest.raises(KeyboardInterrupt):
        session.next()  # while frames are dropped, of which some are gone
    with pytest.raises(ValueError, match="left the cache half changed: reset it"):
        session.next()
    session.reset()
    other = video.session(text(), size=SIZE, policy=Window(6, 1))
    other.generator.set_state(session.generator.get_state())
    for _ in range(3):
        assert torch.equal(session.next(), other.next())
    assert session.frames == 3 * CHUNK


def test_a_stream_goes_on_outside_of_inference_mode(video: CausalVideo) -> None:
    one, other = (rollout(video, 3, read_once=True)[0] for _ in "ab")
    with torch.inference_mode():
        one.next()
    other.next()
    assert torch.equal(one.next(1), other.next(1))  # into the room that is left


@dataclass(frozen=True)
class Other(Switch):
    """A switch that a user wrote."""


@pytest.mark.parametrize("policy", [FullHistory(), Window(3, 1, "absolute"), *[*POLICIES.values()][::2]])
def test_a_restored_stream_goes_on_as_it_would_have(policy: Any, tmp_path: Path) -> None:
    with CausalVideo(wan(layers=2), sampler=FewSteps((1000, 500))) as video:
        settings: dict[str, Any] = {"size": SIZE, "policy": policy, "seed": 7}
        guided = video.session(text(2), negative=text(1, 9), guidance=2.0, **settings)
        plain = video.session(text(), **settings)
        is_plain = isinstance(policy, FullHistory | Window)  # as the others would be
        for name, session in (("guided", guided), ("plain", plain))[: 1 + is_plain]:
            for _ in range(3):
                session.next()
            session.save(tmp_path / name)
            wanted = torch.cat([session.next() for _ in range(2)], 2)
            restored = video.restore(tmp_path / name, policy)
            assert restored.frames == 9
            assert torch.equal(torch.cat([restored.next() for _ in range(2)], 2), wanted)
            restored.save(tmp_path / name)  # over what is there
            again = video.restore(tmp_path / name, policy)
            for each in (again, session):
                each.switch(text(session.batch, 4), Recache(6))  # latents are kept as well
            again.save(tmp_path / name)  # with a switch that has not taken effect
            again = video.restore(tmp_path / name, policy)
            assert torch.equal(again.next(), session.next())
            again.switch(text(session.batch, 4), Other())
            with pytest.raises(ValueError, match=r"mode=Other\(\): is written for Keep, Flush"):
                again.save(tmp_path / name)


def test_a_saved_stream_of_something_else_is_refused(tmp_path: Path) -> None:
    model = wan(layers=1)
    with CausalVideo(model, sampler=FewSteps((1000,))) as video:
        session = video.session(text(), size=SIZE, policy=Window(3, 3))
        session.next()
        session.save(tmp_path / "one")
        session.next()
        session.save(tmp_path / "two")
        with pytest.raises(FileNotFoundError, match="no such file"):
            video.restore(tmp_path / "none")
        with pytest.raises(SavedCacheError, match=r"saved with policy=Window\(window=3, sinks=3"):
            video.restore(tmp_path / "one", Window(3, 1))
        session.sampler = FewSteps((1000, 250))
        session.save(tmp_path / "two")
        with pytest.raises(SavedCacheError, match=r"sampler=FewSteps\(timesteps=\(1000, 250\)"):
            video.restore(tmp_path / "two", Window(3, 3))
        with torch.no_grad():
            model.blocks[0].ffn.net[2].bias.add_(1)
        with pytest.raises(SavedCacheError, match="saved with weights="):
            video.restore(tmp_path / "one", Window(3, 3))
    for layers, chunk, said in ((2, 3, "saved with transformer="), (1, 2, "saved with chunk=3, here is chunk=2")):
        with (
            CausalVideo(wan(layers=layers), sampler=FewSteps((1000,)), chunk=chunk) as other,
            pytest.raises(SavedCacheError, match=said),
        ):
            other.restore(tmp_path / "one", Window(3, 3))
    with CausalVideo(wan(layers=1), sampler=FewSteps((1000,))) as video:
        assert video.restore(tmp_path / "one", Window(3, 3)).frames == 3
        (tmp_path / "two" / CACHE).replace(tmp_path / "one" / CACHE)  # a save that was cut off
        with pytest.raises(SavedCacheError, match="are of two streams"):
            video.restore(tmp_path / "one", Window(3, 3))


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("about.facts", 7), ("about.facts", {}), ("noise", 7), ("noise", lambda x: x[:-1]), ("frames", -1),
        ("frames", 2), ("size", (16, 8)), ("size", "8"), ("recall", "x"), ("prompts", [[0, torch.ones(2)]]), ("prompts", [[0.5, 3]]),
        ("latents", lambda x: x[0]), ("latents", lambda x: x * torch.nan), ("latents", 2**31),
        ("prompt", lambda x: x[..., :5]), ("switch", 3), ("switch.mode", "Other"),
        ("switch.settings", {"last": -1}), ("switch.prompt", lambda x: x[..., :5]),
    ],
)  # fmt: skip
def test_a_stream_that_was_altered_with_care_is_refused(
    video: CausalVideo, where: str, change: Any, tmp_path: Path
) -> None:
    session, _, _ = rollout(video, 1, policy=Window(3, 3))
    session.switch(text(1, 4), Flush())
    session.save(tmp_path)
    state, about = read(tmp_path / STREAM)
    write(tmp_path / STREAM, state, about)
    video.restore(tmp_path, Window(3, 3)).next()
    *outer, key = where.split(".")
    holder = {**state, "about": about}[outer[0]] if outer else state
    holder[key] = change(holder[key]) if callable(change) else change
    write(tmp_path / STREAM, state, about)  # with a digest of its own
    said = "holds what no stream holds|saved with (transformer=None|Recipe)"
    with pytest.raises(SavedCacheError, match=said):
        video.restore(tmp_path, Window(3, 3))


def test_a_saved_stream_of_numbers_that_are_not_finite_is_refused(video: CausalVideo, tmp_path: Path) -> None:
    session, _, _ = rollout(video, 1)
    session.store.layers[0].read().k[0, 0, 0] = torch.nan
    session.save(tmp_path)
    with pytest.raises(SavedCacheError, match="holds what no stream .* not finite"):
        video.restore(tmp_path)
