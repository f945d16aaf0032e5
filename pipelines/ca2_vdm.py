"""Roll a factorized video transformer out with Ca2-VDM's cache: attention over time, over space.

>>> video = FactorizedVideo(FactorizedTransformer(), chunk=8)  # doctest: +SKIP
>>> session = video.session(text, size=(32, 32), policy=Ca2VDM())  # doctest: +SKIP
>>> session.take(first_frame)  # doctest: +SKIP
>>> film = [session.next() for _ in range(20)]  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from diffcache.errors import AttachError
from diffcache.kv.attend import Query
from diffcache.kv.store import KVStore
from diffcache.method import check_int
from diffcache.pipelines.causal_video import CausalVideo, Session
from diffcache.pipelines.factorized import FactorizedTransformer
from diffcache.video import Ca2VDM, FewSteps, Keep, Switch, VideoPolicy
from diffcache.video.ca2_vdm import attention, enhanced, last_frames


class FactorizedVideo(CausalVideo):
    """A factorized transformer that films chunk by chunk.

    A stream goes on from at least one clean frame, which `FactorizedSession.take` is given.

    Args:
        transformer: The transformer.
        chunk: Latent frames of a chunk.
        sampler: Noise levels; `context` must be 0.

    Raises:
        AttachError: If the transformer is of another class.
        ValueError: If a setting is out of its range.
    """

    def __init__(
        self, transformer: nn.Module, *, chunk: int = 8, sampler: FewSteps | None = None
    ) -> None:  # no door: the transformer asks the session itself
        check_int("chunk", chunk, 1)
        if not isinstance(transformer, FactorizedTransformer):
            raise AttachError(
                f"{type(transformer).__name__}: Ca2-VDM is served on FactorizedTransformer of "
                "diffcache.pipelines.factorized"
            )
        sampler = FewSteps() if sampler is None else sampler
        if sampler.context:
            raise ValueError(f"sampler={sampler!r}: context must be 0, since Ca2-VDM runs clean frames at timestep 0")
        self.transformer: Any = transformer
        self.chunk, self.sampler = chunk, sampler
        self.policy: VideoPolicy = Ca2VDM()

    def check_policy(self, policy: VideoPolicy) -> None:
        """Raise ValueError unless it is a `Ca2VDM` with room for a chunk."""
        if not isinstance(policy, Ca2VDM):
            raise ValueError(f"policy={policy!r}: must be a Ca2VDM")
        if self.chunk > policy.room:
            raise ValueError(f"chunk={self.chunk}: must be at most {policy.room}, length - queue of {policy!r}")

    def close(self) -> None:
        """Do nothing: nothing was put into the transformer."""

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
        recall: int = 0,
    ) -> FactorizedSession:
        """Return a new stream, as `CausalVideo.session` does.

        The policy is a `Ca2VDM`, or its name with settings; `read_once` is not looked at, as keys are not
        rotated.

        Raises:
            ValueError: If an argument is out of its range.
        """
        return FactorizedSession(self, prompt, size, self._chosen(policy), seed, negative, guidance, read_once, recall)

    def call(self, stream: Any, x: Tensor, times: Tensor, text: Tensor) -> Tensor:
        """Call the transformer, its attention going through a session."""
        if not isinstance(stream, FactorizedSession):
            raise ValueError(
                f"{type(stream).__name__} has a cache for every noise level, and Ca2-VDM one for "
                "all: use FactorizedVideo.session"
            )
        out: Tensor = self.transformer(x.to(self.transformer.dtype), times, text, stream)
        return out


class FactorizedSession(Session):
    """One stream of a factorized transformer; `store` has two layers a block: time, space."""

    _policy: Ca2VDM

    @property
    def policy(self) -> Ca2VDM:
        """Return the policy that chooses the frames that are held."""
        return self._policy

    def empty_store(self, read_once: bool) -> KVStore:
        """Return the cache that a stream begins with."""
        blocks = len(self.video.transformer.blocks)
        return KVStore(2 * blocks, self.policy.recipes(blocks))

    def next(self, frames: int | None = None) -> Tensor:
        """Make the next chunk and commit it; return its latents, `[B, C, F, H, W]`.

        Args:
            frames: Latent frames of it; None for a chunk.

        Raises:
            ValueError: If `frames` is out of its range, or no clean frame came before.
        """
        if not self.frames:
            raise ValueError("next: Ca2-VDM goes on from clean frames; give the first with take()")
        if frames is not None:
            check_int("frames", frames, 1)
        if frames is not None and frames > self.policy.room:
            raise ValueError(f"frames={frames}: must be at most {self.policy.room}, length - queue of {self.policy!r}")
        return super().next(frames)

    def switch(self, prompt: Tensor, mode: Switch | None = None, *, negative: Tensor | None = None) -> None:
        """Change the prompt from the next chunk on; frames that are held stay as they are.

        Raises:
            ValueError: If texts are of another shape, or `mode` is another one than `Keep()`.
        """
        if mode is not None and mode != Keep():
            raise ValueError(f"mode={mode!r}: must be Keep(), as keys hold their positions")
        super().switch(prompt, mode, negative=negative)

    # what the transformer asks for ---------------------------------------------------------

    @property
    def unit(self) -> int:
        """Tokens of a frame in a layer: places in the frame are rows of the batch."""
        return 1

    @property
    def start(self) -> int:
        """Number of the first frame of the chunk."""
        return self.frames

    @property
    def prefix(self) -> int:
        """Clean frames of a call beside noisy ones: none, as they are in the cache."""
        return 0

    def temporal(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention over the queue and, causally, the chunk, `[B, S, H, F, D]`."""
        layer = self.store.layers[2 * block]
        rows, count = q.shape[:2], q.shape[3]
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        if layer.seen == self._start:
            layer.write(k, v)
        else:
            layer.overwrite(range(layer.held - count, layer.held), k, v)
        query = Query(q, layer.seen - count, q.shape[-1] ** -0.5)
        out = self.store.attend(2 * block, query)
        return out.view(*rows, *out.shape[1:])

    def spatial(self, block: int, q: Tensor, k: Tensor, v: Tensor, beside: bool) -> Tensor:
        """Return attention over the last frames of the prefix, `[B, F, H, S, D]`.

        In the clean pass frames see themselves, and are written.
        """
        layer = self.store.layers[2 * block + 1]
        if self._clean:
            rows = [x.permute(0, 3, 2, 1, 4).flatten(0, 1) for x in (k, v)]
            layer.write(*rows)
            return attention(q, k, v)
        held = layer.read()
        sites = (-1, q.shape[3])
        before = [x.unflatten(0, sites).permute(0, 3, 2, 1, 4) for x in (held.k, held.v)]
        latest = [last_frames(x, self.policy.prefix) for x in before]
        return enhanced([q, k, v], latest, beside)
