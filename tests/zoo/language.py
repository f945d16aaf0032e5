"""Tiny random models of every class of transformers that generates text, from text or images."""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

# What a configuration is given if it has a setting of the name.
SMALL: Mapping[str, Any] = {
    "use_cache": True, "vocab_size": 160, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "image_token_id": 150, "image_token_index": 150,
    "video_token_id": 151, "video_token_index": 151, "vision_start_token_id": 152,
    "vision_end_token_id": 153, "audio_token_id": 154, "boi_token_id": 155, "eoi_token_id": 156,
    "boi_token_index": 155, "eoi_token_index": 156,
    # width, under all the names it has
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "hidden_dim": 64, "emb_dim": 64,
    "embed_dim": 64, "embedding_size": 64, "word_embed_proj_dim": 64, "input_embedding_size": 64,
    "output_embedding_size": 64, "lru_width": 64, "projection_dim": 64, "out_hidden_size": 64,
    "text_hidden_size": 64, "backbone_hidden_size": 64,
    "intermediate_size": 96, "n_inner": 96, "d_ff": 96, "ffn_dim": 96, "dff": 96,
    "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "ffn_hidden_size": 96, "feed_forward_size": 96,
    # depth
    "num_hidden_layers": 4, "n_layer": 4, "num_layers": 4, "n_layers": 4, "decoder_layers": 4,
    "attention_layers": 4, "num_decoder_layers": 4, "encoder_layers": 4, "num_encoder_layers": 4,
    # heads
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "n_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "d_kv": 16, "dim_head": 16, "global_head_dim": 16, "rotary_dim": 8,
    "query_pre_attn_scalar": 16, "attention_types": [[["global"], 4]],
    # length
    "max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512, "max_seq_len": 512,
    "max_target_positions": 512, "max_source_positions": 64, "sliding_window": 12,
    "attention_window_size": 12,
    # experts
    "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 32, "shared_experts_intermediate_size": 32,
    "first_k_dense_replace": 1, "moe_num_experts": 4, "moe_k": 2, "expert_ffn_hidden_size": 32,
    "zero_expert_num": 1, "moe_topk": 2, "shared_intermediate_size": 32,
    "moe_num_shared_experts": 1, "num_shared_experts": 1, "router_hidden_size": 16,
    # latents and indexers
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "qk_head_dim": 16, "index_head_dim": 16, "index_n_heads": 2,
    "index_topk": 256, "indexer_n_heads": 2, "indexer_kv_heads": 2, "indexer_head_dim": 16,
    "indexer_budget": 256, "indexer_compress_ratio": 4,
    # states
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "mamba_expand": 2, "ssm_state_size": 8, "state_size": 8,
    "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_dt_rank": 8, "n_mamba_heads": 2,
    "mamba_ngroups": 1, "n_groups": 1, "mamba_chunk_size": 8, "chunk_size": 8, "expand": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    # embeddings of each layer, and layers that share
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 160, "num_kv_shared_layers": 0,
}  # fmt: skip
VISION: Mapping[str, Any] = {
    **SMALL, "hidden_size": 32, "embed_dim": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "depth": 2, "num_heads": 2,
    "num_layers": 2, "projection_dim": 32, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip


def _within(part: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{part}.{name}": value for name, value in settings.items()}


TEXT_PARTS = ("text_config", "llm_config", "language_config", "text_decoder_config", "decoder_config", "decoder")
# What the generic settings do not fit; settings of parts have a dot.
_EQUAL_HEADS = {"num_key_value_heads": 4}
_NO_TABLE = {"vocabulary_map": {"<image>": 150}}
_COMPASS = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}
_MIXED = ["linear_attention", "full_attention"] * 2
_SECTIONS = {"text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_QSA = {"indexer_kv_heads": 1}
OWN: Mapping[str, Mapping[str, Any]] = {
    "CohereCompassForCausalLM": _COMPASS,
    "CohereCompassForConditionalGeneration": _within("text_config", _COMPASS),
    "BailingHybridForCausalLM": {"layer_types": _MIXED},
    "BambaForCausalLM": {"attn_layer_indices": [1, 3]},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"] * 2},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearForCausalLM": {"layer_types": _MIXED},
    "DbrxForCausalLM": {"attn_config": {"kv_n_heads": 2}},
    "Dots3NoteForCausalLM": _EQUAL_HEADS,
    "Dots3NoteForConditionalGeneration": _within("text_config", _EQUAL_HEADS),
    "HrmTextForCausalLM": {"num_hidden_layers": 2, "L_cycles": 2},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "Mamba2ForCausalLM": {"num_heads": 8},
    "Qwen4ExpForCausalLM": _QSA,
    "Qwen4ExpForConditionalGeneration": _within("text_config", _QSA),
    "ReformerModelWithLMHead": {"axial_pos_embds": False},
    "ZambaForCausalLM": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2},
    "Zamba2ForCausalLM": {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_ngroups": 1},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "ChameleonForConditionalGeneration": _NO_TABLE,
    "Emu3ForConditionalGeneration": _NO_TABLE,
    "Ernie4_5_VLMoeForConditionalGeneration": {"text_config.moe_intermediate_size": [32, 32]},
    "Glm5NextForConditionalGeneration": _within("text_config", _EQUAL_HEADS),
    "Glm46VForConditionalGeneration": _SECTIONS,
    "Glm4vForConditionalGeneration": _SECTIONS,
    "PaddleOCRVLForConditionalGeneration": _SECTIONS,
    "Qwen2_5_VLForConditionalGeneration": _SECTIONS,
    "Qwen2VLForConditionalGeneration": _SECTIONS,
    "GlmOcrForConditionalGeneration": _SECTIONS,
    "Molmo2ForConditionalGeneration": {"vision_config.image_size": [28, 28]},
}


def kinds() -> Iterator[tuple[str, str]]:
    """Yield the kind and the class of every causal or image-text model, each class once."""
    seen: set[str] = set()
    for names in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        for kind, name in names.items():
            if name not in seen:
                seen.add(name)
                yield kind, name


def build(name: str, kind: str, **own: Any) -> Any:
    """Return a tiny random model in float32, with attention that prefers some tokens.

    Args:
        name: Name of the class in transformers.
        kind: Its `model_type`, by which transformers finds its configuration.
        own: Settings that replace the generic ones.
    """
    model_class = getattr(transformers, name)
    config_class = model_class.config_class or CONFIG_MAPPING[kind]
    settings = _settings(config_class, SMALL)
    for path, value in {**OWN.get(name, {}), **own}.items():
        *parts, last = path.split(".")
        target = settings
        for part in parts:
            target = target[part]
        target[last] = value
    config = config_class(**settings)
    if hasattr(config, "is_decoder") and not getattr(config, "is_encoder_decoder", False):
        config.is_decoder = True
    torch.manual_seed(0)
    return peaked(model_class(config).float())


def peaked(model: Any) -> Any:
    """Draw the weights of a model anew so that every query prefers some keys."""
    generator = torch.Generator().manual_seed(1)
    keen = ("q_proj", "k_proj", "qkv", "query", "key", "Wqkv", "c_attn", "q_b_proj", "kv_b_proj")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 or not parameter.is_floating_point():
                continue
            scale = 1.6 if any(part in name for part in keen) else 0.7
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.copy_(drawn * scale / parameter.shape[-1] ** 0.5)
            if "embed_tokens" in name or "wte" in name or "word_embeddings" in name:
                parameter.mul_(6)
    return model.eval()


def _settings(config_class: Any, small: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration and of those in it, under the names it has."""
    names = set(inspect.signature(config_class.__init__).parameters)
    if dataclasses.is_dataclass(config_class):
        names |= {field.name for field in dataclasses.fields(config_class)}
    settings = {name: value for name, value in small.items() if name in names}
    if "kv_lora_rank" in names:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    default = None
    for name, declared in getattr(config_class, "sub_configs", {}).items():
        part_class: Any = declared
        if part_class.__name__ == "AutoConfig":
            default = default or config_class()
            part_class = type(getattr(default, name, None))
            if not hasattr(part_class, "model_type"):
                continue
            settings[name] = {"model_type": part_class.model_type}
        inner = _settings(part_class, SMALL if name in TEXT_PARTS else VISION)
        settings[name] = {**settings.get(name, {}), **inner}
    return settings
