"""Draw samples of the shipped models, each from noise of its own."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from diffcache.eval.workshop.small import sticker_flux, sticker_kontext


def draw(
    pipe: DiffusionPipeline,
    columns: Sequence[Any],
    *,
    steps: int,
    seeds: Sequence[int],
    call: Mapping[str, Any],
    batch: int = 32,
) -> NDArray[np.uint8]:
    """Call a pipeline on some samples at a time, each from noise of a seed of its own.

    Args:
        pipe: The pipeline.
        columns: First arguments of the call, each with an entry for every sample.
        steps: Sampling steps.
        seeds: Seed of the noise of every sample.
        call: Further arguments.
        batch: Samples drawn at once.

    Returns:
        Pictures or films, uint8 [N, ..., 64, 64, 3].
    """
    made = []
    for start in tqdm(range(0, len(columns[0]), batch), desc=f"{steps} steps", leave=False):
        part = [column[start : start + batch] for column in columns]
        noise = [torch.Generator("cpu").manual_seed(number) for number in seeds[start : start + batch]]
        output = pipe(*part, num_inference_steps=steps, generator=noise, **{**call, "output_type": "np"})
        made.append(np.round(output[0] * 255).astype(np.uint8))
    return np.concatenate(made)


def draw_stickers(
    pipe: DiffusionPipeline,
    texts: Sequence[str],
    *,
    steps: int,
    seeds: Sequence[int],
    before: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """Draw one picture for each sentence, with guidance, or edit one by each instruction; see `draw`.

    Args:
        pipe: The pipeline.
        texts: Sentences, or instructions.
        steps: Sampling steps.
        seeds: Seed of the noise of every picture.
        before: Pictures to edit, uint8 [B, 64, 64, 3].
    """
    call = dict(sticker_flux.CALL if before is None else sticker_kontext.CALL)
    unsaid = [call.pop("negative_prompt")] * len(texts)  # as many as sentences, in a batch
    shown = [] if before is None else [torch.from_numpy(before).permute(0, 3, 1, 2).float() / 255]
    return draw(pipe, [*shown, list(texts), list(texts), unsaid], steps=steps, seeds=seeds, call=call)


def draw_grid(
    cells: Sequence[Sequence[NDArray[np.uint8]]] | NDArray[np.uint8], texts: Sequence[str], *, scale: int, columns: int
) -> Image.Image:
    """Lay samples out in a grid, enlarged, each over its text.

    Args:
        cells: Pictures of each sample, uint8 [64, 64, 3], which stand side by side.
        texts: Prompts, one for each sample.
        scale: Pixels of the grid for one of a picture.
        columns: Samples in a row.
    """
    side, gap, line = 64 * scale, 10, 18
    wide = len(cells[0]) * side
    wrapped = ["\n".join(textwrap.wrap(text, wide // 7)) for text in texts]
    high = side + line * max(text.count("\n") + 1 for text in wrapped) + gap
    rows = math.ceil(len(cells) / columns)
    grid = Image.new("RGB", (columns * (wide + gap) + gap, rows * high + gap), "white")
    pen, font = ImageDraw.Draw(grid), ImageFont.load_default(size=13)
    for index, (pictures, text) in enumerate(zip(cells, wrapped, strict=True)):
        row, column = divmod(index, columns)
        x, y = gap + column * (wide + gap), gap + row * high
        for place, picture in enumerate(pictures):
            enlarged = Image.fromarray(picture).resize((side, side), Image.Resampling.NEAREST)
            grid.paste(enlarged, (x + place * side, y))
        pen.multiline_text((x, y + side + 2), text, fill="black", font=font, spacing=1)
    return grid
