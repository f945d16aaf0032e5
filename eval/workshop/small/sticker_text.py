"""Train the text encoders of the sticker models to understand a sentence before anything is drawn.

Large pipelines start from text encoders that know language; these learn it in minutes. The pooled
vector has to tell the objects, their relation and the ground, and the token of each object's name
what it is and on which side of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPTextModel, T5EncoderModel

from diffcache.eval.workshop.small.job import Job, Settings
from diffcache.eval.workshop.small.stickers import GROUNDS, OBJECTS, RELATIONS, caption, parse, sample_scene, words
from diffcache.eval.workshop.small.text_encoders import build_text_encoders, build_tokenizers
from diffcache.pipelines.shipped_models import MODELS

TEXT_TOKENS = 12
_ROLES = ("", *RELATIONS)
_OPPOSITE = {"": "", "left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_GROUNDS = tuple(GROUNDS)
_POOLED = (len(OBJECTS), len(OBJECTS) + 1, len(_ROLES), len(_GROUNDS))
_TOKEN = (len(OBJECTS), len(_ROLES), len(_GROUNDS))


class Encoder:
    """Both tokenizers, and how sentences go through a pair of text encoders.

    Args:
        known: Words that have a token; those of `stickers.words` if there are none.
    """

    def __init__(self, known: Sequence[str] = ()) -> None:
        self.clip, self.t5 = build_tokenizers(list(known) or words())

    def build(self) -> tuple[CLIPTextModel, T5EncoderModel]:
        """Build both text encoders, untrained."""
        return build_text_encoders(self.clip, self.t5)

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


def load_text(encoder: Encoder, path: Path) -> dict[str, nn.Module]:
    """Build both text encoders with trained weights, by their names in a pipeline.

    Args:
        encoder: Tokenizers of the encoders.
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
    clip, t5 = encoder.build()
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
