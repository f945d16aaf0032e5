"""FLUX attention written with two matrix products, for training on a CPU.

The fused kernel's backward pass takes a third of a training step there; this one takes a tenth. The
weights are those of the model, so that it is put back with `set_attn_processor` before saving.
"""

from __future__ import annotations

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend over all tokens; [B, T, H, D] each, softmax in float32."""
    scale = query.shape[-1] ** -0.5
    scores = torch.matmul(query.transpose(1, 2) * scale, key.permute(0, 2, 3, 1))
    weights = torch.softmax(scores.float(), dim=-1).to(value.dtype)
    return torch.matmul(weights, value.transpose(1, 2)).transpose(1, 2)


class PlainFluxAttention:
    """An attention processor for both block kinds of `FluxTransformer2DModel`."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run attention as `FluxAttnProcessor` does."""

        def heads(states: Tensor) -> Tensor:
            split: Tensor = states.unflatten(-1, (-1, attn.head_dim))
            return split

        query = attn.norm_q(heads(attn.to_q(hidden_states)))
        key = attn.norm_k(heads(attn.to_k(hidden_states)))
        value = heads(attn.to_v(hidden_states))
        if encoder_hidden_states is not None:
            text_query = attn.norm_added_q(heads(attn.add_q_proj(encoder_hidden_states)))
            text_key = attn.norm_added_k(heads(attn.add_k_proj(encoder_hidden_states)))
            text_value = heads(attn.add_v_proj(encoder_hidden_states))
            query = torch.cat([text_query, query], dim=1)
            key = torch.cat([text_key, key], dim=1)
            value = torch.cat([text_value, value], dim=1)
        if image_rotary_emb is not None:
            query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
            key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)
        states = attend(query.to(value.dtype), key.to(value.dtype), value).flatten(2, 3)
        if encoder_hidden_states is None:
            return states
        tokens = encoder_hidden_states.shape[1]
        image = attn.to_out[1](attn.to_out[0](states[:, tokens:].contiguous()))
        return image, attn.to_add_out(states[:, :tokens].contiguous())
