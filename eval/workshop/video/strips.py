"""Draw frames of held-out films, one strip for every policy.

    python -m diffcache.eval.workshop.video.strips

The films are the first ones of the table's, not chosen ones.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from diffcache.command import Threads, script
from diffcache.eval.record import FOLDER
from diffcache.eval.workshop.video.rollouts import Rollouts
from diffcache.eval.workshop.video.rows import ROWS
from diffcache.pipelines.demo.console import progress
from diffcache.pipelines.small.causal import load

FRAMES = (0, 3, 12, 24, 48, 120, 240, 360, 479)
FILMS = 3


def draw_strips(films: Mapping[str, Tensor], frames: Sequence[int], file: Path) -> None:
    """Draw frames of films, one row for every name, the films of a name side by side.

    Args:
        films: Name -> films in -1..1, `[B, 3, F, H, W]`.
        frames: Frames that are shown.
        file: PNG that is written.
    """
    from matplotlib.figure import Figure

    count = len(next(iter(films.values())))
    figure = Figure(figsize=(1.2 + 0.45 * count * len(frames), 0.5 * len(films) + 0.4))
    axes = figure.subplots(len(films), count, squeeze=False)
    for row, (name, film) in zip(axes, films.items(), strict=True):
        row[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=7)
        for axis, one in zip(row, film, strict=True):
            strip = torch.cat([one[:, frame] for frame in frames], -1)  # [3, H, frames * W]
            axis.imshow((strip.permute(1, 2, 0) + 1).div(2).clamp(0, 1), interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
    width = next(iter(films.values())).shape[-1]
    for axis in axes[-1]:
        axis.set_xticks([(n + 0.5) * width for n in range(len(frames))], map(str, frames))
        axis.tick_params(length=0, labelsize=6)
    figure.tight_layout(pad=0.3)
    figure.savefig(file, dpi=150)


def strips(
    out: Annotated[Path, typer.Option(help="PNG that is written.")] = FOLDER / "causal-strips.png",
    threads: Threads = 1,
) -> None:
    """Roll out the first held-out films with every policy and draw frames of them."""
    torch.set_num_threads(threads)
    rollouts = Rollouts(load(), FILMS)
    films = {"ground truth": rollouts.groups[0].lasting(FRAMES[-1] + 1).film()}
    with rollouts.model.video() as video, progress("strips") as show:
        for number, row in enumerate(ROWS):
            show(number, len(ROWS), row.name)
            films[row.name] = rollouts.film(video, row.policy, 0, FRAMES[-1] + 1)
    draw_strips(films, FRAMES, out)


main = script(strips)

if __name__ == "__main__":
    sys.exit(main())
