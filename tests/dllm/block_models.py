"""Small models with the names, signatures and habits of LLaDA2's, SDAR's and Fast-dLLM v2's code.

Attention is causal over blocks. LLaDA2 projects queries, keys and values at once, rotates half of
their channels, sends tokens to experts, and attends by transformers' interface; SDAR normalizes
queries and keys and calls torch's attention itself; both are given the mask of blocks. Fast-dLLM v2
makes it, by an argument of its forward, and takes the interface's `sdpa` whatever it is told.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import rotate_half as halves_turned

from tests.dllm.remote_models import DreamMLP, RMSNorm

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 3, "intermediate_size": 48, "vocab_size": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "mask_token_id": 63, "max_position_embeddings": 256,
}  # fmt: skip


class LLaDA2MoeConfig(PretrainedConfig):
    model_type = "llada2_moe"

    def __init__(self, **settings: Any) -> None:
        more = {"block_length": 8, "num_experts": 4, "num_experts_per_tok": 2}
        super().__init__(**{**SIZES, **more, **settings})


class SDARConfig(PretrainedConfig):
    model_type = "sdar"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**SIZES, "block_size": 8, **settings})


class FastDLLMConfig(PretrainedConfig):
    model_type = "Fast_dLLM_Qwen"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**SIZES, "bd_size": 8, **settings})


def rotated(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (part.unsqueeze(1) for part in table)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([turned * cos + halves_turned(turned) * sin, rest], dim=-1)


class Attention(nn.Module):
    """What the three have in common: the shapes."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling, self.is_causal = self.head_dim**-0.5, config.model_type == "sdar"
        self.attention_dropout = 0.0
        self.width = config.num_attention_heads * self.head_dim
        self.shared = config.num_key_value_heads * self.head_dim


class LLaDA2MoeAttention(Attention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        size = self.width + 2 * self.shared
        self.query_key_value = nn.Linear(config.hidden_size, size, bias=False)
        self.query_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.dense = nn.Linear(self.width, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, attention_mask: Any, table: Any) -> Tensor:
        mixed = self.query_key_value(hidden_states).unflatten(2, (-1, self.head_dim))
        shared = self.config.num_key_value_heads
        q, k, v = (
            x.transpose(1, 2)
            for x in mixed.split([mixed.shape[2] - 2 * shared, shared, shared], dim=2)
        )
        q, k = rotated(self.query_layernorm(q), table), rotated(self.key_layernorm(k), table)
        if attention_mask.dim() == 2:  # what it makes of a mask without padding
            attention_mask = None
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling)
        return self.dense(out.flatten(2))


class SDARAttention(Attention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        is_sdar = config.model_type == "sdar"
        self.q_proj = nn.Linear(config.hidden_size, self.width, bias=not is_sdar)
        self.k_proj = nn.Linear(config.hidden_size, self.shared, bias=not is_sdar)
        self.v_proj = nn.Linear(config.hidden_size, self.shared, bias=not is_sdar)
        self.o_proj = nn.Linear(self.width, config.hidden_size, bias=False)
        if is_sdar:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def projected(self, hidden_states: Tensor, table: Any) -> list[Tensor]:
        names = ("q_proj", "k_proj", "v_proj")
        parts = [getattr(self, name)(hidden_states) for name in names]
        q, k, v = (x.unflatten(2, (-1, self.head_dim)) for x in parts)
        if self.config.model_type == "sdar":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return [rotated(q, table), rotated(k, table), v]

    def forward(self, hidden_states: Tensor, attention_mask: Any, table: Any) -> Tensor:
        q, k, v = self.projected(hidden_states, table)
        attention_mask = None if attention_mask is None else attention_mask.bool()
        torch.all(attention_mask)  # whether flash attention would do, and fails without a mask
        out = functional.scaled_dot_product_attention(
            query=q, key=k, value=v, attn_mask=attention_mask, is_causal=False,
            scale=self.scaling, enable_gqa=True,
        )  # fmt: skip
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FastDLLMAttention(SDARAttention):
    def forward(self, hidden_states: Tensor, attention_mask: Any, table: Any) -> Tensor:
        q, k, v = self.projected(hidden_states, table)
        out, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
            self, q, k, v, attention_mask, is_causal=False, dropout=0.0, scaling=self.scaling
        )
        return self.o_proj(out.flatten(2).contiguous())


class SparseMoeBlock(nn.Module):
    """Sends each token to two experts by sigmoid scores, and adds one that all share."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.count = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(DreamMLP(config) for _ in range(config.num_experts))
        self.shared_experts = DreamMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).sigmoid()
        weights, chosen = scores.topk(self.count, dim=-1)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        dense = torch.zeros_like(scores).scatter(-1, chosen, weights)
        out = self.shared_experts(x)
        for number, expert in enumerate(self.experts):
            out = out + expert(x) * dense[..., number : number + 1]
        return out


ATTENTIONS = {
    "llada2_moe": LLaDA2MoeAttention, "sdar": SDARAttention, "Fast_dLLM_Qwen": FastDLLMAttention,
}  # fmt: skip


class DecoderLayer(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        is_moe = config.model_type == "llada2_moe" and layer_idx > 0
        attention = ATTENTIONS[config.model_type](config, layer_idx)
        self.name = "attention" if config.model_type == "llada2_moe" else "self_attn"
        setattr(self, self.name, attention)
        self.mlp = SparseMoeBlock(config) if is_moe else DreamMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, attention_mask: Any, table: Any) -> tuple[Tensor]:
        inner = self.input_layernorm(hidden_states)
        attend = getattr(self, self.name)
        hidden_states = hidden_states + attend(inner, attention_mask=attention_mask, table=table)
        return (hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)),)


class BlockPreTrainedModel(PreTrainedModel):
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True


class BlockModel(BlockPreTrainedModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        name = "word_embeddings" if config.model_type == "llada2_moe" else "embed_tokens"
        setattr(self, name, nn.Embedding(config.vocab_size, config.hidden_size))
        self.name = name
        layers = [DecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        size = config.head_dim // (2 if config.model_type == "llada2_moe" else 1)
        powers = torch.arange(0, size, 2) / size
        self.register_buffer("inv_freq", config.rope_theta**-powers, persistent=False)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return getattr(self, self.name)

    def forward(self, input_ids: Tensor, attention_mask: Any, position_ids: Any) -> Tensor:
        x = self.get_input_embeddings()(input_ids)
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        angles = position_ids[..., None].float() * self.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1)
        table = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            (x,) = layer(x, attention_mask=attention_mask, table=table)
        return self.norm(x)


class ForCausalLM(BlockPreTrainedModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = BlockModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
    ) -> CausalLMOutputWithPast:
        assert input_ids is not None
        hidden_states = self.model(input_ids, attention_mask, position_ids)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden_states))


class LLaDA2MoeModelLM(ForCausalLM):
    config_class = LLaDA2MoeConfig


class SDARForCausalLM(ForCausalLM):
    config_class = SDARConfig


class FastDLLMForCausalLM(ForCausalLM):
    config_class = FastDLLMConfig

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        block_size: int = 32,
    ) -> CausalLMOutputWithPast:
        assert input_ids is not None
        number = torch.arange(input_ids.shape[1], device=input_ids.device) // block_size
        mask = number[:, None] >= number
        return CausalLMOutputWithPast(
            logits=self.lm_head(self.model(input_ids, mask, position_ids))
        )
