"""Invariants of a cache of causal video that no test of one policy shows."""

from __future__ import annotations

from contextlib import suppress
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
from tests.video.toys import (
    CHANNELS,
    CHUNK,
    HEAD,
    SIZE,
    UNIT,
    held,
    noted,
    rollout,
    text,
    turned,
    wan,
)

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
    drift = [(each.float() - wanted.float()).norm() / wanted.float().norm()
             for each in (met, in_place)]  # fmt: skip
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
