"""Train a causal video model so that every chunk of a film sees what a stream will show it.

A film goes in twice, once clean at noise level 0 and once noised chunk by chunk. A chunk, clean or
noisy, attends to itself and to those clean chunks before it that a cache would hold, so that one
pass trains all chunks of a film, each as after any number of chunks of a stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor


@dataclass(frozen=True)
class HeldChunks:
    """Chunks that a cache holds: the latest, and the first one with `sinks`.

    Attributes:
        window: Number of latest chunks; None for all.
        sinks: Whether the first chunk is held for ever, next to the window.
    """

    window: int | None = None
    sinks: bool = False


def draw_held(generator: torch.Generator, most: int) -> HeldChunks:
    """Draw a cache: half of them hold all, the others 1 to `most` chunks, half with sinks."""
    kind = torch.rand((), generator=generator)
    window = 1 + int(torch.randint(most, (), generator=generator))
    return HeldChunks() if kind < 0.5 else HeldChunks(window, bool(kind > 0.75))


class ChunkAttention:
    """Self-attention of a transformer whose batch is frames, so that each has its own noise level.

    Frames come film by film, those of a film first clean and then noisy.

    Args:
        model: Transformer that attends with this.
        chunk: Frames of a chunk.
        grid: Rows and columns of tokens of a frame.

    Attributes:
        frames: Frames of a film.
        held: Chunks that a cache would hold.
    """

    def __init__(self, model: WanTransformer3DModel, chunk: int, grid: tuple[int, int]) -> None:
        self.sections = (model.rope.t_dim, model.rope.h_dim, model.rope.w_dim)
        self.chunk = chunk
        self.grid = grid
        self.frames = chunk
        self.held = HeldChunks()

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attend to the chunk itself and to the clean chunks that are held; all [2 B F, N, D]."""
        x = hidden_states
        made = (attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(x)), attn.to_v(x))
        q, k, v = (
            y.unflatten(0, (-1, 2, self.frames)).unflatten(-1, (attn.heads, -1)) for y in made
        )  # [B, 2, F, N, H, D]
        numbers = torch.arange(self.frames)
        q, k = self.turn(q, numbers), self.turn(k, numbers)
        outs = []
        for start in range(0, self.frames, self.chunk):
            own = slice(start, start + self.chunk)
            keys = torch.cat([self._seen(k, start, turned=True), k[:, :, own]], 2)
            values = torch.cat([self._seen(v, start), v[:, :, own]], 2)
            outs.append(attend(q[:, :, own], keys, values))
        out = torch.cat(outs, 2).flatten(-2).flatten(0, 2)
        found: Tensor = attn.to_out[1](attn.to_out[0](out))
        return found

    def _seen(self, x: Tensor, start: int, *, turned: bool = False) -> Tensor:
        """Return clean frames that the chunk from `start` on attends to, for both halves.

        Args:
            x: Keys or values [B, 2, F, N, H, D].
            start: First frame of the chunk.
            turned: Whether sinks are rotated on, so that they lie next to the window.
        """
        clean, width = x[:, :1], self.held.window
        oldest = 0 if width is None else max(start - width * self.chunk, 0)
        held = clean[:, :, oldest:start]
        if self.held.sinks and oldest >= self.chunk:
            sinks = clean[:, :, : self.chunk]
            if turned:
                sinks = self.turn(sinks, torch.full((self.chunk,), oldest - self.chunk), rows=False)
            held = torch.cat([sinks, held], 2)
        return held.expand(-1, 2, *held.shape[2:])

    def turn(self, x: Tensor, numbers: Tensor, *, rows: bool = True) -> Tensor:
        """Rotate tokens as the model's rotary embedding does.

        Args:
            x: Queries or keys [..., F, N, H, D].
            numbers: Number of every frame, int64 [F].
            rows: Whether to rotate by row and column too.
        """
        places = [numbers, *(torch.arange(size) * rows for size in self.grid)]
        angles = torch.cat(
            [
                place.flatten()[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
                for place, width in zip(torch.meshgrid(*places, indexing="ij"), self.sections, strict=True)
            ],
            -1,
        ).view(len(numbers), -1, 1, x.shape[-1] // 2)
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend over all tokens of all frames, each [B, 2, F, N, H, D], in two matrix products."""
    rows, keys, values = (x.flatten(2, 3).transpose(2, 3) for x in (q, k, v))  # [B, 2, H, T, D]
    out = (rows * rows.shape[-1] ** -0.5 @ keys.mT).softmax(-1) @ values
    found: Tensor = out.transpose(2, 3).view_as(q)
    return found


def predict(model: WanTransformer3DModel, clean: Tensor, noisy: Tensor, levels: Tensor, text: Tensor) -> Tensor:
    """Return the clean frames that the transformer makes of noisy ones, after clean ones.

    Args:
        model: Transformer with a `ChunkAttention` whose `frames` is F.
        clean: Frames of the history, [B, C, F, H, W].
        noisy: Frames to denoise, like `clean`.
        levels: Noise level of every frame, in 0..1, [B, F].
        text: Text embeddings of every frame, [B, F, S, E].
    """
    times = 1000 * torch.cat([torch.zeros_like(levels), levels], 1).flatten()
    frames = torch.cat([clean, noisy], 2).transpose(1, 2).flatten(0, 1)[:, :, None]
    words = torch.cat([text, text], 1).flatten(0, 1)
    out = model(frames, times, words, return_dict=False)[0].unflatten(0, (len(clean), -1))
    found: Tensor = out[:, clean.shape[2] :, :, 0].transpose(1, 2)
    return found
