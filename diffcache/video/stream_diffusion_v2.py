"""StreamDiffusionV2's cache: sinks that follow the newest frames, and a rolling window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kv.layer import KVLayer
from diffcache.kv.positions import Refresh
from diffcache.kv.recipe import Recipe
from diffcache.kv.store import KVStore
from diffcache.method import check_int
from diffcache.ranges import Cosine, Count, Whole
from diffcache.video.policy import Prompts, VideoPolicy


@dataclass(frozen=True)
class StreamDiffusionV2(VideoPolicy):
    """Hold sinks and the latest frames; a frame that is unlike a sink takes the sink's place.

    Each layer decides for itself, by the mean of two cosines: of keys and of values, both averaged
    over the tokens of a frame. A frame that becomes a sink is not held in the window as well. The
    first frames are sinks until then. Numbers of frames begin anew at `refresh`.

    In the paper every sink below the threshold is replaced, so that a frame may be held more than
    once. In the released code only the sink of the lowest cosine is (`replaces="least"`), and keys
    keep the phases of their own count at a refresh (`phases="stay"`).

    Departures: with both, too, other frames come to be held than in the released code wherever
    sinks are replaced. A frame is compared at the start of the next chunk, as it was finished, so
    that it still sees the sink it replaces and one frame of the window less; the released code
    compares it as it comes in, noisy. Keys are compared before rotation, there after. Nothing is
    compared until the cache is full; there first frames are compared with sinks that are still
    empty. The frames of a longer chunk are compared one after the other, where the released code
    compares chunks of one frame alone. What a frame is compared by is not said in the paper and
    taken from the code.

    Args:
        window: Latest frames that are held beside the chunk.
        sinks: Frames that are held beside the window; 0 for a rolling window alone.
        threshold: Cosine below which a sink is replaced; -1 for never.
        refresh: Count of frames at which numbers begin anew.
        back: Count that they begin with, at least the frames of window and chunk but one.
        replaces: Sinks that a frame takes the place of: `all` below the threshold, or of those the
            one `least` alike.
        phases: Whether keys that are held `move` with the numbers at a refresh, or `stay`.

    Raises:
        ValueError: If `back` is less than the window, or not below `refresh`.

    Reference: StreamDiffusionV2, arXiv 2511.07399 (sink-token-guided rolling KV cache, RoPE
    refresh), and its released code.
    """

    window: Count = 2
    sinks: Whole = 3
    threshold: Cosine = 0.2
    refresh: int = 50
    back: int = 5
    replaces: Literal["all", "least"] = "all"
    phases: Literal["move", "stay"] = "move"

    def check(self) -> None:
        """Raise ValueError unless numbers begin anew within a run."""
        check_int("back", self.back, self.window)
        check_int("refresh", self.refresh, self.back + 1)

    def recipe(self, unit: int) -> Recipe:
        """Return the recipe that rotates by the refreshed count; `begin` drops frames."""
        positions = Refresh(self.refresh, self.back, self.phases == "stay")
        return Recipe(self.name, space="pre", positions=positions)

    @property
    def most_recached(self) -> int:
        """Frames that `back` leaves numbers for, with sinks that stay."""
        return self.back + 1

    def begin(self, store: KVStore, unit: int, prompts: Prompts = ()) -> None:
        """Hold the sinks and the window, in this order; raise ValueError if `back` is too small for the chunks."""
        room = self.sinks + self.window
        new = max(layer.held for layer in store.layers) // unit - room  # an error may leave some layers as they were
        if new <= 0:
            return
        if self.window + new - 1 > self.back:
            raise ValueError(
                f"back={self.back}: numbers that begin anew there give out in a window of "
                f"{self.window} and a chunk of {new} frames; set back={self.window + new - 1}"
            )
        kept = [self._kept(layer, unit) for layer in store.layers]
        for layer, frames in zip(store.layers, kept, strict=True):
            tokens = frames[..., None] * unit + torch.arange(unit, device=frames.device)
            layer.replace(layer.read().gather(tokens.flatten(1)[:, None]))

    def _kept(self, layer: KVLayer, unit: int) -> Tensor:
        """Return the frames of a layer that stay, by their place in it, int64 [B, F]."""
        slots = layer.read()
        marks = [_marks(column, unit) for column in (slots.k, slots.v)]
        batch, count = marks[0].shape[:2]
        room = self.sinks + self.window
        held = torch.arange(room, device=slots.k.device).expand(batch, -1)
        sinks, window = held.split([self.sinks, self.window], 1)
        for place in range(room, count):
            new = torch.full((batch, 1), place, device=held.device)
            if self.sinks:
                goes = self._unlike(marks, sinks, place)
                sinks = new.where(goes, sinks)
                came = goes.any(1, keepdim=True)
            else:
                came = torch.zeros_like(new, dtype=torch.bool)
            window = window.where(came, torch.cat([window[:, 1:], new], 1))
        return torch.cat([sinks, window], 1)

    def _unlike(self, marks: list[Tensor], sinks: Tensor, place: int) -> Tensor:
        """Return which sinks a frame takes the place of, bool [B, sinks]."""
        rows = torch.arange(len(sinks), device=sinks.device)[:, None]
        cosines = [functional.cosine_similarity(mark[rows, sinks], mark[:, place, None], dim=-1) for mark in marks]
        alike = (cosines[0] + cosines[1]) / 2
        below = alike < self.threshold
        if self.replaces == "least":
            below &= functional.one_hot(alike.argmin(1), self.sinks).bool()
        return below


def _marks(x: Tensor, unit: int) -> Tensor:
    """Return the mean over the tokens of each frame, float32 [B, F, H D]."""
    frames: Tensor = x.unflatten(2, (-1, unit))
    return frames.float().mean(3).transpose(1, 2).flatten(2)
