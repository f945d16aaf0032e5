"""Judge films of the causal video model, with all history held, by what their prompts state."""

from __future__ import annotations

import torch
from torch import Tensor

from diffcache.eval.workshop.video.rollouts import Rollouts
from diffcache.eval.workshop.video.shapes import judge
from diffcache.pipelines.small.causal import ShapesCausal
from diffcache.pipelines.small.causal_scenes import FRAMES
from diffcache.video import FullHistory


def measure(model: ShapesCausal, steps: int, samples: int, seed: int) -> dict[str, Tensor]:
    """Return what films of as many frames as a training film has show.

    Args:
        model: The model.
        steps: Steps of a chunk, those of its sampler.
        samples: Number of films.
        seed: Seed of the draw, which no training reached, and of the noise.

    Returns:
        `whole_right`, films whose every frame shows the stated shape and color and the mark of the
        first frames, bool `[N]`; `frame_right`, bool `[N, F]`; `mark`, share of its cells, `[N]`;
        `wall_db`, dB, `[N]`.
    """
    rollouts = Rollouts(model, samples, seed)
    found: dict[str, list[Tensor]] = {"frame_right": [], "mark": [], "wall_db": []}
    with model.video() as video:
        assert len(video.sampler.levels) == steps
        for group, truth in enumerate(rollouts.groups):
            film = rollouts.film(video, FullHistory(), group, FRAMES)
            kept = judge(film, truth.lasting(FRAMES))
            found["frame_right"].append(kept["identity"] > 0)
            found["mark"].append(kept["mark"])
            found["wall_db"].append(kept["wall_db"][:, -1])
    columns = {key: torch.cat(parts) for key, parts in found.items()}
    whole = columns["frame_right"].all(1) & (columns["mark"] == 1).all(1)
    columns["mark"] = columns["mark"].mean(1)
    return {"whole_right": whole, **columns}
