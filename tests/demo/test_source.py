"""Pictures of a viewer's camera or file: the latest are kept, and the films that are made from them."""

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from diffcache.pipelines.demo import source as sources
from diffcache.pipelines.demo.program import Asked
from diffcache.pipelines.demo.session_film import LiveFilm, program_of
from diffcache.pipelines.demo.showing import Viewers, show
from diffcache.pipelines.demo.source import ANEW, BEGINS, FRESH, Reader, Source
from diffcache.pipelines.video_to_video import VideoToVideo
from tests.demo.test_showing import PROGRAM, RED, Plain
from tests.demo.test_stream import films

SIZE = (16, 24)


def shot(color: int, size: tuple[int, int] = SIZE) -> str:
    file = io.BytesIO()
    Image.fromarray(np.full((*size, 3), color, np.uint8)).save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()


def sent(first: int, colors: Any, use: str = ANEW) -> dict[str, Any]:
    return {"use": use, "first": first, "files": [shot(color) for color in colors]}


def colors(pictures: Any) -> list[int]:
    return [int(picture.mean().round()) for picture in pictures]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test moves, and that a wait for pictures moves on."""
    now = [0.0]
    monkeypatch.setattr(sources.time, "monotonic", lambda: now[0])
    wait = sources.threading.Condition.wait

    def waited(self: Any, timeout: float | None = None) -> bool:
        now[0] += timeout or 0.0
        return wait(self, 0.0)

    monkeypatch.setattr(sources.threading.Condition, "wait", waited)
    return now


def test_a_film_is_never_more_than_two_chunks_behind(clock: list[float]) -> None:
    source = Source(12)
    source.put(sent(100, [1, 2]))
    quick, slow = (Reader(source, SIZE, 5, 6) for _ in "ab")
    assert quick.take(lambda: True) is None  # pictures before the film do not count
    source.put(sent(102, range(10, 15)))
    clock[0] += 1
    assert colors(quick.take(lambda: False)) == [10, 11, 12, 13, 14]
    assert (quick.dropped, quick.arrived) == (0, 0.0)
    source.put(sent(107, range(20, 24)))
    source.put(sent(114, [30, 31]))  # the page left three out
    assert colors(quick.take(lambda: False)) == [20, 21, 22, 23, 30, 31]
    assert (quick.dropped, quick.arrived) == (3, 1.0)
    source.put(sent(116, range(40, 55)))  # more than are kept
    assert colors(slow.take(lambda: False)) == [50, 51, 52, 53, 54]  # the latest of them
    assert slow.dropped == 5 + 4 + 3 + 2 + 10
    source.put(sent(131, [60]))
    assert slow.take(lambda: True) is None and slow.dropped == 24
    assert slow.take(lambda: False) is None  # no more come: it has waited
    assert clock[0] == pytest.approx(1 + FRESH, abs=0.2) and not source.is_on
    source.put(sent(5, [70]))  # of another file, which counts anew
    assert source.is_on and colors(source.latest(SIZE, 2)) == [70]
    source.put(sent(6, []))
    assert not source.is_on
    assert sources.opened(base64.b64decode(shot(3)), 24).size == SIZE[::-1]


class Seen(Plain):
    """A film that shows the pictures that it is made from, or begins with."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self.asked = asked

    def next(self, seen: Any = None) -> Any:
        if self.asked.start is not None:
            return self.asked.start
        assert (seen is not None) is self.asked.anew
        return super().next() if seen is None else seen


def test_films_begin_with_pictures_or_are_made_from_them_side_by_side() -> None:
    program = PROGRAM.__class__(**{**vars(PROGRAM), "make": Seen, "seen": (1, 2), "latent": 2})
    viewers = Viewers(2)
    viewers.see("me", sent(0, [5, 6, 7, 8], BEGINS), 4)
    values = show(program, viewers, "me", RED)
    (chunks,) = next(values)["player"]["films"]
    assert len(chunks[0]["frames"]) == 3  # 1 and a multiple of 2, the latest
    values.close()
    assert next(show(program, viewers, "you", RED))["player"]["dropped"] == 0  # has no source
    viewers.leave("you")

    viewers.see("me", sent(4, [5, 6, 7, 8], ANEW), 4)
    values = show(program, viewers, "me", RED, "full")
    number, shown = 8, []
    for _ in range(3):  # as pictures come in
        viewers.see("me", sent(number, [number], ANEW), 4)
        number += 1
    values = show(program, viewers, "me", RED, "full")
    with pytest.MonkeyPatch.context() as patch:
        take = Reader.take

        def fed(self: Reader, stopped: Any) -> Any:
            viewers.see("me", sent(number, [60, 61, 62, 63], ANEW), 4)
            return take(self, stopped)

        patch.setattr(Reader, "take", fed)
        for _ in range(3):
            value = next(values)
            shown.append([len(chunks[-1]["frames"]) for chunks in value["player"]["films"]])
        rows = {row[0]: row[1:] for row in value["player"]["table"]}
        assert shown[0] == [1, 1] and shown[1:] == [[2, 2]] * 2
        assert {"made after pictures came", "pictures left out"} < rows.keys()
    viewers.see("me", sent(0, [], ANEW), 4)  # the camera is turned off: the film ends
    assert list(values)[-1]["player"]["over"] == "stopped"
    viewers.leave("me")
    assert not films() and viewers.source("me") is None
    for number in range(8):  # anybody may send some
        viewers.see(str(number), sent(0, [1]), 4)
    viewers.see("0", sent(1, [1]), 4)
    with pytest.raises(ValueError, match="these are no pictures"):
        viewers.see("new", {}, 4)  # nobody goes for it
    with pytest.raises(ValueError, match="2 viewers are served already"):
        viewers.see("new", sent(0, [1]), 4)
    viewers.see("5", sent(0, []), 4)  # turned off
    viewers.see("new", sent(0, [1]), 4)
    assert list(viewers._sources) == ["1", "2", "3", "4", "6", "7", "0", "new"]


def test_a_live_film_is_that_of_the_pictures_and_takes_orders() -> None:
    from diffcache.pipelines.causal_video import CausalVideo

    with CausalVideo.from_pretrained("sticker-causal") as video:
        program = program_of(video, "sticker-causal", 1, 10**9)
        assert (program.seen, program.latent) == ((5, 6), 2)
        asked = Asked("a crab", "window", 3, 4, SIZE := (16, 32), anew=True)
        film = program.make(asked)
        assert isinstance(film, LiveFilm)
        pictures = np.random.default_rng(0).integers(0, 255, (29, *SIZE, 3), dtype=np.uint8)
        plain = VideoToVideo(video, "a crab", policy="window", size=SIZE, seed=3, rows=1)
        for group in (pictures[:5], pictures[5:11]):
            assert np.array_equal(film.next(group), plain.next(group))
        assert {"bytes", "decoder_bytes", "drift"} == film.readings().keys()
        for bad, said in (
            ({"prompt": "a fox", "switch": "re-cache"}, "no.* clean pass|has none"),
            ({"policy": "deep-forcing", "prompt": "a fox"}, "queries of finished"),
        ):
            with pytest.raises(ValueError, match=said):
                film.apply(bad)
        assert np.array_equal(film.next(pictures[11:17]), plain.next(pictures[11:17]))
        film.apply({"prompt": "a fox", "policy": "infinity-rope"})
        later = film.next(pictures[17:23])
        assert len(later) == 6 and (film.stream.prompt, film.stream.policy) == ("a fox", "infinity-rope")
        assert not np.array_equal(later, plain.next(pictures[17:23]))
        again = program.make(asked)  # in another replica, where chunks go on as before
        assert len(again.next(pictures[:6])) == 5
        start = program.make(Asked("a crab", "window", 3, 4, SIZE, start=pictures[:5]))
        assert len(start.next()) == 5 + 6
