"""Policies of causal video: each by hand or at a limit, and the contract of all."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffcache.kv.attend import Query
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
    Flush,
    FullHistory,
    HistoryRetrieval,
    InfinityRoPE,
    Keep,
    LayerBudgets,
    Quantized,
    Recache,
    RollingSink,
    SemanticBank,
    StreamDiffusionV2,
    Switch,
    VideoPolicy,
    Window,
)
from diffcache.video.deep_forcing import Realigned
from diffcache.video.ema_sink import Fuses
from diffcache.video.history_retrieval import Numbers
from diffcache.video.semantic_bank import salient
from tests.video.cases import APART, POLICIES
from tests.video.toys import (
    CHANNELS,
    CHUNK,
    HEAD,
    HEADS,
    SIZE,
    UNIT,
    by_frames,
    check_calls,
    cut_off,
    disturb,
    frames,
    held,
    noted,
    rollout,
    text,
    turned,
    wan,
)


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


@pytest.mark.parametrize(("policy", "limit", "apart", "other"), LIMITS, ids=repr)
def test_a_policy_at_its_limit_is_another(
    video: CausalVideo, policy: VideoPolicy, limit: VideoPolicy, apart: float, other: VideoPolicy | None
) -> None:
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
def test_memory_stays_as_it_is_and_a_chunk_that_is_cut_off_leaves_nothing(video: CausalVideo, name: str) -> None:
    policy, sizes = POLICIES[name], []
    one, other = (video.session(text(), size=SIZE, policy=policy) for _ in range(2))
    for chunk in range(8):
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


FAR = 1000 * UNIT


def latents(frames: int, batch: int = 1, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, CHANNELS, frames, *SIZE, generator=generator)


@torch.no_grad()
def asked(session: Session, x: Tensor) -> Tensor:
    """Return what the transformer predicts for all rows of a chunk; nothing stays."""
    chunk = session.chunk(x.shape[2])
    with noted(session.video.transformer) as calls, suppress(KeyboardInterrupt), chunk:
        session._velocity(x, 700.0)
        raise KeyboardInterrupt
    return calls[0][2]


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


def test_denoising_leaves_what_was_committed_alone(video: CausalVideo) -> None:
    stores = []
    for times in ((900.0, 600.0, 300.0), (300.0, 900.0), ()):
        session, _, _ = rollout(video, 3, policy=Window(3, 3))
        with session.chunk(CHUNK), torch.no_grad():
            before = held(session)
            for seed, time in enumerate(times):
                session._velocity(latents(CHUNK, seed=seed), time)
                for one, other in zip(before, held(session), strict=True):
                    assert torch.equal(other[:, :, : one.shape[2]], one)
            session._commit(latents(CHUNK))
        stores.append(held(session))
    for other in stores[1:]:
        assert all(map(torch.equal, stores[0], other))


def test_rows_of_branches_and_of_a_batch_are_apart(video: CausalVideo) -> None:
    film, x = latents(2 * CHUNK), latents(CHUNK, seed=6)
    rows = []
    for prompt, negative in ((text(), text(seed=9)), (text(seed=9), text())):
        session = video.session(prompt, size=SIZE, negative=negative, guidance=2.0)
        session.take(film)
        rows.append(asked(session, x))
    torch.testing.assert_close(rows[0].flip(0), rows[1], atol=1e-6, rtol=0)
    assert (rows[0][0] - rows[0][1]).abs().max() > 1e-3

    prompt, film, x = text(2), latents(2 * CHUNK, 2), latents(CHUNK, 2, 6)
    outs = []
    for row in (slice(0, 2), slice(0, 1), slice(1, 2)):
        session = video.session(prompt[row], size=SIZE, policy=Window(3, 3))
        session.take(film[row])
        outs.append(asked(session, x[row]))
    torch.testing.assert_close(outs[0], torch.cat(outs[1:]), atol=1e-5, rtol=1e-5)


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


def test_more_than_a_table_has_is_refused(video: CausalVideo) -> None:
    narrow = video.session(text(), size=(2, 2))
    with pytest.raises(ValueError, match="frames=65: the transformer numbers at most 64"):
        narrow.next(65)
    with pytest.raises(ValueError, match=r"size=\(2, 130\): is 1 rows and 65 columns of tokens"):
        video.session(text(), size=(2, 130))
    assert narrow.next(1).shape[2] == 1


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
def test_a_rollout_is_the_recompute_over_what_is_alike(video: CausalVideo, numbers: Numbers) -> None:
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


TOKENS = 4  # of a frame of the small store


def drawn(frames: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, TOKENS * frames, 12, generator=generator, dtype=torch.float64)


def kept(policy: FlowCache, k: Tensor, q: Tensor, chunk: int = 3) -> Tensor:
    """Return the tokens that are held before a chunk, `[B, H, S]`."""
    rotary = replace(RotaryND.sections((4, 4, 4)), grid=(2, 2))
    store = KVStore(1, policy.recipe(TOKENS), rotary=[rotary])
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
    turn = replace(RotaryND.sections((4, 4, 4)), grid=(2, 2))
    keys, asked = turn.rotate(k, at), turn.rotate(q, at)[:, :, -2 * TOKENS :]
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


def test_limits_are_redundancy_and_importance_alone() -> None:
    k, q = drawn(6, 1), drawn(6, 2)
    k[:, :, :12] = functional.normalize(torch.ones_like(k[:, :, :12]), dim=-1)  # three like frames
    k[:, :, :12, 4:] = drawn(3, 3)[..., 4:] * 0.01
    alike = kept(FlowCache(window=3, mix=0.0), k, q, chunk=6)
    assert (alike >= 12).float().mean() > 0.9  # nearly all of the unlike ones
    planted = k.clone()
    turn = replace(RotaryND.sections((4, 4, 4)), grid=(2, 2))
    asked = turn.rotate(q, torch.arange(24)[None, None])[:, :, -TOKENS:].sum(2, keepdim=True)
    planted[:, :, 5:6] = turn.unrotate(5 * asked, torch.tensor([[[5]]]))
    held = kept(FlowCache(window=3, mix=1.0, kernel=1), planted, q, chunk=6)
    assert (held == 5).any(-1).all()


def test_a_rollout_is_the_masked_recompute_of_the_tokens_it_kept(video: CausalVideo) -> None:
    prompt, made, read = text(2), [], [[], []]
    session = video.session(prompt, size=SIZE, policy=FlowCache(4))
    for _ in range(5):
        with noted(video.transformer) as calls:
            made.append(session.next())
        for layer, each in zip(session.store.layers, read, strict=True):
            tokens = layer.meta()["pos"].expand(2, HEADS, -1).long()
            each.append((tokens, tokens // UNIT))
    last = read[0][-1][0]
    assert last.shape[2] == 7 * UNIT and not torch.equal(last[:, 0], last[:, 1])
    check_calls(video.transformer, made[:-1], calls, prompt, read)


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


def test_until_the_sinks_are_full_it_is_the_whole_history_and_then_sinks_speak(video: CausalVideo) -> None:
    full, rolling = (rollout(video, 5, policy=each)[1] for each in (FullHistory(), RollingSink(6, 3)))
    torch.testing.assert_close(rolling[:3], full[:3], atol=1e-5, rtol=1e-5)
    assert (rolling[3] - full[3]).abs().max() > 1e-3


def test_a_flush_leaves_sinks_in_the_place_of_what_goes(video: CausalVideo) -> None:
    session, _, _ = rollout(video, 5, policy=RollingSink(6, 3))
    session.switch(text(seed=4), Flush(1))
    session.next()
    assert frames(session) == [0, 1, 2, 3, 4, 5, 14, 15, 16, 17]
    assert session.next().isfinite().all()


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


def frames_of_slots(pos: Tensor) -> list[int]:
    return [place // UNIT for place in pos.tolist() if place >= 0]


LAYER_BUDGETS_UNIT, LAYER_BUDGETS_CHUNK, WIDE = 16, 3, 2  # tokens, frames, the layer that looks far back


def fill(store: KVStore, wide: int, seed: int) -> None:
    """Write a chunk into every layer, and ask: one layer attends evenly, the others to its own."""
    count = LAYER_BUDGETS_CHUNK * LAYER_BUDGETS_UNIT
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
    store = KVStore(4, policy.recipe(LAYER_BUDGETS_UNIT), rotary=[rotary] * 4)
    for chunk in range(12):
        fill(store, WIDE if chunk < 6 else 0, chunk)  # later another one looks far back
        frames = [layer.held / LAYER_BUDGETS_UNIT for layer in store.layers]
        assert sum(frames) <= 4 * (8 + LAYER_BUDGETS_CHUNK)
        if chunk >= 2:
            assert [frames[layer] for layer in (0, 1, 3)] == [4 + LAYER_BUDGETS_CHUNK] * 3
    assert frames[WIDE] == 8 + 3 * 4 + LAYER_BUDGETS_CHUNK
    for layer in store.layers:
        pos = layer.meta()["pos"][0, 0]
        assert set(range(LAYER_BUDGETS_UNIT)) <= set(pos.tolist())  # the first frame stays, and the latest chunk
        assert set(range(33 * LAYER_BUDGETS_UNIT, 36 * LAYER_BUDGETS_UNIT)) <= set(pos.tolist())


def test_what_is_attended_to_stays() -> None:
    rotary = RotaryND(torch.zeros(3, dtype=torch.float64), axes=(0, 1, 2), grid=(4, 4))
    store = KVStore(1, LayerBudgets(4, recent=1, reduction=0, sinks=0).recipe(LAYER_BUDGETS_UNIT), rotary=[rotary])
    layer, count = store.layers[0], LAYER_BUDGETS_CHUNK * LAYER_BUDGETS_UNIT
    for chunk in range(3):
        store.begin(count)
        k = torch.randn(1, 1, count, 6, generator=torch.Generator().manual_seed(chunk))
        k[..., 0] = 0
        if chunk == 0:
            k[:, :, 5, 0] = 9.0  # one token of the second frame
        layer.write(k, k)
        q = torch.zeros_like(k)
        q[..., 0] = 9.0
        store.attend(0, Query(q, layer.seen - count, 1.0, causal=False))
    held = layer.meta()["pos"][0, 0].tolist()
    assert 5 in held and len(held) == (4 + LAYER_BUDGETS_CHUNK) * LAYER_BUDGETS_UNIT


POLICY = DeepForcing(window=9, sinks=3, budget=8, recent=4)


def deep_forcing_drawn(frames: int, seed: int) -> Tensor:
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
    store, k, q = small(policy), deep_forcing_drawn(8, 1), deep_forcing_drawn(8, 2)
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


def test_a_planted_key_stays_and_the_order_of_candidates_does_not_matter() -> None:
    policy = DeepForcing(window=6, sinks=1, budget=5, recent=3)
    kept = []
    for order in (torch.arange(16), torch.arange(16).flip(0)):
        store, k = small(policy), deep_forcing_drawn(8, 1)
        turn = store.layers[0].rotary
        assert turn is not None
        at = torch.arange(32)[None, None]
        asked = turn.rotate(deep_forcing_drawn(8, 2), at)[:, :, 20:].sum(2, keepdim=True)
        k[:, :, 9:10] = turn.unrotate(3 * asked, torch.tensor([[[9]]]))
        rank = turn.rotate(k, at)
        moved = rank[:, :, 4:20][:, :, order]  # candidates as they are met, at other places
        k[:, :, 4:20] = turn.unrotate(moved, at[:, :, 4:20])
        for start in (0, 8, 16, 24):
            chunk(store, policy, k[:, :, start : start + 8], deep_forcing_drawn(8, 2)[:, :, start : start + 8])
        found = positions(store)
        kept.append([{int(order[p - 4]) for p in row if 4 <= p < 20} for row in found])
        assert all(5 in row for row in kept[-1])  # token 9
        assert all(row == sorted(row) for row in found)
    assert kept[0] == kept[1]


@pytest.mark.parametrize("phase", ["original", "contiguous"])
def test_what_is_held_stays_constant_and_reuse_has_a_bound(phase: Any) -> None:
    policy = DeepForcing(window=9, sinks=3, budget=8, recent=4, topc_phase=phase, max_reuse=2)
    free, capped = replace(policy, max_reuse=None), policy
    chosen: dict[int, list[set[int]]] = {0: [], 1: []}
    for which, each in enumerate((free, capped)):
        store = small(each)
        for number in range(14):
            k = deep_forcing_drawn(3, 10 + number)
            if number == 1:
                k = 30 * k.abs()  # large keys are chosen again and again
            chunk(store, each, k, deep_forcing_drawn(3, 2).abs())
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
def test_deep_forcing_a_rollout_is_the_masked_recompute_of_the_tokens_it_kept(video: CausalVideo, phase: Any) -> None:
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
