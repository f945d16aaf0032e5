"""Pictures of a film while it is made: from a prompt to uint8 frames, chunk by chunk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffcache.kv.life.save import SavedCacheError, read, refusing, write
from diffcache.method import check_int
from diffcache.pipelines.source_pictures import begin_with, to_tensor
from diffcache.pipelines.streaming_vae import WanDecoder, WanEncoder
from diffcache.pipelines.video_inputs import check_latents
from diffcache.pipelines.video_memory import HORIZON, check_fits, check_grown, free_bytes
from diffcache.video import Switch, VideoPolicy, make_policy

RECALL = 12  # latent frames that a re-cache, or another policy, begins with
PICTURES = "pictures.safetensors"
SMALLER = ("window", "quantized")  # policies that an error suggests where another does not fit


class VideoStream(Iterator[NDArray[np.uint8]]):
    """A film, which makes a chunk of pictures each time that the next one is asked for.

    Args:
        video: `CausalVideo` with a text encoder and an autoencoder.
        prompt: Text that is filmed.
        policy: Policy that chooses the frames to hold, or its name with settings, such as `infinity-rope`; None for
            that of the video.
        size: Height and width in pixels; None for those that the model was trained at.
        seed: Seed of the noise.
        start: Pictures that the film begins with, and shows first: a file of an image or a video, an image of PIL,
            uint8 `[H, W, 3]` or `[F, H, W, 3]`, or a list of images. They are cropped in the middle and scaled to the
            size; the first ones are left out where all of them make no whole latent frames, and only the latest 60
            latent frames are used. None for a film from the prompt alone.
        chunks: Chunks that are made until the film ends; None for a film without an end.
        read_once: Whether rotated keys are kept from step to step, as for `CausalVideo.session`.
        most_bytes: Bytes of keys and values that it may hold; None for the memory that is free on the device.

    Attributes:
        prompt: Text that is filmed.
        policy: The policy as it was given.
        session: The stream of latents.
        decoder: Decoder of its pictures.
        expected_bytes: Bytes of keys and values that it will hold at most: in all latent frames if `chunks` are given,
            else in the first 36, or in the pictures it begins with and a chunk if that is more.

    Raises:
        FileNotFoundError: If there is no such file to start from.
        ValueError: If there is no text encoder, an argument is out of its range, or it would hold more.
    """

    def __init__(
        self,
        video: Any,
        prompt: str,
        *,
        policy: VideoPolicy | str | None = None,
        size: tuple[int, int] | None = None,
        seed: int = 0,
        start: Any = None,
        chunks: int | None = None,
        read_once: bool = False,
        most_bytes: int | None = None,
    ) -> None:
        for name, value in (("chunks", chunks), ("most_bytes", most_bytes)):
            if value is not None:
                check_int(name, value, 1)
        self.video, self.prompt, self.chunks, self.made = video, prompt, chunks, 0
        self.policy: VideoPolicy | str = video.policy if policy is None else policy
        text, self._size, self._seed = video.embed(prompt), size, seed
        self._read_once = read_once
        self.most_bytes = free_bytes(text.device) if most_bytes is None else most_bytes
        self._begins = 0  # latent frames that were not made here
        self.decoder = WanDecoder(video.pipe.vae)
        encoder = WanEncoder(video.pipe.vae) if start is not None else None
        first = None
        if encoder is not None:
            way = video.way
            first = begin_with(start, size or way.size, encoder.pictures, way.fps)
        if encoder is not None and first is not None:
            self._begins = 1 + (len(first) - 1) // encoder.pictures
        self.expected_bytes = self._expected(self.policy, self._begins, read_once)
        self.session = self._begun(text, self.policy)
        self._first: NDArray[np.uint8] | None = None  # pictures to show before those of a chunk
        self._undecoded: Tensor | None = None  # latents of a chunk that was made, and could not be decoded
        if encoder is not None and first is not None:
            latents = encoder.encode(to_tensor(first, text.device)).to(text)
            self.session.take(latents)
            self._first = to_pictures(self.decoder.decode(latents))

    def __next__(self) -> NDArray[np.uint8]:
        """Return the pictures of the next chunk, uint8 `[F, H, W, 3]`.

        The pictures that the film begins with come before the first chunk, as the autoencoder decodes them. A chunk
        that could not be decoded is tried again by the next call.

        Raises:
            ValueError: If the cache has grown beyond the bytes that it may hold.
        """
        if self.made == self.chunks:
            raise StopIteration
        if self._undecoded is None:
            check_grown(self.policy, self.nbytes, self.most_bytes, self.session.frames)
            self._undecoded = self.session.next()
        pictures = to_pictures(self.decoder.decode(self._undecoded))
        self._undecoded = None
        self.made += 1
        first, self._first = self._first, None
        return pictures if first is None else np.concatenate([first, pictures])

    def switch(self, prompt: str, mode: Switch | None = None) -> None:
        """Change the prompt from the next chunk on.

        Args:
            prompt: New text.
            mode: Treatment of the cache, as for `Session.switch`.

        Raises:
            ValueError: If the text is empty, or the mode asks for more than is kept.
        """
        self.session.switch(self.video.embed(prompt), mode)
        self.prompt = prompt

    def use(self, policy: VideoPolicy | str) -> None:
        """Go on under another policy; the latest 12 latent frames are computed again for it.

        Raises:
            ValueError: If there is no such policy, or it would hold too much; nothing is changed.
        """
        before, expected = self.session, self._expected(policy, self._begins, self._read_once)
        session = self._begun(before.prompt, policy)
        session.sampler = before.sampler
        if before.latents is not None:
            session.take(before.latents)
        if before._switch is not None:  # a new prompt was ordered for the next chunk
            session.switch(*before._switch)
        session.frames = before.frames
        session.generator.set_state(before.generator.get_state())
        self.session, self.policy, self.expected_bytes = session, policy, expected

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that it holds."""
        held: int = self.session.store.nbytes
        return held

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the stream into a folder, for `resume`; one that is there is replaced.

        Raises:
            ValueError: If something in it has no place in a file.
        """
        self.session.save(folder)
        state = {"held": self.decoder.held(), "frames": self.decoder.frames, "made": self.made}
        first = None if self._first is None else torch.from_numpy(self._first)
        state |= {"first": first, "begins": self._begins, "undecoded": self._undecoded}
        policy = self.policy if isinstance(self.policy, str) else ""
        about = {"prompt": self.prompt, "policy": policy, "frames": str(self.session.frames)}
        write(Path(folder) / PICTURES, state, about)

    def resume(self, folder: str | os.PathLike[str]) -> None:
        """Go on where `save` left a stream of the same model and size, bit for bit.

        It goes on under the policy that it had, if that was given by its name.

        Raises:
            FileNotFoundError: If there is no saved stream.
            SavedCacheError: If it is altered, was cut off, or was made with another model or settings.
            ValueError: If it would hold too much.
        """
        state, about = read(Path(folder) / PICTURES, self.decoder.vae.device)
        policy = about.get("policy") or self.policy
        session = self.video.restore(folder, policy, sampler=self.session.sampler)
        if session.size != self.session.size or about.get("frames") != str(session.frames):
            raise SavedCacheError(
                f"{os.fspath(folder)}: its pictures are of another moment or size than its cache; save it again"
            )
        with refusing(folder, "stream"):
            prompt, made = str(about["prompt"]), int(state["made"])
            first, begins, undecoded = state["first"], int(state["begins"]), state["undecoded"]
            first = None if first is None else first.cpu().numpy()
            if undecoded is not None:
                check_latents(undecoded, session.shape)
        expected = self._expected(policy, begins, session.store.read_once)
        with refusing(folder, "stream"):
            self.decoder.hold(state["held"], state["frames"])
        self._first, self._begins, self._undecoded = first, begins, undecoded
        self.policy, self.expected_bytes, self._read_once = policy, expected, session.store.read_once
        self.session, self.prompt, self.made = session, prompt, made

    def _expected(self, policy: VideoPolicy | str, begins: int, read_once: bool) -> int:
        """Return the bytes that the stream will hold under a policy.

        `begins` is the number of latent frames that it begins with.

        Raises:
            ValueError: If they are more than there are.
        """

        def size_of(name: VideoPolicy | str) -> int:
            made = begins + (self.chunks or 1) * self.video.chunk
            frames = max(HORIZON, made) if self.chunks is None else made
            found: int = self.video.expected_bytes(name, size=self._size, frames=frames, read_once=read_once)
            return found

        needed = size_of(policy)
        if self.most_bytes is not None and needed > self.most_bytes:
            others = {each: size_of(each) for each in SMALLER}
            check_fits(named(policy), needed, self.most_bytes, others)
        return needed

    def _begun(self, text: Tensor, policy: VideoPolicy | str) -> Any:
        return self.video.session(
            text,
            size=self.video.latent_size(self._size),
            policy=policy,
            seed=self._seed,
            read_once=self._read_once,
            recall=RECALL,
        )


def named(policy: VideoPolicy | str) -> str:
    """Return the name of a policy, as the user wrote it."""
    return policy if isinstance(policy, str) else make_policy(policy).name


def to_pictures(decoded: Tensor) -> NDArray[np.uint8]:
    """Return decoded pictures of one film, `[1, 3, F, H, W]` in -1..1, as uint8 `[F, H, W, 3]` on the CPU."""
    pictures = (decoded[0].movedim(0, -1).float() * 0.5 + 0.5).clamp(0, 1)
    found: NDArray[np.uint8] = (255 * pictures).round().byte().cpu().numpy()  # as of WanPipeline
    return found
