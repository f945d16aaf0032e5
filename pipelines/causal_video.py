"""Roll a causal video transformer out: chunks of frames, one after the other, over a KV cache.

>>> video = CausalVideo.from_pretrained("sticker-causal")  # doctest: +SKIP
>>> for frames in video.stream("a fox on grass", policy="window", seed=0):  # doctest: +SKIP
...     show(frames)  # uint8 [F, H, W, 3]
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from diffcache.attach.attention import Door, attention_sites
from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.errors import AttachError
from diffcache.method import check_int
from diffcache.pipelines.context_parallel import attend_by_heads
from diffcache.pipelines.pretrained_video import Streaming, open_pipeline
from diffcache.pipelines.saved_stream import restored
from diffcache.pipelines.video_inputs import check_places, checked_size, refuse_copy, rotary_of
from diffcache.pipelines.video_memory import HORIZON, rehearsed
from diffcache.pipelines.video_session import Session as Session
from diffcache.pipelines.video_stream import VideoStream
from diffcache.video import FewSteps, FullHistory, VideoPolicy
from diffcache.video.policy import Films, make_policy

_CURRENT: ContextVar[Any] = ContextVar("diffcache_video_session", default=None)
_ENCODING = threading.Lock()  # a tokenizer holds the padding of the call under way


class CausalVideo(Films):
    """A transformer that films chunk by chunk; attention goes through the session that calls it.

    Any number of sessions share the transformer and take turns on it, in threads of their own or in
    one. Outside of a session the transformer is its own.

    Args:
        transformer: `WanTransformer3DModel` of diffusers, whose weights attend block-causally, such
            as those of Self-Forcing.
        chunk: Latent frames of a chunk.
        sampler: Noise levels.

    Attributes:
        policy: Frames that streams hold where nobody says; `diffcache.wrap` changes it.
        pipe: Pipeline with the text encoder and the autoencoder; None where there is none, so that
            prompts are embeddings and films latents.
        way: Size, length of prompts and frames a second that the model was trained with.

    Raises:
        AttachError: If the transformer is of another class, takes a condition beside latents, or has a door already.
        ValueError: If `chunk` is less than 1.
    """

    sessions: ClassVar[Any] = Session

    def __init__(self, transformer: nn.Module, *, chunk: int = 3, sampler: FewSteps | None = None) -> None:
        check_int("chunk", chunk, 1)
        if type(transformer).__name__ != "WanTransformer3DModel":
            raise AttachError(
                f"{type(transformer).__name__}: causal video is served on WanTransformer3DModel "
                "of diffusers, whose self-attention can be given frames of its own"
            )
        self.transformer: Any = transformer
        config: Any = self.transformer.config
        if config.in_channels != config.out_channels:
            raise AttachError(
                f"in_channels={config.in_channels}: the transformer takes a condition beside its "
                f"{config.out_channels} channels of latents; give one that films from text alone"
            )
        self.chunk = chunk
        self.sampler = FewSteps() if sampler is None else sampler
        self.policy: VideoPolicy = FullHistory()
        self.pipe: Any = None
        self.way = Streaming()
        own = [site for site in attention_sites(transformer) if site.kind == "self"]
        self.numbers = {site.path: number for number, site in enumerate(own)}
        self._door = Door(transformer, self, own)
        self._closed = False

    __reduce_ex__ = refuse_copy

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        lora: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> CausalVideo:
        """Open a model with its text encoder, its autoencoder and the settings of its streams.

        Args:
            folder: Folder of a `WanPipeline` of diffusers, a shipped model or a Hugging Face ID. A `diffcache.json` in
                it says how it is streamed, by default as Self-Forcing's weights are: 480 x 832 pixels, chunks of three
                latent frames, four steps, prompts of 512 tokens, the policy `window`.
            checkpoint: File of causal weights, such as `self_forcing_dmd.pt`; None for those of the folder.
            lora: File of low-rank updates of the checkpoint, such as LongLive's `lora.pt`.
            dtype: Dtype of transformer and text encoder; None for float32 on the CPU, bfloat16 elsewhere.
            device: Device of all models.

        Raises:
            FileNotFoundError: If there is no such folder or file.
            CheckpointError: If a file holds anything else.
            ValueError: If `lora` comes alone, or `diffcache.json` cannot be read.
        """
        pipe, way = open_pipeline(folder, checkpoint, device=device, dtype=dtype, lora=lora)
        video = cls(pipe.transformer, chunk=way.chunk, sampler=way.sampler)
        video.pipe, video.way, video.policy = pipe, way, make_policy(way.policy)
        return video

    @property
    def network(self) -> nn.Module:
        """The transformer."""
        found: nn.Module = self.transformer
        return found

    def check_policy(self, policy: VideoPolicy) -> None:
        """Raise ValueError unless streams can be held under a policy, and this is still open."""
        self._check_open()
        policy.recipe(64)  # tokens of a frame, as an example

    def close(self) -> None:
        """Give the transformer its attention back; sessions end with it."""
        self._door.remove()
        self._closed = True

    def __enter__(self) -> CausalVideo:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def session(
        self,
        prompt: Tensor,
        *,
        size: tuple[int, int],
        policy: VideoPolicy | str | None = None,
        seed: int = 0,
        negative: Tensor | None = None,
        guidance: float = 1.0,
        read_once: bool = False,
        recall: int = 12,
    ) -> Session:
        """Return a new stream.

        Args:
            prompt: Text embeddings, `[B, S, E]`.
            size: Height and width in latents.
            policy: Frames that are held, or the name of a policy with settings; None for the
                policy that this is wrapped with, else all frames.
            seed: Seed of the noise.
            negative: Text embeddings of the unguided branch, `[B, S, E]`; needed for guidance.
            guidance: Scale of classifier-free guidance; 1 for none.
            read_once: Whether rotated keys are kept from step to step, which saves a little time
                and takes the memory of the keys once more, half as much again in all.
            recall: Latest clean latents that are kept for a re-cache, in frames.

        Raises:
            ValueError: If an argument is out of its range, or this was closed.
        """
        chosen = self._chosen(policy)
        made: Session = self.sessions(self, prompt, size, chosen, seed, negative, guidance, read_once, recall)
        return made

    def stream(self, prompt: str, **settings: Any) -> VideoStream:
        """Return an iterator over the pictures of a film, uint8 `[F, H, W, 3]`, chunk by chunk.

        Its `switch` changes the prompt, its `use` the policy; `expected_bytes` are the bytes of keys
        and values that it will hold.

        Args:
            prompt: Text that is filmed.
            **settings: Others of `VideoStream`: `policy`, `size`, `seed`, `start` (pictures that the
                film begins with), `chunks` (None for a film without an end), `read_once`, `most_bytes`.

        Raises:
            FileNotFoundError: If there is no such file to start from.
            ValueError: If there is no text encoder, an argument is out of its range, or the stream
                would hold more than `most_bytes`.
        """
        return VideoStream(self, prompt, **settings)

    def restyle(self, prompt: str, source: Any, **settings: Any) -> Iterator[NDArray[np.uint8]]:
        """Yield the pictures of a video that is made anew under a prompt, chunk by chunk.

        A video that comes in live goes through `VideoToVideo` itself, which takes the pictures of a chunk at a time.

        Args:
            prompt: Text that the film is made to show.
            source: A file of an image or a video, uint8 pictures `[F, H, W, 3]`, or an iterable of images of PIL or
                uint8 `[H, W, 3]`, which may have no end. They are cut in the middle and scaled to the size.
            **settings: Others of `VideoToVideo`: `policy`, `size`, `seed`, `noise`, `rows`.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If there is no text encoder, or an argument is out of its range.
        """
        from diffcache.pipelines.video_to_video import VideoToVideo

        return VideoToVideo(self, prompt, **settings).of(source)

    def expected_bytes(
        self,
        policy: VideoPolicy | str | None = None,
        *,
        size: tuple[int, int] | None = None,
        frames: int = HORIZON,
        batch: int = 1,
        read_once: bool = False,
    ) -> int:
        """Return the most bytes of keys and values that a stream holds between two chunks.

        They are those of `session.store.nbytes`. Within a step one layer's rotated keys come on top
        where they are not kept.

        Args:
            policy: Frames that are held, or the name of a policy; None for that of this video.
            size: Height and width in pixels; None for those that the model was trained at.
            frames: Latent frames of the film. Policies with a bound have reached it in 36, by
                default; what `full` holds grows with every frame.
            batch: Rows of a call: two of them for a prompt with guidance.
            read_once: Whether rotated keys are kept from step to step.

        Raises:
            ValueError: If an argument is out of its range.
        """
        chosen, config = self._chosen(policy), self.transformer.config
        check_int("frames", frames, 1)
        check_int("batch", batch, 1)
        height, width = checked_size(self.latent_size(size), config.patch_size)
        _, *patch = config.patch_size
        shape = (batch, len(self.numbers), config.num_attention_heads, config.attention_head_dim)
        return rehearsed(
            chosen,
            rotary_of(self.transformer, (height // patch[0], width // patch[1])),
            chunk=self.chunk,
            frames=frames,
            shape=shape,
            dtype=self.transformer.dtype,
            read_once=read_once,
        )

    def latent_size(self, size: tuple[int, int] | None) -> tuple[int, int]:
        """Return height and width in latents of a size in pixels; None for that of the training.

        Raises:
            ValueError: If they do not come from whole patches of latents.
        """
        height, width = self.way.size if size is None else size
        scale = 8 if self.pipe is None else self.pipe.vae_scale_factor_spatial
        _, *patch = self.transformer.config.patch_size
        for name, pixels, each in (("height", height, patch[0]), ("width", width, patch[1])):
            check_int(f"size={(height, width)}: {name}", pixels, 1)
            if pixels % (scale * each):
                raise ValueError(f"size={(height, width)}: {name} must be a multiple of {scale * each} pixels")
        return height // scale, width // scale

    @torch.no_grad()
    def embed(self, prompt: str) -> Tensor:
        """Return the text embeddings of a prompt, `[1, S, E]`, padded as the model was trained.

        Raises:
            ValueError: If there is no text encoder, or the prompt is no text.
        """
        if self.pipe is None:
            raise ValueError(
                "this CausalVideo has a transformer alone: open one with its text encoder, "
                "CausalVideo.from_pretrained(folder, checkpoint=file), or give sessions embeddings"
            )
        if not str(prompt or "").strip():
            raise ValueError(f"prompt={prompt!r}: must be a text that says what to film")
        with _ENCODING:
            embeddings: Tensor = self.pipe.encode_prompt(
                prompt, do_classifier_free_guidance=False, max_sequence_length=self.way.words
            )[0]
        return embeddings

    def restore(
        self,
        folder: str | os.PathLike[str],
        policy: VideoPolicy | str | None = None,
        *,
        sampler: FewSteps | None = None,
    ) -> Session:
        """Return a stream that goes on where `Session.save` left it, to the bit.

        Args:
            folder: Folder it was saved in.
            policy: Policy it was made with, as for `session`.
            sampler: Noise levels it was made with; None for those of this video.

        Raises:
            FileNotFoundError: If there is no saved stream.
            SavedCacheError: If it is altered, holds what no stream holds, or was made with other
                weights, another policy, chunk or sampler.
        """
        session: Session = restored(self, folder, self._chosen(policy), sampler or self.sampler)
        return session

    def _chosen(self, policy: VideoPolicy | str | None) -> VideoPolicy:
        """Return the policy of a new stream."""
        chosen = self.policy if policy is None else make_policy(policy)
        self.check_policy(chosen)
        return chosen

    def call(self, stream: Any, x: Tensor, times: Tensor, text: Tensor) -> Tensor:
        """Call the transformer, its attention going through a stream.

        Args:
            stream: `Session` or `StreamBatch` that attends.
            x: Noisy chunks, `[B, C, F, H, W]`.
            times: Noise levels in thousandths, `[B]`.
            text: Text embeddings, `[B, S, E]`.

        Raises:
            ValueError: If the chunk is too large for the transformer, or this was closed, before or meanwhile.
        """
        self._check_open()
        check_places(self.transformer.config, x.shape)
        token = _CURRENT.set(stream)
        try:
            x = x.to(self.transformer.dtype)
            found: Tensor = self.transformer(x, times, text, return_dict=False)[0]
        finally:
            _CURRENT.reset(token)
        self._check_open()  # else layers after the close saw no cache
        return found

    def _check_open(self) -> None:
        """Raise ValueError if this was closed."""
        if self._closed:
            raise ValueError(
                "this CausalVideo was closed, and its transformer attends without the cache: make "
                "another, CausalVideo(transformer), and go on with sessions of that"
            )

    def attend(self, site: AttentionSite, call: AttentionCall) -> Tensor | None:
        """Attend over the frames that the current session holds."""
        session = _CURRENT.get()
        if session is None or session.video is not self:
            return None
        attend = partial(session.attend, self.numbers[site.path])
        return attend_by_heads(self.transformer, call, attend)
