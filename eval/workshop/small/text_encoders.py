"""Untrained text encoders of the small Flux pipelines, with tokenizers of whole words."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

TEXT_WIDTH = 64
_CLIP_TOKENS = 32


def build_tokenizers(known: list[str]) -> tuple[CLIPTokenizer, T5TokenizerFast]:
    """Build both tokenizers; one word is one token.

    Args:
        known: Words that have a token.
    """
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


def build_text_encoders(clip: CLIPTokenizer, t5: T5TokenizerFast) -> tuple[CLIPTextModel, T5EncoderModel]:
    """Build both text encoders, untrained."""
    first = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(clip),
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=_CLIP_TOKENS,
            bos_token_id=clip.bos_token_id,
            eos_token_id=clip.eos_token_id,
            pad_token_id=clip.pad_token_id,
        )
    )
    return first, T5EncoderModel(T5Config(**t5_settings(t5, layers=3)))


def t5_settings(tokenizer: T5TokenizerFast, layers: int) -> dict[str, Any]:
    """Return the configuration of a small T5 or UMT5 encoder of width 64."""
    return {
        "vocab_size": len(tokenizer),
        "d_model": TEXT_WIDTH,
        "d_kv": 16,
        "d_ff": 2 * TEXT_WIDTH,
        "num_layers": layers,
        "num_heads": 4,
        "relative_attention_num_buckets": 16,
        "relative_attention_max_distance": 24,
        "dropout_rate": 0.0,
        "is_encoder_decoder": False,
        "use_cache": False,
    }
