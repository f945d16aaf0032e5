"""The causal WanPipeline that films stickers, chunk by chunk: how it is built and trained.

A film is learned as a stream makes it: each chunk of three latent frames after the clean chunks
before it. Later in the training the history is what the model itself makes of the film, once or
twice over, so that it learns to go on from its own mistakes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from transformers import T5TokenizerFast

from diffcache.eval.workshop.small.causal_step import ChunkAttention, HeldChunks, draw_held, predict
from diffcache.eval.workshop.small.export import save_pipeline
from diffcache.eval.workshop.small.film_job import TEXT_TOKENS, FilmJob, build_text
from diffcache.eval.workshop.small.grid import draw_grid
from diffcache.eval.workshop.small.job import Settings, seeded
from diffcache.eval.workshop.small.sticker_films import FPS, Film, sample_film
from diffcache.eval.workshop.small.sticker_video_autoencoder import CHANNELS, TIMES
from diffcache.eval.workshop.small.text_encoders import TEXT_WIDTH
from diffcache.files import read_json, write_json
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.streaming_vae import WanDecoder
from diffcache.video import FewSteps

CHUNK = 3
LATENTS = 21  # of a training film: seven chunks
FRAMES = TIMES * (LATENTS - 1) + 1  # the autoencoder takes 1 + 4 n frames
SAMPLER = FewSteps(timesteps=(1000, 750, 500, 250), shift=2.0, predicts="clean")
CALL: dict[str, Any] = {"height": 64, "width": 64, "max_sequence_length": TEXT_TOKENS}
STREAM: dict[str, Any] = {
    "chunk": CHUNK,
    "fps": FPS,
    "sampler": asdict(SAMPLER),
    "prompts": ["a frog on grass", "a crab", "a sunflower in space", "a burger on wood"],
    "policy": "full",  # keeps most objects: films under a window fall apart after 60 chunks
}
HELD = 64
_GRID = (4, 4)
_WIDTH, _HEADS, _LAYERS = 192, 6, 6
_DISTURBED = 0.1  # most noise on the history, whose noise level is said to be 0
_OWN_FROM = 0.3  # share of the run after which histories are the model's own


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
        later = first_frame(CHUNK * int(rng.integers(1, LATENTS // CHUNK)))
        switches = (later,) if rng.random() < 0.25 else ()
        films.append(sample_film(rng, held=held, switches=switches))
    return films


def first_frame(latent: int) -> int:
    """Return the number of the first frame that a latent frame stands for."""
    return max(TIMES * (latent - 1) + 1, 0)


def captions(film: Film) -> list[str]:
    """Return the sentence of every chunk of a training film."""
    return [film.caption_at(first_frame(start)) for start in range(0, LATENTS, CHUNK)]


class Causal(FilmJob):
    """Train transformer and text encoder on chunks of films, to say the clean frames."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        films = draw_films(settings.examples, settings.seed + 1, held=False)
        held = draw_films(HELD, settings.seed + 2, held=True)
        super().__init__(settings, folder, films, held, FRAMES)
        self.levels = torch.tensor(SAMPLER.levels)

    def build(self) -> nn.ModuleDict:
        """Build transformer and text encoder."""
        _, encoder = build_text()
        return nn.ModuleDict({"text_encoder": encoder, "transformer": build_transformer()})

    def chunk_ids(self, films: list[Film]) -> tuple[Tensor, Tensor]:
        """Return token numbers and words of the sentence of every chunk, [B * chunks, S] each."""
        return self.ids([text for film in films for text in captions(film)])

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

    def draw(self, chosen: Tensor, generator: torch.Generator) -> dict[str, Any]:
        """Draw latents, sentences, what a cache holds and how often histories are made anew."""
        numbers, known = self.chunk_ids([self.films[i] for i in chosen])
        return {
            "latents": self.latents[chosen],
            "numbers": numbers,
            "known": known,
            "own": max(int(torch.randint(4, (), generator=generator)) - 1, 0),
            "held": draw_held(generator, 3),
        }

    def way(self, drawn: Mapping[str, Any]) -> tuple[int, HeldChunks]:
        """Return how often histories are made anew, and what a cache holds."""
        late = self.step >= _OWN_FROM * self.settings.steps
        return drawn["own"] if late else 0, drawn["held"]

    def loss(self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator) -> Tensor:
        """Return the mean square error of clean frames."""
        own, held = self.way(drawn)
        self.attention(models["transformer"]).held = held
        said = (drawn["numbers"], drawn["known"])
        return self._error(models, drawn["latents"].float(), said, generator, own)

    def _error(
        self, models: nn.ModuleDict, clean: Tensor, said: tuple[Tensor, Tensor], generator: torch.Generator, own: int
    ) -> Tensor:
        """Return the error after histories that the model has made anew this many times."""
        states = self.embed(models, said).unflatten(0, (len(clean), -1))
        text = states.repeat_interleave(CHUNK, 1)
        model = self.compile(models["transformer"])
        history = clean
        for _ in range(own):
            with torch.no_grad():
                noisy, levels = self.add_noise(clean, generator)
                history = predict(model, history, noisy, levels, text).float()
        depth = _DISTURBED * torch.rand(len(clean), 1, 1, 1, 1, generator=generator)
        history = history + depth * torch.randn(clean.shape, generator=generator)
        noisy, levels = self.add_noise(clean, generator)
        found = predict(model, history, noisy, levels, text)
        return functional.mse_loss(found.float(), clean)

    def add_noise(self, clean: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return films [B, C, F, H, W] with noise, and its level in every frame [B, F].

        It is the same in the frames of a chunk. A third of the chunks are all noise, a third have
        another level of the sampler, the rest any.
        """
        shape = (len(clean), clean.shape[2] // CHUNK)
        kind = torch.rand(shape, generator=generator)
        any_level = torch.rand(shape, generator=generator)
        later = self.levels[torch.randint(1, len(self.levels), shape, generator=generator)]
        levels = torch.where(kind < 2 / 3, later, any_level)
        levels = torch.where(kind < 1 / 3, self.levels[0], levels).repeat_interleave(CHUNK, 1)
        noise = torch.randn(clean.shape, generator=generator)
        return torch.lerp(clean, noise, levels[:, None, :, None, None]), levels

    @torch.no_grad()
    def measure(self, models: nn.ModuleDict) -> dict[str, float]:
        """Measure errors on held-out films, after true histories and after own ones."""
        self.attention(models["transformer"]).held = HeldChunks()
        said = self.chunk_ids(self.held_films)
        return {
            name: float(self._error(models, self.held, said, seeded(5), own))
            for name, own in (("held_loss", 0), ("held_own", 2))
        }

    @torch.no_grad()
    def stream(self, models: nn.ModuleDict, text: str, *, chunks: int, first: int | None = None) -> Tensor:
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
            session = video.session(self.embed(models, self.ids([text])), size=(8, 8))
            if first is not None:
                given = self.held[first : first + 1, :, :CHUNK]
                session.take(given)
                parts.append(decoder.decode(given))
            while len(parts) < chunks:
                parts.append(decoder.decode(session.next()))
        film = torch.cat(parts, 2)[0]
        return ((film + 1) * 127.5).round().permute(1, 2, 3, 0).byte().cpu()

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


def build_pipeline(autoencoder: AutoencoderKLWan, models: nn.ModuleDict, tokenizer: T5TokenizerFast) -> WanPipeline:
    """Put the pipeline together."""
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=models["text_encoder"],
        vae=autoencoder,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SAMPLER.shift),
        transformer=models["transformer"],
    )
