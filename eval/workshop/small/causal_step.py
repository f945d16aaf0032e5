"""One training step of the causal video model: every chunk sees what a rollout will show it.

A film goes in twice, once clean at noise level 0 and once noised chunk by chunk. A chunk, clean or
noisy, attends to the clean chunks before it that a cache would hold and to itself, so that one pass
trains all chunks of a film, as after any number of chunks of a rollout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor

from diffcache.pipelines.small.causal_scenes import CHUNK

SINKS = CHUNK  # first frames that a cache with sinks holds
WINDOWS = (CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK)


@dataclass(frozen=True)
class Held:
    """Frames that a cache holds: the latest, and the first three with `sinks`.

    Attributes:
        window: Number of latest frames; None for all.
        sinks: Whether the first frames are held for ever.
    """

    window: int | None = None
    sinks: bool = False


def draw_held(generator: torch.Generator) -> Held:
    """Draw a cache: half of them hold all, the others a window, half of those with sinks."""
    kind = torch.rand((), generator=generator)
    window = WINDOWS[int(torch.randint(len(WINDOWS), (), generator=generator))]
    return Held() if kind < 0.5 else Held(window, bool(kind > 0.75))


class ChunkAttention:
    """A processor for the self-attention of a transformer that is given frames one by one.

    The frames are the batch, so that each has a noise level and a prompt of its own: those of every
    film first clean and then noisy.
    """

    def __init__(self, model: WanTransformer3DModel, grid: tuple[int, int]) -> None:
        rope = model.rope
        self.sections = (rope.t_dim, rope.h_dim, rope.w_dim)
        self.grid = grid
        self.held = Held()
        self.frames = 1  # of a film

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attend within the history and the chunk."""
        x = hidden_states
        q, k, v = attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(x)), attn.to_v(x)
        q, k, v = (
            y.to(v.dtype).unflatten(0, (-1, 2 * self.frames)).flatten(1, 2)
            .unflatten(2, (attn.heads, -1)) for y in (q, k, v)
        )  # fmt: skip
        out = self._over_frames(q, k, v).reshape(x.shape)
        found: Tensor = attn.to_out[1](attn.to_out[0](out))
        return found

    def _over_frames(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend to the held frames and the own chunk, `[B, 2 F N, H, D]`."""
        frames = self.frames
        q, k = self._turn(q, torch.arange(frames)), self._turn(k, torch.arange(frames))
        rows, keys, values = (x.unflatten(1, (2, -1)).permute(1, 0, 3, 2, 4) for x in (q, k, v))
        outs = []
        for start in range(0, frames, CHUNK):
            own = slice(start * self.unit, (start + CHUNK) * self.unit)
            seen = self._seen(keys[0], start, turned=True), self._seen(values[0], start)
            held = [torch.cat([x.expand(2, *x.shape), y[..., own, :]], 3)
                    for x, y in zip(seen, (keys, values), strict=True)]  # fmt: skip
            outs.append(attention(rows[..., own, :], *held))
        return torch.cat(outs, 3).permute(1, 0, 3, 2, 4).flatten(1, 2)

    def _seen(self, clean: Tensor, start: int, *, turned: bool = False) -> Tensor:
        """Return the held tokens of the history, `[B, H, T, D]`.

        Args:
            clean: Tokens of all clean frames, `[B, H, F N, D]`.
            start: First frame of the chunk that attends.
            turned: Whether sinks are rotated on, so that they lie next to the window.
        """
        oldest = 0 if self.held.window is None else max(start - self.held.window, 0)
        window = clean[:, :, oldest * self.unit : start * self.unit]
        if not self.held.sinks or oldest < SINKS:
            return window
        first = clean[:, :, : SINKS * self.unit]
        if turned:
            gap = torch.full((SINKS,), oldest - SINKS)
            first = self._turn(first.transpose(1, 2), gap, grid=False).transpose(1, 2)
        return torch.cat([first, window], 2)

    @property
    def unit(self) -> int:
        """Tokens of a frame."""
        return self.grid[0] * self.grid[1]

    def _turn(self, x: Tensor, time: Tensor, *, grid: bool = True) -> Tensor:
        """Rotate tokens by frame, row and column.

        Args:
            x: `[B, T, H, D]`, of these frames, once or more.
            time: Number of every frame, `[F]`.
            grid: Whether to rotate by row and column as well.
        """
        rows, columns = (torch.arange(size) * grid for size in self.grid)
        places = torch.meshgrid(time, rows, columns, indexing="ij")
        angles = torch.cat([
            place.flatten()[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
            for place, width in zip(places, self.sections, strict=True)
        ], -1).repeat(x.shape[1] // places[0].numel(), 1)[:, None]  # fmt: skip
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles))
        found: Tensor = turned.flatten(-2).to(x.dtype)
        return found


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend in two matrix products, whose backward pass is fast on a CPU; all `[..., T, D]`."""
    found: Tensor = (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1).to(v.dtype) @ v
    return found


def predict(
    model: WanTransformer3DModel, clean: Tensor, noisy: Tensor, levels: Tensor, text: Tensor
) -> Tensor:
    """Return what the transformer says of noisy frames, after clean ones.

    Args:
        model: Transformer with a `ChunkAttention` whose `frames` is F.
        clean: Frames of the history, `[B, 3, F, H, W]`.
        noisy: Frames to denoise, like `clean`.
        levels: Noise level of every frame, 0..1, `[B, F]`.
        text: Text embeddings of every frame, `[B, F, S, E]`.

    Returns:
        Like `noisy`.
    """
    times = 1000 * torch.cat([torch.zeros_like(levels), levels], 1).flatten()
    frames = torch.cat([clean, noisy], 2).transpose(1, 2).flatten(0, 1)[:, :, None]
    words = torch.cat([text, text], 1).flatten(0, 1)
    out = model(frames, times, words, return_dict=False)[0].unflatten(0, (len(clean), -1))
    found: Tensor = out[:, clean.shape[2] :, :, 0].transpose(1, 2)
    return found
