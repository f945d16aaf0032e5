"""The small FluxPipeline that draws shapes: how it is built, loaded and called.

The shipped directory is an ordinary diffusers pipeline that `FluxPipeline.from_pretrained` loads.
Two defaults are written into the source of `FluxPipeline` for large models (latents of 128 x 128,
512 text tokens) and cannot be saved with a model, so a call has to pass the numbers in `CALL`:

    pipe = load()
    picture = pipe("a small red ring on the left, on a yellow background", **CALL).images[0]
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from diffcache.pipelines.shipped_models import MODELS
from diffcache.pipelines.small.scenes import COLORS, POSITIONS, SHAPES, SIZES
from diffcache.pipelines.small.shipped import load_pipeline

TEXT_TOKENS = 24
CALL: dict[str, Any] = {"height": 64, "width": 64, "max_sequence_length": TEXT_TOKENS}
DIRECTORY = MODELS / "shapes-flux"

LATENT_CHANNELS = 4
_TEXT_WIDTH = 64
_CLIP_TOKENS = 32
_WORDS = ("a", "on", "the", "at", "in", "with", "and", "background")


def load(dtype: torch.dtype = torch.float32, directory: str | Path = DIRECTORY) -> FluxPipeline:
    """Load the shipped pipeline, with its progress bar off and 64x64 as its default size.

    Args:
        dtype: Dtype of every model in it; the files hold bfloat16.
        directory: Directory of the saved pipeline.
    """
    pipe = load_pipeline(FluxPipeline, directory, dtype)
    pipe.default_sample_size = CALL["height"] // pipe.vae_scale_factor
    return pipe


def words() -> list[str]:
    """Return every word a prompt can hold, sorted."""
    places = {word for name in POSITIONS for word in name.split()}
    return sorted({*SHAPES, *COLORS, *SIZES, *places, *_WORDS})


def build_tokenizers(known: list[str] | None = None) -> tuple[CLIPTokenizer, T5TokenizerFast]:
    """Build both tokenizers; one word is one token.

    Args:
        known: Words that have a token; None takes those of the generator of shapes.
    """
    known = words() if known is None else known
    return _clip_tokenizer(known), _t5_tokenizer(known)


def _clip_tokenizer(known: list[str]) -> CLIPTokenizer:
    merges = learn_merges([split_word(word) for word in (*known, ",", ".")])
    letters = sorted({letter for word in known for letter in word})
    symbols = [*letters, ",", "."]
    vocabulary = ["<|startoftext|>", "<|endoftext|>", *symbols, *(f"{s}</w>" for s in symbols)]
    vocabulary += dict.fromkeys(one + other for one, other in merges)
    numbers = {token: index for index, token in enumerate(vocabulary)}
    return CLIPTokenizer(vocab=numbers, merges=merges, model_max_length=_CLIP_TOKENS)


def split_word(word: str) -> list[str]:
    """Return a word as the symbols that byte-pair merges start from; the last one ends it."""
    return [*word[:-1], f"{word[-1]}</w>"]


def learn_merges(split: list[list[str]]) -> list[tuple[str, str]]:
    """Return byte-pair merges that make every word one token; the same on every run.

    The trainer of the `tokenizers` library numbers tokens in an order that changes from process to
    process, which would part the weights from their words.

    Args:
        split: Words as symbols.
    """
    merges = []
    while pairs := Counter(pair for word in split for pair in pairwise(word)):
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        split = [merge(word, best) for word in split]
    return merges


def merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    """Return the symbols of a word with each such pair of neighbors made one."""
    made: list[str] = []
    for symbol in word:
        if made and (made[-1], symbol) == pair:
            made[-1] += symbol
        else:
            made.append(symbol)
    return made


def _t5_tokenizer(known: list[str]) -> T5TokenizerFast:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -6.0), (",", -3.0), (".", -3.0)]
    pieces += [(f"▁{word}", -4.0) for word in known] + [("▁A", -4.0)]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)


def build_text_encoders(
    clip: CLIPTokenizer, t5: T5TokenizerFast
) -> tuple[CLIPTextModel, T5EncoderModel]:
    """Build both text encoders, untrained."""
    first = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(clip),
            hidden_size=_TEXT_WIDTH,
            intermediate_size=2 * _TEXT_WIDTH,
            projection_dim=_TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=_CLIP_TOKENS,
            bos_token_id=clip.bos_token_id,
            eos_token_id=clip.eos_token_id,
            pad_token_id=clip.pad_token_id,
        )
    )
    second = T5EncoderModel(
        T5Config(
            vocab_size=len(t5),
            d_model=_TEXT_WIDTH,
            d_kv=16,
            d_ff=2 * _TEXT_WIDTH,
            num_layers=3,
            num_heads=4,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=24,
            dropout_rate=0.0,
            is_encoder_decoder=False,
            use_cache=False,
        )
    )
    return first, second


def build_transformer() -> FluxTransformer2DModel:
    """Build the denoiser: 4 double and 8 single blocks of width 128, adaLN-zero start."""
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=4,
        num_single_layers=8,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=_TEXT_WIDTH,
        pooled_projection_dim=_TEXT_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            start_at_zero = name == "proj_out" or name.endswith(("norm.linear", "norm_out.linear"))
            start_at_zero |= ".norm1" in name
            if start_at_zero:
                nn.init.zeros_(module.weight)
            else:
                nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def build_autoencoder() -> AutoencoderKL:
    """Build the autoencoder: 64x64 pictures to 16x16 latents of four channels."""
    return AutoencoderKL(
        block_out_channels=(16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=64,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )


def build_pipeline(autoencoder: AutoencoderKL, shift: float = 1.0) -> FluxPipeline:
    """Put an untrained pipeline round a trained autoencoder.

    Args:
        autoencoder: Autoencoder with its shift and scaling factors set.
        shift: Shift of the sampling sigmas; 1 leaves them evenly spaced.
    """
    clip, t5 = build_tokenizers()
    text_encoder, text_encoder_2 = build_text_encoders(clip, t5)
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift, use_dynamic_shifting=False),
        vae=autoencoder,
        text_encoder=text_encoder,
        tokenizer=clip,
        text_encoder_2=text_encoder_2,
        tokenizer_2=t5,
        transformer=build_transformer(),
    )
