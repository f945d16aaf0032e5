"""Roll a causal video transformer out: chunks of frames, one after the other, over a KV cache.

>>> video = CausalVideo(transformer, chunk=3)  # doctest: +SKIP
>>> session = video.session(text, size=(60, 104), policy=Window(window=6))  # doctest: +SKIP
>>> film = [session.next() for _ in range(20)]  # doctest: +SKIP
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor, nn

from diffcache.attach.attention import Door, attention_sites
from diffcache.attach.attention_call import AttentionCall, AttentionSite
from diffcache.errors import AttachError
from diffcache.method import check_int
from diffcache.pipelines.context_parallel import attend_by_heads
from diffcache.pipelines.saved_stream import restored
from diffcache.pipelines.video_inputs import check_places, refuse_copy
from diffcache.pipelines.video_session import Session as Session
from diffcache.video import FewSteps, FullHistory, VideoPolicy
from diffcache.video.policy import Films, make_policy

_CURRENT: ContextVar[Any] = ContextVar("diffcache_video_session", default=None)


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

    Raises:
        AttachError: If the transformer is of another class, or has a door already.
        ValueError: If `chunk` is less than 1.
    """

    def __init__(
        self, transformer: nn.Module, *, chunk: int = 3, sampler: FewSteps | None = None
    ) -> None:
        check_int("chunk", chunk, 1)
        if type(transformer).__name__ != "WanTransformer3DModel":
            raise AttachError(
                f"{type(transformer).__name__}: causal video is served on WanTransformer3DModel "
                "of diffusers, whose self-attention can be given frames of its own"
            )
        self.transformer: Any = transformer
        self.chunk = chunk
        self.sampler = FewSteps() if sampler is None else sampler
        self.policy: VideoPolicy = FullHistory()
        own = [site for site in attention_sites(transformer) if site.kind == "self"]
        self.numbers = {site.path: number for number, site in enumerate(own)}
        self._door = Door(transformer, self, own)
        self._closed = False

    __reduce_ex__ = refuse_copy

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
        read_once: bool = True,
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
            read_once: Whether rotated keys are kept from step to step, which takes the memory of
                the keys once more, half as much again in all: a third of 5.6 GB for Wan 1.3B in
                bfloat16 at 480 x 832 under `Window(6, sinks=3)`.
            recall: Latest clean latents that are kept for a re-cache, in frames.

        Raises:
            ValueError: If an argument is out of its range, or this was closed.
        """
        session = Session(
            self, prompt, size, self._chosen(policy), seed, negative, guidance, read_once, recall
        )
        check_places(self.transformer.config, (*session.shape[:2], self.chunk, *session.size))
        return session

    def restore(
        self, folder: str | os.PathLike[str], policy: VideoPolicy | str | None = None
    ) -> Session:
        """Return a stream that goes on where `Session.save` left it, to the bit.

        Args:
            folder: Folder it was saved in.
            policy: Policy it was made with, as for `session`.

        Raises:
            FileNotFoundError: If there is no saved stream.
            SavedCacheError: If it is altered, holds what no stream holds, or was made with other
                weights, another policy, chunk or sampler.
        """
        session: Session = restored(self, folder, self._chosen(policy))
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
            ValueError: If the chunk is too large for the transformer, or this was closed.
        """
        self._check_open()
        check_places(self.transformer.config, x.shape)
        token = _CURRENT.set(stream)
        try:
            x = x.to(self.transformer.dtype)
            found: Tensor = self.transformer(x, times, text, return_dict=False)[0]
        finally:
            _CURRENT.reset(token)
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
