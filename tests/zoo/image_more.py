"""Cases: editors of images, language models that draw, and denoisers of image embeddings."""

from __future__ import annotations

import torch

from tests.zoo.case import Case
from tests.zoo.draw import (
    given,
    integers,
    long_time,
    normal,
    ones,
    tensor,
    time,
)

_HEADS = dict(num_attention_heads=2, attention_head_dim=16)
_TEXT = normal(2, 6, 24)

CASES = [
    Case(
        "JoyImageEditTransformer3DModel",
        "JoyImageEditTransformer3DModel",
        dict(
            in_channels=4,
            hidden_size=32,
            num_attention_heads=2,
            text_dim=24,
            mlp_width_ratio=2.0,
            num_layers=4,
            rope_dim_list=[4, 6, 6],
        ),
        given(hidden_states=normal(2, 4, 1, 8, 8), timestep=time(), encoder_hidden_states=_TEXT),
        blocks=("double_blocks",),
    ),
    Case(
        "JoyImageEditPlusTransformer3DModel",
        "JoyImageEditPlusTransformer3DModel",
        dict(
            in_channels=4,
            hidden_size=32,
            num_attention_heads=2,
            text_dim=24,
            mlp_width_ratio=2.0,
            num_layers=4,
            rope_dim_list=[4, 6, 6],
        ),
        given(
            hidden_states=normal(2, 20, 4, 1, 2, 2),
            timestep=time(),
            encoder_hidden_states=_TEXT,
            shape_list=[[(1, 4, 4), (1, 2, 2)]] * 2,
        ),
        blocks=("double_blocks",),
        note="patches of several images, noisy one first, in one sequence",
    ),
    Case(
        "PRXTransformer2DModel",
        "PRXTransformer2DModel",
        dict(
            in_channels=4,
            patch_size=2,
            context_in_dim=24,
            hidden_size=32,
            mlp_ratio=2.0,
            num_heads=2,
            depth=4,
            axes_dim=[8, 8],
        ),
        given(
            hidden_states=normal(2, 4, 8, 8),
            timestep=time(at=0.5),
            encoder_hidden_states=_TEXT,
            attention_mask=ones(2, 6, dtype=torch.bool),
        ),
        span=1.0,
        blocks=("blocks",),
    ),
    Case(
        "OmniGenTransformer2DModel",
        "OmniGenTransformer2DModel",
        dict(
            in_channels=4,
            patch_size=2,
            hidden_size=32,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=48,
            num_layers=4,
            pad_token_id=0,
            vocab_size=64,
            pos_embed_max_size=8,
            time_step_dim=16,
            rope_scaling={"long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
        ),
        given(
            hidden_states=normal(2, 4, 8, 8),
            timestep=time(at=0.5),
            input_ids=integers(64, 2, 8),
            input_img_latents=[normal(1, 4, 4, 4)],
            input_image_sizes={0: [[2, 6]]},
            attention_mask=ones(2, 25, 25),
            position_ids=tensor([list(range(25))] * 2, torch.long),
        ),
        span=1.0,
        rising=True,
        blocks=("layers",),
        note="a language model: text, timestep and image tokens in one stream",
    ),
    Case(
        "PriorTransformer",
        "PriorTransformer",
        dict(
            **_HEADS,
            num_layers=4,
            embedding_dim=24,
            num_embeddings=6,
            additional_embeddings=4,
        ),
        given(
            hidden_states=normal(2, 24),
            timestep=long_time(),
            proj_embedding=normal(2, 24),
            encoder_hidden_states=_TEXT,
            attention_mask=ones(2, 6, dtype=torch.bool),
        ),
        note="denoises an image embedding; the output is the last token of a causal stream",
    ),
]
