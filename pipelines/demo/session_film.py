"""Films of a causal video model, one stream each, for a page that shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffcache.kv.codec.base import tensors
from diffcache.pipelines.causal_video import CausalVideo, Session
from diffcache.pipelines.demo.program import Asked, Program, checked_prompt
from diffcache.pipelines.demo.stream import Film
from diffcache.pipelines.video_stream import VideoStream
from diffcache.pipelines.video_to_video import VideoToVideo
from diffcache.registry import rows_of
from diffcache.video import Cut, FewSteps, Flush, Keep, Recache, Switch

SWITCHES: dict[str, Switch] = {"keep": Keep(), "flush": Flush(), "re-cache": Recache(), "cut": Cut()}


def policies() -> list[str]:
    """Return the names of policies for streams of a causal Wan; policies of other builds are left out."""
    return [name for name, row in rows_of("video").items() if row.family == "Frames"]


def program_of(video: CausalVideo, name: str, viewers: int, most_bytes: int) -> Program:
    """Return the films and settings of a model that a page can show; `most_bytes` bounds a film's keys and values."""
    way = video.way
    names = [way.policy, *(other for other in policies() if other != way.policy)]
    sizes = {f"{size[0]} x {size[1]}": size for size in (way.size, way.size[::-1])}
    each = 2 ** sum(video.pipe.vae.config.temperal_downsample)
    later = video.chunk * each

    def make(asked: Asked) -> Film:
        return (LiveFilm if asked.anew else SessionFilm)(video, asked, most_bytes)

    return Program(
        make,
        names,
        list(SWITCHES),
        way.prompts,
        sizes,
        len(way.sampler.timesteps),
        way.fps,
        f"{name} - diffcache",
        viewers,
        "infinity-rope" if way.policy == "window" else "window",
        (later - each + 1, later),
        each,
    )


class _FilmOfThePage:
    """A film of a stream; the drift of its colors is measured from the first chunk of its prompt."""

    stream: Any
    drift = 0.0
    _first: NDArray[np.float64] | None = None

    def measured(self, frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the frames of a chunk, `[F, H, W, 3]`, and note the drift of their colors."""
        colors = np.concatenate([frames.mean((0, 1, 2)), frames.std((0, 1, 2))])
        self._first = colors if self._first is None else self._first
        self.drift = float(np.sqrt(np.square(colors - self._first).mean()))
        return frames

    def save(self, folder: str) -> None:
        """Write the film into a folder, for `resume`."""
        self.stream.save(folder)

    def resume(self, folder: str) -> None:
        """Go on where another film of these settings was saved."""
        self.stream.resume(folder)

    def news(self) -> str:
        """Return nothing: nothing happens to this film but what the viewer ordered."""
        return ""


class SessionFilm(_FilmOfThePage):
    """A film of one stream, which may hold at most `most_bytes` of keys and values.

    Raises:
        ValueError: If the model cannot make such a film.
    """

    def __init__(self, video: CausalVideo, asked: Asked, most_bytes: int) -> None:
        more: dict[str, Any] = {"size": asked.size, "seed": asked.seed, "start": asked.start}
        self.stream = VideoStream(video, asked.prompt, policy=asked.policy, most_bytes=most_bytes, **more)
        self.stream.session.sampler = sampler_of(video.sampler, asked.steps)

    def next(self, seen: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Return the frames of the next chunk, `[F, H, W, 3]`.

        Raises:
            ValueError: If the cache has grown to its bound.
        """
        return self.measured(next(self.stream))

    def apply(self, order: Mapping[str, Any]) -> None:
        """Change the policy or the prompt.

        Raises:
            ValueError: If one of them is refused; nothing is changed then.
        """
        prompt, stream = order.get("prompt"), self.stream
        if prompt is not None:
            stream.video.embed(checked_prompt(prompt))  # refuses before anything is changed
        if order.get("policy", stream.policy) != stream.policy:
            stream.use(order["policy"])
        if prompt is not None:
            mode, most = SWITCHES[order.get("switch", "keep")], stream.session.policy.most_recached
            if isinstance(mode, Recache) and most is not None:
                mode = replace(mode, frames=min(mode.frames, most))
            stream.switch(checked_prompt(prompt), mode)
            self._first = None

    def readings(self) -> dict[str, float]:
        """Return the cache's bytes by role, and the drift of the colors since the prompt's first chunk."""
        held = float(self.stream.decoder.nbytes)
        return bytes_by_role(self.stream.session) | {"decoder_bytes": held, "drift": self.drift}


class LiveFilm(_FilmOfThePage):
    """A film that is made from pictures that come in; arguments are those of `SessionFilm`.

    Every chunk comes out in the call that it goes in, so that the delay is as short as possible. Of the steps, only
    those below the noise level of the pictures are made.

    Raises:
        ValueError: If the model cannot make such a film.
    """

    def __init__(self, video: CausalVideo, asked: Asked, most_bytes: int) -> None:
        more: dict[str, Any] = {"size": asked.size, "seed": asked.seed, "most_bytes": most_bytes}
        sampler = sampler_of(video.sampler, asked.steps)

        def make(prompt: str, policy: Any) -> VideoToVideo:
            return VideoToVideo(video, prompt, policy=policy, rows=1, sampler=sampler, **more)

        self._make, self.stream = make, make(asked.prompt, asked.policy)

    def next(self, seen: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Return the frames that are made from the pictures `seen`, both uint8 `[F, H, W, 3]`.

        Raises:
            ValueError: If there are no pictures or too few for a chunk, or the cache has grown to its bound.
        """
        if seen is None:
            raise ValueError("seen=None: this film is made from pictures")
        return self.measured(self.stream.next(seen[-self.stream.wanted :]))  # a film that began anew takes fewer

    def apply(self, order: Mapping[str, Any]) -> None:
        """Change the prompt, or the policy, which begins with an empty cache.

        Raises:
            ValueError: If one of them is refused; nothing is changed then.
        """
        live, prompt = self.stream, order.get("prompt")
        mode = SWITCHES[order.get("switch", "keep")]
        if order.get("policy", live.policy) != live.policy:
            live = self._make(live.prompt, order["policy"])
            live.go_on_from(self.stream)
        if prompt is not None:
            live.switch(checked_prompt(prompt), mode)
            self._first = None
        self.stream = live

    def readings(self) -> dict[str, float]:
        """Return the bytes held, and the drift of the colors since the prompt's first chunk."""
        held = self.stream.encoder.nbytes + self.stream.decoder.nbytes
        return {"bytes": float(self.stream.nbytes), "decoder_bytes": float(held), "drift": self.drift}


def sampler_of(sampler: FewSteps, steps: int) -> FewSteps:
    """Return a sampler with a given number of steps.

    It is the model's own sampler if that has this number, else one with evenly spaced times.
    """
    if steps == len(sampler.timesteps):
        return sampler
    first = sampler.timesteps[0]
    return replace(sampler, timesteps=tuple(first * (steps - n) / steps for n in range(steps)))


def bytes_by_role(session: Session) -> dict[str, float]:
    """Return the bytes of a session's cache: in total, of the first frames, of later ones, and the rest.

    The rest are rotated copies that steps of a chunk share, room for the next frames, and numbers of positions.
    """
    total, first = session.store.nbytes, session.policy.sinks * session.unit
    sinks = history = 0.0
    for layer in session.store.layers:
        if layer.form is None:
            continue
        form, coded = layer.form, sum(segment.width for segment in layer.segments)
        exact = form.batch * form.heads * (form.size + form.value_size) * form.dtype.itemsize
        codes = sum(part.nbytes for part in tensors(layer.segments)) / max(coded, 1)
        old = min(first, coded)
        new = min(first - old, layer.tail.length)
        sinks += old * codes + new * exact
        history += (coded - old) * codes + (layer.tail.length - new) * exact
    return {
        "bytes": total,
        "sinks_bytes": sinks,
        "history_bytes": history,
        "working_bytes": max(0.0, total - sinks - history),
    }
