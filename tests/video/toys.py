"""A tiny Wan transformer, and rollouts with every call of it noted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from diffcache.pipelines.causal_video import CausalVideo, Session

CHANNELS, SIZE, UNIT, CHUNK, TEXT = 4, (8, 8), 16, 3, 32
HEADS, HEAD = 4, 24
Kept = Sequence[Sequence[int | tuple[int, int]]]


def wan(
    dtype: torch.dtype = torch.float32, layers: int = 3, heads: int = HEADS
) -> WanTransformer3DModel:
    """Return a transformer whose tokens depend on each other strongly."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=HEAD, in_channels=CHANNELS,
        out_channels=CHANNELS, text_dim=TEXT, freq_dim=64, ffn_dim=192, num_layers=layers,
        rope_max_seq_len=64,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def text(batch: int = 1, seed: int = 2) -> Tensor:
    """Return text embeddings."""
    return torch.randn(batch, 5, TEXT, generator=torch.Generator().manual_seed(seed))


@dataclass(eq=False)
class Noted:
    """The calls of a transformer: noisy chunk, time and velocity of each."""

    calls: list[tuple[Tensor, float, Tensor]] = field(default_factory=list)

    def hook(self, module: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.calls.append((args[0].clone(), float(args[1][0]), out[0].clone()))


def rollout(
    video: CausalVideo, chunks: int, **settings: Any
) -> tuple[Session, list[Tensor], list[list[tuple[Tensor, float, Tensor]]]]:
    """Return a session after some chunks, their latents, and the calls of each."""
    settings = {"size": SIZE, **settings}
    prompt = settings.pop("prompt", text())
    session = video.session(prompt, **settings)
    made, calls = [], []
    for _ in range(chunks):
        noted = Noted()
        handle = video.transformer.register_forward_hook(noted.hook, with_kwargs=True)
        try:
            made.append(session.next())
        finally:
            handle.remove()
        calls.append(noted.calls)
    return session, made, calls


class ByHand:
    """Attend in one pass over all frames: those of a chunk see its kept frames and their own.

    Args:
        kept: For each chunk, the frames that are held before it; one that is rotated under another
            number than its own in `numbers` comes with it, as a pair.
        numbers: For each chunk, the number that every frame it sees is rotated under.
    """

    def __init__(self, kept: Kept, numbers: list[dict[int, int]]) -> None:
        self.kept, self.numbers = kept, numbers

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None,
        attention_mask: Any = None, rotary_emb: Any = None,
    ) -> Tensor:  # fmt: skip
        q, k = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        v = attn.to_v(hidden_states)
        q, k, v = (x.unflatten(2, (HEADS, HEAD)).unflatten(1, (-1, UNIT)) for x in (q, k, v))
        outs = []
        for chunk, frames in enumerate(self.kept):
            own = list(range(chunk * CHUNK, min((chunk + 1) * CHUNK, q.shape[1])))
            number = self.numbers[chunk]
            seen = [(f, number[f]) if isinstance(f, int) else f for f in [*frames, *own]]
            queries = torch.cat([turned(q[:, f], number[f]) for f in own], 1)
            keys = torch.cat([turned(k[:, f], at) for f, at in seen], 1)
            values = torch.cat([v[:, f] for f, _ in seen], 1)
            logits = torch.einsum("bqhd,bkhd->bhqk", queries, keys) / HEAD**0.5
            outs.append(torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), values))
        out = torch.cat(outs, 1).flatten(2)
        return attn.to_out[1](attn.to_out[0](out))


def turned(x: Tensor, number: int) -> Tensor:
    """Rotate the tokens of one frame, `[B, 16, H, 24]`."""
    return turned_tokens(x, torch.full((1, UNIT), number), torch.arange(UNIT)[None])


def turned_tokens(x: Tensor, number: Tensor, token: Tensor) -> Tensor:
    """Rotate tokens, `[B, n, H, 24]`: 8 channels each of time, row, column.

    Args:
        x: Queries or keys.
        number: Number of each token's frame, `[B, n]`.
        token: Place of each token in its frame, `[B, n]`.
    """
    places = [number, token // 4, token % 4]
    parts = []
    for place, part in zip(places, x.double().split(8, dim=-1), strict=True):
        freq = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        angle = (place[..., None] * freq)[:, :, None]
        pair = torch.view_as_complex(part.unflatten(-1, (4, 2)).contiguous())
        parts.append(torch.view_as_real(pair * torch.polar(torch.ones_like(angle), angle)))
    return torch.cat([part.flatten(-2) for part in parts], -1).to(x.dtype)


@torch.no_grad()
def recomputed(
    model: Any, made: list[Tensor], noisy: Tensor, time: float, prompt: Tensor,
    kept: Kept, numbers: list[dict[int, int]], context: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return the velocity of the last chunk, from one masked pass over everything before it.

    What was made before has the noise level `context`, in thousandths.
    """
    x = torch.cat([*made, noisy], 2)
    times = torch.full((len(x), x.shape[2] * UNIT), context)
    times[:, -noisy.shape[2] * UNIT :] = time
    before = [block.attn1.processor for block in model.blocks]
    for block in model.blocks:
        block.attn1.processor = ByHand(kept, numbers)
    try:
        out = model(x, times, prompt.to(x), return_dict=False)[0]
    finally:
        for block, processor in zip(model.blocks, before, strict=True):
            block.attn1.processor = processor
    return out[:, :, -noisy.shape[2] :]


def next_noted(
    session: Session, model: WanTransformer3DModel
) -> tuple[Tensor, list[tuple[Tensor, float, Tensor]]]:
    """Make a chunk; return it, and noisy latents, time and velocity of every call for it."""
    noted: list[tuple[Tensor, float, Tensor]] = []
    handle = model.register_forward_hook(
        lambda _, given, out: noted.append((given[0], float(given[1][0]), out[0]))
    )
    try:
        return session.next(), noted
    finally:
        handle.remove()
