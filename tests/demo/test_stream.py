"""A film in a thread: orders at the start of a chunk, chunks in order, nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from diffcache.pipelines.demo.stream import AHEAD, Chunk, Stream


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


def test_a_hundred_viewers_that_leave_at_any_time_leave_nothing() -> None:
    drawn = np.random.default_rng(0)
    for _ in range(100):
        stream = Stream(Counting).start()
        for _ in range(int(drawn.integers(0, 4))):
            next(iter(stream.chunks()))
        stream.close()
    assert not films()
