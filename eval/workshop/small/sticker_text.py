"""Text encoders of the sticker models, with tokenizers of whole words, and their training before anything is drawn.

Large pipelines start from text encoders that know language; these learn it in minutes. The pooled
vector has to tell the objects, their relation and the ground, and the token of each object's name
what it is and on which side of the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

from diffcache.eval.workshop.small.job import Job, Settings
from diffcache.eval.workshop.small.stickers import GROUNDS, OBJECTS, RELATIONS, caption, parse, sample_scene, words
from diffcache.pipelines.shipped_models import MODELS

TEXT_TOKENS = 12
TEXT_WIDTH = 64
_CLIP_TOKENS = 32
_ROLES = ("", *RELATIONS)
_OPPOSITE = {"": "", "left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_GROUNDS = tuple(GROUNDS)
_POOLED = (len(OBJECTS), len(OBJECTS) + 1, len(_ROLES), len(_GROUNDS))
_TOKEN = (len(OBJECTS), len(_ROLES), len(_GROUNDS))


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


class Encoder:
    """Both tokenizers, and how sentences go through a pair of text encoders.

    Args:
        known: Words that have a token; those of `stickers.words` if there are none.
    """

    def __init__(self, known: Sequence[str] = ()) -> None:
        self.clip, self.t5 = build_tokenizers(list(known) or words())

    def build(self) -> tuple[CLIPTextModel, T5EncoderModel]:
        """Build both text encoders, untrained."""
        first = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(self.clip),
                hidden_size=TEXT_WIDTH,
                intermediate_size=2 * TEXT_WIDTH,
                projection_dim=TEXT_WIDTH,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=_CLIP_TOKENS,
                bos_token_id=self.clip.bos_token_id,
                eos_token_id=self.clip.eos_token_id,
                pad_token_id=self.clip.pad_token_id,
            )
        )
        return first, T5EncoderModel(T5Config(**t5_settings(self.t5, layers=3)))

    def ids(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Return token numbers of sentences for CLIP and for T5, int64 [B, T] each."""
        pad = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        first = self.clip(texts, max_length=self.clip.model_max_length, **pad).input_ids
        second = self.t5(texts, max_length=TEXT_TOKENS, **pad).input_ids
        return first, second

    def encode(self, models: nn.ModuleDict, said: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return text states [B, T, D] and the pooled vector [B, D] of what `ids` gave."""
        first, second = (ids.to(torch.get_default_device()) for ids in said)
        return models["text_encoder_2"](second)[0], models["text_encoder"](first).pooler_output


def load_text(path: Path) -> dict[str, nn.Module]:
    """Build both text encoders with trained weights, by their names in a pipeline.

    Args:
        path: Path of a checkpoint of their training; where there is none, those of the shipped
            sticker-flux are taken.
    """
    here = torch.get_default_device()
    if not path.exists():
        shipped = MODELS / "sticker-flux"
        return {
            "text_encoder": CLIPTextModel.from_pretrained(shipped / "text_encoder").to(here),
            "text_encoder_2": T5EncoderModel.from_pretrained(shipped / "text_encoder_2").to(here),
        }
    clip, t5 = Encoder().build()
    models = nn.ModuleDict({"text_encoder": clip, "text_encoder_2": t5})
    kept = torch.load(path, weights_only=True, map_location=here)["average"]
    models.load_state_dict({k: v for k, v in kept.items() if k.startswith("text_")})
    return dict(models.items())


@torch.no_grad()
def learn_words(models: Mapping[str, nn.Module], old: Encoder, new: Encoder) -> None:
    """Give both text encoders the words of other tokenizers; tokens of both keep their vectors.

    Args:
        models: Text encoders by their names in a pipeline, changed in place.
        old: Tokenizers that they were trained with.
        new: Tokenizers with more words.
    """
    pairs = {"text_encoder": (old.clip, new.clip), "text_encoder_2": (old.t5, new.t5)}
    for name, (before, after) in pairs.items():
        model: Any = models[name]
        known = model.get_input_embeddings().weight.clone()
        model.resize_token_embeddings(len(after), mean_resizing=False)
        table = model.get_input_embeddings().weight
        nn.init.normal_(table, std=float(known.std()))
        numbers = before.get_vocab()
        for token, row in after.get_vocab().items():
            if token in numbers:
                table[row] = known[numbers[token]]


class Text(Job):
    """Train both encoders with linear readouts, which are used nowhere else."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings, folder)
        self.encoder = Encoder()
        rng = np.random.default_rng(settings.seed + 30)
        self.texts = [caption(sample_scene(rng)) for _ in range(settings.examples)]
        self.held = [caption(sample_scene(rng, held=True)) for _ in range(256)]

    def build(self) -> nn.ModuleDict:
        """Build encoders and readouts."""
        clip, t5 = self.encoder.build()
        width = t5.config.d_model
        readouts = {"pooled": nn.Linear(width, sum(_POOLED)), "token": nn.Linear(width, sum(_TOKEN))}
        return nn.ModuleDict({"text_encoder": clip, "text_encoder_2": t5, **readouts})

    def loss(self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator) -> Tensor:
        """Return the cross-entropy of all that the sentences say."""
        return self._errors(models, [self.texts[i] for i in drawn["chosen"]])[0]

    def _errors(self, models: nn.ModuleDict, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Return the loss, and the share of sentences whose pooled vector tells all, 0-d each."""
        states, pooled = self.encoder.encode(models, self.encoder.ids(texts))
        whole, tokens = self._targets(texts)
        loss = torch.zeros(())
        right = torch.ones(len(texts), dtype=torch.bool)
        for index, part in enumerate(models["pooled"](pooled).split(_POOLED, -1)):
            loss = loss + functional.cross_entropy(part, whole[:, index])
            right &= part.argmax(-1) == whole[:, index]
        for index, part in enumerate(models["token"](states).split(_TOKEN, -1)):
            wanted = tokens[..., index].flatten()
            loss = loss + functional.cross_entropy(part.flatten(0, 1), wanted, ignore_index=-1)
        return loss, right.float().mean()

    def _targets(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        ids = self.encoder.ids(texts)[1]
        whole = torch.zeros(len(texts), len(_POOLED), dtype=torch.long)
        tokens = torch.full((*ids.shape, len(_TOKEN)), -1)
        for row, text in enumerate(texts):
            names, relation, ground = parse(text)
            numbers = [OBJECTS.index(name) for name in names] + [len(OBJECTS)]
            place = _GROUNDS.index(ground or "gradient")
            whole[row] = torch.tensor([*numbers[:2], _ROLES.index(relation), place])
            roles = (relation, _OPPOSITE[relation])
            for name, role in zip(names, roles, strict=False):
                token = self.encoder.t5.convert_tokens_to_ids(f"▁{name}")
                told = torch.tensor([OBJECTS.index(name), _ROLES.index(role), place])
                tokens[row, ids[row] == token] = told
        return whole, tokens

    @torch.no_grad()
    def measure(self, models: nn.ModuleDict) -> dict[str, float]:
        """Measure the loss on held-out sentences, and the share that is understood whole."""
        loss, right = self._errors(models, self.held)
        return {"held_loss": float(loss), "understood": float(right)}
