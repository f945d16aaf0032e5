"""The small causal video model of a shape that bounces about a room.

    model = load()
    with model.video() as video:
        session = video.session(model.embed(["a red ring"]), policy=Window(12), **CALL)
        film = torch.cat([session.next() for _ in range(20)], 2)  # [1, 3, 60, 24, 24] in -1..1

The transformer is a `WanTransformer3DModel` of diffusers on pixels, without an autoencoder: a token
is a patch of 6 x 6 pixels, a frame has 16. It predicts the clean frames and not the velocity, which
would have to carry 108 values of noise through 128 channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from transformers import T5TokenizerFast, UMT5EncoderModel

from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.shipped_models import present
from diffcache.pipelines.small import wan
from diffcache.pipelines.small.causal_scenes import CHUNK, SIZE, parse
from diffcache.video import FewSteps

DIRECTORY = wan.DIRECTORY.with_name("shapes-causal")
SAMPLER = FewSteps(timesteps=(1000, 750, 500, 250), shift=1.0, predicts="clean")
STEPS = len(SAMPLER.levels)
CALL: dict[str, Any] = {"size": (SIZE, SIZE)}


@dataclass(frozen=True)
class ShapesCausal:
    """A transformer with the text encoder that it listens to.

    Attributes:
        transformer: Block-causal transformer on pixels in -1..1.
        text_encoder: Text encoder of shapes-wan.
        tokenizer: Its tokenizer.
    """

    transformer: WanTransformer3DModel
    text_encoder: UMT5EncoderModel
    tokenizer: T5TokenizerFast

    def to(self, device: torch.device | str) -> ShapesCausal:
        """Move all weights to a device."""
        for part in (self.transformer, self.text_encoder):
            nn.Module.to(part, device)
        return self

    def video(self) -> CausalVideo:
        """Return a video that films with the transformer."""
        return CausalVideo(self.transformer, chunk=CHUNK, sampler=SAMPLER)

    @torch.no_grad()
    def embed(self, prompts: Sequence[str]) -> Tensor:
        """Return text embeddings, `[B, 4, 64]`.

        Args:
            prompts: Prompts such as `a red ring`.

        Raises:
            ValueError: If a prompt does not name one shape and one color that the model knows.
        """
        for text in prompts:
            parse(text)
        words = self.tokenizer(list(prompts), return_tensors="pt", padding=True)
        words = words.to(self.text_encoder.device)
        found: Tensor = self.text_encoder(words.input_ids, words.attention_mask).last_hidden_state
        return found


def load(directory: str | Path = DIRECTORY, dtype: torch.dtype = torch.float32) -> ShapesCausal:
    """Load the model with plain `from_pretrained`.

    Args:
        directory: Directory of the saved model.
        dtype: Data type of all weights; the files hold bfloat16.
    """
    path = present(directory)
    transformer = WanTransformer3DModel.from_pretrained(path / "transformer", torch_dtype=dtype)
    encoder = UMT5EncoderModel.from_pretrained(path / "text_encoder", dtype=dtype)
    tokenizer = T5TokenizerFast.from_pretrained(path / "tokenizer")
    return ShapesCausal(transformer.eval(), encoder.eval(), tokenizer)
