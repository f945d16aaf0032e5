"""Share sentences, films and their latents among the trainings on films."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

from diffcache.digest import weights_digest
from diffcache.eval.workshop.small.job import Job, Settings, spread
from diffcache.eval.workshop.small.sticker_films import Film, render_film
from diffcache.eval.workshop.small.sticker_text import TEXT_WIDTH, build_tokenizers, t5_settings
from diffcache.eval.workshop.small.sticker_video_autoencoder import CHANNELS, load_autoencoder, to_film
from diffcache.eval.workshop.small.stickers import words
from diffcache.files import write_file

TEXT_TOKENS = 8
_PART = 16  # films that are encoded at once
_WIDTH, _HEADS, _LAYERS = 192, 6, 6


def build_text() -> tuple[T5TokenizerFast, UMT5EncoderModel]:
    """Build tokenizer and text encoder, untrained: 2 layers of width 64."""
    tokenizer = build_tokenizers(words())[1]
    return tokenizer, UMT5EncoderModel(UMT5Config(**t5_settings(tokenizer, layers=2)))


def build_transformer() -> WanTransformer3DModel:
    """Build the transformer, untrained: its output and its gates start near zero."""
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=_HEADS,
        attention_head_dim=_WIDTH // _HEADS,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=128,
        ffn_dim=4 * _WIDTH,
        num_layers=_LAYERS,
        rope_max_seq_len=1024,
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
            if name in ("proj_out", "condition_embedder.time_proj"):
                nn.init.zeros_(module.weight)
    for block in model.blocks:
        nn.init.zeros_(block.scale_shift_table)
        # Attention and feed-forward count from the first step on, if little.
        nn.init.constant_(block.scale_shift_table[:, [2, 5]], 0.5)
    nn.init.zeros_(model.scale_shift_table)
    return model


class FilmJob(Job):
    """Train on latents of films, which are drawn and encoded once.

    The autoencoder is that of `sticker-video-autoencoder.state` in the folder, or the shipped one.

    Args:
        settings: Settings of the training.
        folder: Folder of the run.
        films: Films to train on.
        held: Held-out films.
        frames: Frames of a film.
    """

    on_gpu = True

    def __init__(self, settings: Settings, folder: Path, films: list[Film], held: list[Film], frames: int) -> None:
        super().__init__(settings, folder)
        self.tokenizer, _ = build_text()
        self.autoencoder = load_autoencoder(folder / "sticker-video-autoencoder.state")
        self.films, self.held_films = films, held
        self.latents, kept = self._prepare(frames)
        self.held_latents = kept.to(torch.get_default_device())

    def build(self) -> nn.ModuleDict:
        """Build transformer and text encoder."""
        return nn.ModuleDict({"text_encoder": build_text()[1], "transformer": build_transformer()})

    def assemble(self, models: nn.ModuleDict, shift: float) -> WanPipeline:
        """Put the pipeline together, with this shift of its noise levels."""
        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        return WanPipeline(tokenizer=self.tokenizer, vae=self.autoencoder, scheduler=scheduler, **dict(models.items()))

    @torch.no_grad()
    def _prepare(self, frames: int) -> tuple[Tensor, Tensor]:
        """Return latents of training and held-out films [N, C, F, 8, 8], of unit variance.

        They are made once for a number of films and an autoencoder, and kept.
        """
        made_by = weights_digest(self.autoencoder.cpu().parameters())
        self.autoencoder.to(torch.get_default_device())
        path = self.folder / f"film-latents-{len(self.films)}-{frames}-{made_by}.safetensors"
        if not path.exists():
            kept = {"latents": self._encode(self.films, frames), "held": self._encode(self.held_films, frames)}
            sample = kept["latents"][:2000].float()
            kept["mean"], kept["std"] = sample.mean((0, 2, 3, 4)), sample.std((0, 2, 3, 4))
            write_file(path, save(kept))  # whole or not at all: another training may wait for it
        kept = load_file(path)
        mean, std = (kept[name].view(1, -1, 1, 1, 1) for name in ("mean", "std"))
        self.autoencoder.register_to_config(
            latents_mean=[round(float(x), 5) for x in kept["mean"]],
            latents_std=[round(float(x), 5) for x in kept["std"]],
        )
        latents = ((kept["latents"].float() - mean) / std).half()
        return latents, (kept["held"].float() - mean) / std

    def _encode(self, films: list[Film], frames: int) -> Tensor:
        """Return the latents of films, float16 on the CPU."""
        parts, waiting = [], []
        for number, (pictures, _) in enumerate(spread(partial(render_film, count=frames), films)):
            waiting.append(torch.from_numpy(pictures))
            if len(waiting) == _PART or number == len(films) - 1:
                shown = to_film(torch.stack(waiting).to(torch.get_default_device()))
                parts.append(self.autoencoder.encode(shown).latent_dist.mode().half().cpu())
                waiting = []
        return torch.cat(parts)

    def ids(self, texts: list[str]) -> dict[str, Tensor]:
        """Return token numbers of sentences, and which of them are words, int64 [B, S] each."""
        pad = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        said = self.tokenizer(texts, max_length=TEXT_TOKENS, **pad)
        return {"numbers": said.input_ids, "known": said.attention_mask}

    def embed(self, models: nn.ModuleDict, said: Mapping[str, Tensor]) -> Tensor:
        """Return text embeddings [B, S, E] of what `ids` gave, zero where there is no word, as the pipeline does."""
        numbers, known = (said[name].to(torch.get_default_device()) for name in ("numbers", "known"))
        # A mask of four dimensions is taken as it is; one of two is looked at by the host.
        unseen = (1.0 - known[:, None, None].float()) * torch.finfo(torch.float32).min
        encoder: Any = models["text_encoder"]
        found: Tensor = encoder(numbers, unseen).last_hidden_state * known[..., None]
        return found
