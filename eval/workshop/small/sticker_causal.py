"""The causal WanPipeline that films stickers, chunk by chunk: how it is built and trained.

A film is learned as a stream makes it: each chunk of three latent frames after the clean chunks
before it. Later in the training the history is what the model itself makes of the film, once or
twice over, so that it learns to go on from its own mistakes.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

from diffcache.digest import weights_digest
from diffcache.eval.workshop.small.causal_step import (
    ChunkAttention,
    Held,
    draw_held,
    predict,
)
from diffcache.eval.workshop.small.export import save_pipeline
from diffcache.eval.workshop.small.grid import draw_grid
from diffcache.eval.workshop.small.sticker_films import FPS, Film, render_film, sample_film
from diffcache.eval.workshop.small.sticker_video_autoencoder import (
    CHANNELS,
    load_autoencoder,
    to_film,
)
from diffcache.eval.workshop.small.stickers import words
from diffcache.eval.workshop.small.text_encoders import TEXT_WIDTH, build_tokenizers, t5_settings
from diffcache.eval.workshop.small.trainer import Job, Settings
from diffcache.files import read_json, write_json
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.streaming_vae import WanDecoder
from diffcache.video import FewSteps

CHUNK = 3
LATENTS = 12  # of a training film: four chunks
FRAMES = 4 * LATENTS - 3
TEXT_TOKENS = 8
SAMPLER = FewSteps(timesteps=(1000, 750, 500, 250), shift=2.0, predicts="clean")
CALL: dict[str, Any] = {"height": 64, "width": 64, "max_sequence_length": TEXT_TOKENS}
STREAM: dict[str, Any] = {
    "chunk": CHUNK,
    "fps": FPS,
    "sampler": asdict(SAMPLER),
    "prompts": ["a fox on grass", "a rocket in space", "a butterfly", "a burger on wood"],
}
HELD = 64
_GRID = (4, 4)
_WIDTH, _HEADS, _LAYERS = 192, 6, 6
_DISTURBED = 0.1  # most noise on the history, whose noise level is said to be 0
_OWN_FROM = 0.3  # share of the run after which histories are the model's own


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


def draw_films(count: int, seed: int, *, held: bool) -> list[Film]:
    """Draw films; in a quarter of them the sentence changes where a chunk begins."""
    films = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        later = 4 * CHUNK * int(rng.integers(1, LATENTS // CHUNK)) - 3
        switches = (later,) if rng.random() < 0.25 else ()
        films.append(sample_film(rng, held=held, switches=switches))
    return films


def captions(film: Film) -> list[str]:
    """Return the sentence of every chunk of a training film."""
    return [film.caption_at(max(4 * start - 3, 0)) for start in range(0, LATENTS, CHUNK)]


class Causal(Job):
    """Train transformer and text encoder on chunks of films, to say the clean frames."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings, folder)
        self.tokenizer, _ = build_text()
        self.autoencoder = load_autoencoder(folder / "sticker-video-autoencoder.state")
        self.films = draw_films(settings.examples, settings.seed + 1, held=False)
        self.held_films = draw_films(HELD, settings.seed + 2, held=True)
        self.latents, self.held = self._prepare()

    @torch.no_grad()
    def _prepare(self) -> tuple[Tensor, Tensor]:
        """Return latents of training and held-out films [N, C, F, 8, 8], of unit variance.

        They are made once for a number of films and an autoencoder, and kept.
        """
        made_by = weights_digest(self.autoencoder.parameters())
        path = self.folder / f"film-latents-{len(self.films)}-{made_by}.safetensors"
        if not path.exists():
            kept = {"latents": self._encode(self.films), "held": self._encode(self.held_films)}
            sample = kept["latents"][:2000].float()
            kept["mean"], kept["std"] = sample.mean((0, 2, 3, 4)), sample.std((0, 2, 3, 4))
            save_file(kept, path)
        kept = load_file(path)
        mean, std = (kept[name].view(1, -1, 1, 1, 1) for name in ("mean", "std"))
        self.autoencoder.register_to_config(
            latents_mean=[round(float(x), 5) for x in kept["mean"]],
            latents_std=[round(float(x), 5) for x in kept["std"]],
        )
        latents = ((kept["latents"].float() - mean) / std).half()
        return latents, (kept["held"].float() - mean) / std

    def _encode(self, films: list[Film]) -> Tensor:
        parts = []
        for film in films:
            pictures = torch.from_numpy(render_film(film, FRAMES)[0])
            parts.append(self.autoencoder.encode(to_film(pictures)[None]).latent_dist.mode())
        return torch.cat(parts).half()

    def build(self) -> nn.ModuleDict:
        """Build transformer and text encoder."""
        _, encoder = build_text()
        return nn.ModuleDict({"text_encoder": encoder, "transformer": build_transformer()})

    def embed(self, models: nn.ModuleDict, texts: list[str]) -> Tensor:
        """Return text embeddings [B, S, E], zero where there is no word, as the pipeline does."""
        pad = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        ids = self.tokenizer(texts, max_length=TEXT_TOKENS, **pad)
        states = models["text_encoder"](ids.input_ids, ids.attention_mask).last_hidden_state
        found: Tensor = states * ids.attention_mask[..., None]
        return found

    def _frames(self, models: nn.ModuleDict, films: list[Film]) -> Tensor:
        """Return the text embeddings of every frame of films, [B, F, S, E]."""
        said = [text for film in films for text in captions(film)]
        states = self.embed(models, said).unflatten(0, (len(films), -1))
        found: Tensor = states.repeat_interleave(CHUNK, 1)
        return found

    def attention(self, transformer: nn.Module) -> ChunkAttention:
        """Return the attention that a transformer trains with, set up once."""
        model: Any = transformer
        used = model.blocks[0].attn1.processor
        if not isinstance(used, ChunkAttention):
            used = ChunkAttention(model, CHUNK, _GRID)
            for block in model.blocks:
                block.attn1.set_processor(used)
        used.frames = LATENTS
        return used

    def loss(
        self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator
    ) -> Tensor:
        """Return the mean square error of clean frames."""
        films = [self.films[i] for i in chosen]
        own = 0
        if self.step >= _OWN_FROM * self.settings.steps:
            own = max(int(torch.randint(4, (), generator=generator)) - 1, 0)
        attention = self.attention(models["transformer"])
        attention.held = draw_held(generator, LATENTS // CHUNK - 1)
        return self._error(models, self.latents[chosen].float(), films, generator, own)

    def _error(
        self,
        models: nn.ModuleDict,
        clean: Tensor,
        films: list[Film],
        generator: torch.Generator,
        own: int,
    ) -> Tensor:
        """Return the error after histories that the model has made anew this many times."""
        text = self._frames(models, films)
        model = self.compile(models["transformer"])
        history = clean
        for _ in range(own):
            with torch.no_grad():
                noisy, levels = add_noise(clean, draw_levels(clean, generator), generator)
                history = predict(model, history, noisy, levels, text)
        depth = _DISTURBED * torch.rand(len(clean), 1, 1, 1, 1, generator=generator)
        history = history + depth * torch.randn(clean.shape, generator=generator)
        noisy, levels = add_noise(clean, draw_levels(clean, generator), generator)
        found = predict(model, history, noisy, levels, text)
        return functional.mse_loss(found.float(), clean)

    @torch.no_grad()
    def measure(self, models: nn.ModuleDict) -> dict[str, float]:
        """Measure errors on held-out films, after true histories and after own ones."""
        self.attention(models["transformer"]).held = Held()
        found = {}
        for name, own in (("held_loss", 0), ("held_own", 2)):
            generator = torch.Generator().manual_seed(5)
            error = self._error(models, self.held, self.held_films, generator, own)
            found[name] = float(error)
        return found

    @torch.no_grad()
    def stream(
        self,
        models: nn.ModuleDict,
        text: str,
        *,
        chunks: int,
        first: int | None = None,
    ) -> Tensor:
        """Film as a stream does, uint8 [F, 64, 64, 3].

        Args:
            models: Averaged modules.
            text: Sentence.
            chunks: Number of chunks.
            first: Number of the held-out film whose first chunk is given; None for none.
        """
        transformer: Any = models["transformer"]
        transformer.set_attn_processor(WanAttnProcessor())
        decoder, parts = WanDecoder(self.autoencoder), []
        with CausalVideo(transformer, chunk=CHUNK, sampler=SAMPLER) as video:
            session = video.session(self.embed(models, [text]), size=(8, 8))
            if first is not None:
                given = self.held[first : first + 1, :, :CHUNK]
                session.take(given)
                parts.append(decoder.decode(given))
            while len(parts) < chunks:
                parts.append(decoder.decode(session.next()))
        film = torch.cat(parts, 2)[0]
        return ((film + 1) * 127.5).round().permute(1, 2, 3, 0).byte()

    def show(self, models: nn.ModuleDict) -> Image.Image:
        """Draw held-out films after a true first chunk, and without one, every eighth frame."""
        rows, said = [], []
        for number in range(8):
            said.append(self.held_films[number].caption_at(0))
            film = self.stream(models, said[-1], chunks=7, first=number if number < 4 else None)
            rows.append([Image.fromarray(picture) for picture in film[::8].numpy()])
        return draw_grid(rows, said, scale=1, columns=1)

    def export(self, models: nn.ModuleDict, directory: Path) -> None:
        """Save the pipeline in bfloat16, with what a stream needs."""
        transformer: Any = models["transformer"]
        transformer.set_attn_processor(WanAttnProcessor())
        pipe = build_pipeline(self.autoencoder, models, self.tokenizer)
        save_pipeline(pipe, directory, CALL)
        path = directory / "diffcache.json"
        write_json(path, read_json(path) | {"stream": STREAM})


def build_pipeline(
    autoencoder: AutoencoderKLWan, models: nn.ModuleDict, tokenizer: T5TokenizerFast
) -> WanPipeline:
    """Put the pipeline together."""
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=models["text_encoder"],
        vae=autoencoder,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SAMPLER.shift),
        transformer=models["transformer"],
    )


def draw_levels(clean: Tensor, generator: torch.Generator) -> Tensor:
    """Draw the noise level of every frame of films, the same for the frames of a chunk, [B, F].

    A third of the chunks are all noise, a third have another level of the sampler, the rest any.
    """
    shape = (len(clean), clean.shape[2] // CHUNK)
    sampled = torch.tensor(SAMPLER.levels)
    kind = torch.rand(shape, generator=generator)
    any_level = torch.rand(shape, generator=generator)
    later = sampled[torch.randint(1, len(sampled), shape, generator=generator)]
    levels = torch.where(kind < 2 / 3, later, any_level)
    return torch.where(kind < 1 / 3, sampled[0], levels).repeat_interleave(CHUNK, 1)


def add_noise(clean: Tensor, levels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return films [B, C, F, H, W] with noise of these levels [B, F], and the levels."""
    noise = torch.randn(clean.shape, generator=generator)
    return torch.lerp(clean, noise, levels[:, None, :, None, None]), levels
