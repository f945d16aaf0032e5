"""StreamDiffusionV2: sinks that follow the newest frames, against a rollout of frames by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv.rotary_nd import RotaryND
from diffcache.kv.store import KVStore
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.video import FewSteps, Flush, MotionNoise, StreamDiffusionV2
from tests.video.toys import rollout, wan

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


def test_a_refresh_that_a_chunk_does_not_fit_into_is_refused() -> None:
    with (
        CausalVideo(wan(layers=1), chunk=4, sampler=FewSteps((1000,))) as video,
        pytest.raises(ValueError, match="back=5: .* a chunk of 4 frames; set back=6"),
    ):
        rollout(video, 3, policy=StreamDiffusionV2(window=3, sinks=0))


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
