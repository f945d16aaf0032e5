"""Film with the shipped causal model under every policy, and judge what the films keep."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from diffusers import WanPipeline
from numpy.typing import NDArray
from torch import Tensor

from diffcache.eval.metrics.intervals import mean_interval, share_interval
from diffcache.eval.record import Progress, Setting
from diffcache.eval.workshop.parts import Parts
from diffcache.eval.workshop.small.shipping import loader
from diffcache.eval.workshop.small.sticker_causal import CALL, CHUNK, SAMPLER
from diffcache.eval.workshop.small.sticker_judge import read_faults
from diffcache.eval.workshop.small.sticker_wan import draw_films
from diffcache.eval.workshop.video.rows import Row
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.pipelines.shipped_models import MODELS
from diffcache.pipelines.streaming_vae import WanDecoder
from diffcache.video import VideoPolicy

DIRECTORY = MODELS / "sticker-causal"
EVERY = 12  # frames from one that is judged to the next
STILL = 0.5  # levels of 255 below which a frame stands still
SIZE = (8, 8)  # of latents
load = loader(WanPipeline, DIRECTORY)


def held_sentences(samples: int, seed: int = 0) -> list[str]:
    """Return sentences of held-out combinations of object and ground, of films drawn by seed."""
    return [film.caption_at(0) for film in draw_films(samples, seed, held=True)]


class Rollouts:
    """Films of sentences, made with the same noise under every policy; `pipe` of None is the shipped pipeline."""

    def __init__(self, said: Sequence[str], setting: Setting, seed: int = 0, pipe: Any = None) -> None:
        self.pipe = (pipe or load(setting.dtype)).to(setting.device)
        self.said, self.seed = list(said), seed

    def video(self) -> CausalVideo:
        """Return a video that films with the transformer."""
        return CausalVideo(self.pipe.transformer, chunk=CHUNK, sampler=SAMPLER)

    @cached_property
    def text(self) -> Tensor:
        """Embeddings of the sentences, `[B, S, E]`."""
        found: Tensor = self.pipe.encode_prompt(
            self.said, do_classifier_free_guidance=False, max_sequence_length=CALL["max_sequence_length"]
        )[0]
        return found

    @torch.no_grad()
    def films(self, video: CausalVideo, policy: VideoPolicy, chunks: int) -> Tensor:
        """Return films under a policy, uint8 `[B, F, 64, 64, 3]`, on the CPU."""
        session = video.session(self.text, policy=policy, seed=self.seed, size=SIZE, read_once=True)
        decoder = WanDecoder(self.pipe.vae)
        made = [decoder.decode(session.next()).float().cpu() for _ in range(chunks)]
        film = torch.cat(made, 2).clamp(-1, 1)
        return ((film + 1) * 127.5).round().permute(0, 2, 3, 4, 1).byte()

    def table(self, rows: Sequence[Row], chunks: int, kept: Parts, progress: Progress) -> dict[str, Any]:
        """Return the scores of every row's films of `chunks` chunks, by name; rows in `kept` were made before."""
        found: dict[str, Any] = {}
        with self.video() as video:
            for number, row in enumerate(rows):
                progress(number, len(rows), row.name)
                make = partial(self._row, video, row.policy, chunks)
                found[row.name] = kept.take(f"films: {row.name}", make)
        return found

    def _row(self, video: CausalVideo, policy: VideoPolicy, chunks: int) -> dict[str, Any]:
        return judged(self.films(video, policy, chunks), self.said)


def judged(films: Tensor, said: Sequence[str]) -> dict[str, Any]:
    """Return what films, uint8 `[B, F, 64, 64, 3]`, keep of their sentences and of their first colors.

    `right` is the share of every twelfth frame of the whole film in which the judge finds nothing wrong,
    `late`, the same of the last quarter, both with intervals over films; `drift`, the mean distance of the
    colors of the last quarter from those of the first `EVERY` frames; `motion`, the mean distance of a
    frame of the last quarter from the next; all in levels of 255; and `static`, the share of these that
    move less than `STILL`.
    """
    right = frames_right(films[:, EVERY - 1 :: EVERY].numpy(), said)
    quarter = -max(right.shape[1] // 4, 1)
    last = films[:, -max(films.shape[1] // 4, 1) :]
    moves = last.float().diff(dim=1).abs().mean((2, 3, 4))  # [B, F - 1]
    change = (_colors(last) - _colors(films[:, :EVERY])).square().mean(1).sqrt()
    return {
        "right": share_interval(right).to_dict(),
        "late": share_interval(right[:, quarter:]).to_dict(),
        "drift": mean_interval(change, bounds=(0.0, 255.0)).to_dict(),
        "motion": mean_interval(moves.mean(1), bounds=(0.0, 255.0)).to_dict(),
        "static": share_interval(moves < STILL).to_dict(),
    }


def frames_right(films: NDArray[np.uint8], said: Sequence[str]) -> Tensor:
    """Tell in which frames, uint8 `[B, F, 64, 64, 3]`, the judge finds nothing wrong, bool `[B, F]`."""
    texts = [text for text in said for _ in range(films.shape[1])]
    wrong = read_faults(texts, np.ascontiguousarray(films.reshape(-1, *films.shape[2:])))
    right = torch.tensor([not faults for faults in wrong])
    return right.reshape(films.shape[:2])


def films_right(films: Tensor, prompts: Sequence[str]) -> Tensor:
    """Reward films with 1 if the judge finds nothing wrong in any frame, else with 0, float64 [N].

    Films are uint8 [N, F, 3, 64, 64], with a sentence each.
    """
    return frames_right(films.permute(0, 1, 3, 4, 2).cpu().numpy(), prompts).all(1).double()


def _colors(films: Tensor) -> Tensor:
    """Return mean and standard deviation of each channel, `[B, 6]`."""
    pixels = films.float().flatten(1, 3)
    return torch.cat([pixels.mean(1), pixels.std(1)], 1)
