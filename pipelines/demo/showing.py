"""Show films on the page of `diffcache serve` while they are made, side by side.

Every viewer has films of their own, on one model.
"""

from __future__ import annotations

import base64
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from diffcache.pipelines.demo.kept import Kept, is_viewer
from diffcache.pipelines.demo.program import Asked, Program, one_of
from diffcache.pipelines.demo.recording import Recording, jpeg
from diffcache.pipelines.demo.source import ANEW, MOST_SIDE, Reader, Source, checked_pictures
from diffcache.pipelines.demo.stream import Chunk, Film, Stream
from diffcache.run_report import human

POINTS = 240  # points of a plot, one a second
AGAIN = 2  # chunks that are sent anew, should the page have missed one
ALONE = "nothing"
_LISTEN = 10.0  # seconds in which a page begins to take what it is sent
_BRIEFLY = 2.0  # the same, while many other pages have not begun
_LEAD = 0.5  # seconds by which frames reach a page before they are shown
_REMEMBERED = 4  # times the viewers at a time, whose films can still be saved
_BYTES = {
    "bytes": "held in all",
    "sinks_bytes": "first frames (sinks)",
    "history_bytes": "later frames",
    "working_bytes": "rotated copies and room",
    "decoder_bytes": "autoencoder",
}


@dataclass(eq=False)
class Showing:
    """The films of one viewer, side by side; `titles` are the names of their policies."""

    titles: list[str]
    streams: list[Stream]
    recording: Recording
    job: str = field(default_factory=lambda: uuid.uuid4().hex)

    def order(self, **orders: Any) -> None:
        """Leave orders; a policy is for the first film alone, the other one is there to compare with."""
        self.streams[0].orders.put(**orders)
        orders.pop("policy", None)
        for stream in self.streams[1:]:
            stream.orders.put(**orders)

    def close(self) -> None:
        """End the films."""
        for stream in self.streams:
            stream.close()

    @property
    def over(self) -> bool:
        """Return True once one of the films has ended; the others end with it."""
        return any(stream.over for stream in self.streams)


class Viewers:
    """The films of everybody who looks at the page, by their session.

    Args:
        most: Most viewers whose films run at the same time.
        listeners: Sessions whose pages take the events that are sent to them; None for all.
        kept: Saved films, from which viewers go on; None where none are saved.
    """

    def __init__(self, most: int, listeners: Container[str] | None = None, kept: Kept | None = None) -> None:
        self.most, self._listeners, self.kept = most, listeners, kept
        self._showings: dict[str, Showing] = {}
        self._begun: weakref.WeakSet[Showing] = weakref.WeakSet()  # those too that end in another thread
        self._sources: dict[str, Source] = {}  # ordered by when each sent something, the latest last
        self._lock = threading.Lock()
        self.waited_for = 0  # number of pages; each wait holds a thread of the server

    def begin(self, who: str, showing: Showing) -> None:
        """Note a showing in place of the viewer's last one; raise ValueError if too many viewers watch already."""
        self._end(who)
        with self._lock:
            if len(self) >= self.most:
                raise self._too_many()
            ended = [name for name, other in self._showings.items() if other.over]
            for name in ended[: max(0, len(self._showings) - _REMEMBERED * self.most)]:
                del self._showings[name]  # its page has not said that it was closed
            before = self._showings.get(who)  # begun at the same moment
            self._showings[who] = showing
            self._begun.add(showing)
        if before is not None:
            before.close()

    def find(self, who: str | None) -> Showing | None:
        """Return a viewer's showing, also one that has ended; None without one."""
        return self._showings.get(who or "")

    def listens(self, who: str) -> bool:
        """Return whether a viewer's page takes its events."""
        return self._listeners is None or who in self._listeners

    def wait_for(self, who: str) -> None:
        """Wait until a viewer's page takes its events: gradio also runs handlers whose results nobody fetches.

        Raises:
            ValueError: If it does not within 10 seconds, or within 2 where as many pages are waited for as there may
                be viewers.
        """
        if self.listens(who):
            return
        with self._lock:
            self.waited_for += 1
            patience = _LISTEN if self.waited_for <= self.most else _BRIEFLY
        try:
            latest = time.monotonic() + patience
            while not self.listens(who):
                if time.monotonic() > latest:
                    raise ValueError("nobody listens to this page: open it again")
                time.sleep(0.05)
        finally:
            with self._lock:
                self.waited_for -= 1

    def _too_many(self) -> ValueError:
        return ValueError(f"{self.most} viewers are served already; try again in a minute")

    def see(self, who: str, value: Any, most: int, side: int = MOST_SIDE) -> None:
        """Take pictures of a viewer's camera or file, as `Source.put` does.

        At most `most` pictures are kept; `side` is the most pixels of a picture's longer side.

        Raises:
            ValueError: If they cannot be read, or too many viewers send some.
        """
        pictures = checked_pictures(value)  # first, so that bad ones do not push out another viewer's source
        with self._lock:
            source = self._sources.pop(who, None)
            if source is None:
                self._make_room()
                source = Source(most, side)
            self._sources[who] = source
            source.take(*pictures)

    def _make_room(self) -> None:
        """Forget the oldest source that is off if there are too many; the caller holds the lock.

        Raises:
            ValueError: If all are on.
        """
        if len(self._sources) < _REMEMBERED * self.most:  # anybody may send some
            return
        oldest = next((who for who, source in self._sources.items() if not source.is_on), None)
        if oldest is None:
            raise self._too_many()
        del self._sources[oldest]

    def source(self, who: str) -> Source | None:
        """Return a viewer's camera or file, if pictures come in from one."""
        source = self._sources.get(who)
        return source if source is not None and source.is_on else None

    def stop(self, who: str | None) -> None:
        """End a viewer's films; the frames so far can still be saved."""
        showing = self.find(who)
        if showing is not None:
            showing.close()

    def leave(self, who: str | None) -> None:
        """End a viewer's films and forget them."""
        self._end(who or "")
        with self._lock:
            self._sources.pop(who or "", None)

    def _end(self, who: str) -> None:
        with self._lock:
            showing = self._showings.pop(who, None)
        if showing is not None:
            showing.close()

    def close(self) -> None:
        """End all films, wait for them, forget them, and let nobody begin another.

        A thread that still films as the process ends would abort it.
        """
        with self._lock:
            self.most, begun = 0, list(self._begun)
        for who in list(self._showings):
            self.leave(who)
        for showing in begun:
            showing.close()

    def __len__(self) -> int:
        return sum(not showing.over for showing in list(self._showings.values()))


def show(
    program: Program,
    viewers: Viewers,
    who: str,
    asked: Asked,
    other: str = ALONE,
    viewer: str = "",
    goes_on: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield the values of a page, chunk by chunk, and end the films when nobody takes them.

    Args:
        program: Films that can be shown.
        viewers: Everybody's films.
        who: Session of the viewer.
        asked: Settings of the film.
        other: Name of the policy of a film beside it; `ALONE` for none.
        viewer: Number of the viewer, by which the first film is saved; empty to save none.
        goes_on: Whether the first film goes on from the viewer's saved one.

    Raises:
        ValueError: If there are too many viewers, nobody listens, there is no such policy, or the film cannot be made.
    """
    names = [asked.policy] if other == ALONE else [asked.policy, one_of("policy", other, program.policies)]
    viewers.wait_for(who)
    asked, source = _with_pictures(program, asked, viewers.source(who), goes_on)
    makers: list[Callable[[], Film]] = [partial(program.make, replace(asked, policy=name)) for name in names]
    if viewers.kept is not None and is_viewer(viewer):
        makers[0] = partial(viewers.kept.film, viewer, asked, makers[0], goes_on)
    streams = [Stream(make) for make in makers]
    showing = Showing(names, streams, Recording(len(names), program.fps))
    viewers.begin(who, showing)
    try:
        for stream in streams:
            if source is not None and program.seen is not None:
                stream.reader = Reader(source, asked.size, *program.seen)
            stream.start()
        yield from _values(program, showing, asked, lambda: viewers.listens(who))
    finally:
        showing.close()


def _with_pictures(
    program: Program, asked: Asked, source: Source | None, goes_on: bool
) -> tuple[Asked, Source | None]:
    """Return the settings of a film with the pictures that it begins with, and the source of pictures that come in.

    A film that `goes_on` from a saved one has its beginning already.

    Raises:
        ValueError: If a picture cannot be read, or none come in for a saved film that was made from some.
    """
    if goes_on and not asked.anew:
        return asked, None
    if goes_on and (source is None or source.use != ANEW):
        raise ValueError(
            "your film is made from pictures: turn the camera on, or choose a file, and say that "
            "the film is made from it; then go on"
        )
    if source is None or program.seen is None:
        return asked, None
    if source.use == ANEW:
        return replace(asked, anew=True), source
    return replace(asked, start=source.latest(asked.size, program.latent)), None


def _values(program: Program, showing: Showing, asked: Asked, listens: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Yield the page's values after every chunk that all films have, and at the end."""
    sources = [stream.chunks() for stream in showing.streams]
    sent: list[deque[dict[str, Any]]] = [deque(maxlen=AGAIN) for _ in sources]
    points: deque[dict[str, Any]] = deque(maxlen=POINTS)
    marks = [{"frame": 0, "text": asked.prompt}]
    started, shown, frames, plotted, first = time.monotonic(), 0.0, 0, -1.0, 0.0
    player = {
        "job": showing.job,
        "fps": program.fps,
        "titles": showing.titles,
        "height": asked.size[0],
        "width": asked.size[1],
        "over": "",
    }
    while True:
        found = [next((chunk for chunk in source if chunk or not listens()), None) for source in sources]
        chunks = [chunk for chunk in found if chunk is not None]
        if len(chunks) < len(sources) or not listens():
            films = [list(kept) for kept in sent]
            yield {"player": {**player, "films": films, "over": "stopped"}, "note": "stopped"}
            return
        first = first or time.monotonic() - started
        due = started + shown - _LEAD
        time.sleep(max(0.0, due - time.monotonic()))  # no more than can be shown
        late = max(0.0, time.monotonic() - due - _LEAD)
        shown += late + len(chunks[0].frames) / program.fps
        for film, (chunk, kept) in enumerate(zip(chunks, sent, strict=True)):
            showing.titles[film] = chunk.applied.get("policy", showing.titles[film])
            files = [jpeg(frame) for frame in chunk.frames]
            showing.recording.add(film, files)
            kept.append(
                {
                    "number": chunk.number,
                    "marked": bool(chunk.applied),
                    "frames": [base64.b64encode(file).decode() for file in files],
                }
            )
        marks += _marks(frames, chunks[0])
        frames += len(chunks[0].frames)
        value: dict[str, Any] = {
            **player,
            "films": [list(kept) for kept in sent],
            "marks": marks,
            "frames": frames,
            "table": table(chunks, [s.waiting for s in showing.streams], first),
            "dropped": int(max(chunk.readings.get("dropped", 0) for chunk in chunks)),
        }
        if shown - plotted >= 1:  # a page draws plots slowly
            plotted = shown
            points.append(
                {
                    "second": round(shown, 1),
                    "ms": [round(1e3 * chunk.readings["seconds"], 1) for chunk in chunks],
                    "MB": [round(chunk.readings.get("bytes", 0.0) / 1e6, 2) for chunk in chunks],
                }
            )
            value["points"] = list(points)
        yield {"player": value, "note": _note(chunks)}


def _marks(frame: int, chunk: Chunk) -> list[dict[str, Any]]:
    """Return the marks of a chunk on the timeline of prompts: a new prompt, a policy, a restart."""
    said = [chunk.applied["prompt"]] if "prompt" in chunk.applied else []
    if "policy" in chunk.applied:
        said.append(f"cache: {chunk.applied['policy']}")
    said += ["restored"] if chunk.news else []
    return [{"frame": frame, "text": text} for text in said]


def _note(chunks: Sequence[Chunk]) -> str:
    """Return the results of orders in the latest chunks; empty where there were none."""
    refused = next((chunk.refused for chunk in chunks if chunk.refused), "")
    if refused:
        return f"**Not done:** {refused}"
    news = next((chunk.news for chunk in chunks if chunk.news), "")
    if news:
        return f"**{news}**"
    applied = chunks[0].applied
    return (
        f"from chunk {chunks[0].number} on: " + ", ".join(f"{k} {v!r}" for k, v in applied.items()) if applied else ""
    )


def table(chunks: Sequence[Chunk], waiting: Sequence[int], first: float) -> list[list[str]]:
    """Return the read-outs as rows: a label, and the value of each film.

    They show the latest chunk of each film, the number of its chunks that wait to be shown, and the seconds from the
    start until all films had their `first` frames.
    """
    known = [key for key in _BYTES if all(key in chunk.readings for chunk in chunks)]
    rows = [
        ["frames made a second", *(f"{len(c.frames) / c.readings['p50']:.1f}" for c in chunks)],
        ["a chunk takes, p50", *(_milliseconds(c.readings["p50"]) for c in chunks)],
        ["a chunk takes, p95", *(_milliseconds(c.readings["p95"]) for c in chunks)],
        ["first frame after", *(_milliseconds(first) for _ in chunks)],
        *([_BYTES[key], *(human(c.readings[key], "B") for c in chunks)] for key in known),
    ]
    if all("behind" in chunk.readings for chunk in chunks):
        rows += [
            ["made after pictures came", *(_milliseconds(c.readings["behind"]) for c in chunks)],
            ["pictures left out", *(f"{c.readings['dropped']:.0f}" for c in chunks)],
        ]
    if all("drift" in chunk.readings for chunk in chunks):
        rows.append(["color drift (of 255)", *(f"{c.readings['drift']:.1f}" for c in chunks)])
    rows.append(["chunk", *(str(chunk.number) for chunk in chunks)])
    rows.append(["chunks that wait", *map(str, waiting)])
    return rows


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"
