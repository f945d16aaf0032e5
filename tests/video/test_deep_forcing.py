"""Deep Forcing: what stays by hand, bounds, numbers, and the masked recompute."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv.attend import Query
from diffcache.kv.layer import KVLayer
from diffcache.kv.rotary_nd import RotaryND
from diffcache.kv.store import KVStore
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.video import DeepForcing
from diffcache.video.deep_forcing import Realigned
from tests.video.toys import SIZE, UNIT, check_calls, noted, text

POLICY = DeepForcing(window=9, sinks=3, budget=8, recent=4)


def drawn(frames: int, seed: int) -> Tensor:
    """Return keys or queries of small frames of 4 tokens, [2, 2, n, 12]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, 4 * frames, 12, generator=generator, dtype=torch.float64)


def small(policy: DeepForcing) -> KVStore:
    rotary = replace(RotaryND.sections((4, 4, 4)), grid=(2, 2))
    return KVStore(1, policy.recipe(4), rotary=[rotary])


def chunk(store: KVStore, policy: DeepForcing, k: Tensor, q: Tensor) -> None:
    """Write a chunk, let the policy act, and finish it with the same queries."""
    layer, count = store.layers[0], k.shape[2]
    store.begin(count)
    layer.write(k, k)
    query = Query(rotated(layer, q, count), layer.seen - count, 0.3, causal=False)
    policy.first_step(store, 0, query)
    store.attend(0, query)


def rotated(layer: KVLayer, q: Tensor, count: int) -> Tensor:
    return layer.rotate(q, torch.arange(layer.seen - count, layer.seen))


def positions(store: KVStore) -> list[list[int]]:
    layer = store.layers[0]
    pos: list[list[int]] = layer.meta()["pos"].expand(2, 1, -1)[:, 0].tolist()
    return pos


def test_the_tokens_of_the_largest_dot_product_with_all_recent_queries_stay() -> None:
    policy = DeepForcing(window=6, sinks=1, budget=5, recent=3)
    store, k, q = small(policy), drawn(8, 1), drawn(8, 2)
    for start in (0, 8, 16):
        chunk(store, policy, k[:, :, start : start + 8], q[:, :, start : start + 8])
    assert positions(store) == [list(range(24))] * 2  # six frames are not more than the window
    chunk(store, policy, k[:, :, 24:], q[:, :, 24:])
    turn = store.layers[0].rotary
    assert turn is not None
    at = torch.arange(32)[None, None]
    keys, asked = turn.rotate(k, at), turn.rotate(q, at)[:, :, 20:]  # the chunk and one frame more
    score = torch.einsum("bhqd,bhkd->bk", asked, keys)[:, 4:20]
    wanted = [[*range(4), *sorted((row.topk(4).indices + 4).tolist()), *range(20, 32)] for row in score]
    assert positions(store) == wanted
    assert wanted[0] != wanted[1]  # rows choose for themselves
    assert not set(wanted[0]) <= {*range(4), *range(16, 32)}


@pytest.mark.parametrize("phase", ["original", "contiguous"])
def test_what_is_held_stays_constant_and_reuse_has_a_bound(phase: Any) -> None:
    policy = DeepForcing(window=9, sinks=3, budget=8, recent=4, topc_phase=phase, max_reuse=2)
    free, capped = replace(policy, max_reuse=None), policy
    chosen: dict[int, list[set[int]]] = {0: [], 1: []}
    for which, each in enumerate((free, capped)):
        store = small(each)
        for number in range(14):
            k = drawn(3, 10 + number)
            if number == 1:
                k = 30 * k.abs()  # large keys are chosen again and again
            chunk(store, each, k, drawn(3, 2).abs())
            held = positions(store)[0]
            if number >= 3:  # 12 frames, cut to 8; then 11, cut to 8; and so on
                assert len(held) == 8 * 4
                assert set(range(12)) <= set(held)  # sinks
                assert set(range(12 * number - 4, 12 * number + 12)) <= set(held)  # recent
                chosen[which].append({p for p in held if 12 <= p < 12 * number - 4})
    lasting = [set.intersection(*tokens[i : i + 3]) for tokens in chosen.values() for i in (0, 5)]
    assert lasting[0] and not lasting[2] and not lasting[3]


def test_numbers_are_closed_up_to_the_newest_frame() -> None:
    # sinks 0 and 1, tokens of frames 5 and 9, frames 20 to 22, two tokens a frame
    held = torch.tensor([[[0, 0, 1, 1, 5, 9, 20, 20, 21, 21, 22, 22]]])
    original = Realigned(2, 2).place(held, held)[0, 0].tolist()
    assert original == [17, 17, 18, 18, 5, 9, 20, 20, 21, 21, 22, 22]
    contiguous = Realigned(2).place(held, held)[0, 0].tolist()
    assert contiguous == [17, 17, 18, 18, 19, 19, 20, 20, 21, 21, 22, 22]
    whole = torch.arange(6).repeat_interleave(2)[None, None]
    assert torch.equal(Realigned(2).place(whole, whole), whole)


def numbered(tokens: Tensor, sinks: int, closed: bool) -> Tensor:
    """Return the numbers of the frames of tokens `[B, n]`.

    Args:
        tokens: Tokens that a chunk read, its own last.
        sinks: First frames, which are numbered up to what follows them without a gap.
        closed: Whether all frames are.
    """
    frame = tokens // UNIT
    after = (frame[:, None, :] > frame[:, :, None]).sum(-1) // UNIT  # tokens of later frames
    number = frame[:, -1:] - after
    return number if closed else number.where(frame < sinks, frame)


@pytest.mark.parametrize("phase", ["original", "contiguous"])
def test_a_rollout_is_the_masked_recompute_of_the_tokens_it_kept(video: CausalVideo, phase: Any) -> None:
    prompt, policy = text(2), replace(POLICY, topc_phase=phase)
    session = video.session(prompt, size=SIZE, policy=policy)
    made, read = [], [[], []]
    for _ in range(6):
        with noted(video.transformer) as calls:
            made.append(session.next())
        for layer, each in zip(session.store.layers, read, strict=True):
            tokens = layer.meta()["pos"][:, 0].expand(2, -1).long()
            number = numbered(tokens, policy.sinks, phase == "contiguous")
            each.append((tokens[:, None], number[:, None]))
    last = read[0][-1][0]
    assert last.shape[2] == 8 * UNIT and not torch.equal(last, read[1][-1][0])
    assert ((last >= 3 * UNIT) & (last < 14 * UNIT)).any()
    check_calls(video.transformer, made[:-1], calls, prompt, read)
