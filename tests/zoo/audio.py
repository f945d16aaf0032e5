"""Cases: audio denoisers, and video denoisers that make sound along."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.case import Case
from tests.zoo.draw import given, normal, ones, tensor, time

_TEXT = normal(2, 6, 24)
_LTX2 = dict(
    in_channels=4,
    out_channels=4,
    num_attention_heads=2,
    attention_head_dim=16,
    cross_attention_dim=32,
    audio_in_channels=4,
    audio_out_channels=4,
    audio_num_attention_heads=2,
    audio_attention_head_dim=8,
    audio_cross_attention_dim=16,
    num_layers=4,
    caption_channels=24,
    rope_double_precision=False,
)

_LTX2_INPUTS = given(
    hidden_states=normal(2, 32, 4),
    audio_hidden_states=normal(2, 6, 4),
    encoder_hidden_states=_TEXT,
    audio_encoder_hidden_states=_TEXT,
    timestep=time(),
    encoder_attention_mask=ones(2, 6),
    audio_encoder_attention_mask=ones(2, 6),
    num_frames=2,
    height=4,
    width=4,
    fps=24.0,
    audio_num_frames=6,
)


def _isolated(model: nn.Module, seed: int) -> dict[str, Any]:
    del model, seed
    return {"isolate_modalities": True}


def _perturbed(model: nn.Module, seed: int) -> dict[str, Any]:
    del model, seed
    return {"spatio_temporal_guidance_blocks": [1]}


CASES = [
    Case(
        "AceStepTransformer1DModel",
        "AceStepTransformer1DModel",
        dict(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            in_channels=24,
            audio_acoustic_hidden_dim=8,
            patch_size=2,
            sliding_window=4,
        ),
        given(
            hidden_states=normal(2, 16, 8),
            timestep=time(at=0.5),
            timestep_r=time(at=0.5),
            encoder_hidden_states=normal(2, 6, 32),
            context_latents=normal(2, 16, 16),
        ),
        span=1.0,
        times=("timestep_r",),
        blocks=("layers",),
        note="every second block attends in a window",
    ),
    Case(
        "LongCatAudioDiTTransformer",
        "LongCatAudioDiTTransformer",
        dict(dit_dim=32, dit_depth=4, dit_heads=4, dit_text_dim=24, latent_dim=8),
        given(
            hidden_states=normal(2, 12, 8),
            encoder_hidden_states=_TEXT,
            encoder_attention_mask=ones(2, 6, dtype=torch.bool),
            timestep=time(at=0.5),
            attention_mask=ones(2, 12, dtype=torch.bool),
            latent_cond=normal(2, 12, 8),
        ),
        span=1.0,
        rising=True,
        blocks=("blocks",),
        note="one skip from before the first block to after the last",
    ),
    Case(
        "MiniMaxMusic3Transformer1DModel",
        "MiniMaxMusic3Transformer1DModel",
        dict(
            in_channels=8,
            condition_dim=16,
            num_layers=4,
            num_attention_heads=2,
            attention_head_dim=16,
            ff_inner_dim=48,
            rotary_dim=8,
            fourier_embedding_dim=8,
        ),
        given(
            hidden_states=normal(2, 8, 12),
            timestep=time(at=0.5),
            encoder_hidden_states=normal(2, 12, 16),
        ),
        span=1.0,
        note="the timestep is a token of the stream",
    ),
    Case(
        "StableAudioDiTModel",
        "StableAudioDiTModel",
        dict(
            sample_size=12,
            in_channels=8,
            out_channels=8,
            num_layers=4,
            attention_head_dim=16,
            num_attention_heads=2,
            num_key_value_attention_heads=1,
            cross_attention_dim=32,
            time_proj_dim=16,
            global_states_input_dim=12,
            cross_attention_input_dim=24,
        ),
        given(
            hidden_states=normal(2, 8, 12),
            timestep=time(at=0.5),
            encoder_hidden_states=_TEXT,
            global_hidden_states=normal(2, 1, 12),
            rotary_embedding=(normal(13, 8), normal(13, 8)),
        ),
        span=1.0,
        note="the timestep is a token of the stream, cut off after the last block",
    ),
    Case(
        "StableAudio3DiTModel",
        "StableAudio3DiTModel",
        dict(
            io_channels=8,
            patch_size=1,
            embed_dim=32,
            depth=4,
            num_heads=2,
            cond_token_dim=24,
            global_cond_dim=12,
            local_add_cond_dim=5,
            timestep_features_dim=16,
            ff_mult=2,
            num_memory_tokens=3,
        ),
        given(
            hidden_states=normal(2, 8, 12),
            timestep=time(at=0.5),
            encoder_hidden_states=_TEXT,
            global_hidden_states=normal(2, 12),
            local_add_cond=normal(2, 5, 12),
        ),
        span=1.0,
        note="memory tokens precede the noisy tokens in the stream",
    ),
    Case(
        "T5FilmDecoder",
        "T5FilmDecoder",
        dict(
            input_dims=8,
            targets_length=12,
            d_model=32,
            num_layers=4,
            num_heads=2,
            d_kv=16,
            d_ff=48,
            dropout_rate=0.1,
        ),
        given(
            encodings_and_masks=[(normal(2, 6, 32), ones(2, 6)), (normal(2, 4, 32), ones(2, 4))],
            decoder_input_tokens=normal(2, 12, 8),
            decoder_noise_time=time(at=0.5),
        ),
        timestep="decoder_noise_time",
        span=1.0,
        latents=("decoder_input_tokens",),
        blocks=("decoders",),
        note="blocks return a 1-tuple; the mask rows follow the conditioning, not the batch",
    ),
    Case(
        "LTX2VideoTransformer3DModel",
        "LTX2VideoTransformer3DModel",
        _LTX2,
        _LTX2_INPUTS,
        latents=("hidden_states", "audio_hidden_states"),
        note="two streams, video and audio, and two samples out",
        extras={"isolated": _isolated},
    ),
    Case(
        "LTX2VideoTransformer3DModel-perturbed",
        "LTX2VideoTransformer3DModel",
        {**_LTX2, "gated_attn": True, "audio_gated_attn": True, "perturbed_attn": True},
        _LTX2_INPUTS,
        latents=("hidden_states", "audio_hidden_states"),
        note="attention can be perturbed in chosen blocks, for spatio-temporal guidance",
        extras={"perturbed": _perturbed},
    ),
    Case(
        "MiniMaxH3Transformer3DModel",
        "MiniMaxH3Transformer3DModel",
        dict(
            num_attention_heads=2,
            attention_head_dim=16,
            hidden_size=32,
            num_layers=4,
            num_refiner_layers=2,
            ffn_dim=48,
            in_channels=4,
            audio_in_channels=6,
            patch_size=(1, 2, 2),
            text_dim=24,
            freq_dim=16,
            time_embed_hidden_dim=32,
            time_embed_dim=16,
            rope_freq_dim=2,
        ),
        given(
            hidden_states=normal(2, 8, 16),
            audio_hidden_states=normal(2, 6, 6),
            encoder_hidden_states=normal(2, 4, 24),
            timestep=time(2, at=0.5),
            timestep_indices=tensor([0] * 4 + [1] * 6 + [0] * 8, torch.long),
            token_tags=tensor([1] * 4 + [2] * 6 + [0] * 8, torch.long),
            position_ids=tensor(
                [[i, 0, 0] for i in range(10)] + [[10, i // 4, i % 4] for i in range(8)]
            ),
            video_indices=tensor(range(10, 18), torch.long),
            audio_indices=tensor(range(4, 10), torch.long),
            text_indices=tensor(range(4), torch.long),
        ),
        span=1.0,
        latents=("hidden_states", "audio_hidden_states"),
        note="one stream of text, audio and video; `timestep` lists noise levels, not samples",
    ),
    Case(
        "Kandinsky6Transformer3DModel",
        "Kandinsky6Transformer3DModel",
        dict(
            in_visual_dim=4,
            out_visual_dim=4,
            in_text_dim=24,
            in_text_dim2=12,
            time_dim=16,
            patch_size=(1, 2, 2),
            model_dim=32,
            ff_dim=48,
            num_text_blocks=4,
            num_visual_blocks=4,
            axes_dims=(4, 6, 6),
            visual_cond=False,
            in_audio_dim=6,
            out_audio_dim=6,
        ),
        given(
            hidden_states=normal(2, 2, 8, 8, 4),
            encoder_hidden_states=_TEXT,
            pooled_projections=normal(2, 12),
            timestep=time(),
            audio_hidden_states=normal(2, 6, 6),
        ),
        latents=("hidden_states", "audio_hidden_states"),
        blocks=(
            "video_text_transformer_blocks",
            "audio_text_transformer_blocks",
            "visual_transformer_blocks",
        ),
        note="two streams through one list, after two lists of text blocks",
    ),
]
