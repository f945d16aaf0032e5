"""Make a video anew under a prompt while it comes in: StreamDiffusionV2.

>>> for frames in video.restyle("a crab on gravel", "fox.mp4"):  # doctest: +SKIP
...     show(frames)  # uint8 [F, H, W, 3]
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffcache.kv.life.save import SavedCacheError, read, refusing, write
from diffcache.pipelines.source_pictures import Pictures, film_of, groups, to_tensor
from diffcache.pipelines.stream_batch import StreamBatch
from diffcache.pipelines.streaming_vae import WanDecoder, WanEncoder
from diffcache.pipelines.video_memory import check_fits, check_grown, free_bytes
from diffcache.pipelines.video_stream import PICTURES, named, to_pictures
from diffcache.video import FewSteps, MotionNoise, Switch, VideoPolicy

POLICY = "stream-diffusion-v2"


class VideoToVideo:
    """A film that is made from another one, chunk by chunk, as that comes in.

    Pictures are encoded, noised, the less the faster they move, and denoised under the prompt over the cache of the
    chunks before, several chunks in one call of the transformer.

    Args:
        video: `CausalVideo` with a text encoder and an autoencoder.
        prompt: Text that the film is made to show.
        policy: Policy that chooses the frames to hold, or its name; one that decides by the queries of finished frames
            is refused.
        size: Height and width in pixels; None for those that the model was trained at.
        seed: Seed of the noise.
        noise: Noise that is added to the video.
        rows: Noise levels that run in one call; None for all of them, which makes the most pictures a second where a
            device has room. With 1 a chunk comes out in the call that it goes in.
        sampler: Noise levels, of which those below `noise.low` are used; None for those of the video.
        most_bytes: Bytes of keys and values that it may hold; None for the memory that is free.

    Attributes:
        prompt: Text that the film is made to show.
        expected_bytes: Bytes of keys and values that it will hold in the first 36 latent frames, all noise levels
            together.
        level: Noise level of the latest chunk; None before the first.
        batch: Chunks that are on their way, at a noise level each.

    Raises:
        ValueError: If an argument is out of its range.

    Reference: StreamDiffusionV2, arXiv 2511.07399.
    """

    def __init__(
        self,
        video: Any,
        prompt: str,
        *,
        policy: VideoPolicy | str | None = None,
        size: tuple[int, int] | None = None,
        seed: int = 0,
        noise: MotionNoise | None = None,
        rows: int | None = None,
        sampler: FewSteps | None = None,
        most_bytes: int | None = None,
    ) -> None:
        self.video, self.prompt = video, prompt
        self.size = video.way.size if size is None else size
        self.noise = MotionNoise() if noise is None else noise
        self.policy = POLICY if policy is None else policy
        text, latent = video.embed(prompt), video.latent_size(size)
        sampler = below(sampler or video.sampler, self.noise.low)
        self.most_bytes = free_bytes(text.device) if most_bytes is None else most_bytes
        self.expected_bytes = self._expected(self.policy, len(sampler.levels))
        self.batch = StreamBatch(video, text, seed=seed, rows=rows, sampler=sampler, size=latent, policy=self.policy)
        self.encoder, self.decoder = WanEncoder(video.pipe.vae), WanDecoder(video.pipe.vae)
        self.level: float | None = None
        self._last: Tensor | None = None  # last picture of the chunk before
        self._undecoded: list[Tensor] = []  # latents of finished chunks

    @property
    def wanted(self) -> int:
        """Pictures that the next chunk is made from."""
        later: int = self.video.chunk * self.encoder.pictures
        return later if self.encoder.frames else later - self.encoder.pictures + 1

    @torch.no_grad()
    def next(self, pictures: Pictures) -> Pictures:
        """Let a chunk in, and return the pictures of the one that comes out, none at first.

        Args:
            pictures: `wanted` pictures of the film's size, uint8 `[F, H, W, 3]`.

        Returns:
            uint8 `[F, H, W, 3]`, with as many pictures as the chunk was made from.

        Raises:
            ValueError: If pictures have another shape, or the caches have grown beyond the bytes that they may hold.
        """
        check_grown(self.policy, self.nbytes, self.most_bytes, self.batch.levels[-1].frames)
        shape, wanted = [*pictures.shape], [self.wanted, *self.size, 3]
        if shape != wanted or pictures.dtype != np.uint8:
            raise ValueError(f"pictures={pictures.dtype} {shape}: must be uint8 {wanted}")
        film = to_tensor(pictures, self.video.transformer.device)
        level = self.noise.level(film, self._last, self.level)
        held, frames = self.encoder.held(), self.encoder.frames
        try:
            done = self.batch.next(self.encoder.encode(film), level)
        except BaseException:  # the chunk can be given again
            self.encoder.hold(held, frames)
            raise
        self.level, self._last = level, film[:, :, -1:]
        if done is not None:
            self._undecoded.append(done)
        return self._shown(len(self._undecoded))

    def finish(self) -> Iterator[Pictures]:
        """Yield the pictures of the chunks that are still on their way."""
        self._undecoded += self.batch.finish()
        while self._undecoded:
            yield self._shown(1)

    def of(self, source: Any) -> Iterator[Pictures]:
        """Yield the pictures that are made from a source, chunk by chunk.

        Pictures at its end that make no whole chunk are left out.

        Args:
            source: File, or pictures, as for `CausalVideo.restyle`.

        Raises:
            ValueError: If something else is given, or pictures cannot be read.
        """
        counts = chain([self.wanted], repeat(self.video.chunk * self.encoder.pictures))
        for group in groups(film_of(source, self.size, self.video.way.fps), counts):
            made = self.next(group)
            if len(made):
                yield made
        yield from self.finish()

    def switch(self, prompt: str, mode: Switch | None = None) -> None:
        """Change the prompt from the next chunk that comes in.

        Args:
            prompt: New text.
            mode: Treatment of the caches, as for `StreamBatch.switch`.

        Raises:
            ValueError: If the text is empty, or the mode is a re-cache.
        """
        self.batch.switch(self.video.embed(prompt), mode)
        self.prompt = prompt

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the film into a folder, for `resume`; one that is there is replaced.

        Raises:
            ValueError: If something in it has no place in a file.
        """
        self.batch.save(folder)
        state = {
            "encoder": [self.encoder.held(), self.encoder.frames],
            "level": self.level,
            "decoder": [self.decoder.held(), self.decoder.frames],
            "last": self._last,
            "undecoded": self._undecoded,
        }
        policy = self.policy if isinstance(self.policy, str) else ""
        about = {"prompt": self.prompt, "policy": policy, "frames": self.batch.levels[0].frames}
        write(Path(folder) / PICTURES, state, about)

    def resume(self, folder: str | os.PathLike[str]) -> None:
        """Go on where `save` left a film of the same model and size, bit for bit.

        It goes on under the policy that it had, if that was given by its name.

        Raises:
            FileNotFoundError: If there is no saved film.
            SavedCacheError: If it is altered, was cut off, or was made with another model or settings.
            ValueError: If it would hold too much.
        """
        state, about = read(Path(folder) / PICTURES, self.decoder.vae.device)
        policy = about.get("policy") or self.policy
        expected = self._expected(policy, len(self.batch.levels))
        before, came = vars(self.batch).copy(), (self.encoder.held(), self.encoder.frames)
        self.batch.resume(folder, policy)
        try:
            with refusing(folder, "film"):
                if about["frames"] != self.batch.levels[0].frames:
                    raise SavedCacheError(
                        f"{os.fspath(folder)}: its pictures are of another moment than its caches; save it again"
                    )
                level, last, undecoded = (state[name] for name in ("level", "last", "undecoded"))
                prompt = str(about["prompt"])
                self.encoder.hold(*state["encoder"])
                self.decoder.hold(*state["decoder"])
        except BaseException:
            vars(self.batch).update(before)
            self.encoder.hold(*came)
            raise
        self.level, self._last, self._undecoded = level, last, undecoded
        self.policy, self.prompt, self.expected_bytes = policy, prompt, expected

    def go_on_from(self, other: VideoToVideo) -> None:
        """Go on with the pictures of another film of the same size, with an empty cache.

        No chunk of the other film may be on its way.
        """
        self.encoder, self.decoder = other.encoder, other.decoder
        self.level, self._last, self._undecoded = other.level, other._last, other._undecoded

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values of all noise levels."""
        return sum(session.store.nbytes for session in self.batch.levels)

    def _expected(self, policy: VideoPolicy | str, levels: int) -> int:
        """Return the bytes that the caches of a number of noise levels will hold.

        Raises:
            ValueError: If they are more than there are.
        """
        expected: int = levels * self.video.expected_bytes(policy, size=self.size)
        check_fits(named(policy), expected, self.most_bytes, {})
        return expected

    def _shown(self, count: int) -> Pictures:
        """Decode the first finished latents; latents that fail to be decoded are tried again with the next chunk."""
        if not count:
            return np.zeros((0, *self.size, 3), np.uint8)
        shown = to_pictures(self.decoder.decode(torch.cat(self._undecoded[:count], 2)))
        del self._undecoded[:count]
        return shown


def below(sampler: FewSteps, level: float) -> FewSteps:
    """Return a sampler whose steps after the first begin below a noise level, 0..1.

    The first step begins at the level to which the video is noised.
    """
    lower = [t for t, at in zip(sampler.timesteps, sampler.levels, strict=True) if at < level]
    return replace(sampler, timesteps=(1000.0, *(t for t in lower if t < 1000)))
