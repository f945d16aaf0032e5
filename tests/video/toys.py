"""A tiny Wan transformer, rollouts with every call of it noted, and attention by hand."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from diffcache.kv.layer import KVLayer
from diffcache.pipelines.causal_video import CausalVideo, Session
from diffcache.video import FewSteps

CHANNELS, SIZE, UNIT, CHUNK, TEXT = 4, (8, 8), 16, 3, 32
HEADS, HEAD = 4, 24
ONE = FewSteps((1000,))
Call = tuple[Tensor, float, Tensor]  # noisy chunk, time and velocity
Kept = Sequence[Sequence[int | tuple[int, int]]]
Read = tuple[Tensor, Tensor]  # tokens, and the numbers of their frames, `[B, H, n]` each


def wan(dtype: torch.dtype = torch.float32, layers: int = 3, heads: int = HEADS) -> WanTransformer3DModel:
    """Return a transformer whose tokens depend on each other strongly."""
    torch.manual_seed(0)
    sizes = dict(attention_head_dim=HEAD, in_channels=CHANNELS, out_channels=CHANNELS, text_dim=TEXT, freq_dim=64)
    model = WanTransformer3DModel(
        num_attention_heads=heads, num_layers=layers, ffn_dim=192, rope_max_seq_len=64, **sizes
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def text(batch: int = 1, seed: int = 2) -> Tensor:
    """Return text embeddings."""
    return torch.randn(batch, 5, TEXT, generator=torch.Generator().manual_seed(seed))


@contextmanager
def noted(model: Any) -> Iterator[list[Call]]:
    """Note the calls of a transformer."""
    calls: list[Call] = []
    handle = model.register_forward_hook(
        lambda _, args, out: calls.append((args[0].clone(), float(args[1][0]), out[0].clone()))
    )
    try:
        yield calls
    finally:
        handle.remove()


def rollout(
    video: CausalVideo, chunks: int, prompt: Tensor | None = None, **settings: Any
) -> tuple[Session, list[Tensor], list[list[Call]]]:
    """Return a session after some chunks, their latents, and the calls of each."""
    session = video.session(text() if prompt is None else prompt, **{"size": SIZE, **settings})
    made, calls = [], []
    for _ in range(chunks):
        with noted(video.transformer) as found:
            made.append(session.next())
        calls.append(found)
    return session, made, calls


def held(session: Session) -> list[Tensor]:
    """Return the keys and values of every layer."""
    return [x.clone() for layer in session.store.layers for x in (layer.read().k, layer.read().v)]


def frames(session: Session) -> list[int]:
    """Return the frames that the first layer holds."""
    pos = session.store.layers[0].meta()["pos"][0, 0, ::UNIT].tolist()
    return [place // UNIT for place in pos]


def disturb(layer: KVLayer, slots: range) -> None:
    """Write other keys and values into slots."""
    there = layer.read().narrow(slots.start, slots.stop)
    layer.overwrite(slots, there.k + 1, 3 * there.v)


class ByHand:
    """Attend in one pass: queries of a chunk see the tokens that it read, its own last.

    Args:
        read: Tokens that each head read and the numbers of their frames, by chunk.
    """

    def __init__(self, read: Sequence[Read]) -> None:
        self.read = read

    def __call__(self, attn: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        v = attn.to_v(hidden_states)
        q, k, v = (x.unflatten(2, (HEADS, HEAD)).transpose(1, 2) for x in (q, k, v))
        outs, own = [], CHUNK * UNIT
        for tokens, number in self.read:
            tokens, number = (x.expand(len(q), HEADS, -1) for x in (tokens, number))
            index = tokens[..., None].expand(-1, -1, -1, HEAD)
            keys = turned(k.gather(2, index), number, tokens % UNIT)
            queries = q.gather(2, index[:, :, -own:])
            queries = turned(queries, number[:, :, -own:], tokens[:, :, -own:] % UNIT)
            weights = (queries @ keys.mT / HEAD**0.5).softmax(-1)
            outs.append(weights @ v.gather(2, index))
        out = torch.cat(outs, 2).transpose(1, 2).flatten(2)
        return attn.to_out[1](attn.to_out[0](out))


def turned(x: Tensor, number: Tensor, token: Tensor) -> Tensor:
    """Rotate tokens, `[B, H, n, 24]`: 8 channels each of time, row, column.

    Args:
        x: Queries or keys.
        number: Number of each token's frame, `[B, H, n]`.
        token: Place of each token in its frame, `[B, H, n]`.
    """
    places = [number, token // 4, token % 4]
    parts = []
    for place, part in zip(places, x.double().split(8, dim=-1), strict=True):
        freq = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        angle = place[..., None] * freq
        pair = torch.view_as_complex(part.unflatten(-1, (4, 2)).contiguous())
        parts.append(torch.view_as_real(pair * torch.polar(torch.ones_like(angle), angle)))
    return torch.cat([part.flatten(-2) for part in parts], -1).to(x.dtype)


def by_frames(kept: Kept, numbers: Sequence[dict[int, int]]) -> list[Read]:
    """Return the tokens that chunks read, from their frames.

    Args:
        kept: Frames that are held before each chunk; one that is rotated under another number than
            its own in `numbers` comes with it, as a pair.
        numbers: Number that every frame that a chunk sees is rotated under, by chunk.
    """
    found = []
    for chunk, (there, number) in enumerate(zip(kept, numbers, strict=True)):
        own = range(chunk * CHUNK, (chunk + 1) * CHUNK)
        seen = [(f, number[f]) if isinstance(f, int) else f for f in [*there, *own]]
        frame, at = torch.tensor(seen).repeat_interleave(UNIT, 0).T[:, None, None]
        found.append((frame * UNIT + torch.arange(UNIT).repeat(len(seen)), at))
    return found


@torch.no_grad()
def recomputed(
    model: Any,
    made: list[Tensor],
    noisy: Tensor,
    time: float,
    prompt: Tensor,
    read: Sequence[Sequence[Read]],
    context: float = 0.0,
) -> Tensor:
    """Return the velocity of the last chunk, from one masked pass over everything before it.

    What was made before has the noise level `context`, in thousandths; `read` is of each layer.
    """
    x = torch.cat([*made, noisy], 2)
    times = torch.full((len(x), x.shape[2] * UNIT), context)
    times[:, -CHUNK * UNIT :] = time
    before = [block.attn1.processor for block in model.blocks]
    for block, each in zip(model.blocks, read, strict=True):
        block.attn1.processor = ByHand(each)
    try:
        out = model(x, times, prompt.to(x), return_dict=False)[0]
    finally:
        for block, processor in zip(model.blocks, before, strict=True):
            block.attn1.processor = processor
    return out[:, :, -CHUNK:]


def check_calls(
    model: Any,
    made: list[Tensor],
    calls: list[Call],
    prompt: Tensor,
    read: Sequence[Read] | Sequence[Sequence[Read]],
    context: float = 0.0,
) -> None:
    """Hold the calls for a chunk against a pass over all before it; `read` may be of each layer."""
    layers = read if isinstance(read[0], list) else [read] * len(model.blocks)
    for noisy, time, velocity in calls:
        wanted = recomputed(model, made, noisy, time, prompt, layers, context)  # type: ignore[arg-type]
        torch.testing.assert_close(velocity, wanted, atol=1e-5, rtol=1e-5)
