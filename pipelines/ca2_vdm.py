"""Roll a factorized video transformer out with Ca2-VDM's cache: attention over time, over space.

>>> video = FactorizedVideo(FactorizedTransformer(), chunk=8)  # doctest: +SKIP
>>> session = video.session(text, size=(32, 32), policy=Ca2VDM())  # doctest: +SKIP
>>> session.take(first_frame)  # doctest: +SKIP
>>> film = [session.next() for _ in range(20)]  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from diffcache.errors import AttachError
from diffcache.kv.attend import Query
from diffcache.kv.store import KVStore
from diffcache.method import check_int
from diffcache.pipelines.causal_video import CausalVideo, Session
from diffcache.pipelines.pretrained_video import Streaming
from diffcache.pipelines.video_inputs import checked_size
from diffcache.video import Ca2VDM, FewSteps, Keep, Switch, VideoPolicy
from diffcache.video.ca2_vdm import History, attention, enhanced, last_frames

__all__ = ["FactorizedTransformer", "ModelMixin"]  # by its base, diffusers knows a saved model

_TIME_WIDTH = 256


class Attention(nn.Module):
    """Queries, keys and values of tokens, and the projection of the heads' outputs."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each `[..., H, n, D]`, of tokens `[..., n, C]`."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(-4, -2).unbind(-3)
        return q, k, v

    def join(self, x: Tensor) -> Tensor:
        """Return tokens `[..., n, C]` of heads `[..., H, n, D]`."""
        out: Tensor = self.out(x.transpose(-3, -2).flatten(-2))
        return out


class TextAttention(nn.Module):
    """Attention of tokens `[B, n, C]` to text `[B, m, C]`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """Attend to the text."""
        whole = self.q(x), *self.kv(text).chunk(2, -1)
        heads = [each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in whole]
        out: Tensor = self.out(attention(*heads).transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention over space, over time, and to the text; then a feed-forward.

    With `official`, attention to the prefix follows attention within a frame, with weights of its own;
    otherwise one attention does both.
    """

    def __init__(self, width: int, heads: int, official: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, width) / width**0.5)
        self.norm1 = nn.LayerNorm(width, 1e-6, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, 1e-6, elementwise_affine=False)
        self.space = Attention(width, heads)
        self.prefix = Attention(width, heads) if official else None
        self.time = Attention(width, heads)
        self.text = TextAttention(width, heads)
        self.mlp = feed_forward(width, 4 * width, width)

    def forward(
        self, x: Tensor, noise: Tensor, text: Tensor, history: History, number: int, rows: Tensor | None
    ) -> Tensor:
        """Return tokens after the block, `[B, F, S, C]`.

        Args:
            x: Tokens, `[B, F, S, C]`.
            noise: Modulation of every frame by its timestep, `[B, F, 6, C]`.
            text: Text, `[B, m, C]`.
            history: Frames that are seen beside those of `x`.
            number: Number of the block.
            rows: Temporal positions, which are added before attention over time, `[F, C]`; None
                for a block that adds none.
        """
        told = (self.table + noise)[:, :, None].unbind(-2)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = told
        within = self.space.split(modulated(self.norm1(x), shift, scale))
        if self.prefix is None:
            x = x + gate * self.space.join(history.spatial(number, *within, beside=True))
        else:
            x = x + gate * self.space.join(attention(*within))
            seen = history.spatial(number, *self.prefix.split(x), beside=False)
            x = x + gate * self.prefix.join(seen)
        sites = x.transpose(1, 2) if rows is None else x.transpose(1, 2) + rows
        seen = history.temporal(number, *self.time.split(sites))
        x = x + gate * self.time.join(seen).transpose(1, 2)
        x = x + self.text(x.flatten(1, 2), text).view_as(x)
        out: Tensor = x + gate_mlp * self.mlp(modulated(self.norm2(x), shift_mlp, scale_mlp))
        return out


class FactorizedTransformer(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """A video transformer in which attention over space and over time take turns.

    It is Ca2-VDM's causal spatial-temporal transformer, on that of Open-Sora 1.0, at any size. Spatial attention of
    the paper sees the prefix and the frame at once; in the released code (`official`) it sees the frame, and a second
    one sees the prefix alone.

    Departures: the first block is not told which frames are clean by a channel of a mask, as their timestep of 0 tells
    it; one prediction comes out, without variances; text has no padding; a clean frame sees itself once, where the
    released code has it see copies of itself, which weigh the same.

    Args:
        in_channels: Channels of latents.
        patch_size: Frames, rows and columns of a patch; 1 frame.
        num_attention_heads: Attention heads.
        attention_head_dim: Channels of a head.
        num_layers: Blocks.
        text_dim: Channels of text embeddings.
        official: Whether blocks are those of the released code.

    Raises:
        ValueError: If the width, heads times channels, is no multiple of 4.

    Reference: Ca2-VDM, arXiv 2411.16375, and its released code (`CausalSTDiT2`).
    """

    config_name = "config.json"

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        in_channels: int = 4,
        patch_size: tuple[int, int, int] = (1, 2, 2),
        num_attention_heads: int = 4,
        attention_head_dim: int = 16,
        num_layers: int = 4,
        text_dim: int = 32,
        official: bool = False,
    ) -> None:
        super().__init__()
        width = num_attention_heads * attention_head_dim
        if width % 4:
            raise ValueError(
                f"num_attention_heads={num_attention_heads}, attention_head_dim="
                f"{attention_head_dim}: their product must be a multiple of 4"
            )
        one, tall, wide = patch_size
        self.width = width
        self.patch = nn.Conv3d(in_channels, width, (one, tall, wide), (one, tall, wide))
        self.timestep = feed_forward(_TIME_WIDTH, width, width, nn.SiLU())
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.text = feed_forward(text_dim, width, width)
        made = [Block(width, num_attention_heads, official) for _ in range(num_layers)]
        self.blocks = nn.ModuleList(made)
        self.norm = nn.LayerNorm(width, 1e-6, elementwise_affine=False)
        self.table = nn.Parameter(torch.randn(2, width) / width**0.5)
        self.out = nn.Linear(width, tall * wide * in_channels)

    def forward(self, sample: Tensor, timestep: Tensor, text: Tensor, history: History) -> Tensor:
        """Return the prediction, like `sample`; of clean frames it means nothing.

        Args:
            sample: Latents, `[B, C, F, H, W]`.
            timestep: Noise level of the frames that are not clean, in thousandths, `[B]`.
            text: Text embeddings, `[B, m, E]`.
            history: Frames that are seen beside these.

        Raises:
            ValueError: If patches do not divide the size, or there are too many frames.
        """
        *_, frames, height, width = sample.shape
        _, tall, wide = self.config.patch_size
        checked_size((height, width), self.config.patch_size)
        if history.prefix > frames:
            raise ValueError(f"prefix={history.prefix}: the pass has {frames} frames")
        rows = waves(history.policy.rows(history.start, frames), self.width).to(sample)
        grid = height // tall, width // wide
        x = self.patch(sample).flatten(3).permute(0, 2, 3, 1)
        x = x + places(grid, self.width).to(x)
        times = timestep[:, None].repeat(1, frames)
        times[:, : history.prefix] = 0
        level = self.timestep(waves(times, _TIME_WIDTH).to(x))
        noise = self.modulation(level).unflatten(-1, (6, -1))
        text = self.text(text)
        for number, block in enumerate(self.blocks):
            x = block(x, noise, text, history, number, rows if number == 0 else None)
        shift, scale = (self.table + level[:, :, None])[:, :, None].unbind(-2)
        x = self.out(modulated(self.norm(x), shift, scale))
        x = x.unflatten(2, grid).unflatten(-1, (tall, wide, -1)).permute(0, 6, 1, 2, 4, 3, 5)
        out: Tensor = x.flatten(5).flatten(3, 4)
        return out


def feed_forward(given: int, inner: int, out: int, activation: nn.Module | None = None) -> nn.Sequential:
    """Return two linears around an activation, by default GELU by its tanh formula."""
    activation = nn.GELU(approximate="tanh") if activation is None else activation
    return nn.Sequential(nn.Linear(given, inner), activation, nn.Linear(inner, out))


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return normed tokens, scaled and shifted by the timestep's modulation."""
    return x * (1 + scale) + shift


def waves(at: Tensor, width: int) -> Tensor:
    """Return sines and cosines of numbers at falling rates, float64 `[..., width]`."""
    rates = 10_000.0 ** (-torch.arange(width // 2, device=at.device).double() * 2 / width)
    angles = at.double()[..., None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


def places(grid: tuple[int, int], width: int) -> Tensor:
    """Return positions of the tokens of a frame by column and row, float64 `[S, width]`."""
    row, column = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    return torch.cat([waves(x.flatten(), width // 2) for x in (column, row)], -1)


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
            frames: Latent frames to make; None for a whole chunk.

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

        Args:
            prompt: Text embeddings, `[B, S, E]`.
            mode: `Keep()` or None.
            negative: Text embeddings of the unguided branch; None to leave them as they are.

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


class FactorizedVideo(CausalVideo):
    """A factorized transformer that films chunk by chunk.

    A stream goes on from at least one clean frame, which `FactorizedSession.take` is given. Keys are not
    rotated, so that `read_once` of a session is not looked at.

    Args:
        transformer: The transformer.
        chunk: Latent frames of a chunk.
        sampler: Noise levels; `context` must be 0.

    Raises:
        AttachError: If the transformer is of another class.
        ValueError: If a setting is out of its range.
    """

    sessions = FactorizedSession

    def __init__(
        self, transformer: nn.Module, *, chunk: int = 8, sampler: FewSteps | None = None
    ) -> None:  # no door: the transformer asks the session itself
        check_int("chunk", chunk, 1)
        if not isinstance(transformer, FactorizedTransformer):
            raise AttachError(
                f"{type(transformer).__name__}: Ca2-VDM is served on FactorizedTransformer of "
                "diffcache.pipelines.ca2_vdm"
            )
        sampler = FewSteps() if sampler is None else sampler
        if sampler.context:
            raise ValueError(f"sampler={sampler!r}: context must be 0, since Ca2-VDM runs clean frames at timestep 0")
        self.transformer: Any = transformer
        self.chunk, self.sampler = chunk, sampler
        self.policy: VideoPolicy = Ca2VDM()
        self.pipe, self.way = None, Streaming()  # prompts are embeddings, films latents

    def check_policy(self, policy: VideoPolicy) -> None:
        """Raise ValueError unless it is a `Ca2VDM` with room for a chunk."""
        if not isinstance(policy, Ca2VDM):
            raise ValueError(f"policy={policy!r}: must be a Ca2VDM")
        if self.chunk > policy.room:
            raise ValueError(f"chunk={self.chunk}: must be at most {policy.room}, length - queue of {policy!r}")

    def expected_bytes(self, *given: Any, **settings: Any) -> int:
        """Raise ValueError: what is held is bounded by the policy's frames, and not counted beforehand."""
        raise ValueError(
            "expected_bytes: is not known of a FactorizedVideo; look at session.store.nbytes after some chunks"
        )

    def close(self) -> None:
        """Do nothing: nothing was put into the transformer."""

    def call(self, stream: Any, x: Tensor, times: Tensor, text: Tensor) -> Tensor:
        """Call the transformer, its attention going through a session."""
        if not isinstance(stream, FactorizedSession):
            raise ValueError(
                f"{type(stream).__name__} has a cache for every noise level, and Ca2-VDM one for "
                "all: use FactorizedVideo.session"
            )
        out: Tensor = self.transformer(x.to(self.transformer.dtype), times, text, stream)
        return out
