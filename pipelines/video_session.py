"""A stream of causal video: its cache, its noise and its prompt."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import diffcache
from diffcache.attach.attention_call import AttentionCall
from diffcache.kv.attend import Query
from diffcache.kv.positions import PositionMap
from diffcache.kv.store import KVStore
from diffcache.method import check_bool, check_int
from diffcache.pipelines.context_parallel import check_alike, shared_by
from diffcache.pipelines.saved_stream import facts, state_of, write_stream
from diffcache.pipelines.video_inputs import (
    check_latents,
    check_places,
    check_text,
    checked_size,
    guided,
    one_run,
    refuse_copy,
    rotary_of,
    text_rows,
)
from diffcache.video import Cut, Flush, Keep, Recache, Switch, VideoPolicy

if TYPE_CHECKING:
    from diffcache.pipelines.causal_video import CausalVideo

_PROMPTS = 100  # prompts that are remembered; frames of earlier ones count as those of the oldest


class Session:
    """One stream: its cache, its noise and its prompt.

    Attributes:
        video: Transformer that it rolls out.
        sampler: Noise levels of a chunk; those of `video` unless others are set between two chunks.
        store: Keys and values, before rotation; with guidance, rows of the unguided branch follow those of the guided
            one.
        ranks: Processes that hold a part of the heads each; None where one process holds all.
        frames: Latent frames made so far.
        recall: Number of the latest clean latent frames that are kept.
        latents: Those latents, `[B, C, F, H, W]`; None while there are none.
    """

    def __init__(
        self,
        video: CausalVideo,
        prompt: Tensor,
        size: tuple[int, int],
        policy: VideoPolicy,
        seed: int,
        negative: Tensor | None,
        guidance: float,
        read_once: bool,
        recall: int,
    ) -> None:
        self.video, self._policy, self.sampler = video, policy, video.sampler
        config = video.transformer.config
        self.size = checked_size(size, config.patch_size)
        check_text("prompt", prompt, config.text_dim)
        check_int("seed", seed, 0)
        check_bool("read_once", read_once)
        check_int("recall", recall, 0)
        self.ranks = shared_by(video.transformer, policy, size, self.unit)
        self.guidance, self.recall = guidance, recall
        self.prompt = text_rows(video.transformer, prompt, negative, guidance)
        self.batch = len(prompt)
        self.store = self.empty_store(read_once)
        self.frames = 0
        self.generator = torch.Generator().manual_seed(seed)
        self._start = 0  # tokens seen before the chunk
        self._clean = False  # True in a clean pass, whose queries belong to finished frames
        self.latents: Tensor | None = None
        self._switch: tuple[Tensor, Switch] | None = None
        self.prompts: list[tuple[int, Tensor]] = []  # first token and mean of each, for the policy
        self._busy = Lock()  # while a chunk is made

    __reduce_ex__ = refuse_copy

    def empty_store(self, read_once: bool) -> KVStore:
        """Return the cache that a stream begins with."""
        check_places(self.video.transformer.config, (*self.shape[:2], self.video.chunk, *self.size))
        rotary = rotary_of(self.video.transformer, self.grid)
        recipe = self.policy.recipe(rotary.unit)
        turns = [rotary] * len(self.video.numbers)
        return KVStore(len(turns), recipe, rotary=turns, read_once=read_once)

    # what a user calls ---------------------------------------------------------------------

    @property
    def policy(self) -> VideoPolicy:
        """Return the policy that chooses the frames to hold, fixed for the life of the stream."""
        return self._policy

    def reset(self) -> None:
        """Forget the film, and begin another under the latest prompt; the noise goes on.

        A stream whose cache was left half changed by an interrupt can be used again after it.

        Raises:
            ValueError: If another thread is making a chunk.
        """
        with self._alone():
            self.store = self.empty_store(self.store.read_once)
            self.frames, self.latents, self.prompts = 0, None, []

    @torch.no_grad()
    def next(self, frames: int | None = None) -> Tensor:
        """Make the next chunk and commit it; return its latents, `[B, C, F, H, W]`.

        Args:
            frames: Latent frames to make; None for a chunk.

        Raises:
            ValueError: If `frames` is less than 1, or an earlier chunk was cut off in such a way that the stream needs
                `reset`.
        """
        count = self.video.chunk if frames is None else frames
        check_int("frames", count, 1)
        sampler = self.sampler
        with self.chunk(count), one_run(self.video.transformer, len(sampler.levels)):
            clean = torch.zeros(())
            for step, level in enumerate(sampler.levels):
                noise = self.noise(count)
                x = noise if step == 0 else sampler.noised(clean, noise, step)
                clean = sampler.clean(x, self._velocity(x, 1000 * level), step)
            self._commit(clean)
        return clean

    @torch.no_grad()
    def take(self, latents: Tensor) -> None:
        """Commit frames that were not made here, such as an image or the start of a film.

        Args:
            latents: Clean latents, `[B, C, F, H, W]`, committed a chunk at a time; `frames` says how many were, should
                one be cut off.

        Raises:
            ValueError: If they have another size, or numbers that are not finite.
        """
        check_latents(latents, self.shape)
        check_alike(self, latents)
        for part in latents.to(self.prompt).split(self.video.chunk, 2):
            with self.chunk(part.shape[2]):
                self._commit(part)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the stream into a folder, for `CausalVideo.restore`.

        Args:
            folder: Folder, made if need be; a stream that is there is replaced.

        Raises:
            ValueError: If something in the cache, or the mode of a switch that has not taken
                effect, has no place in a file, or another thread is making a chunk.
        """
        with self._alone():
            write_stream(folder, self.store, state_of(self), facts(self.video, self.policy, self.sampler))

    def switch(self, prompt: Tensor, mode: Switch | None = None, *, negative: Tensor | None = None) -> None:
        """Change the prompt from the next chunk on; of several calls before it the last one counts.

        Args:
            prompt: Text embeddings, `[B, S, E]`.
            mode: Treatment of the cache; None for `Keep()`.
            negative: Text embeddings of the unguided branch; None to leave them as they are.

        Raises:
            ValueError: If texts are of another shape or not finite, or `mode` is no switch or asks
                for more latents than are kept.
        """
        self._switch = checked(self, prompt, mode, negative)

    # a chunk -------------------------------------------------------------------------------

    @contextmanager
    def chunk(self, frames: int) -> Iterator[None]:
        """Let the policy decide, then make a chunk; one that is cut off leaves nothing behind.

        But frames that the policy drops, or averages into others, for a chunk are so from then on.

        Raises:
            ValueError: If another thread is making one.
        """
        with self._alone(), self._chunk(frames):
            yield

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse other threads, which would meet a chunk that is half made; raise ValueError in them."""
        if not self._busy.acquire(blocking=False):
            raise ValueError(
                "this session is making a chunk in another thread: wait for that, or open a session for each thread"
            )
        try:
            yield
        finally:
            self._busy.release()

    @contextmanager
    def _chunk(self, frames: int) -> Iterator[None]:
        check_alike(self, frames, self._switch)
        prompt, switch, noise = self.prompt, self._switch, self.generator.get_state()
        prompts = self.prompts
        # A rollback restores neither dropped nor observed tokens, so these cases keep a copy.
        lasting = self.policy.by_query or self.store.recipe.observes
        store = self.store.fork() if lasting or switch is not None else None
        before = self.store.seen
        try:
            if switch is not None:
                self._switch = None  # first: another one may be ordered meanwhile
                apply(self, *switch)
            if switch is not None or not self.prompts:
                self._take_prompt(None if switch is None else switch[1])
            self.store.begin(frames * self.unit)
            self.policy.begin(self.store, self.unit, self.prompts)
            self._start = self.store.seen
            yield
        except BaseException:
            if store is None:
                for layer in self.store.layers:
                    layer.rollback(layer.seen - before)
            else:
                self.store = store
            self.prompt, self.prompts = prompt, prompts
            self._switch = self._switch or switch  # one that was ordered in the meantime counts
            self.generator.set_state(noise)
            raise
        finally:
            place(self.store, self.store.recipe.positions)

    def _take_prompt(self, mode: Switch | None) -> None:
        """Note that frames from here on belong to the present prompt."""
        mean = self.prompt[: self.batch].float().mean(1).repeat(1 + self.guided, 1)
        before = [] if isinstance(mode, Recache) else self.prompts[-_PROMPTS:]  # a re-cache makes all anew
        self.prompts = [*before, (self.store.seen, mean)]

    def _commit(self, clean: Tensor) -> None:
        """Run the clean pass, whose keys and values stay."""
        self._clean_pass(clean)
        self.frames += clean.shape[2]
        if self.recall:
            before = [] if self.latents is None else [self.latents]
            self.latents = torch.cat([*before, clean], 2)[:, :, -self.recall :].clone()

    def _clean_pass(self, clean: Tensor) -> None:
        self._clean = True
        try:
            with diffcache.writing():
                self._velocity(clean, self.sampler.context)
        finally:
            self._clean = False

    def rewrite(self, clean: Tensor) -> None:
        """Write keys and values of finished frames, clean latents `[B, C, F, H, W]`, without counting them as new."""
        self.store.begin(clean.shape[2] * self.unit)
        self._start = self.store.seen
        self._clean_pass(clean)

    def _velocity(self, x: Tensor, time: float) -> Tensor:
        """Call the transformer with this session's cache, guided."""
        x = torch.cat([x, x]) if self.guided else x
        times = torch.full((len(x),), time, device=x.device, dtype=torch.float32)
        found = self.video.call(self, x, times, self.prompt)
        return guided(found, self.guidance)

    def attend(self, number: int, call: AttentionCall) -> Tensor:
        """Write the chunk's keys and values into a layer and attend over its slots.

        `number` is that of the layer; queries, keys and values come before rotation. A layer is written to when it is
        first computed in a chunk; later steps of the chunk overwrite these slots.
        """
        layer = self.store.layers[number]
        q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
        count = k.shape[2]
        is_first = layer.seen == self._start
        if is_first:
            layer.write(k, v)
        else:
            layer.overwrite(range(layer.held - count, layer.held), k, v)
        start = layer.seen - count
        at = torch.arange(start, layer.seen, device=q.device)
        query = Query(layer.rotate(q, at), start, call.scale, causal=False)
        if is_first and (not self._clean or count <= self.video.chunk * self.unit):  # or a re-cache in one pass
            self.policy.first_step(self.store, number, query)
        return self.store.attend(number, query, observe=self._clean).transpose(1, 2)

    # within --------------------------------------------------------------------------------

    @property
    def guided(self) -> bool:
        """Return True where an unguided branch runs beside the guided one."""
        return self.guidance != 1

    @property
    def grid(self) -> tuple[int, int]:
        """Tokens of a frame: rows and columns."""
        _, height, width = self.video.transformer.config.patch_size
        return self.size[0] // height, self.size[1] // width

    @property
    def unit(self) -> int:
        """Tokens of a frame."""
        return self.grid[0] * self.grid[1]

    def noise(self, frames: int) -> Tensor:
        """Draw noise on the CPU, so that a seed gives the same noise on every device."""
        batch, channels, height, width = self.shape
        shape = (batch, channels, frames, height, width)
        return torch.randn(shape, generator=self.generator).to(self.prompt)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, channels, height and width of latents."""
        return self.batch, self.video.transformer.config.in_channels, *self.size


def checked(session: Any, prompt: Tensor, mode: Switch | None, negative: Tensor | None) -> tuple[Tensor, Switch]:
    """Return the text of all rows after a switch, and its mode; arguments are those of `Session.switch`.

    Raises:
        ValueError: If texts are of another shape or not finite, or `mode` is no switch or asks for
            more latents than are kept.
    """
    mode = Keep() if mode is None else mode
    if not isinstance(mode, Switch):
        raise ValueError(f"mode={mode!r}: must be Keep(), Flush(), Recache() or Cut()")
    check_text("prompt", prompt, session.video.transformer.config.text_dim)
    if len(prompt) != session.batch:
        raise ValueError(f"prompt={list(prompt.shape)}: must have B={session.batch} rows")
    if isinstance(mode, Recache) and mode.frames > session.recall:
        raise ValueError(
            f"frames={mode.frames}: the session keeps its latest {session.recall} latents; open it "
            f"with recall={mode.frames}"
        )
    most = session.policy.most_recached
    if isinstance(mode, Recache) and most is not None and mode.frames > most:
        raise ValueError(
            f"frames={mode.frames}: {session.policy!r} can make at most {most} frames anew at "
            f"once; give Recache({most})"
        )
    if session.guided and negative is None:
        negative = session.prompt[session.batch :]
        if negative.shape != prompt.shape:
            raise ValueError(
                f"prompt={list(prompt.shape)}: with guidance it must have as many tokens as "
                f"negative, {negative.shape[1]}; give `negative` anew with it"
            )
    return text_rows(session.video.transformer, prompt, negative, session.guidance), mode


def apply(session: Any, prompt: Tensor, mode: Switch) -> None:
    """Let a new prompt, the text of all rows, take effect on a `Session` between two chunks."""
    session.prompt, store = prompt, session.store
    if isinstance(mode, Flush):
        mode.carry_out(store, session.policy.sinks, session.unit)
    elif isinstance(mode, Recache) and session.latents is not None:
        _recache(session, mode, session.latents[:, :, -mode.frames :])
    elif isinstance(mode, Cut) and store.seen:
        place(store, mode.around(store.recipe.positions, store.seen // session.unit))


def place(store: KVStore, positions: PositionMap | None) -> None:
    """Rotate keys and queries under the numbers of a map from now on; None for the plain numbers."""
    for layer in store.layers:
        layer.positions = positions


def _recache(session: Any, mode: Recache, latents: Tensor) -> None:
    """Compute keys and values of latents again, in place of all that is held."""
    store, unit, sinks = session.store, session.unit, session.policy.sinks
    if mode.keep_sinks and sinks:
        seen = store.seen // unit
        start = max(seen - latents.shape[2], min(sinks, seen))
        latents = latents[:, :, latents.shape[2] - (seen - start) :]
        Flush(0).carry_out(store, sinks, unit)
        for layer in store.layers:  # the frames are written under their own numbers
            layer.seen = start * unit
    else:
        store.reset()
    if not latents.shape[2]:
        return
    whole = mode.mask == "bidirectional"
    for part in latents.split(latents.shape[2] if whole else session.video.chunk, 2):
        session.rewrite(part)
