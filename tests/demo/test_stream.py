"""Films of the demo: made chunk by chunk, kept, and gone on with."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import pytest

from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.demo.kept import SAVED_EVERY, Kept, is_viewer
from diffcache.pipelines.demo.program import Asked
from diffcache.pipelines.demo.session_film import program_of
from diffcache.pipelines.demo.showing import Viewers, show
from diffcache.pipelines.demo.stream import AHEAD, Chunk, Stream
from diffcache.video import FewSteps


class Counting:
    """A film whose frames show its prompt's length and the number of the chunk."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.prompt, self.number, self.fails_at = "a", 0, fails_at
        self.applied: list[Mapping[str, Any]] = []
        self.gate = threading.Event()
        self.gate.set()

    def next(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        assert self.gate.wait(10)
        if self.number == self.fails_at:
            raise RuntimeError("the device is gone")
        frames = np.full((2, 4, 4, 3), len(self.prompt), np.uint8)
        frames[:, 0, 0, 0] = self.number
        self.number += 1
        return frames

    def apply(self, order: Mapping[str, Any]) -> None:
        if not order.get("prompt", "x"):
            raise ValueError("prompt='': must not be empty")
        self.applied.append(order)
        self.prompt = order.get("prompt", self.prompt)

    def news(self) -> str:
        return ""

    def readings(self) -> dict[str, float]:
        return {"bytes": 8.0 * self.number}


def films() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "diffcache-film"}


def test_chunks_come_in_order_and_the_film_ends() -> None:
    with Stream(Counting, limit=5) as stream:
        made = [chunk for chunk in stream.chunks() if chunk is not None]
    assert [chunk.number for chunk in made] == [0, 1, 2, 3, 4]
    assert [int(chunk.frames[0, 0, 0, 0]) for chunk in made] == [0, 1, 2, 3, 4]
    last = made[-1].readings
    assert last["bytes"] == 40 and 0 <= last["p50"] <= last["p95"] and last["seconds"] >= 0
    assert not films()


def test_of_orders_before_a_chunk_the_latest_counts() -> None:
    film = Counting()
    film.gate.clear()
    with Stream(lambda: film, limit=3) as stream:
        taken = iter(stream.chunks())
        for text in ("bb", "ccc", "dddd"):  # while the first chunk is made
            stream.orders.put(prompt=text)
        stream.orders.put(mode="keep")
        film.gate.set()
        made = [chunk for chunk in taken if chunk is not None]
    assert film.applied[-1] == {"prompt": "dddd", "mode": "keep"}
    where = next(chunk.number for chunk in made if chunk.applied)
    assert where <= 1 and [int(c.frames[0, 1, 1, 0]) for c in made] == [1] * where + [4] * (3 - where)


def test_an_order_that_cannot_be_done_is_told_and_the_film_goes_on() -> None:
    stream = Stream(Counting, limit=3)
    stream.orders.put(prompt="")
    with stream:
        made = [chunk for chunk in stream.chunks() if chunk is not None]
    assert [chunk.refused for chunk in made].count("prompt='': must not be empty") == 1
    assert all(int(chunk.frames[0, 1, 1, 0]) == 1 for chunk in made) and len(made) == 3


def test_no_more_is_made_than_may_wait_and_a_pause_ends_at_resume() -> None:
    film = Counting()
    with Stream(lambda: film) as stream:
        while stream.waiting < AHEAD:
            pass
        assert film.number <= AHEAD + 1  # one more waits to be put
        stream.pause()
        taken: list[Chunk] = []
        quiet = 0
        for chunk in stream.chunks():
            quiet = quiet + 1 if chunk is None else 0
            taken += [] if chunk is None else [chunk]
            if quiet == 2:
                break
        made = film.number
        assert len(taken) == made <= AHEAD + 2
        stream.resume()
        assert next(chunk for chunk in stream.chunks() if chunk is not None).number == made


def test_an_error_comes_after_the_frames_before_it_and_no_thread_stays() -> None:
    with Stream(lambda: Counting(fails_at=2)) as stream:
        chunks = (chunk for chunk in stream.chunks() if chunk is not None)
        assert [next(chunks).number, next(chunks).number] == [0, 1]
        with pytest.raises(RuntimeError, match="the device is gone"):
            next(chunks)
    with Stream(lambda: 1 / 0) as stream, pytest.raises(ZeroDivisionError):  # type: ignore[arg-type, return-value]
        list(stream.chunks())
    assert not films()


PLENTY = 10**9


@pytest.fixture(scope="module")
def video() -> Iterator[CausalVideo]:
    with CausalVideo.from_pretrained("sticker-causal") as opened:
        opened.sampler = FewSteps((1000, 500), shift=2.0, predicts="clean")
        yield opened


def asked(**changes: Any) -> Asked:
    return replace(Asked("a fox on grass", "window", 3, 2, (16, 16)), **changes)


def pictures(chunk: int) -> Any:
    """Return the pictures that come in for a chunk: a square that moves."""
    film = np.zeros((5 if chunk == 0 else 6, 16, 16, 3), np.uint8)
    for at, picture in enumerate(film):
        picture[4:9, (chunk + at) % 12 : (chunk + at) % 12 + 4] = 200
    return film


@pytest.mark.parametrize("anew", [False, True])
def test_a_film_goes_on_in_another_process_as_if_nothing_had_happened(
    video: CausalVideo, anew: bool, tmp_path: Path
) -> None:
    """With orders in it, one that begins with pictures and one that is made from them."""
    make = program_of(video, "tiny", 2, PLENTY).make
    start = None if anew else pictures(0)[:5]
    request, viewer = asked(anew=anew, start=start), token_hex(16)
    seen = [(pictures(chunk),) if anew else () for chunk in range(8)]
    order = {"prompt": "a crab", "policy": "window:window=3", "switch": "keep"}

    film = Kept(tmp_path, PLENTY).film(viewer, request, lambda: make(request), False)
    for chunk in range(SAVED_EVERY + 2):  # two of them are lost
        if chunk == 2:
            film.apply(order)
        film.next(*seen[chunk])
    kept = Kept(tmp_path, PLENTY)  # of a process that begins anew
    found = kept.find(viewer)
    assert found is not None and found[1] == SAVED_EVERY
    assert found[0] == asked(anew=anew, prompt="a crab", policy="window:window=3")
    again = kept.film(viewer, found[0], lambda: make(found[0]), True)
    assert again.news() == f"the film goes on from chunk {SAVED_EVERY}, as saved"

    plain = make(request)
    for chunk in range(8):
        if chunk == 2:
            plain.apply(order)
        frames = plain.next(*seen[chunk])
        if chunk >= SAVED_EVERY:
            np.testing.assert_array_equal(again.next(*seen[chunk]), frames)
    assert again.news() == "" and kept.find(viewer) == (found[0], 2 * SAVED_EVERY)


def test_a_page_goes_on_with_its_viewers_film_alone(video: CausalVideo, tmp_path: Path) -> None:
    program, viewer = replace(program_of(video, "tiny", 2, PLENTY), fps=10_000), token_hex(16)
    viewers = Viewers(2, kept=Kept(tmp_path, PLENTY))
    values = show(program, viewers, "me", asked(), viewer=viewer)
    for _ in range(SAVED_EVERY + 1):
        next(values)
    values.close()
    viewers = Viewers(2, kept=Kept(tmp_path, PLENTY))
    assert viewers.kept is not None
    for stranger in (token_hex(16), "", None, "../" + viewer, viewer.upper(), 7):
        assert viewers.kept.find(stranger) is None  # type: ignore[arg-type]
        if not is_viewer(stranger):
            continue
        values = show(program, viewers, "other", asked(), viewer=stranger, goes_on=True)
        with pytest.raises(ValueError, match="not saved any more"):
            next(values)
    assert viewer not in " ".join(os.listdir(tmp_path))
    values = show(program, viewers, "again", asked(), viewer=viewer, goes_on=True)
    first = next(values)
    assert first["note"] == f"**the film goes on from chunk {SAVED_EVERY}, as saved**"
    assert first["player"]["marks"][-1] == {"frame": 0, "text": "restored"}
    values.close()
    live = asked(anew=True)
    with pytest.raises(ValueError, match="turn the camera on"):
        next(show(program, viewers, "live", live, viewer=viewer, goes_on=True))


def test_the_folder_is_bounded_and_a_film_of_something_else_is_refused(video: CausalVideo, tmp_path: Path) -> None:
    make = program_of(video, "tiny", 2, PLENTY).make
    viewers = [token_hex(16) for _ in range(3)]

    def filmed(kept: Kept, viewer: str) -> Any:
        film = kept.film(viewer, asked(), lambda: make(asked()), False)
        for _ in range(SAVED_EVERY):
            film.next()
        return film

    kept = Kept(tmp_path, PLENTY)
    filmed(kept, viewers[0])
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    kept.most_bytes = int(2.5 * size)
    for age, viewer in enumerate(viewers[1:]):
        os.utime(next(kept.place(viewers[0]).glob("film.json")), (0, time.time() - 60 + age))
        filmed(kept, viewer)
    assert [kept.find(viewer) is not None for viewer in viewers] == [False, True, True]
    old = filmed(kept, viewers[1])
    filmed(kept, viewers[1])  # another film of the viewer
    before = kept.find(viewers[1])
    for _ in range(SAVED_EVERY):
        old.next()  # whose saves count no more
    assert kept.find(viewers[1]) == before

    other = asked(size=(32, 16))
    with pytest.raises(ValueError, match="your film cannot go on here, start another one"):
        kept.film(viewers[1], other, lambda: make(other), True)
    late = Kept(tmp_path, PLENTY, seconds=0)
    assert late.find(viewers[2]) is None and not list(tmp_path.iterdir())


def test_a_save_that_cannot_be_is_told_and_the_film_goes_on(video: CausalVideo, tmp_path: Path) -> None:
    make, viewer = program_of(video, "tiny", 2, PLENTY).make, token_hex(16)
    kept = Kept(tmp_path, PLENTY)
    film = kept.film(viewer, asked(), lambda: make(asked()), False)
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    os.utime(tmp_path / "other", (0, 0))
    kept.folder = tmp_path / "file"  # no folder can be made in it
    for _ in range(SAVED_EVERY):
        assert len(film.next())
    assert "the film could not be saved" in film.news()
    ended = weakref.ref(film.film)  # type: ignore[attr-defined]
    del film
    gc.collect()
    assert ended() is None and (tmp_path / "other").exists()  # old, and not ours
    kept = Kept(tmp_path, 1)
    film = kept.film(viewer, asked(), lambda: make(asked()), False)
    for _ in range(SAVED_EVERY):
        film.next()
    assert "more room than all films may" in film.news() and (tmp_path / "other").exists()
