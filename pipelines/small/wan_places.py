"""A start for the small Wan denoiser whose first two blocks tell every token where it lies.

Wan's rotary embedding tells tokens how far apart they are and nothing else does: where a token lies
can only be read from which neighbors exist. A large model learns that; this start gives it to
a small one. In the first block each head looks at the neighbor in one direction, or at the token
itself where there is none, and the feed-forward network measures how unlike the two are: zero at
an edge. The second block hands these four flags on to the neighbors. All of it stays trainable.
"""

from __future__ import annotations

import math

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanTransformerBlock
from torch import nn

_COMPARED = 12
_SHARPNESS = 3.0
_LEAN = 0.7


@torch.no_grad()
def start_with_places(model: WanTransformer3DModel) -> None:
    """Set the first two blocks and the patch embedding; the model has 4 heads of 24 for 24 inputs.

    The residual stream holds the inputs in [0, 24), twelve of each neighbor's in [24, 72), the
    edge flags (-1 at the edge, about 1 elsewhere) of left, right, top, bottom in [72, 76), and
    those of the four neighbors in [76, 92).

    Raises:
        ValueError: if the model has other heads or inputs.
    """
    config = model.config
    embedding, inputs = model.patch_embedding, config.in_channels * math.prod(config.patch_size)
    built = (config.num_attention_heads, config.attention_head_dim, inputs)
    if built != (4, 24, 24):
        raise ValueError(
            f"a model of {built[0]} heads of {built[1]} for {built[2]} inputs a token cannot start "
            "with places; build it with 4 heads of 24 for 24 inputs"
        )
    nn.init.zeros_(embedding.bias)
    nn.init.zeros_(embedding.weight)
    embedding.weight[:inputs] = torch.eye(inputs).unflatten(1, embedding.weight.shape[1:])
    for block in model.blocks[:2]:
        _look_around(block.attn1)
        block.scale_shift_table[:, [2, 5]] = 1.0
    first, second = model.blocks[:2]
    _carry(first.attn1, range(_COMPARED), inputs, 0.5)
    _compare(first, inputs)
    flags = inputs + 4 * _COMPARED
    _carry(second.attn1, range(flags, flags + 4), flags + 4, 1.0)
    nn.init.zeros_(second.ffn.net[2].weight)


def _look_around(attention: WanAttention) -> None:
    """Let head 0, 1, 2, 3 look left, right, up, down, whatever the content."""
    width = attention.inner_dim // attention.heads
    along = 2 * (width // 6)
    starts = {"time": 0, "down": width - 2 * along, "across": width - along}
    query, key = torch.zeros(attention.heads, width), torch.zeros(attention.heads, width)
    for head, (axis, side) in enumerate([("across", -1), ("across", 1), ("down", -1), ("down", 1)]):
        for name, start in starts.items():
            turn = side * _LEAN if name == axis else 0.0
            key[head, start] = 1.0
            query[head, start], query[head, start + 1] = math.cos(turn), math.sin(turn)
    for layer, bias in ((attention.to_q, query), (attention.to_k, key)):
        nn.init.zeros_(layer.weight)
        layer.bias.copy_(bias.flatten())
    for norm in (attention.norm_q, attention.norm_k):
        nn.init.constant_(norm.weight, _SHARPNESS)


def _carry(attention: WanAttention, taken: range, put: int, scale: float) -> None:
    """Let every head bring the entries `taken` of what it sees and write them from `put` on."""
    nn.init.zeros_(attention.to_v.weight)
    nn.init.zeros_(attention.to_out[0].weight)
    width = attention.inner_dim // attention.heads
    for head in range(attention.heads):
        for index, entry in enumerate(taken):
            inner = head * width + index
            attention.to_v.weight[inner, entry] = scale
            attention.to_out[0].weight[put + head * len(taken) + index, inner] = 1.0


def _compare(block: WanTransformerBlock, inputs: int) -> None:
    """Write -1 where a head saw the token itself, and about 1 where it saw another."""
    wide, narrow = block.ffn.net[0].proj, block.ffn.net[2]
    nn.init.zeros_(narrow.weight)
    unit = 0
    for head in range(4):
        flag = inputs + 4 * _COMPARED + head
        narrow.bias[flag] = -1.0
        for index in range(_COMPARED):
            for sign in (1.0, -1.0):
                wide.weight[unit] = 0.0
                wide.weight[unit, index] = sign
                wide.weight[unit, inputs + head * _COMPARED + index] = -sign
                narrow.weight[flag, unit] = 2.0 / (1.1 * _COMPARED)
                unit += 1
