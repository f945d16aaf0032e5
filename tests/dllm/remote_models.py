"""Small models with the module names, signatures and habits of code that comes with checkpoints.

LLaDA and Dream call torch's fused attention themselves. LLaDA has no attention modules, takes no
positions, counts the rows it is given, and calls no `post_init`; Dream hands its mask on to
attention as it is, and looks up a rotary embedding that transformers 5 has no more. One file, so
that a test can put it beside a checkpoint.

LLaDA2, SDAR and Fast-dLLM v2 are causal over blocks, and here Dream's layers but for attention.
LLaDA2 projects queries, keys and values at once, rotates half of their channels, sends tokens to
experts, and names its attention function as transformers 4 did; SDAR normalizes queries and keys,
and asks for a mask; both are given that of blocks. Fast-dLLM v2 makes it, by an argument of its
forward, and takes `sdpa` whatever it is told.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.llama.modeling_llama import LlamaRMSNorm as RMSNorm
from transformers.models.llama.modeling_llama import rotate_half as halves_turned


class LLaDAConfig(PretrainedConfig):
    model_type = "llada"

    def __init__(self, **settings: Any) -> None:
        sizes = dict(d_model=32, n_heads=4, n_kv_heads=4, n_layers=3, mlp_hidden_size=48, vocab_size=64)
        sizes |= dict(max_sequence_length=64, rope_theta=10000.0, rope_full_precision=True, rms_norm_eps=1e-5)
        sizes |= dict(mask_token_id=63, honors_mask=True)
        super().__init__(**{**sizes, **settings})
        self.__dict__.pop("use_cache", None)

    @property
    def num_attention_heads(self) -> int:
        return self.n_heads

    @property
    def num_hidden_layers(self) -> int:
        return self.n_layers


class RotaryEmbedding(nn.Module):
    def __init__(self, config: Any, cache: dict[str, Tensor]) -> None:
        super().__init__()
        self.config, self.__cache = config, cache
        self.get_rotary_embedding(config.max_sequence_length, torch.device("cpu"))

    def get_rotary_embedding(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        cache = self.__cache
        if "rope_pos_sin" not in cache or cache["rope_pos_sin"].shape[-2] < seq_len:
            size = self.config.d_model // self.config.n_heads
            powers = torch.arange(0, size, 2, device=device, dtype=torch.float) / size
            places = torch.arange(seq_len, device=device, dtype=torch.float)
            angles = places[:, None] * (1.0 / (self.config.rope_theta**powers))
            angles = torch.cat((angles, angles), dim=-1)[None, None]
            cache["rope_pos_sin"], cache["rope_pos_cos"] = angles.sin(), angles.cos()
        return cache["rope_pos_sin"][:, :, :seq_len], cache["rope_pos_cos"][:, :, :seq_len]

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        wide = [x.float() if self.config.rope_full_precision else x for x in (q, k)]
        queries, keys = q.shape[-2], k.shape[-2]
        sin, cos = (x.type_as(wide[0]) for x in self.get_rotary_embedding(keys, q.device))
        start = keys - queries
        q_, k_ = wide
        q_ = q_ * cos[:, :, start:keys] + halves_turned(q_) * sin[:, :, start:keys]
        return q_.type_as(q), (k_ * cos + halves_turned(k_) * sin).type_as(k)


class LLaDALlamaBlock(nn.Module):
    def __init__(self, layer_id: int, config: Any, cache: dict[str, Tensor]) -> None:
        super().__init__()
        self.layer_id, self.config = layer_id, config
        width, hidden = config.d_model, config.mlp_hidden_size
        self.act = nn.SiLU()
        self.attn_out = nn.Linear(width, width, bias=False)
        self.ff_out = nn.Linear(hidden, width, bias=False)
        self.rotary_emb = RotaryEmbedding(config, cache)
        self.attn_norm = RMSNorm(width, config.rms_norm_eps)
        self.ff_norm = RMSNorm(width, config.rms_norm_eps)
        shared = config.n_kv_heads * (width // config.n_heads)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, shared, bias=False)
        self.v_proj = nn.Linear(width, shared, bias=False)
        self.ff_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attention_bias: Tensor | None = None) -> Tensor:
        size = self.config.d_model // self.config.n_heads
        q, k, v = (x.unflatten(2, (-1, size)).transpose(1, 2) for x in (q, k, v))
        q, k = self.rotary_emb(q, k)
        if attention_bias is not None:
            attention_bias = attention_bias[:, :, : q.shape[2], : k.shape[2]].to(k.dtype)
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_bias, dropout_p=0.0)
        return self.attn_out(out.transpose(1, 2).contiguous().flatten(2))

    def forward(
        self, x: Tensor, attention_bias: Tensor | None = None, layer_past: Any = None, use_cache: bool = False
    ) -> tuple[Tensor, None]:
        inner = self.attn_norm(x)
        q, k, v = self.q_proj(inner), self.k_proj(inner), self.v_proj(inner)
        x = x + self.attention(q, k, v, attention_bias)
        inner = self.ff_norm(x)
        return x + self.ff_out(self.act(self.ff_proj(inner)) * self.up_proj(inner)), None


class LLaDAModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.__cache = config, {}
        blocks = [LLaDALlamaBlock(i, config, self.__cache) for i in range(config.n_layers)]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.d_model),
                "ln_f": RMSNorm(config.d_model, config.rms_norm_eps),
                "blocks": nn.ModuleList(blocks),
                "ff_out": nn.Linear(config.d_model, config.vocab_size, bias=False),
            }
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x, bias = self.transformer.wte(input_ids), None
        if self.config.honors_mask and attention_mask is not None and 0.0 in attention_mask:
            unseen = 1.0 - attention_mask.float().view(len(x), -1)[:, None, None, :]
            width = x.shape[1]
            bias = unseen * torch.finfo(torch.float).min + unseen.new_zeros(1, 1, width, width)
        for block in self.transformer.blocks:
            x, _ = block(x, attention_bias=bias, layer_past=None, use_cache=False)
        return self.transformer.ff_out(self.transformer.ln_f(x))


class LLaDAModelLM(PreTrainedModel):
    config_class = LLaDAConfig
    base_model_prefix = "model"
    _no_split_modules: ClassVar[list[str]] = ["LLaDALlamaBlock"]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = LLaDAModel(config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        attention_bias: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast:
        if use_cache is None:
            use_cache = self.config.use_cache
        return CausalLMOutputWithPast(logits=self.model.forward(input_ids, attention_mask))

    def tie_weights(self) -> None:
        return None


class DreamConfig(PretrainedConfig):
    model_type = "Dream"

    def __init__(self, **settings: Any) -> None:
        sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3)
        sizes |= dict(intermediate_size=48, vocab_size=64, rope_theta=10000.0, rms_norm_eps=1e-6, mask_token_id=63)
        sizes |= dict(hidden_act="silu", mlp_bias=False)
        super().__init__(**{**sizes, **settings})


class DreamRotaryEmbedding(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.rope_init_fn = config, ROPE_INIT_FUNCTIONS["default"]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        frequencies, self.attention_scaling = self.rope_init_fn(self.config, None)
        if self.config.model_type == "llada2_moe":
            frequencies = frequencies[::2]  # those of half as many channels
        self.register_buffer("inv_freq", frequencies, persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotated(x: Tensor, tables: Any) -> Tensor:
    cos, sin = (table.unsqueeze(1) for table in tables)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    turned = turned * cos + halves_turned(turned) * sin
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


class DreamSdpaAttention(nn.Module):
    has_bias = True

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, False
        width, self.num_heads = config.hidden_size, config.num_attention_heads
        self.head_dim = width // self.num_heads
        self.num_key_value_groups = self.num_heads // config.num_key_value_heads
        shared = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, width, bias=self.has_bias)
        self.k_proj = nn.Linear(width, shared, bias=self.has_bias)
        self.v_proj = nn.Linear(width, shared, bias=self.has_bias)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.rotary_emb = DreamRotaryEmbedding(config)
        self.q_norm = self.k_norm = nn.Identity()

    def projected(self, hidden_states: Tensor, position_embeddings: Any) -> list[Tensor]:
        parts = [project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = (x.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for x in parts)
        q, k = self.q_norm(q), self.k_norm(k)
        return [rotated(q, position_embeddings), rotated(k, position_embeddings), v]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        use_cache: bool = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, None, Any]:
        q, k, v = self.projected(hidden_states, position_embeddings)
        k, v = (x[:, :, None].expand(-1, -1, self.num_key_value_groups, -1, -1).flatten(1, 2) for x in (k, v))
        mask = attention_mask if isinstance(attention_mask, Tensor) else None
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False)
        return self.o_proj(out.transpose(1, 2).contiguous().flatten(2)), None, past_key_value


class DreamDecoderLayer(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = ATTENTIONS[config.model_type](config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor]:
        inner = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(hidden_states=inner, **kwargs)[0]
        inner = self.post_attention_layernorm(hidden_states)
        return (hidden_states + self.mlp(inner),)


class DreamGenerationConfig(GenerationConfig):
    def __init__(self, **kwargs: Any) -> None:
        self.steps = kwargs.pop("steps", 512)
        self.validate(is_init=True)

    def validate(self, is_init: bool = False) -> None:
        pass


class DreamPreTrainedModel(PreTrainedModel):
    config_class = DreamConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, **kwargs: Any) -> Any:
        model = super().from_pretrained(source, *args, **kwargs)
        model.generation_config = DreamGenerationConfig.from_pretrained(source)
        return model


class DreamBaseModel(DreamPreTrainedModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = [DreamDecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = DreamRotaryEmbedding(config)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Any, position_ids: Tensor | None) -> Any:
        hidden_states = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        embeddings = self.rotary_emb(hidden_states, position_ids)
        given = dict(attention_mask=attention_mask, position_ids=position_ids, position_embeddings=embeddings)
        for layer in self.layers:
            settings = dict(past_key_value=None, output_attentions=False, use_cache=False)
            hidden_states = layer(hidden_states, **given, **settings)[0]
        return self.norm(hidden_states)


class DreamModel(DreamPreTrainedModel):
    _tied_weights_keys: ClassVar[list[str]] = ["lm_head.weight"]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = DreamBaseModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def reset_rope_parameters(self) -> None:
        self.model.rotary_emb.reset_parameters()
        for layer in self.model.layers:
            layer.self_attn.rotary_emb.reset_parameters()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        num_logits_to_keep: int = 0,
        **loss_kwargs: Any,
    ) -> MaskedLMOutput:
        hidden_states = self.model(input_ids, attention_mask, position_ids)
        return MaskedLMOutput(logits=self.lm_head(hidden_states[:, -num_logits_to_keep:]))


class LLaDA2MoeConfig(DreamConfig):
    model_type = "llada2_moe"

    def __init__(self, **settings: Any) -> None:
        more = {"block_length": 8, "num_experts": 4, "num_experts_per_tok": 2}
        super().__init__(**{**more, **settings})


class SDARConfig(DreamConfig):
    model_type = "sdar"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"block_size": 8, **settings})


class FastDLLMConfig(DreamConfig):
    model_type = "Fast_dLLM_Qwen"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"bd_size": 8, **settings})


class LLaDA2MoeAttention(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, False
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self.query_key_value = nn.Linear(config.hidden_size, heads * self.head_dim, bias=False)
        self.query_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, position_embeddings: Any, **_: Any
    ) -> tuple[Tensor, None, None]:
        mixed = self.query_key_value(hidden_states).unflatten(2, (-1, self.head_dim))
        shared = self.config.num_key_value_heads
        heads = [mixed.shape[2] - 2 * shared, shared, shared]
        q, k, v = (x.transpose(1, 2) for x in mixed.split(heads, dim=2))
        q = rotated(self.query_layernorm(q), position_embeddings)
        k = rotated(self.key_layernorm(k), position_embeddings)
        mask = None if attention_mask.dim() == 2 else attention_mask  # without padding
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attend(self, q, k, v, mask, dropout=0.0, scaling=self.head_dim**-0.5)
        return self.dense(out.flatten(2)), None, None


class SDARAttention(DreamSdpaAttention):
    has_bias = False

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, position_embeddings: Any, **_: Any
    ) -> tuple[Tensor, None, None]:
        q, k, v = self.projected(hidden_states, position_embeddings)
        attention_mask = attention_mask.bool()
        torch.all(attention_mask)  # whether flash attention would do
        settings = dict(attn_mask=attention_mask, is_causal=False, scale=self.head_dim**-0.5, enable_gqa=True)
        out = functional.scaled_dot_product_attention(query=q, key=k, value=v, **settings)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None, None


class FastDLLMAttention(DreamSdpaAttention):
    def forward(self, hidden_states: Tensor, attention_mask: Any, position_embeddings: Any, **_) -> Any:
        q, k, v = self.projected(hidden_states, position_embeddings)
        scaling = self.head_dim**-0.5
        out, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](self, q, k, v, attention_mask, is_causal=False, scaling=scaling)
        return self.o_proj(out.flatten(2).contiguous()), None, None


ATTENTIONS = {"Dream": DreamSdpaAttention, "llada2_moe": LLaDA2MoeAttention, "sdar": SDARAttention}
ATTENTIONS |= {"Fast_dLLM_Qwen": FastDLLMAttention}


class LLaDA2MoeSparseMoeBlock(nn.Module):
    """Sends each token to two experts by sigmoid scores, and adds one that all share."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.count = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(LlamaMLP(config) for _ in range(config.num_experts))
        self.shared_experts = LlamaMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).sigmoid()
        weights, chosen = scores.topk(self.count, dim=-1)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        dense = torch.zeros_like(scores).scatter(-1, chosen, weights)
        out = self.shared_experts(x)
        for number, expert in enumerate(self.experts):
            out = out + expert(x) * dense[..., number : number + 1]
        return out


class LLaDA2MoeModelLM(DreamModel):
    config_class = LLaDA2MoeConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in list(self.model.layers)[1:]:
            layer.mlp = LLaDA2MoeSparseMoeBlock(config)


class SDARForCausalLM(DreamModel):
    config_class = SDARConfig


class FastDLLMForCausalLM(DreamModel):
    config_class = FastDLLMConfig

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        block_size: int = 32,
    ) -> MaskedLMOutput:
        number = torch.arange(input_ids.shape[1], device=input_ids.device) // block_size
        return super().forward(input_ids, number[:, None] >= number, position_ids)
