"""Infinity-RoPE, EMA-Sink and coded history; and the contract of every policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from diffcache.kv.rotary_nd import RotaryND
from diffcache.kv.segment import Coded
from diffcache.kv.store import KVStore
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.registry import rows_of
from diffcache.video import (
    DeepForcing,
    EMASink,
    FlowCache,
    FullHistory,
    HistoryRetrieval,
    InfinityRoPE,
    Quantized,
    RollingSink,
    StreamDiffusionV2,
    VideoPolicy,
    Window,
)
from diffcache.video.ema_sink import Fuses
from tests.video.cases import APART, POLICIES
from tests.video.toys import CHUNK, SIZE, UNIT, by_frames, check_calls, disturb, rollout, text


@pytest.mark.parametrize("window", [3, None])
def test_frames_below_the_horizon_are_numbered_as_the_first(
    video: CausalVideo, window: int | None
) -> None:
    chunks, horizon = 4, 8
    policy = InfinityRoPE(window, 2, "horizon", horizon)
    _, made, calls = rollout(video, chunks, policy=policy)
    kept, numbers = [], []
    for chunk in range(chunks):
        before = list(range(chunk * CHUNK))
        kept.append(before if window is None else sorted({*before[:2], *before[-window:]}))
        end = (chunk + 1) * CHUNK
        beyond = max(end - horizon, 0)
        numbers.append({frame: max(frame - beyond, 0) for frame in range(end)})
    check_calls(video.transformer, made[:-1], calls[-1], text(), by_frames(kept, numbers))


def test_no_number_leaves_the_horizon_in_two_thousand_frames() -> None:
    rotary = RotaryND(torch.ones(3, dtype=torch.float64), axes=(0, 1, 2), grid=(1, 2))
    store = KVStore(1, InfinityRoPE(6, 2, "horizon", 21).recipe(2), rotary=[rotary])
    layer = store.layers[0]
    for chunk in range(667):
        store.begin(6)
        layer.write(torch.zeros(1, 1, 6, 6), torch.zeros(1, 1, 6, 6))
        if chunk % 37 == 0 or chunk == 666:
            number = layer.placed(layer.meta()) // 2
            assert int(number.max()) == min(chunk * 3 + 2, 20)
            assert layer.held <= 2 * 11
    assert number[0, 0].tolist() == [0] * 4 + [12 + i // 2 for i in range(18)]


def test_a_sink_moves_towards_the_frames_that_go() -> None:
    rotary = RotaryND(torch.ones(3, dtype=torch.float64), axes=(0, 1, 2), grid=(1, 2))
    frames = torch.randn(9, 1, 1, 2, 6, dtype=torch.float64)
    fuses: Fuses
    for fuses in ("evicted", "latest"):
        store = KVStore(1, EMASink(2, 2, 0.75, fuses).recipe(2), rotary=[rotary])
        for start in range(0, 9, 3):
            store.begin(6)
            k = torch.cat(list(frames[start : start + 3]), 2)
            store.layers[0].write(k, -k)
        store.begin(6)
        sinks = [frames[0], frames[1]]  # 2 and 3 go first, then 4 to 6
        for frame in range(2, 7) if fuses == "evicted" else range(4, 9):
            sinks[frame % 2] = 0.75 * sinks[frame % 2] + 0.25 * frames[frame]
        wanted = torch.cat([*sinks, frames[7], frames[8]], 2)
        held = store.layers[0].read()
        torch.testing.assert_close(held.k, wanted)
        torch.testing.assert_close(held.v, -wanted)
        assert held.pos[0, 0].tolist() == [0, 1, 2, 3, 14, 15, 16, 17]


# Policy, the one that it is at this limit, how far their films are apart, and one that is not there.
LIMITS: list[tuple[VideoPolicy, VideoPolicy, float, VideoPolicy | None]] = [
    (EMASink(3, 3, 1.0), Window(3, 3), 1e-6, EMASink(3, 3, 0.5)),
    (FlowCache(15), FullHistory(), 1e-6, FlowCache(8)),
    (DeepForcing(15, 3, 8, 4), FullHistory(), 1e-6, DeepForcing(9, 3, 8, 4)),
    (HistoryRetrieval(3, 5, count=0), Window(3, 0), 1e-5, HistoryRetrieval(3, 5, count=2)),
    (HistoryRetrieval(3, 5, count=5), Window(7, 1), 1e-5, None),
    (StreamDiffusionV2(3, 3, threshold=-1.0, refresh=1000), Window(3, 3, "absolute"), 1e-5,
     StreamDiffusionV2(3, 3, threshold=1.0, refresh=1000)),
    # A refresh moves all frames of a window alike, which rotary embedding does not see.
    (StreamDiffusionV2(3, 0, refresh=7), Window(3, 0), 1e-5, None),
    (Quantized(HistoryRetrieval(3, 4, count=2), 8, recent=8, group=8),
     HistoryRetrieval(3, 4, count=2), 0.05, None),
    (Quantized(RollingSink(6, 3), 8, group=8), RollingSink(6, 3), 0.05, None),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "limit", "apart", "other"), LIMITS, ids=repr)
def test_a_policy_at_its_limit_is_another(
    video: CausalVideo, policy: VideoPolicy, limit: VideoPolicy, apart: float,
    other: VideoPolicy | None,
) -> None:  # fmt: skip
    one, two = (torch.cat(rollout(video, 5, policy=each)[1], 2) for each in (policy, limit))
    torch.testing.assert_close(one, two, atol=apart, rtol=0)
    if other is not None:
        assert (torch.cat(rollout(video, 5, policy=other)[1], 2) - two).abs().max() > 1e-4


def test_old_frames_are_coded_and_new_ones_are_not(video: CausalVideo) -> None:
    coded = Quantized(Window(3, 3), bits=8, recent=3, group=8)
    session, made, _ = rollout(video, 5, policy=coded)
    layer = session.store.layers[0]
    assert any(isinstance(segment, Coded) for segment in layer.segments)
    assert layer.held == 9 * UNIT and layer.tail.length >= 3 * UNIT
    exact = rollout(video, 5, policy=Window(3, 3))[1]
    torch.testing.assert_close(made[-1], exact[-1], atol=0.05, rtol=0)
    few = rollout(video, 5, policy=replace(coded, bits=2))[1]
    assert (few[-1] - exact[-1]).abs().max() > 2 * (made[-1] - exact[-1]).abs().max()
    session = rollout(video, 5, policy=Quantized(DeepForcing(9, 3, 8, 4), bits=8, group=8))[0]
    assert session.store.layers[0].held == 8 * UNIT


def test_every_policy_is_tested() -> None:
    assert {policy.name for policy in POLICIES.values()} == set(rows_of("video")) - APART


@pytest.mark.parametrize("name", POLICIES)
def test_memory_stays_as_it_is_and_a_chunk_that_is_cut_off_leaves_nothing(
    video: CausalVideo, name: str
) -> None:
    policy, sizes = POLICIES[name], []
    one, other = (video.session(text(), size=SIZE, policy=policy) for _ in range(2))
    for chunk in range(8):
        if chunk in (0, 3, 5):  # the clean pass fails
            calls = []

            def fails(*_: Any, calls: list[int] = calls) -> None:
                calls.append(0)
                if len(calls) == 3:  # in the clean pass, after layers were compressed
                    raise KeyboardInterrupt

            handles = [b.register_forward_pre_hook(fails) for b in video.transformer.blocks]
            with pytest.raises(KeyboardInterrupt):
                one.next()
            [handle.remove() for handle in handles]
        assert torch.equal(one.next(), other.next())  # they take turns, too
        sizes.append([(layer.held, one.store.nbytes) for layer in one.store.layers])
    if name != "deep-forcing":  # where a cut comes at every second chunk
        assert len({str(size) for size in sizes[4:]}) == 1
    assert len({held for size in sizes[3:] for held, _ in size}) <= 2


@pytest.mark.parametrize("name", ["window", "infinity-rope", "horizon"])
def test_a_frame_that_goes_says_nothing_more(video: CausalVideo, name: str) -> None:
    policy = POLICIES[name]
    one, other = (rollout(video, 3, policy=policy)[0] for _ in range(2))
    for layer in other.store.layers:
        disturb(layer, range(policy.sinks * UNIT, layer.held - 3 * UNIT))
    assert torch.equal(one.next(), other.next())
    for layer in other.store.layers:
        disturb(layer, range(policy.sinks * UNIT))
    assert not torch.equal(one.next(), other.next())
