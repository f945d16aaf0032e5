"""Invariants of a cache of causal video, by number, where no other test of this folder says it.

====  ============================================================================================
I1    a rollout is the masked recompute: test_rollout, and of other policies in their own files
I2    numbers moved by the same change no attention: here
I3    keys held before rotation lose nothing: here
I4    numbers without gaps matter with sinks alone: test_policies
I5    bytes are constant once the cache is full: test_policies
I6    denoising leaves what was committed alone: here
I7    frames say nothing to those before them: here
I8    a clean pass that is left out is missed: here
I9    a frame that goes says nothing more: test_policies, test_switch
I10   a window made anew from its own frames is something else: here
I11   a new prompt is read at once: test_switch
I12   a re-cache under the same prompt makes what is there: test_switch
I13   rows of the two branches are apart: here
I14   rows of a batch are apart: here
I15   a film decoded in pieces is the film decoded at once: test_streaming_vae
I16   the work of a chunk is constant once the cache is full: here
I17   no memory of what was dropped stays: test_policies
I18   keys and values in half the bits change little: here
I19   a restored stream goes on as it would have: test_saved_stream
I20   no number ends with a table: here
====  ============================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffcache.kv.rotary_nd import RotaryND
from diffcache.kv.store import KVStore
from diffcache.pipelines.causal_video import CausalVideo, Session
from diffcache.video import FewSteps, FullHistory, VideoPolicy, Window
from tests.video.test_switch import held
from tests.video.toys import (
    CHANNELS,
    CHUNK,
    HEAD,
    SIZE,
    UNIT,
    Noted,
    recomputed,
    rollout,
    text,
    turned_tokens,
    wan,
)

FAR = 1000 * UNIT


@pytest.fixture(scope="module")
def video() -> Iterator[CausalVideo]:
    with CausalVideo(wan(layers=2), chunk=CHUNK, sampler=FewSteps((1000, 500))) as video:
        yield video


def latents(frames: int, batch: int = 1, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, CHANNELS, frames, *SIZE, generator=generator)


@torch.no_grad()
def asked(session: Session, x: Tensor) -> Tensor:
    """Return what the transformer predicts for all rows of a chunk; nothing stays."""
    noted = Noted()
    handle = session.video.transformer.register_forward_hook(noted.hook, with_kwargs=True)
    try:
        with session.chunk(x.shape[2]):
            session._velocity(x, 700.0)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        return noted.calls[0][2]
    finally:
        handle.remove()


def test_i2_numbers_moved_by_the_same_change_no_attention() -> None:
    rotary = RotaryND.sections((8, 8, 8))
    places = torch.cartesian_prod(torch.arange(3), torch.arange(4), torch.arange(4))[None, None]
    q, k, v = torch.randn(3, 1, 2, 3 * UNIT, HEAD, dtype=torch.float64).unbind()
    outs = []
    for shift in (0, 1000):
        at = places + torch.tensor([shift, 0, 0])
        logits = rotary.rotate(q, at) @ rotary.rotate(k, at).mT
        outs.append((logits / HEAD**0.5).softmax(-1) @ v)
    torch.testing.assert_close(*outs, atol=1e-12, rtol=0)


def test_i3_keys_held_before_rotation_lose_nothing() -> None:
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
    wanted = turned_tokens(frame.transpose(1, 2), last, torch.arange(UNIT)[None]).transpose(1, 2)
    torch.testing.assert_close(met, wanted, atol=0.04, rtol=0)  # one rounding
    drift = [(each.float() - wanted.float()).norm() / wanted.float().norm()
             for each in (met, in_place)]  # fmt: skip
    assert drift[0] < 0.005 and drift[1] > 0.01


def test_i6_denoising_leaves_what_was_committed_alone(video: CausalVideo) -> None:
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


def test_i7_frames_say_nothing_to_those_before_them(video: CausalVideo) -> None:
    film = latents(3 * CHUNK)
    changed = film.clone()
    changed[:, :, CHUNK + 1] += 1
    stores = []
    for each in (film, changed):
        session = video.session(text(), size=SIZE)
        session.take(each)
        stores.append(held(session))
    for one, other in zip(*stores, strict=True):
        assert torch.equal(one[:, :, : CHUNK * UNIT], other[:, :, : CHUNK * UNIT])
    deep, changed = (store[2][:, :, CHUNK * UNIT :] for store in stores)  # second layer's keys
    assert (deep != changed).any(-1).all()


def test_i8_a_clean_pass_that_is_left_out_is_missed(
    video: CausalVideo, monkeypatch: pytest.MonkeyPatch
) -> None:
    films = [rollout(video, 2)[1]]
    monkeypatch.setattr(Session, "_clean_pass", lambda *_: None)
    films.append(rollout(video, 2)[1])
    assert torch.equal(films[0][0], films[1][0])
    assert (films[0][1] - films[1][1]).abs().max() > 1e-3


def test_i10_a_window_made_anew_from_its_own_frames_is_something_else() -> None:
    model = wan(layers=2)
    with CausalVideo(model, chunk=CHUNK, sampler=FewSteps((1000,))) as video:
        _, made, calls = rollout(video, 4, policy=Window(CHUNK, 0, "absolute"))
    noisy, time, velocity = calls[-1][0]
    numbers = {frame: frame for frame in range(4 * CHUNK)}
    kept = [list(range(CHUNK * (c - 1), CHUNK * c)) if c else [] for c in range(4)]
    wanted = recomputed(model, made[:-1], noisy, time, text(), kept, [numbers] * 4)
    torch.testing.assert_close(velocity, wanted, atol=1e-5, rtol=1e-5)
    alone = recomputed(model, made[-2:-1], noisy, time, text(), kept[:2], [numbers] * 2)
    assert (velocity - alone).abs().max() > 1e-3


def test_i13_i14_rows_of_branches_and_of_a_batch_are_apart(video: CausalVideo) -> None:
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = tree_leaves((args, kwargs))
        self.total += sum(x.numel() for x in read if isinstance(x, Tensor))
        return func(*args, **(kwargs or {}))


def test_i16_the_work_of_a_chunk_is_constant_once_the_cache_is_full() -> None:
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


def test_i18_keys_and_values_in_half_the_bits_change_little(video: CausalVideo) -> None:
    session, other = (rollout(video, 2, policy=Window(3, 3))[0] for _ in range(2))
    for layer in other.store.layers:
        slots = layer.read()
        layer.overwrite(range(layer.held), slots.k.bfloat16().float(), slots.v.bfloat16().float())
    one, two = (asked(each, latents(CHUNK)) for each in (session, other))
    assert 0 < (one - two).norm() / one.norm() < 2e-2


@pytest.mark.parametrize("policy", [FullHistory(), Window(3, 3)])
def test_i20_no_number_ends_with_a_table(video: CausalVideo, policy: VideoPolicy) -> None:
    """Frames far beyond the 64 that the transformer has a table for are not rotated as its last."""
    films = []
    for start in (0, FAR):
        session = video.session(text(), size=SIZE, policy=policy)
        for layer in session.store.layers:
            layer.seen = start
        films.append(torch.cat([session.next() for _ in range(2)], 2))
    torch.testing.assert_close(*films, atol=1e-4, rtol=1e-4)


def test_i20_more_than_a_table_has_is_refused(video: CausalVideo) -> None:
    narrow = video.session(text(), size=(2, 2))
    with pytest.raises(ValueError, match="frames=65: the transformer numbers at most 64"):
        narrow.next(65)
    with pytest.raises(ValueError, match=r"size=\(2, 130\): is 1 rows and 65 columns of tokens"):
        video.session(text(), size=(2, 130))
    assert narrow.next(1).shape[2] == 1
