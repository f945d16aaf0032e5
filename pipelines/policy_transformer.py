"""The transformer of a diffusion policy, with the names that published policies have.

Modules and parameters are called as in `TransformerForDiffusion` of the Diffusion Policy repository
(github.com/real-stanford/diffusion_policy, MIT; arXiv 2303.04137), so that its weights load by name. Layers call
attention and the two linears of the feed-forward as modules, so that a cache can skip each.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["ModelMixin", "TransformerForDiffusion"]  # by its base, diffusers knows a saved model


class SinusoidalPosEmb(nn.Module):
    """Sines and cosines of the timestep, `[B, dim]` from `[B]`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, timesteps: Tensor) -> Tensor:
        """Return the embedding in float32."""
        half = self.dim // 2
        rates = torch.arange(half, device=timesteps.device) * (-math.log(10_000) / (half - 1))
        angles = timesteps[:, None].float() * rates.exp()[None, :]
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


class MultiheadAttention(nn.Module):
    """Attention with the parameters of `torch.nn.MultiheadAttention`, returning only its output."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim).normal_(std=0.02))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the attention of `tokens [B, T, D]` over `memory [B, S, D]`, + `mask [T, S]`."""
        dim = tokens.shape[-1]
        weights, biases = self.in_proj_weight, self.in_proj_bias
        query = functional.linear(tokens, weights[:dim], biases[:dim])
        key, value = functional.linear(memory, weights[dim:], biases[dim:]).chunk(2, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        mask = None if mask is None else mask.to(query.dtype)
        seen = functional.scaled_dot_product_attention(query, key, value, mask, dropout)
        out: Tensor = self.out_proj(seen.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """A pre-norm layer: self-attention, in a decoder cross-attention, and a feed-forward."""

    def __init__(self, dim: int, heads: int, dropout: float, *, crosses: bool) -> None:
        super().__init__()
        self.self_attn = MultiheadAttention(dim, heads, dropout)
        self.multihead_attn = MultiheadAttention(dim, heads, dropout) if crosses else None
        self.linear1 = nn.Linear(dim, 4 * dim)
        self.linear2 = nn.Linear(4 * dim, dim)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.norm3 = nn.LayerNorm(dim) if crosses else None
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        tokens: Tensor,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """Return `tokens [B, T, D]` after the layer."""
        given = self.norm1(tokens)
        tokens = tokens + self.dropout(self.self_attn(given, given, mask))
        last = self.norm2
        if self.multihead_attn is not None and self.norm3 is not None:
            seen = self.multihead_attn(self.norm2(tokens), memory, memory_mask)
            tokens, last = tokens + self.dropout(seen), self.norm3
        inner = self.dropout(functional.gelu(self.linear1(last(tokens))))
        out: Tensor = tokens + self.dropout(self.linear2(inner))
        return out


class Stack(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: int, dim: int, heads: int, dropout: float, *, crosses: bool) -> None:
        super().__init__()
        made = [Layer(dim, heads, dropout, crosses=crosses) for _ in range(layers)]
        self.layers = nn.ModuleList(made)

    def forward(self, tokens: Tensor, *rest: Tensor | None) -> Tensor:
        """Return `tokens [B, T, D]` after every layer."""
        for layer in self.layers:
            tokens = layer(tokens, *rest)
        return tokens


class TransformerForDiffusion(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """The transformer that denoises a chunk of actions, given observations.

    Actions are the tokens of a pre-norm decoder that attends to the timestep and the observations (Diffusion Policy,
    arXiv 2303.04137, section IV-A; the published variant with time as a condition).

    Args:
        input_dim: Numbers in a token: an action, and anything that is denoised with it.
        output_dim: Numbers in a prediction.
        horizon: Actions in a chunk.
        n_obs_steps: Observations given, one token each; None for `horizon`.
        cond_dim: Numbers in an observation; 0 for a policy that sees only the timestep.
        n_layer: Decoder layers, at least 2.
        n_head: Attention heads.
        n_emb: Width.
        p_drop_emb: Dropout of the embeddings, 0 to 1.
        p_drop_attn: Dropout inside the layers, 0 to 1.
        causal_attn: Whether an action sees only those before it.
        n_cond_layers: Layers of the encoder of observations; 0 for two linears.

    Raises:
        ValueError: If the width does not divide by twice the heads.
    """

    config_name = "config.json"

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        horizon: int,
        n_obs_steps: int | None = None,
        cond_dim: int = 0,
        n_layer: int = 12,
        n_head: int = 12,
        n_emb: int = 768,
        p_drop_emb: float = 0.1,
        p_drop_attn: float = 0.1,
        causal_attn: bool = False,
        n_cond_layers: int = 0,
    ) -> None:
        super().__init__()
        if n_emb % n_head or n_emb % 2:
            raise ValueError(f"n_emb={n_emb}: must be even and divide by n_head={n_head}")
        seen = 1 + (0 if not cond_dim else horizon if n_obs_steps is None else n_obs_steps)
        self.input_emb = nn.Linear(input_dim, n_emb)
        self.pos_emb = nn.Parameter(torch.empty(1, horizon, n_emb).normal_(std=0.02))
        self.drop = nn.Dropout(p_drop_emb)
        self.time_emb = SinusoidalPosEmb(n_emb)
        self.cond_obs_emb = nn.Linear(cond_dim, n_emb) if cond_dim else None
        self.cond_pos_emb = nn.Parameter(torch.empty(1, seen, n_emb).normal_(std=0.02))
        self.encoder = (
            Stack(n_cond_layers, n_emb, n_head, p_drop_attn, crosses=False)
            if n_cond_layers
            else nn.Sequential(nn.Linear(n_emb, 4 * n_emb), nn.Mish(), nn.Linear(4 * n_emb, n_emb))
        )
        self.decoder = Stack(n_layer, n_emb, n_head, p_drop_attn, crosses=True)
        self.ln_f = nn.LayerNorm(n_emb)
        self.head = nn.Linear(n_emb, output_dim)
        masks = _masks(horizon, seen) if causal_attn else (None, None)
        self.register_buffer("mask", masks[0])
        self.register_buffer("memory_mask", masks[1] if cond_dim else None)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        self.register_load_state_dict_pre_hook(_drop_dummy)

    def forward(self, sample: Tensor, timestep: Tensor | float, cond: Tensor | None = None) -> Tensor:
        """Return the prediction for a chunk of noisy actions.

        Args:
            sample: `[B, horizon, input_dim]`.
            timestep: A number, `[]` or `[B]`, 0 to the scheduler's last.
            cond: Observations, `[B, n_obs_steps, cond_dim]`.

        Returns:
            `[B, horizon, output_dim]`.
        """
        times = torch.as_tensor(timestep, device=sample.device).expand(sample.shape[0])
        memory = self.time_emb(times).to(sample.dtype)[:, None]
        if self.cond_obs_emb is not None:
            if cond is None:
                raise ValueError("cond=None: this policy needs observations [B, n_obs_steps, D]")
            memory = torch.cat((memory, self.cond_obs_emb(cond)), dim=1)
        memory = self.encoder(self.drop(memory + self.cond_pos_emb[:, : memory.shape[1]]))
        tokens = self.drop(self.input_emb(sample) + self.pos_emb[:, : sample.shape[1]])
        tokens = self.decoder(tokens, memory, self.mask, self.memory_mask)
        out: Tensor = self.head(self.ln_f(tokens))
        return out


def _masks(horizon: int, seen: int) -> tuple[Tensor, Tensor]:
    """Return the masks added to the scores: an action sees no later action or observation."""
    actions, conditions = torch.arange(horizon), torch.arange(seen)
    own = torch.zeros(horizon, horizon)
    own[actions[:, None] < actions[None, :]] = -math.inf
    other = torch.zeros(horizon, seen)
    other[actions[:, None] < conditions[None, :] - 1] = -math.inf  # the timestep comes first
    return own, other


def _drop_dummy(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Forget the empty parameter that published policies carry to know their device."""
    state.pop(f"{prefix}_dummy_variable", None)
