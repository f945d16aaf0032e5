"""Policies that choose what stays: what they hold by hand, at bounds, and the recompute over it."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kv.attend import Query
from diffcache.kv.layer import KVLayer
from diffcache.kv.rotary_nd import RotaryND
from diffcache.kv.store import KVStore
from diffcache.pipelines.causal_video import CausalVideo, Session
from diffcache.video import (
    DeepForcing,
    FlowCache,
    Flush,
    HistoryRetrieval,
    Keep,
    LayerBudgets,
    Recache,
    RollingSink,
    SemanticBank,
    Switch,
    VideoPolicy,
)
from diffcache.video.deep_forcing import Realigned
from diffcache.video.semantic_bank import salient
from tests.video.toys import (
    CHANNELS,
    CHUNK,
    HEADS,
    SIZE,
    UNIT,
    by_frames,
    check_calls,
    disturb,
    frames,
    noted,
    rollout,
    text,
    wan,
)

POLICY = DeepForcing(window=9, sinks=3, budget=8, recent=4)


TOKENS = 4  # of a small frame
TURN = replace(RotaryND.sections((4, 4, 4)), grid=(2, 2))


def drawn(count: int, seed: int) -> Tensor:
    """Return keys or queries of small frames, [2, 2, n, 12]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, TOKENS * count, 12, generator=generator, dtype=torch.float64)


def small(policy: VideoPolicy) -> KVStore:
    return KVStore(1, policy.recipe(TOKENS), rotary=[TURN])


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
    at = torch.arange(32)[None, None]
    keys, asked = TURN.rotate(k, at), TURN.rotate(q, at)[:, :, 20:]  # the chunk and one frame more
    score = torch.einsum("bhqd,bhkd->bk", asked, keys)[:, 4:20]
    wanted = [[*range(4), *sorted((row.topk(4).indices + 4).tolist()), *range(20, 32)] for row in score]
    assert positions(store) == wanted
    assert wanted[0] != wanted[1]  # rows choose for themselves
    assert not set(wanted[0]) <= {*range(4), *range(16, 32)}


def test_frames_that_are_shown_are_cut_to_the_window_too(video: CausalVideo) -> None:
    session = video.session(text(), size=SIZE, policy=POLICY)
    session.take(torch.randn(1, CHANNELS, 24, *SIZE, dtype=torch.float64))
    assert session.store.layers[0].held == POLICY.budget * UNIT
    assert session.latents is not None and session.latents.dtype == torch.float32


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


def numbered(policy: VideoPolicy, tokens: Tensor) -> Tensor:
    """Return the numbers of the frames of tokens that a chunk read, its own last, `[B, H, n]`.

    Sinks of Deep Forcing are numbered up to what follows them without a gap, or all frames are.
    """
    frame = tokens // UNIT
    if not isinstance(policy, DeepForcing):
        return frame
    after = (frame[..., None, :] > frame[..., None]).sum(-1) // UNIT  # tokens of later frames
    number = frame[..., -1:] - after
    return number if policy.topc_phase == "contiguous" else number.where(frame < policy.sinks, frame)


@pytest.mark.parametrize(
    "policy",
    [replace(POLICY, topc_phase="original"), replace(POLICY, topc_phase="contiguous"), FlowCache(4)],
    ids=repr,
)
def test_a_rollout_is_the_masked_recompute_of_the_tokens_it_kept(video: CausalVideo, policy: VideoPolicy) -> None:
    prompt = text(2)
    session = video.session(prompt, size=SIZE, policy=policy)
    made, read = [], [[], []]
    for _ in range(6):
        with noted(video.transformer) as calls:
            made.append(session.next())
        for layer, each in zip(session.store.layers, read, strict=True):
            tokens = layer.meta()["pos"].expand(2, HEADS, -1).long()
            each.append((tokens, numbered(policy, tokens)))
    last, other = (each[-1][0] for each in read)
    assert last.shape == other.shape and not torch.equal(last, other)
    assert last.shape[2] == (8 if isinstance(policy, DeepForcing) else 4 + CHUNK) * UNIT
    assert torch.equal(last[:, 0], last[:, 1]) == isinstance(policy, DeepForcing)  # or heads choose for themselves
    assert ((last >= 3 * UNIT) & (last < 14 * UNIT)).any()
    check_calls(video.transformer, made[:-1], calls, prompt, read)


def kept(policy: FlowCache, k: Tensor, q: Tensor, chunk: int = 3) -> Tensor:
    """Return the tokens that are held before a chunk, `[B, H, S]`."""
    store = small(policy)
    layer, count = store.layers[0], chunk * TOKENS
    for start in range(0, k.shape[2], count):
        store.begin(count)
        layer.write(k[:, :, start : start + count], k[:, :, start : start + count])
        at = torch.arange(start, start + count)
        asked = layer.rotate(q[:, :, start : start + count], at)
        store.attend(0, Query(asked, start, 0.3, causal=False))
    store.begin(count)
    return layer.meta()["pos"].expand(2, 2, -1)


@pytest.mark.parametrize("select", ["token", "frame"])
def test_every_head_keeps_the_highest_joint_score(select: Any) -> None:
    policy = FlowCache(window=4, mix=0.5, kernel=3, recent=2, select=select)
    k, q = drawn(6, 1), drawn(6, 2)
    k[:, :, 4:8] = k[:, :, 12:16]  # frames that are alike but for their numbers
    found = kept(policy, k, q, chunk=6)
    at = torch.arange(24)[None, None]
    keys, asked = TURN.rotate(k, at), TURN.rotate(q, at)[:, :, -2 * TOKENS :]
    for row in range(2):
        for head in range(2):
            mean = (asked[row, head] @ keys[row, head].T * 0.3).softmax(-1).mean(0)
            near = [mean[max(i - 1, 0) : i + 2].max() for i in range(24)]
            one = keys[row, head] / keys[row, head].norm(dim=-1, keepdim=True)
            cosine = (one @ one.T).fill_diagonal_(0).mean(0)
            score = 0.5 * torch.stack(near) - 0.5 * cosine.softmax(0)
            if select == "frame":
                frames = score.unflatten(0, (6, TOKENS)).mean(1).topk(4).indices.sort().values
                wanted = (frames[:, None] * TOKENS + torch.arange(TOKENS)).flatten()
            else:
                wanted = score.topk(16).indices.sort().values
            assert found[row, head].tolist() == wanted.tolist()
    assert not torch.equal(found[0, 0], found[0, 1])


WIDE = 2  # the layer that looks far back


def fill(store: KVStore, wide: int, seed: int) -> None:
    """Write a chunk into every layer, and ask: one layer attends evenly, the others to its own."""
    count = CHUNK * UNIT
    store.begin(count)
    generator = torch.Generator().manual_seed(seed)
    for layer in store.layers:
        k = torch.randn(1, 2, count, 6, generator=generator)
        layer.write(k, k)
        at = torch.arange(layer.seen - count, layer.seen)
        q = torch.zeros_like(k) if layer.index == wide else 30 * layer.rotate(k, at)
        store.attend(layer.index, Query(q, layer.seen - count, 1.0, causal=False))


def test_the_layer_that_looks_far_back_holds_what_the_others_save_for_good() -> None:
    rotary = RotaryND(torch.ones(3, dtype=torch.float64), axes=(0, 1, 2), grid=(4, 4))
    policy = LayerBudgets(window=8, recent=3, drafters=0.25, reduction=0.5, sinks=1)
    store = KVStore(4, policy.recipe(UNIT), rotary=[rotary] * 4)
    for chunk in range(12):
        fill(store, WIDE if chunk < 6 else 0, chunk)  # later another one looks far back
        frames = [layer.held / UNIT for layer in store.layers]
        assert sum(frames) <= 4 * (8 + CHUNK)
        if chunk >= 2:
            assert [frames[layer] for layer in (0, 1, 3)] == [4 + CHUNK] * 3
    assert frames[WIDE] == 8 + 3 * 4 + CHUNK
    for layer in store.layers:
        pos = layer.meta()["pos"][0, 0]
        assert set(range(UNIT)) <= set(pos.tolist())  # the first frame stays, and the latest chunk
        assert set(range(33 * UNIT, 36 * UNIT)) <= set(pos.tolist())


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
def test_a_rollout_is_the_recompute_over_an_overwritten_cache(video: CausalVideo, sinks: int) -> None:
    chunks = 9
    session, made, calls = rollout(video, chunks, policy=RollingSink(sinks, 3))
    kept = overwritten(chunks, sinks)
    read = [[frame for frame, _ in each] for each in kept]
    assert any(len(set(each)) < len(each) for each in read) == (sinks == 9)  # twice at a turn
    last = {6: [5, 4, 3, 21, 22, 23], 9: [2, 1, 0, 0, 1, 2, 21, 22, 23]}
    assert read[-1] == last[sinks]
    numbers = [{frame: frame for frame in range(chunks * CHUNK)}] * chunks
    check_calls(video.transformer, made[:-1], calls[-1], text(), by_frames(kept, numbers))
    assert session.store.layers[0].held == (sinks + 2 * CHUNK) * UNIT


@torch.no_grad()
def marks(model: Any, latents: Tensor, prompt: Tensor) -> Tensor:
    """Return the mean value of each frame in the first layer, `[B, F, E]`; it sees no other."""
    found: list[Tensor] = []
    handle = model.blocks[0].attn1.to_v.register_forward_hook(lambda *call: found.append(call[2]))
    try:
        for frame in latents.split(1, 2):
            model(frame, torch.zeros(len(frame)), prompt, return_dict=False)
    finally:
        handle.remove()
    return torch.stack([each.mean(1) for each in found], 1)


def alike(policy: HistoryRetrieval, means: Tensor, start: int) -> list[int]:
    """Return the frames that a chunk reads of its pool, most alike first."""
    earlier = list(range(start - policy.window))
    latest = earlier[policy.sinks :][-(policy.pool - policy.sinks) :]
    pool = [*earlier[: policy.sinks], *latest]
    like = {f: float(functional.cosine_similarity(means[f], means[start - 1], 0)) for f in pool}
    return sorted(pool, key=lambda frame: -like[frame])[: policy.count]


@pytest.mark.parametrize("numbers", ["before", "after"])
def test_a_rollout_is_the_recompute_over_what_is_alike(
    video: CausalVideo, numbers: Literal["before", "after"]
) -> None:
    chunks, policy = 7, HistoryRetrieval(3, 5, 1, 2, numbers)
    session, made, calls = rollout(video, chunks, policy=policy)
    means = marks(wan(layers=2), torch.cat(made, 2), text())[0]
    kept, places, chosen = [], [], []
    for start in range(0, chunks * CHUNK, CHUNK):
        chosen.append(alike(policy, means, start))
        latest = list(range(max(start - 3, 0), start))
        number = {frame: frame for frame in range(chunks * CHUNK)}
        for rank, frame in enumerate(chosen[-1]):
            place = sorted(chosen[-1]).index(frame) - len(chosen[-1])
            number[frame] = start + CHUNK + rank if numbers == "after" else start - 3 + place
        kept.append([*chosen[-1], *latest])
        places.append(number)
    assert any(sorted(each) != each for each in chosen)  # not always the order of time
    assert any(max(each) < 15 for each in chosen[-1:])  # nor the latest of the pool
    check_calls(video.transformer, made[:-1], calls[-1], text(), by_frames(kept, places))
    assert session.store.layers[0].held == (3 + 5 + CHUNK) * UNIT


def test_of_frames_that_were_shown_the_same_ones_are_found_in_every_row(video: CausalVideo) -> None:
    """The pool is bounded and has the first frame; what is not chosen says nothing."""
    film = torch.randn(2, CHANNELS, 15, *SIZE, generator=torch.Generator().manual_seed(5))
    film = film + 2 * torch.randn(2, CHANNELS, 15, 1, 1, generator=torch.Generator().manual_seed(6))
    film[0, :, 14], film[1, :, 14] = film[0, :, 9], film[1, :, 0]
    policy = HistoryRetrieval(window=3, pool=4, count=1)

    def shown() -> Session:
        session = video.session(text(2), size=SIZE, policy=policy)
        session.take(film)
        return session

    plain = shown().next()
    for frame, rows in ((0, [False, True]), (9, [True, False]), (11, [False, False])):
        session = shown()
        for layer in session.store.layers:
            slot = frames(session).index(frame) * UNIT
            there = layer.read().narrow(slot, slot + UNIT)
            values = 3 * there.v if layer.index else there.v  # the choice stays as it was
            layer.overwrite(range(slot, slot + UNIT), there.k + 1, values)
        made = session.next()
        assert [not torch.equal(made[row], plain[row]) for row in range(2)] == rows
    assert sorted(frames(session)) == [0, *range(9, 18)]


def test_as_few_tokens_are_salient_as_have_the_mass() -> None:
    attention = torch.tensor([[0.1, 0.4, 0.2, 0.3], [4.0, 0.0, 0.0, 0.0]])
    assert salient(attention, 0.7).tolist() == [[False, True, False, True], [True] + 3 * [False]]
    assert salient(attention, 0.71).tolist()[0] == [False, True, True, True]
    assert salient(attention, 1).all()
    noise = torch.rand(3, 500, generator=torch.Generator().manual_seed(0))
    kept = salient(noise, 0.9)
    for row, which in zip(noise, kept, strict=True):
        share = row[which] / row.sum()
        assert share.sum() >= 0.9 > share.sum() - share.min()


def read_after(video: CausalVideo, batch: int, mode: Switch | None) -> tuple[Session, list[int]]:
    """Return a session of three prompts, the third the first again, and the frames it reads."""
    session = video.session(text(batch), size=SIZE, policy=SemanticBank(3, 9, 1, 2))
    film = torch.randn(1, CHANNELS, 12, *SIZE, generator=torch.Generator().manual_seed(5))
    first, second, third = film.expand(batch, -1, -1, -1, -1).split([CHUNK, 2 * CHUNK, CHUNK], 2)
    session.take(first)
    for seed, part in ((9, second), (2, third)):
        session.switch(text(batch, seed), mode)
        session.take(part)
    layer = session.store.layers[0]
    pos, recalled = layer.meta()["pos"][:, 0], layer.stats["recalled"][:, 0] > 0
    pos = pos[:, : recalled.shape[1]].where(recalled, -1)
    return session, sorted((pos[pos >= 0] // UNIT).unique().tolist())


@pytest.mark.parametrize(("mode", "read"), [(Keep(), [1, 2]), (Flush(2), [0]), (Recache(6), [1, 2])])
def test_a_prompt_that_comes_again_reads_its_own_frames(video: CausalVideo, mode: Switch, read: list[int]) -> None:
    session, found = read_after(video, 1, mode)
    assert found == read  # of the six of the other prompt none, though they are later
    assert session.store.layers[0].held < (9 + 3 + CHUNK) * UNIT


def test_of_what_is_not_read_nothing_is_seen_and_rows_are_apart(video: CausalVideo) -> None:
    def ahead(*gone: int, batch: int = 1) -> Tensor:
        session = read_after(video, batch, Keep())[0]
        for layer in session.store.layers:
            start = 0
            for frame in sorted(set(frames_of_slots(layer.meta()["pos"][0, 0]))):
                count = int((layer.meta()["pos"][0, 0] // UNIT == frame).sum())
                if frame in gone:
                    disturb(layer, range(start, start + count))
                start += count
        return session.next()

    plain = ahead()
    assert torch.equal(ahead(3, 4, 5), plain)
    assert not torch.equal(ahead(2), plain)
    torch.testing.assert_close(ahead(batch=2)[:1], plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("policy", [SemanticBank(3, 9, 1, 9, 0.7), SemanticBank(1, 4, 0, 2, 0.1)], ids=repr)
def test_rows_that_hold_fewer_salient_tokens_than_others_see_no_filling(
    video: CausalVideo, policy: SemanticBank
) -> None:
    film = torch.randn(2, CHANNELS, 3 * CHUNK, *SIZE, generator=torch.Generator().manual_seed(5))
    made = []
    for rows in (slice(2), slice(1), slice(1, 2)):
        session = video.session(text(2)[rows], size=SIZE, policy=policy)
        session.take(film[rows])
        session.noise = lambda count, rows=rows: film[rows, :, :count]  # type: ignore[method-assign]
        made.append(session.next())
        counts = (session.store.layers[0].meta()["pos"][:, 0] >= 0).sum(1).tolist()
        assert len(counts) == 1 or counts[0] != counts[1]
    torch.testing.assert_close(made[0], torch.cat(made[1:]), atol=1e-5, rtol=0)


def frames_of_slots(pos: Tensor) -> list[int]:
    return [place // UNIT for place in pos.tolist() if place >= 0]
