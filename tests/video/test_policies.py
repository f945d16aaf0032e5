"""Policies of causal video: limits at which one is another, and the contract of all."""

from dataclasses import replace
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffcache.kv.rotary_nd import RotaryND
from diffcache.kv.segment import Coded
from diffcache.kv.store import KVStore
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.registry import rows_of
from diffcache.video import (
    DeepForcing,
    EMASink,
    FewSteps,
    FlowCache,
    FullHistory,
    HistoryRetrieval,
    InfinityRoPE,
    LayerBudgets,
    Quantized,
    RollingSink,
    SemanticBank,
    StreamDiffusionV2,
    VideoPolicy,
    Window,
)
from tests.internals import cut_off
from tests.video.cases import APART, POLICIES
from tests.video.toys import CHUNK, HEAD, SIZE, UNIT, by_frames, check_calls, rollout, text, turned, wan


@pytest.mark.parametrize("window", [3, None])
def test_frames_below_the_horizon_are_numbered_as_the_first(video: CausalVideo, window: int | None) -> None:
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
    for chunk in range(223):
        store.begin(18)
        layer.write(torch.zeros(1, 1, 18, 6), torch.zeros(1, 1, 18, 6))
        if chunk % 37 == 0 or chunk == 222:
            number = layer.placed(layer.meta()) // 2
            assert int(number.max()) == min(chunk * 9 + 8, 20)
            assert layer.held <= 2 * 17
    assert number[0, 0].tolist() == [0] * 4 + [6 + i // 2 for i in range(30)]


def test_a_sink_moves_towards_the_frames_that_go() -> None:
    rotary = RotaryND(torch.ones(3, dtype=torch.float64), axes=(0, 1, 2), grid=(1, 2))
    frames = torch.randn(9, 1, 1, 2, 6, dtype=torch.float64)
    fuses: Literal["evicted", "latest"]
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
    (SemanticBank(3, 20, count=20, mass=1), FullHistory(), 1e-5, SemanticBank(3, 20, count=20, mass=0.5)),
    (LayerBudgets(30), FullHistory(), 1e-6, LayerBudgets(8)),
    (
        StreamDiffusionV2(3, 3, threshold=-1.0, refresh=1000),
        Window(3, 3, "absolute"),
        1e-5,
        StreamDiffusionV2(3, 3, threshold=1.0, refresh=1000),
    ),
    # A refresh moves all frames of a window alike, which rotary embedding does not see.
    (StreamDiffusionV2(3, 0, refresh=7), Window(3, 0), 1e-5, None),
    (Quantized(HistoryRetrieval(3, 4, count=2), 8, recent=8, group=8), HistoryRetrieval(3, 4, count=2), 0.05, None),
    (Quantized(RollingSink(6, 3), 8, group=8), RollingSink(6, 3), 0.05, None),
]


@pytest.fixture(scope="module")
def film(video: CausalVideo) -> Any:
    return cache(lambda policy: torch.cat(rollout(video, 5, policy=policy)[1], 2))


@pytest.mark.parametrize(("policy", "limit", "apart", "other"), LIMITS, ids=repr)
def test_a_policy_at_its_limit_is_another(
    film: Any, policy: VideoPolicy, limit: VideoPolicy, apart: float, other: VideoPolicy | None
) -> None:
    torch.testing.assert_close(film(policy), film(limit), atol=apart, rtol=0)
    if other is not None:
        assert (film(other) - film(limit)).abs().max() > 1e-4


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
def test_memory_stays_as_it_is_and_a_chunk_that_is_cut_off_leaves_nothing(video: CausalVideo, name: str) -> None:
    policy, sizes = POLICIES[name], []
    one, other = (video.session(text(), size=SIZE, policy=policy) for _ in range(2))
    for chunk in range(6):
        if chunk in (0, 3, 5):  # the clean pass fails
            with cut_off(video.transformer.blocks, 3):  # after layers were compressed
                one.next()
        assert torch.equal(one.next(), other.next())  # they take turns, too
        sizes.append([(layer.held, one.store.nbytes) for layer in one.store.layers])
    if name == "semantic-bank":  # in which each chunk leaves as many tokens as matter
        assert max(held for size in sizes for held, _ in size) < (3 + 4 + CHUNK) * UNIT
        return
    if name != "deep-forcing":  # where a cut comes at every second chunk
        assert len({str(size) for size in sizes[4:]}) == 1
    assert len({held for size in sizes[3:] for held, _ in size}) <= 2


FAR = 1000 * UNIT


def test_keys_held_before_rotation_lose_nothing() -> None:
    rotary = RotaryND.sections((8, 8, 8))
    rotary = RotaryND(rotary.inv_freq, axes=rotary.axes, interleaved=True, grid=(4, 4))
    store = KVStore(1, Window(1, 1).recipe(UNIT), rotary=[rotary])
    frame = torch.randn(1, 2, UNIT, HEAD, dtype=torch.bfloat16)
    in_place = rotary.rotate(frame, torch.arange(UNIT))
    for number in range(101):
        store.begin(UNIT)
        store.layers[0].write(frame, frame)
        if number > 1:  # the sink is moved on by one frame
            at = torch.arange(UNIT)
            in_place = rotary.rotate(rotary.unrotate(in_place, at), at + UNIT)
    layer = store.layers[0]
    assert torch.equal(layer.read().k[:, :, :UNIT], frame)
    met = layer.met().k[:, :, :UNIT]
    last = torch.full((1, UNIT), 98)  # the newest is 100
    wanted = turned(frame, last, torch.arange(UNIT))
    torch.testing.assert_close(met, wanted, atol=0.04, rtol=0)  # one rounding
    drift = [(each.float() - wanted.float()).norm() / wanted.float().norm() for each in (met, in_place)]
    assert drift[0] < 0.005 and drift[1] > 0.01


class Work(TorchDispatchMode):
    """Count the numbers that all operations read."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        read = tree_leaves((args, kwargs))
        self.total += sum(x.numel() for x in read if isinstance(x, Tensor))
        return func(*args, **(kwargs or {}))


def test_the_work_of_a_chunk_is_constant_once_the_cache_is_full() -> None:
    counts: dict[VideoPolicy, list[int]] = {Window(3, 1): [], FullHistory(): []}
    with CausalVideo(wan(layers=1), chunk=CHUNK, sampler=FewSteps((1000,))) as video:
        for policy, found in counts.items():
            session = video.session(text(), size=SIZE, policy=policy, recall=0)
            for _ in range(7):
                with Work() as work:
                    session.next()
                found.append(work.total)
    window, full = counts.values()
    assert window[0] < window[3] == window[4] == window[5] == window[6]
    assert full == sorted(set(full))


@pytest.mark.parametrize("policy", [FullHistory(), Window(3, 3)])
def test_no_number_ends_with_a_table(video: CausalVideo, policy: VideoPolicy) -> None:
    """Frames far beyond the 64 that the transformer has a table for are not rotated as its last."""
    films = []
    for start in (0, FAR):
        session = video.session(text(), size=SIZE, policy=policy)
        for layer in session.store.layers:
            layer.seen = start
        films.append(torch.cat([session.next() for _ in range(2)], 2))
    torch.testing.assert_close(*films, atol=1e-4, rtol=1e-4)
