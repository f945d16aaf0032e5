"""Films of real sessions: policies and prompts while they run, and viewers at random."""

import gc
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diffcache.pipelines import video_stream
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.demo.program import Asked
from diffcache.pipelines.demo.session_film import SWITCHES, SessionFilm, policies, program_of
from diffcache.pipelines.demo.showing import ALONE, Viewers, show
from diffcache.pipelines.pretrained_video import Streaming
from diffcache.pipelines.video_stream import to_pictures
from diffcache.video import FewSteps, FullHistory, Window
from tests.demo.test_stream import films
from tests.video.toys import HEAD, HEADS, SIZE, TEXT, UNIT, wan

PLENTY = 10**9
FRAME_BYTES = 2 * 4 * UNIT * HEADS * HEAD  # keys and values, float32


class Pixels:
    """Stands in for a decoder: the first channels of latents are the colors."""

    nbytes = 0

    def __init__(self, vae: None) -> None:
        """Take no autoencoder."""

    def decode(self, latents: Tensor) -> Tensor:
        return latents[:, :3]


def words(text: str, **_: Any) -> tuple[Tensor, None]:
    """Stand in for a text encoder that knows no dogs."""
    if "dog" in text:
        raise ValueError("prompt='a dog': is no prompt of this model")
    return torch.randn(1, 4, TEXT, generator=torch.Generator().manual_seed(len(text))), None


@pytest.fixture(scope="module")
def served() -> Iterator[CausalVideo]:
    sampler = FewSteps((1000, 500), shift=1.0, predicts="clean")
    with pytest.MonkeyPatch.context() as patch, CausalVideo(wan(layers=1), sampler=sampler) as video:
        patch.setattr(video_stream, "WanDecoder", Pixels)
        vae = SimpleNamespace(config=SimpleNamespace(temperal_downsample=[]))
        video.pipe = SimpleNamespace(encode_prompt=words, vae=vae, vae_scale_factor_spatial=1)
        video.way = Streaming(SIZE, 4, 3, 12, ("a red ring",), sampler)
        yield video


def asked(policy: str = "window", **changes: Any) -> Asked:
    return replace(Asked("a red ring", policy, 3, 2, SIZE), **changes)


def test_every_policy_films_and_tells_what_it_holds(served: CausalVideo) -> None:
    assert list(program_of(served, "tiny", 2, PLENTY).sizes) == ["8 x 8"]
    for name in policies():
        film = SessionFilm(served, asked(name), PLENTY)
        frames, known = [], []
        for _ in range(14):
            frames.append(film.next())
            known.append(film.readings())
        assert frames[0].shape == (3, *SIZE, 3) and frames[0].dtype == np.uint8
        assert not np.array_equal(frames[-1], frames[-2])
        last = known[-1]
        roles = [last[f"{role}_bytes"] for role in ("sinks", "history", "working")]
        assert sum(roles) == pytest.approx(last["bytes"]) and last["bytes"] > 0
        if name == "full":
            assert roles[:2] == [0, 42 * FRAME_BYTES]
        else:
            assert last["bytes"] <= 1.5 * max(one["bytes"] for one in known[:9])
        if name == "window":  # before a chunk: 3 first and 6 later; with it 3 more
            assert roles[:2] == [3 * FRAME_BYTES, 9 * FRAME_BYTES]
        if name == "quantized":
            assert roles[0] < 3 * FRAME_BYTES / 4
        assert known[0]["drift"] == 0 and last["drift"] > 0


def test_orders_do_what_a_session_does(served: CausalVideo) -> None:
    film = SessionFilm(served, asked("full", steps=4), PLENTY)
    session = served.session(words("a red ring")[0], size=SIZE, seed=3)
    session.sampler = FewSteps((1000, 750, 500, 250), shift=1.0, predicts="clean")

    def same() -> bool:
        return np.array_equal(film.next(), to_pictures(session.next()[:, :3]))

    assert all(same() for _ in range(5))
    with pytest.raises(ValueError, match="a dog"):
        film.apply({"prompt": "a dog", "policy": "window", "switch": "cut"})
    assert film.stream.session.policy == FullHistory()
    for switch in SWITCHES:
        film.apply({"prompt": switch, "switch": switch})
        session.switch(words(switch)[0], SWITCHES[switch])
        assert same() and film.readings()["drift"] == 0

    policy = Window()
    later = served.session(words("cut")[0], size=SIZE, policy=policy)
    assert session.latents is not None and session.latents.shape[2] == 12
    later.sampler = session.sampler
    later.take(session.latents)
    later.generator.set_state(session.generator.get_state())
    session = later
    film.apply({"policy": "window"})
    assert same() and same() and film.stream.session.policy == policy


def test_a_film_ends_when_its_cache_has_grown_to_the_bound(served: CausalVideo) -> None:
    film = SessionFilm(served, asked("full"), 40 * FRAME_BYTES)
    with pytest.raises(ValueError, match="'full': the film is over, as its cache grew to .* in 42"):
        deque((film.next() for _ in range(40)), 0)
    with pytest.raises(ValueError, match="would hold .* take policy='quantized'"):
        SessionFilm(served, asked("full"), 10 * FRAME_BYTES)


def test_viewers_at_random_leave_nothing_behind(
    served: CausalVideo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some leave at once, some close the page, some are forgotten, and in some the film breaks."""
    monkeypatch.chdir(tmp_path)
    held: list[weakref.ref[Any]] = []

    def make(request: Asked) -> SessionFilm:
        film = SessionFilm(served, request, PLENTY)
        held.extend(map(weakref.ref, (film, film.stream.session, film.stream.session.store)))
        if request.prompt == "broken":

            def gone() -> Any:
                raise RuntimeError("the device is gone")

            film.next = gone  # type: ignore[method-assign]
        return film

    program = replace(program_of(served, "tiny", 8, PLENTY), make=make, fps=10_000)
    viewers, names = Viewers(8), policies()

    def visit(number: int) -> tuple[bool, int, str]:
        random = np.random.default_rng(number)
        breaks, leaves, chunks = number % 10 == 0, random.integers(3), int(random.integers(0, 4))
        prompt = "broken" if breaks else "a red ring"
        request = asked(names[random.integers(len(names))], prompt=prompt, seed=number)
        other = ALONE if random.random() < 0.7 else names[-1]
        values, who, taken = (show(program, viewers, who=str(number), asked=request, other=other), str(number), 0)
        try:
            for _ in range(max(chunks, int(breaks))):
                taken += bool(next(values)["player"]["films"][0])
                showing = viewers.find(who)
                assert showing is not None
                showing.order(prompt="a blue cross", policy="window", switch="re-cache")
        except RuntimeError as error:
            return breaks, taken - chunks, str(error)
        finally:
            if leaves == 0:
                values.close()
            elif leaves == 1:
                viewers.stop(who)
            viewers.leave(who)
        return breaks, taken - chunks, ""

    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(visit, range(20)))
    assert [error for breaks, _, error in told if breaks] == ["the device is gone"] * 2
    assert all(missing == 0 and not error for breaks, missing, error in told if not breaks)
    assert len(held) >= 3 * 10 and not len(viewers) and not viewers._showings and not films()
    gc.collect()
    assert [ref for ref in held if ref() is not None] == [] and list(tmp_path.iterdir()) == []
