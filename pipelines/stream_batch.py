"""Roll several chunks out at once, each at its own noise level, in one call of the network.

>>> stream = StreamBatch(video, text, size=(60, 104))  # doctest: +SKIP
>>> chunks = [stream.next() for _ in range(20)]  # the first are None  # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

import diffcache
from diffcache.attach.attention_call import AttentionCall
from diffcache.kv.life.save import SavedCacheError, read, refusing, write
from diffcache.method import check_int, is_number
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.saved_stream import switch_of, switch_state
from diffcache.pipelines.video_inputs import check_latents, guided, refuse_copy
from diffcache.pipelines.video_session import checked
from diffcache.video import FewSteps, Recache, Switch, VideoPolicy

WAITING = "waiting.safetensors"
Change = tuple[Tensor, Switch]  # text of all rows, and the treatment of the cache


class StreamBatch:
    """A stream whose noise levels work on chunks that follow one another, in one batch.

    A call makes one step of several chunks, one for each noise level: the newest chunk at the highest level, the
    oldest at the lowest, where it comes out finished. Each level has a cache of keys and values made at that level,
    and there is no clean pass. So a chunk costs one call, memory is that of one cache times the number of levels, and
    a chunk comes out as many calls later as there are levels. With fewer `rows`, levels run group after group, so that
    a chunk comes out sooner and costs more calls; with one, it goes through all levels before the next begins. The
    film is the same.

    Departure: rows of the released code share one cache tensor; here each level has a store of its own and attends on
    its own, so that any policy serves, and levels that have no chunk yet cost nothing.

    Args:
        video: Transformer, chunk and noise levels.
        prompt: Text embeddings, `[B, S, E]`.
        seed: Seed of the noise.
        rows: Levels that run in one call; None for all of them.
        sampler: Noise levels; None for those of `video`.
        settings: Other arguments of `CausalVideo.session`.

    Attributes:
        sampler: Noise levels.
        levels: Sessions, one a noise level, the highest first; `store` of each is its cache.

    Raises:
        ValueError: If an argument is out of its range.

    Reference: StreamDiffusionV2, arXiv 2511.07399 (stream batch), and its released code.
    """

    def __init__(
        self,
        video: CausalVideo,
        prompt: Tensor,
        *,
        seed: int = 0,
        rows: int | None = None,
        sampler: FewSteps | None = None,
        **settings: Any,
    ) -> None:
        check_int("seed", seed, 0)
        self.video = video
        self.sampler = video.sampler if sampler is None else sampler
        count = len(self.sampler.levels)
        seeds = torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(seed))
        settings = {"read_once": False, **settings}  # a level reads its cache once a chunk: nothing to keep
        self.levels = [video.session(prompt, seed=int(each), **settings) for each in seeds]
        self.rows = count if rows is None else rows
        check_int("rows", self.rows, 1)
        if self.levels[0].policy.by_query or self.levels[0].store.recipe.observes:
            raise ValueError(
                f"policy={self.levels[0].policy!r}: drops slots by the queries of finished frames, "
                "which are never computed here; give another, or use CausalVideo.session"
            )
        self._waiting: dict[int, Tensor] = {}  # level -> chunk that it takes next
        self._switch: Change | None = None  # of the next chunk that comes in
        self._brought: dict[int, Change] = {}  # level -> switch that its next chunk brings
        self._running: list[int] = []  # levels of the call, in the order of its rows
        self._finished: list[Tensor] = []  # chunks of a `finish` that was cut off
        self._busy = Lock()  # while a step is made

    __reduce_ex__ = refuse_copy

    def reset(self) -> None:
        """Forget the film and the chunks on their way; begin another under the latest prompt."""
        self._waiting, self._brought, self._finished = {}, {}, []
        for session in self.levels:
            session.prompt = self.levels[0].prompt
            session.reset()

    @torch.no_grad()
    def next(
        self, latents: Tensor | None = None, level: float | None = None, *, frames: int | None = None
    ) -> Tensor | None:
        """Let a chunk in, and return the one that is finished, `[B, C, F, H, W]`; None while there is none.

        An error leaves the stream as it was.

        Args:
            latents: Clean latents of a video that the chunk is made from, `[B, C, F, H, W]`; None to make it from
                noise.
            level: Noise level that the latents are brought to, such as `MotionNoise` sets, at most 1 and above the
                level of the second step; None for the sampler's first.
            frames: Latent frames of a chunk made from noise; None for a chunk.

        Raises:
            ValueError: If an argument is out of its range, a `finish` was cut off and has to be called again, or
                another thread is making a step.
        """
        first = self._first_level(latents, level)
        if latents is None:
            count = self.video.chunk if frames is None else frames
            check_int("frames", count, 1)
        else:
            check_latents(latents, self.levels[0].shape)
            count = latents.shape[2]
        others = {x.shape[2] for x in self._waiting.values()} - {count}
        if others:
            raise ValueError(
                f"frames={count}: chunks on their way have {others.pop()}; call finish() before "
                "chunks of another length"
            )
        with self._whole():
            if self._finished:
                raise ValueError("next: chunks of a finish() that was cut off wait; call finish() again")
            noise = self.levels[0].noise(count)
            x = noise if latents is None else (1 - first) * latents.to(noise) + first * noise
            self._waiting[0] = x
            if self._switch is not None:
                self._brought[0], self._switch = self._switch, None
            return self._step(first)

    @torch.no_grad()
    def finish(self) -> list[Tensor]:
        """Return the chunks that are still on their way, first ones first; nothing new begins.

        Where an error cuts it off, the next call returns them all.
        """
        while self._waiting:
            with self._whole():
                done = self._step(self.sampler.levels[0])
            if done is not None:
                self._finished.append(done)
        found, self._finished = self._finished, []
        return found

    def switch(self, prompt: Tensor, mode: Switch | None = None, *, negative: Tensor | None = None) -> None:
        """Change the prompt from the next chunk that comes in; the last call before it counts.

        Chunks on their way are finished under the prompt that they began with: the cache of a level
        changes when the first chunk of the new prompt comes to it.

        Args:
            prompt: Text embeddings, `[B, S, E]`.
            mode: Treatment of the caches; None for `Keep()`.
            negative: Text embeddings of the unguided branch; None to leave them as they are.

        Raises:
            ValueError: If texts are of another shape, or `mode` is a re-cache.
        """
        if isinstance(mode, Recache):
            raise ValueError(
                f"mode={mode!r}: makes frames anew in a clean pass, of which a stream batch has "
                "none; give Keep(), Flush() or Cut()"
            )
        text, mode = checked(self.levels[0], prompt, mode, negative)
        before = self.levels[0].prompt
        if text.shape != before.shape:
            raise ValueError(
                f"prompt={list(prompt.shape)}: must have {before.shape[1]} tokens as before, since "
                "levels of both prompts run in one call"
            )
        self._switch = text, mode

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the stream and the chunks on their way into a folder, for `resume`.

        Raises:
            ValueError: If something in it has no place in a file.
        """
        for level, session in enumerate(self.levels):
            session.save(Path(folder) / str(level))
        brought = [[level, switch_state(each)] for level, each in self._brought.items()]
        state = {
            "waiting": [[*each] for each in self._waiting.items()],
            "brought": brought,
            "switch": switch_state(self._switch),
            "finished": self._finished,
        }
        about = {"frames": [each.frames for each in self.levels], "sampler": repr(self.sampler)}
        write(Path(folder) / WAITING, state, about)

    def resume(self, folder: str | os.PathLike[str], policy: VideoPolicy | str | None = None) -> None:
        """Go on where `save` left a stream of the same levels and size, bit for bit.

        `policy` is the one that the saved stream had; None for the one of this stream.

        Raises:
            FileNotFoundError: If there is no saved stream.
            SavedCacheError: If it is altered, was cut off, or was made with other settings.
        """
        place, first = Path(folder), self.levels[0]
        state, about = read(place / WAITING, first.prompt.device)
        policy = first.policy if policy is None else policy
        levels = [self.video.restore(place / str(n), policy) for n in range(len(self.levels))]
        frames, here = [session.frames for session in levels], repr(self.sampler)
        if about.get("sampler") != here:
            raise SavedCacheError(
                f"{os.fspath(folder)} was saved with sampler={about.get('sampler')}, here is "
                f"sampler={here}: a stream goes on with what it began with"
            )
        if levels[0].shape != first.shape or about.get("frames") != frames:
            raise SavedCacheError(
                f"{os.fspath(folder)}: its levels are of different moments, or of another size or "
                "number; save it again"
            )
        with refusing(folder, "stream"):
            known = range(len(levels))
            waiting = {known[level]: x for level, x in state["waiting"]}
            brought = {int(level): switch_of(each) for level, each in state["brought"]}
            switch = switch_of(state["switch"])
            finished = list(state["finished"])
            for x in [*waiting.values(), *finished]:
                check_latents(x, first.shape)
        self.levels, self._waiting, self._finished = levels, waiting, finished
        self._brought, self._switch = brought, switch

    def attend(self, number: int, call: AttentionCall) -> Tensor:
        """Attend over the cache of each level that runs.

        `number` is that of the layer; queries, keys and values come before rotation.
        """
        parts = zip(*(x.chunk(len(self._running)) for x in (call.q, call.k, call.v)), strict=True)
        return torch.cat(
            [
                self.levels[level].attend(number, replace(call, q=q, k=k, v=v))
                for level, (q, k, v) in zip(self._running, parts, strict=True)
            ]
        )

    # within --------------------------------------------------------------------------------

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Undo the effects of a step that is cut off; sessions restore their own caches.

        Raises:
            ValueError: If another thread is making one.
        """
        if not self._busy.acquire(blocking=False):
            raise ValueError("this stream batch makes a step in another thread: wait for that, or open one for each")
        before, brought, switch = dict(self._waiting), dict(self._brought), self._switch
        states = [(session.frames, session.generator.get_state()) for session in self.levels]
        try:
            yield
        except BaseException:
            self._waiting, self._brought = before, brought
            self._switch = self._switch or switch  # one that was ordered in the meantime counts
            for session, (frames, noise) in zip(self.levels, states, strict=True):
                session.frames, session._switch = frames, None
                session.generator.set_state(noise)
            raise
        finally:
            self._busy.release()

    def _step(self, first: float) -> Tensor | None:
        """Make the step of every level, group after group; return the finished chunk."""
        count = len(self.levels)
        done = None
        with ExitStack() as opened:  # an error takes back what every level wrote
            for start in range(0, count, self.rows):
                group = range(start, min(start + self.rows, count))
                # The chunk that left the previous group is waiting at this group's first level by now.
                running = [level for level in group if level in self._waiting]
                if running:
                    done = self._call(running, first, opened)
        return done

    def _call(self, running: list[int], first: float, opened: ExitStack) -> Tensor | None:
        """Call the transformer once, hand each chunk on to the next level, and return the finished one, if any."""
        sampler, sessions = self.sampler, [self.levels[level] for level in running]
        chunks = [self._waiting.pop(level) for level in running]
        brought = [self._brought.pop(level, None) for level in running]
        for session, x, switch in zip(sessions, chunks, brought, strict=True):
            session._switch = switch
            opened.enter_context(session.chunk(x.shape[2]))
        for level, switch in zip(running, brought, strict=True):
            if switch is not None and level + 1 < len(self.levels):
                self._brought[level + 1] = switch
        rows = [torch.cat([x, x]) if self.levels[0].guided else x for x in chunks]
        levels = [sampler.levels[level] if level else first for level in running]
        times = torch.tensor([1000 * level for level in levels]).repeat_interleave(len(rows[0]))
        text = torch.cat([session.prompt for session in sessions])
        self._running = running
        with diffcache.writing():
            found = self.video.call(self, torch.cat(rows), times.to(text.device), text)
        done = None
        parts = zip(running, sessions, chunks, levels, found.chunk(len(rows)), strict=True)
        for level, session, x, height, part in parts:
            velocity = guided(part, session.guidance)
            clean = sampler.clean_at(x, velocity, height)
            session.frames += x.shape[2]
            if level + 1 == len(self.levels):
                done = clean
            else:
                noise = self.levels[level + 1].noise(x.shape[2])
                self._waiting[level + 1] = sampler.noised(clean, noise, level + 1)
        return done

    def _first_level(self, latents: Tensor | None, level: float | None) -> float:
        """Return the noise level that a chunk begins at."""
        levels = self.sampler.levels
        if level is None:
            return levels[0]
        below = levels[1] if len(levels) > 1 else 0.0
        if latents is None:
            raise ValueError(f"level={level}: is for latents; a chunk from noise begins at 1")
        if not is_number(level) or not below < level <= 1:
            raise ValueError(f"level={level!r}: must be above the level of the second step, {below:g}, and at most 1")
        return level
