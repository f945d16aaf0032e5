"""The causal WanPipeline that films stickers, chunk by chunk: how it is built and trained.

A film is learned as a stream makes it: each chunk of three latent frames after the clean chunks
before it. It goes in twice, once clean at noise level 0 and once noised chunk by chunk: a chunk, clean
or noisy, attends to itself and to those clean chunks before it that a cache would hold, so that one
pass trains all chunks of a film. Later in the training the history is what the model itself makes of the film, once or
twice over, so that it learns to go on from its own mistakes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn
from torch.nn import functional

from diffcache.eval.workshop.small.film_job import TEXT_TOKENS, FilmJob
from diffcache.eval.workshop.small.job import Settings, seeded
from diffcache.eval.workshop.small.sticker_films import FPS, Film, sample_film
from diffcache.eval.workshop.small.sticker_video_autoencoder import TIMES
from diffcache.files import read_json, write_json
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
_DISTURBED = 0.1  # most noise on the history, whose noise level is said to be 0
_OWN_FROM = 0.3  # share of the run after which histories are the model's own


@dataclass(frozen=True)
class HeldChunks:
    """Chunks that a cache holds: the latest, and the first one with `sinks`.

    Attributes:
        window: Number of latest chunks; None for all.
        sinks: Whether the first chunk is held for ever, next to the window.
    """

    window: int | None = None
    sinks: bool = False


def draw_held(generator: torch.Generator, most: int) -> HeldChunks:
    """Draw a cache: half of them hold all, the others 1 to `most` chunks, half with sinks."""
    kind = torch.rand((), generator=generator)
    window = 1 + int(torch.randint(most, (), generator=generator))
    return HeldChunks() if kind < 0.5 else HeldChunks(window, bool(kind > 0.75))


class ChunkAttention:
    """Self-attention of a transformer whose batch is frames, so that each has its own noise level.

    Frames come film by film, those of a film first clean and then noisy.

    Args:
        model: Transformer that attends with this.
        chunk: Frames of a chunk.
        grid: Rows and columns of tokens of a frame.

    Attributes:
        frames: Frames of a film.
        held: Chunks that a cache would hold.
    """

    def __init__(self, model: WanTransformer3DModel, chunk: int, grid: tuple[int, int]) -> None:
        self.sections = (model.rope.t_dim, model.rope.h_dim, model.rope.w_dim)
        self.chunk = chunk
        self.grid = grid
        self.frames = chunk
        self.held = HeldChunks()

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attend to the chunk itself and to the clean chunks that are held; all [2 B F, N, D]."""
        x = hidden_states
        made = (attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(x)), attn.to_v(x))
        q, k, v = (
            y.unflatten(0, (-1, 2, self.frames)).unflatten(-1, (attn.heads, -1)) for y in made
        )  # [B, 2, F, N, H, D]
        numbers = torch.arange(self.frames)
        q, k = self.turn(q, numbers), self.turn(k, numbers)
        outs = []
        for start in range(0, self.frames, self.chunk):
            own = slice(start, start + self.chunk)
            keys = torch.cat([self._seen(k, start, turned=True), k[:, :, own]], 2)
            values = torch.cat([self._seen(v, start), v[:, :, own]], 2)
            outs.append(attend(q[:, :, own], keys, values))
        out = torch.cat(outs, 2).flatten(-2).flatten(0, 2)
        found: Tensor = attn.to_out[1](attn.to_out[0](out))
        return found

    def _seen(self, x: Tensor, start: int, *, turned: bool = False) -> Tensor:
        """Return clean frames that the chunk from `start` on attends to, for both halves.

        Args:
            x: Keys or values [B, 2, F, N, H, D].
            start: First frame of the chunk.
            turned: Whether sinks are rotated on, so that they lie next to the window.
        """
        clean, width = x[:, :1], self.held.window
        oldest = 0 if width is None else max(start - width * self.chunk, 0)
        held = clean[:, :, oldest:start]
        if self.held.sinks and oldest >= self.chunk:
            sinks = clean[:, :, : self.chunk]
            if turned:
                sinks = self.turn(sinks, torch.full((self.chunk,), oldest - self.chunk), rows=False)
            held = torch.cat([sinks, held], 2)
        return held.expand(-1, 2, *held.shape[2:])

    def turn(self, x: Tensor, numbers: Tensor, *, rows: bool = True) -> Tensor:
        """Rotate tokens as the model's rotary embedding does.

        Args:
            x: Queries or keys [..., F, N, H, D].
            numbers: Number of every frame, int64 [F].
            rows: Whether to rotate by row and column too.
        """
        places = [numbers, *(torch.arange(size) * rows for size in self.grid)]
        angles = torch.cat(
            [
                place.flatten()[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
                for place, width in zip(torch.meshgrid(*places, indexing="ij"), self.sections, strict=True)
            ],
            -1,
        ).view(len(numbers), -1, 1, x.shape[-1] // 2)
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend over all tokens of all frames, each [B, 2, F, N, H, D], in two matrix products."""
    rows, keys, values = (x.flatten(2, 3).transpose(2, 3) for x in (q, k, v))  # [B, 2, H, T, D]
    out = (rows * rows.shape[-1] ** -0.5 @ keys.mT).softmax(-1) @ values
    found: Tensor = out.transpose(2, 3).view_as(q)
    return found


def predict(model: WanTransformer3DModel, clean: Tensor, noisy: Tensor, levels: Tensor, text: Tensor) -> Tensor:
    """Return the clean frames that the transformer makes of noisy ones, after clean ones.

    Args:
        model: Transformer with a `ChunkAttention` whose `frames` is F.
        clean: Frames of the history, [B, C, F, H, W].
        noisy: Frames to denoise, like `clean`.
        levels: Noise level of every frame, in 0..1, [B, F].
        text: Text embeddings of every frame, [B, F, S, E].
    """
    times = 1000 * torch.cat([torch.zeros_like(levels), levels], 1).flatten()
    frames = torch.cat([clean, noisy], 2).transpose(1, 2).flatten(0, 1)[:, :, None]
    words = torch.cat([text, text], 1).flatten(0, 1)
    out = model(frames, times, words, return_dict=False)[0].unflatten(0, (len(clean), -1))
    found: Tensor = out[:, clean.shape[2] :, :, 0].transpose(1, 2)
    return found


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

    call = CALL

    def __init__(self, settings: Settings, folder: Path) -> None:
        films = draw_films(settings.examples, settings.seed + 1, held=False)
        held = draw_films(HELD, settings.seed + 2, held=True)
        super().__init__(settings, folder, films, held, FRAMES)
        self.levels = torch.tensor(SAMPLER.levels)

    def chunk_ids(self, films: list[Film]) -> dict[str, Tensor]:
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
        return {
            "latents": self.latents[chosen],
            **self.chunk_ids([self.films[i] for i in chosen]),
            "own": max(int(torch.randint(4, (), generator=generator)) - 1, 0),
            "held": draw_held(generator, 3),
        }

    def loss(self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator) -> Tensor:
        """Return the mean square error of clean frames."""
        own = drawn["own"] if self.step >= _OWN_FROM * self.settings.steps else 0
        self.attention(models["transformer"]).held = drawn["held"]
        return self._error(models, drawn["latents"].float(), drawn, generator, own)

    def _error(
        self, models: nn.ModuleDict, clean: Tensor, drawn: Mapping[str, Any], generator: torch.Generator, own: int
    ) -> Tensor:
        """Return the error after histories that the model has made anew this many times."""
        states = self.embed(models, drawn).unflatten(0, (len(clean), -1))
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
            name: float(self._error(models, self.held_latents, said, seeded(5), own))
            for name, own in (("held_loss", 0), ("held_own", 2))
        }

    def pipeline(self, models: nn.ModuleDict) -> WanPipeline:
        """Put the pipeline together."""
        transformer: Any = models["transformer"]
        transformer.set_attn_processor(WanAttnProcessor())
        return self.assemble(models, SAMPLER.shift)

    def export(self, models: nn.ModuleDict, directory: Path) -> None:
        """Save the pipeline in bfloat16, with what a stream needs."""
        super().export(models, directory)
        path = directory / "diffcache.json"
        write_json(path, read_json(path) | {"stream": STREAM})
