"""The small FluxKontextPipeline that edits pictures of shapes: how it is built, loaded, called.

It starts from the shipped text-to-picture model: the same transformer, autoencoder and text
encoders, with a few words added behind the old ones. `FluxKontextPipeline` has defaults for large
models in its source (a megapixel, 512 text tokens, seventeen preferred sizes), so a call passes the
numbers in `CALL`:

    pipe = load()
    edited = pipe(image=picture, prompt="make the ring green", **CALL).images[0]
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxKontextPipeline, FluxPipeline
from transformers import CLIPTokenizer, T5TokenizerFast

from diffcache.pipelines.small.edits import NEW_WORDS
from diffcache.pipelines.small.flux import DIRECTORY as FLUX
from diffcache.pipelines.small.flux import learn_merges, merge, split_word
from diffcache.pipelines.small.flux import load as load_flux
from diffcache.pipelines.small.shipped import load_pipeline

TEXT_TOKENS = 16
CALL: dict[str, Any] = {
    "height": 64,
    "width": 64,
    "max_area": 64 * 64,
    "_auto_resize": False,
    "max_sequence_length": TEXT_TOKENS,
}
DIRECTORY = FLUX.with_name("shapes-kontext")


def load(
    dtype: torch.dtype = torch.float32, directory: str | Path = DIRECTORY
) -> FluxKontextPipeline:
    """Load the shipped pipeline, with its progress bar off and 64x64 as its default size.

    Args:
        dtype: Dtype of every model in it; the files hold bfloat16.
        directory: Directory of the saved pipeline.
    """
    pipe = load_pipeline(FluxKontextPipeline, directory, dtype)
    pipe.default_sample_size = CALL["height"] // pipe.vae_scale_factor
    return pipe


def extend_tokenizers(
    clip: CLIPTokenizer, t5: T5TokenizerFast, words: tuple[str, ...] = NEW_WORDS
) -> tuple[CLIPTokenizer, T5TokenizerFast]:
    """Return tokenizers that know more words, each as one token; old tokens keep their numbers.

    Args:
        clip: Tokenizer of the first text encoder; it sees every word in lower case.
        t5: Tokenizer of the second; each word is added with a small and a capital first letter.
        words: Lower-case words to add.
    """
    known = json.loads(clip.backend_tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = dict(known["vocab"])
    merges = [(str(one), str(other)) for one, other in known["merges"]]
    split = [_apply(merges, split_word(word)) for word in words]
    letters = sorted({symbol for word in split for symbol in word} - set(vocabulary))
    new = learn_merges(split)
    for token in [*letters, *dict.fromkeys(one + other for one, other in new)]:
        vocabulary.setdefault(token, len(vocabulary))
    first = CLIPTokenizer(
        vocab=vocabulary, merges=[*merges, *new], model_max_length=clip.model_max_length
    )
    pieces = [
        (str(piece), float(score))
        for piece, score in json.loads(t5.backend_tokenizer.to_str())["model"]["vocab"]
    ]
    for word in words:
        pieces += [(f"▁{word}", -4.0), (f"▁{word.capitalize()}", -4.0)]
    second = T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=t5.model_max_length)
    return first, second


def _apply(merges: list[tuple[str, str]], symbols: list[str]) -> list[str]:
    # byte-pair encoding: always the earliest merge that fits
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    while fitting := [pair for pair in pairwise(symbols) if pair in ranks]:
        symbols = merge(symbols, min(fitting, key=ranks.__getitem__))
    return symbols


def build_pipeline(base: FluxPipeline | None = None) -> FluxKontextPipeline:
    """Put the editing pipeline together from the text-to-picture pipeline's weights, untrained.

    The rows of new tokens start at the mean of the old rows, which no prompt has used yet.

    Args:
        base: The pipeline to start from, changed in place; the shipped one when None.
    """
    base = load_flux() if base is None else base
    clip, t5 = extend_tokenizers(base.tokenizer, base.tokenizer_2)
    for encoder, tokenizer in ((base.text_encoder, clip), (base.text_encoder_2, t5)):
        _add_rows(encoder, len(tokenizer))
    return FluxKontextPipeline(
        scheduler=base.scheduler,
        vae=base.vae,
        text_encoder=base.text_encoder,
        tokenizer=clip,
        text_encoder_2=base.text_encoder_2,
        tokenizer_2=t5,
        transformer=base.transformer,
    )


def _add_rows(encoder: Any, count: int) -> None:
    old = encoder.get_input_embeddings().weight.detach().clone()
    encoder.resize_token_embeddings(count, mean_resizing=False)
    rows = encoder.get_input_embeddings().weight
    with torch.no_grad():
        rows[: len(old)] = old
        rows[len(old) :] = old.mean(dim=0)
