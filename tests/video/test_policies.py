"""Infinity-RoPE, EMA-Sink, coded history; and what holds of every policy."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv.layer import KVLayer
from diffcache.kv.rotary_nd import RotaryND
from diffcache.kv.segment import Coded
from diffcache.kv.store import KVStore
from diffcache.pipelines.causal_video import CausalVideo, Session
from diffcache.registry import rows_of
from diffcache.video import (
    DeepForcing,
    EMASink,
    FewSteps,
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
from tests.video.toys import CHUNK, SIZE, UNIT, recomputed, rollout, text, wan

ONE = FewSteps((1000,))


def film(policy: VideoPolicy, chunks: int, **settings: Any) -> tuple[Session, list[Tensor]]:
    """Roll out with one step a chunk."""
    with CausalVideo(wan(layers=2), chunk=CHUNK, sampler=ONE) as video:
        return rollout(video, chunks, policy=policy, **settings)[:2]


def test_without_sinks_numbers_do_not_matter_and_with_them_they_do() -> None:
    made = [film(policy, 4)[1] for policy in (
        FullHistory(), Window(3, 0, "absolute"), InfinityRoPE(3, 0),
        InfinityRoPE(3, 0, "horizon", 6), InfinityRoPE(3, 2), InfinityRoPE(3, 2, "horizon", 6),
        Window(3, 2, "absolute"),
    )]  # fmt: skip
    full, absolute, slot, horizon, sinks, far, own = (torch.cat(each, 2) for each in made)
    torch.testing.assert_close(slot, absolute, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(horizon, absolute, atol=1e-5, rtol=1e-5)
    for one, other in ((sinks, own), (far, own), (sinks, far)):
        assert (one - other).abs().max() > 1e-3
    until = 6  # frames made before anything is dropped
    for each in (sinks, far):
        torch.testing.assert_close(each[:, :, :until], full[:, :, :until], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [3, None])
def test_frames_below_the_horizon_are_numbered_as_the_first(window: int | None) -> None:
    model, prompt, chunks, horizon = wan(layers=2), text(), 4, 8
    with CausalVideo(model, chunk=CHUNK, sampler=ONE) as video:
        policy = InfinityRoPE(window, 2, "horizon", horizon)
        _, made, calls = rollout(video, chunks, policy=policy, prompt=prompt)
    kept, numbers = [], []
    for chunk in range(chunks):
        before = list(range(chunk * CHUNK))
        kept.append(before if window is None else sorted({*before[:2], *before[-window:]}))
        end = (chunk + 1) * CHUNK
        beyond = max(end - horizon, 0)
        numbers.append({frame: max(frame - beyond, 0) for frame in range(end)})
    noisy, time, velocity = calls[-1][0]
    wanted = recomputed(model, made[:-1], noisy, time, prompt, kept, numbers)
    torch.testing.assert_close(velocity, wanted, atol=1e-5, rtol=1e-5)


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


@cache
def filmed(policy: VideoPolicy) -> Tensor:
    return torch.cat(film(policy, 5)[1], 2)


@pytest.mark.parametrize(("policy", "limit", "apart", "other"), LIMITS, ids=repr)
def test_a_policy_at_its_limit_is_another(
    policy: VideoPolicy, limit: VideoPolicy, apart: float, other: VideoPolicy | None
) -> None:
    torch.testing.assert_close(filmed(policy), filmed(limit), atol=apart, rtol=0)
    assert other is None or (filmed(other) - filmed(limit)).abs().max() > 1e-4


def test_old_frames_are_coded_and_new_ones_are_not() -> None:
    session, made = film(Quantized(Window(3, 3), bits=8, recent=3, group=8), 5)
    layer = session.store.layers[0]
    assert any(isinstance(segment, Coded) for segment in layer.segments)
    assert layer.held == 9 * UNIT and layer.tail.length >= 3 * UNIT
    exact = film(Window(3, 3), 5)[1]
    torch.testing.assert_close(made[-1], exact[-1], atol=0.05, rtol=0)
    few = film(Quantized(Window(3, 3), bits=2, recent=3, group=8), 5)[1]
    assert (few[-1] - exact[-1]).abs().max() > 2 * (made[-1] - exact[-1]).abs().max()
    session, _ = film(Quantized(DeepForcing(9, 3, 8, 4), bits=8, group=8), 5)
    assert session.store.layers[0].held == 8 * UNIT


def test_every_policy_is_tested() -> None:
    assert {policy.name for policy in POLICIES.values()} == set(rows_of("video")) - APART


@pytest.mark.parametrize("name", POLICIES)
def test_memory_stays_as_it_is_and_a_chunk_that_is_cut_off_leaves_nothing(name: str) -> None:
    policy, sizes = POLICIES[name], []
    with CausalVideo(wan(layers=2), chunk=CHUNK, sampler=ONE) as video:
        sessions = [video.session(text(), size=SIZE, policy=policy) for _ in range(2)]
        for chunk in range(8):
            one, other = sessions
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
            made = one.next()
            assert torch.equal(made, other.next())  # they take turns, too
            sizes.append([(layer.held, one.store.nbytes) for layer in one.store.layers])
    if name != "deep-forcing":  # where a cut comes at every second chunk
        assert len({str(size) for size in sizes[4:]}) == 1
    assert len({held for size in sizes[3:] for held, _ in size}) <= 2


@pytest.mark.parametrize("name", ["window", "infinity-rope", "horizon"])
def test_a_frame_that_goes_says_nothing_more(name: str) -> None:
    policy = POLICIES[name]
    with CausalVideo(wan(layers=2), chunk=CHUNK, sampler=ONE) as video:
        one, other = (rollout(video, 3, policy=policy)[0] for _ in range(2))
        for layer in other.store.layers:
            goes = slice(policy.sinks * UNIT, layer.held - 3 * UNIT)
            disturb(layer, range(goes.start, goes.stop))
        assert torch.equal(one.next(), other.next())
        for layer in other.store.layers:
            disturb(layer, range(policy.sinks * UNIT))
        assert not torch.equal(one.next(), other.next())


def disturb(layer: KVLayer, slots: range) -> None:
    """Write other keys and values into slots."""
    held = layer.read().narrow(slots.start, slots.stop)
    layer.overwrite(slots, held.k + 1, 3 * held.v)
