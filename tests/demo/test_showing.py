"""Films of several viewers: what a page is given, what is refused, and what stays behind."""

import base64
import io
import time
from collections.abc import Mapping
from dataclasses import replace
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image

from diffcache.pipelines.demo import recording
from diffcache.pipelines.demo.program import Asked, Program, checked_prompt
from diffcache.pipelines.demo.recording import Recording
from diffcache.pipelines.demo.showing import AGAIN, ALONE, Showing, Viewers, show
from diffcache.pipelines.demo.stream import Stream
from tests.demo.test_stream import films


class Plain:
    """A film of one color, whose bytes grow without a limit or stay."""

    def __init__(self, asked: Asked) -> None:
        if asked.prompt == "broken":
            raise RuntimeError("out of memory")
        self.color, self.policy, self.made = len(asked.prompt), asked.policy, 0

    def next(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        self.made += 1
        return np.full((2, 16, 24, 3), self.color, np.uint8)

    def apply(self, order: Mapping[str, Any]) -> None:
        self.color = len(order.get("prompt", self.color * "x"))
        self.policy = order.get("policy", self.policy)

    def news(self) -> str:
        return ""

    def readings(self) -> dict[str, float]:
        return {"bytes": 1e6 * (self.made if self.policy == "full" else 1)}


PROGRAM = Program(Plain, ("window", "full"), ("keep",), ("red",), {"16 x 24": (16, 24)}, fps=10_000, viewers=2)
RED = PROGRAM.asked("red", "window", 0, 4, "16 x 24")


def color(jpeg: str) -> int:
    return int(np.asarray(Image.open(io.BytesIO(base64.b64decode(jpeg)))).mean().round())


def test_the_end_waits_for_a_film_that_its_viewer_is_leaving() -> None:
    inside, gate, viewers = Event(), Event(), Viewers(2)

    class Slow(Plain):
        def next(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
            inside.set()
            gate.wait()
            return super().next()

    stream = Stream(lambda: Slow(RED))
    viewers.begin("me", Showing(["window"], [stream], Recording(1, 8)))
    stream.start()
    inside.wait()
    leaving = Thread(target=viewers.leave, args=("me",))
    leaving.start()
    while viewers.find("me") is not None:
        time.sleep(0.01)
    closing = Thread(target=viewers.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()  # as the film is
    gate.set()
    closing.join()
    leaving.join()
    assert not stream._thread.is_alive()
    with pytest.raises(ValueError, match="served already"):
        next(show(PROGRAM, viewers, "you", RED))


def test_two_films_side_by_side_a_new_prompt_and_a_new_policy() -> None:
    viewers = Viewers(2)
    values = show(PROGRAM, viewers, "me", RED, "full")
    first = next(values)
    assert first["player"]["titles"] == ["window", "full"] and first["player"]["width"] == 24
    assert [color(chunks[0]["frames"][0]) for chunks in first["player"]["films"]] == [3, 3]
    assert first["player"]["points"][0]["MB"] == [1.0, 1.0]
    assert first["player"]["marks"] == [{"frame": 0, "text": "red"}]
    mine = viewers.find("me")
    assert mine is not None
    mine.order(prompt="a" * 40, switch="keep", policy="full")
    notes = []
    for _ in range(8):
        value = next(values)
        notes.append(value["note"])
    player = value["player"]
    assert [len(chunks) for chunks in player["films"]] == [AGAIN, AGAIN]
    assert [color(chunks[-1]["frames"][0]) for chunks in player["films"]] == [40, 40]
    assert player["titles"] == ["full", "full"]  # the second has no say in it
    told = [note for note in notes if note]
    assert len(told) == 1 and told[0].endswith(f"prompt '{'a' * 40}', switch 'keep', policy 'full'")
    texts = [mark["text"] for mark in player["marks"]]
    assert texts == ["red", "a" * 40, "cache: full"] and player["frames"] == 18
    rows = {row[0]: row[1:] for row in player["table"]}
    assert {"held in all", "first frame after"} < rows.keys() and len(rows["chunk"]) == 2
    values.close()
    assert not films() and not len(viewers)
    assert len(Image.open(io.BytesIO(mine.recording._frames[0][0])).getbands()) == 3


def test_a_viewer_has_one_showing_and_there_are_no_more_than_places() -> None:
    viewers = Viewers(2)
    mine = show(PROGRAM, viewers, "me", RED)
    again = show(PROGRAM, viewers, "me", replace(RED, policy="full"))
    yours = show(PROGRAM, viewers, "you", RED)
    next(mine)
    next(again)  # in place of the first
    next(yours)
    assert len(viewers) == 2 and len(films()) == 2
    assert [value["player"]["over"] for value in mine] == ["stopped"]
    assert len(viewers) == 2  # the end of the first leaves the second
    with pytest.raises(ValueError, match="2 viewers are served already"):
        next(show(PROGRAM, viewers, "they", RED))
    viewers.stop("me")
    assert len(viewers) == 1 and viewers.find("me") is not None  # to be saved
    viewers.leave("me")
    viewers.close()
    assert viewers.find("me") is None and viewers.find("you") is None and not films()
    viewers = Viewers(2)
    for number in range(20):  # whose pages never say that they were closed
        next(show(PROGRAM, viewers, str(number), RED))
    assert len(viewers._showings) <= 9


def test_what_cannot_be_shown_is_said_before_a_film_begins() -> None:
    good = {"prompt": "red", "policy": "window", "seed": 0, "steps": 4, "size": "16 x 24"}
    assert PROGRAM.asked(**good) == RED == PROGRAM.asked(**good | {"prompt": " red ", "seed": "0"})
    with pytest.raises(ValueError, match="no policy 'nothing much'"):
        next(show(PROGRAM, Viewers(2), "me", RED, "nothing much"))
    assert not films() and checked_prompt("  a\ud800 ") == "a" and ALONE not in PROGRAM.policies


def test_a_film_that_breaks_off_ends_alone() -> None:
    viewers = Viewers(2)
    other = show(PROGRAM, viewers, "other", RED)
    next(other)
    with pytest.raises(RuntimeError, match="out of memory"):
        next(show(PROGRAM, viewers, "me", replace(RED, prompt="broken")))
    assert len(viewers) == 1 and next(other)["player"]["films"][0]
    other.close()
    assert not films()


def test_the_latest_frames_are_written_as_mp4(monkeypatch: pytest.MonkeyPatch) -> None:
    av = pytest.importorskip("av", reason="PyAV is not installed")
    monkeypatch.setattr(recording, "LATEST", 6)
    kept = Recording(2, 12)
    with pytest.raises(ValueError, match="nothing was filmed yet"):
        kept.mp4()
    for shade in range(0, 80, 10):
        for film in (0, 1):
            frame = np.full((17, 24, 3), shade + 100 * film, np.uint8)
            kept.add(film, [recording.jpeg(frame)])
    with av.open(io.BytesIO(kept.mp4())) as container:
        frames = [frame.to_ndarray(format="gray") for frame in container.decode(video=0)]
        assert container.streams.video[0].average_rate == 12
    assert len(frames) == 6 and frames[0].shape == (16 * 15, 48 * 15)
    halves = [[int(half.mean()) for half in np.split(frame, 2, 1)] for frame in frames]
    assert np.abs(np.array(halves) - [[s, s + 100] for s in range(20, 80, 10)]).max() < 4
    monkeypatch.setattr(recording, "find_spec", lambda name: None)
    with pytest.raises(Exception, match="MP4 needs PyAV: pip install"):
        kept.mp4()
