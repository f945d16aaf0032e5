"""Prompt switches: the frames held afterwards, and all else unchanged."""

from typing import Any

import pytest
import torch

from diffcache.kv.positions import Absolute
from diffcache.pipelines.causal_video import CausalVideo, Session
from diffcache.video import (
    Cut,
    Flush,
    FullHistory,
    InfinityRoPE,
    Keep,
    Recache,
    SemanticBank,
    StreamDiffusionV2,
    Switch,
    VideoPolicy,
    Window,
)
from tests.video.toys import CHUNK, SIZE, UNIT, by_frames, check_calls, disturb, frames, held, noted, rollout, text

OLD, NEW = text(seed=2), text(seed=3)
MODES: list[Switch] = [Keep(), Flush(1), Recache(6), Recache(6, "block_causal", keep_sinks=True), Cut(42)]


def opened(video: CausalVideo, chunks: int, policy: VideoPolicy) -> Session:
    return rollout(video, chunks, OLD, policy=policy)[0]


def test_a_flush_leaves_sinks_and_the_latest_and_nothing_of_the_others(video: CausalVideo) -> None:
    for policy, last, wanted in (
        (InfinityRoPE(3, 1), 1, [0, 8]),
        (InfinityRoPE(3, 1), 2, [0, 7, 8]),
        (FullHistory(), 2, [7, 8]),
        (Window(3, 3), 0, [0, 1, 2]),
        (SemanticBank(3, 9, 0, mass=1), 0, []),
    ):
        one, other = (opened(video, 3, policy) for _ in range(2))
        there = frames(other)
        for layer in other.store.layers:
            for slot, frame in enumerate(there):
                if frame not in wanted:
                    disturb(layer, range(slot * UNIT, (slot + 1) * UNIT))
        for session in (one, other):
            session.switch(NEW, Flush(last))
        assert torch.equal(one.next(), other.next())
        assert frames(one) == [*wanted, 9, 10, 11]
        assert torch.equal(one.next(), other.next())


def test_a_flush_of_little_shows_only_what_was_written(video: CausalVideo) -> None:
    empty = video.session(OLD, size=SIZE, policy=InfinityRoPE())
    fresh = video.session(NEW, size=SIZE, policy=InfinityRoPE())
    empty.switch(NEW, Flush(2))
    assert torch.equal(empty.next(), fresh.next())
    part = opened(video, 1, Window(6, 4))
    plain = opened(video, 1, Window(6, 4))
    part.switch(OLD, Flush(5))
    assert torch.equal(part.next(), plain.next())
    assert frames(part) == list(range(6))


@pytest.mark.parametrize("mask", ["block_causal", "bidirectional"])
def test_a_recache_is_a_new_session_that_takes_the_latest_frames(
    video: CausalVideo, mask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, made, _ = rollout(video, 4, OLD, policy=Window(3, 3))
    other = video.session(NEW, size=SIZE, policy=Window(3, 3))
    other.generator.set_state(session.generator.get_state())
    session.switch(NEW, Recache(8, mask))
    with monkeypatch.context() as patch:
        patch.setattr(video, "chunk", 8 if mask == "bidirectional" else CHUNK)
        other.take(torch.cat(made, 2)[:, :, -8:])
    assert torch.equal(session.next(), other.next())


@pytest.mark.parametrize("keep_sinks", [False, True])
def test_a_recache_is_as_long_as_numbers_that_begin_anew_allow(video: CausalVideo, keep_sinks: bool) -> None:
    policy = StreamDiffusionV2(2, 3, back=5)
    session = opened(video, 6, policy)
    with pytest.raises(ValueError, match="frames=7: StreamDiffusionV2.* give Recache\\(6\\)"):
        session.switch(NEW, Recache(7, keep_sinks=keep_sinks))
    session.switch(NEW, Recache(6, keep_sinks=keep_sinks))
    for _ in range(3):
        session.next()
    assert session.store.layers[0].held == (5 + CHUNK) * UNIT


def test_a_recache_can_leave_the_sinks(video: CausalVideo) -> None:
    for policy, wanted in ((Window(3, 3), [0, 1, 2, 9, 10, 11]), (FullHistory(), range(3, 12))):
        session = opened(video, 4, policy)
        sinks = [x[:, :, : 3 * UNIT] for x in held(session)]
        session.switch(NEW, Recache(9, keep_sinks=True))
        with noted(video.transformer) as calls:
            session.next()
        assert [noisy.shape[2] for noisy, _, _ in calls] == [9, CHUNK, CHUNK]
        if policy.sinks:
            assert frames(session) == [*wanted, 12, 13, 14]
            for before, after in zip(sinks, held(session), strict=True):
                assert torch.equal(before, after[:, :, : 3 * UNIT])
        else:
            assert frames(session) == list(range(12))
    early = opened(video, 1, Window(3, 3))  # sinks alone: nothing to make anew
    early.switch(NEW, Recache(9, keep_sinks=True))
    other = opened(video, 1, Window(3, 3))
    other.switch(NEW)
    assert torch.equal(early.next(), other.next())


@pytest.mark.parametrize(("delta", "lead"), [(0, 0), (42, 0), (1000, 1)])
def test_a_cut_moves_one_chunk_and_nothing_else(video: CausalVideo, delta: int, lead: int) -> None:
    session = opened(video, 0, InfinityRoPE(3, 1))
    session.switch(OLD, Cut(delta, lead))  # there is nothing to jump ahead of
    made, calls = [], []
    for chunk in range(4):
        if chunk == 2:
            session.switch(OLD, Cut(delta, lead))
            before = held(session)
        with noted(video.transformer) as found:
            made.append(session.next())
        calls.append(found)
        if not chunk:
            assert torch.equal(made[0], opened(video, 0, InfinityRoPE(3, 1)).next())
        if chunk == 2:
            for old, new in zip(before, held(session), strict=True):
                assert torch.equal(old[:, :, -3 * UNIT :], new[:, :, UNIT : 4 * UNIT])
    kept = [[], [0, 1, 2], [0, 3, 4, 5], [0, 6, 7, 8]]
    numbers = []
    for chunk, there in enumerate(kept):
        seen = [*there, *range(3 * chunk, 3 * chunk + 3)]
        numbers.append({frame: place for place, frame in enumerate(seen)})
    for frame in range(6 + lead, 9):
        numbers[2][frame] += delta
    read = by_frames(kept, numbers)
    for chunk in (2, 3):
        check_calls(video.transformer, made[:chunk], calls[chunk], OLD, read[: chunk + 1])
    assert all(layer.positions == session.store.recipe.positions for layer in session.store.layers)
    assert Cut(3).around(None, 4).place(torch.tensor([3, 4]), torch.tensor([4])).tolist() == [3, 7]
    assert Cut(3).around(None, 4).inner == Absolute()


@pytest.mark.parametrize("mode", MODES, ids=repr)
def test_a_switch_that_is_cut_off_is_made_again(video: CausalVideo, mode: Switch) -> None:
    one, other = (opened(video, 3, Window(3, 2)) for _ in range(2))
    for session in (one, other):
        session.switch(NEW, mode)
    handle = video.transformer.blocks[1].register_forward_pre_hook(fails)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            one.next()
        assert torch.equal(one.prompt, OLD)
    handle.remove()
    # A switch that is ordered while a chunk is made counts for the next, though this one breaks off.
    for session in (one, other):
        session.switch(text(seed=8), mode)
    handle = video.transformer.blocks[1].register_forward_pre_hook(lambda *_: one.switch(NEW, mode) or fails())
    with pytest.raises(KeyboardInterrupt):
        one.next()
    handle.remove()
    other.switch(NEW, mode)
    for _ in range(2):
        assert torch.equal(one.next(), other.next())  # they take turns, too
    assert torch.equal(one.prompt, NEW)


def test_a_switch_that_is_ordered_during_a_recache_counts_for_the_next_chunk(video: CausalVideo) -> None:
    session = opened(video, 2, Window(3, 2))
    session.switch(NEW, Recache(6))
    block = video.transformer.blocks[1]
    handle = block.register_forward_pre_hook(lambda *_: handle.remove() or session.switch(OLD))
    for prompt in (NEW, OLD):
        session.next()
        assert torch.equal(session.prompt, prompt)


def fails(*_: Any) -> None:
    raise KeyboardInterrupt


def test_the_unguided_branch_keeps_its_text(video: CausalVideo) -> None:
    given = {"negative": text(seed=5), "guidance": 2.0}
    one = video.session(OLD, size=SIZE, **given)
    one.switch(NEW)
    assert torch.equal(one.next(), video.session(NEW, size=SIZE, **given).next())
    one.switch(NEW, negative=text(seed=6))
    one.next()
    assert torch.equal(one.prompt, torch.cat([NEW, text(seed=6)]))
    with pytest.raises(ValueError, match="as many tokens as negative, 5; give `negative` anew"):
        one.switch(NEW[:, :4])
    assert one._switch is None
