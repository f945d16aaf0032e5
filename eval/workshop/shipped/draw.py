"""Draw samples of the shipped models, each from noise of its own."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, FluxKontextPipeline
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from diffcache.eval.workshop.small import sticker_flux, sticker_kontext


def outputs_of(
    pipe: DiffusionPipeline, columns: Sequence[Any], steps: int, seeds: Sequence[int], batch: int, **call: Any
) -> Iterator[Any]:
    """Call a pipeline on some samples at a time, each from noise of a seed of its own.

    Args:
        pipe: The pipeline.
        columns: First arguments of the call, each with an entry for every sample.
        steps: Sampling steps.
        seeds: Seed of the noise of every sample.
        batch: Samples drawn at once.
        **call: Further arguments.
    """
    for start in tqdm(range(0, len(columns[0]), batch), desc=f"{steps} steps", leave=False):
        part = [column[start : start + batch] for column in columns]
        own = seeds[start : start + batch]
        noise = [torch.Generator("cpu").manual_seed(number) for number in own]
        yield pipe(*part, num_inference_steps=steps, generator=noise, **call)


def draw_pictures(
    pipe: DiffusionPipeline, prompts: Sequence[Any], *, steps: int, seeds: Sequence[int], call: Mapping[str, Any]
) -> list[Image.Image]:
    """Draw one picture for each prompt, a text or class; see `outputs_of`."""
    made = outputs_of(pipe, [list(prompts)], steps, seeds, 32, **call)
    return [picture for output in made for picture in output.images]


def draw_stickers(
    pipe: DiffusionPipeline, texts: Sequence[str], *, steps: int, seeds: Sequence[int]
) -> NDArray[np.uint8]:
    """Draw one picture for each sentence, with guidance; see `outputs_of`.

    Args:
        pipe: The pipeline.
        texts: Sentences.
        steps: Sampling steps.
        seeds: Seed of the noise of every picture.

    Returns:
        Pictures, uint8 [B, 64, 64, 3].
    """
    call = {**sticker_flux.CALL, "output_type": "np"}
    unsaid = [call.pop("negative_prompt")] * len(texts)  # as many as sentences, in a batch
    made = outputs_of(pipe, [list(texts), list(texts), unsaid], steps, seeds, 32, **call)
    return np.concatenate([np.round(output.images * 255).astype(np.uint8) for output in made])


def edit_stickers(
    pipe: FluxKontextPipeline,
    before: NDArray[np.uint8],
    texts: Sequence[str],
    *,
    steps: int,
    seeds: Sequence[int],
    batch: int = 32,
    each: Callable[[int], None] = lambda count: None,
) -> NDArray[np.uint8]:
    """Edit pictures of stickers, with guidance; see `outputs_of`.

    Args:
        pipe: The pipeline.
        before: Reference pictures, uint8 [B, 64, 64, 3].
        texts: One instruction for each.
        steps: Sampling steps.
        seeds: Seed of the noise of every picture.
        batch: Pictures edited at once.
        each: Callback that is given the number of pictures of every run, after it.

    Returns:
        Pictures, uint8 [B, 64, 64, 3].
    """
    call = {**sticker_kontext.CALL, "output_type": "np"}
    unsaid = [call.pop("negative_prompt")] * len(texts)
    shown = torch.from_numpy(before).permute(0, 3, 1, 2).float() / 255
    columns, made = [shown, list(texts), list(texts), unsaid], []
    for output in outputs_of(pipe, columns, steps, seeds, batch, **call):
        each(len(output.images))
        made.append(np.round(output.images * 255).astype(np.uint8))
    return np.concatenate(made)


def draw_grid(
    cells: Sequence[Sequence[Image.Image]], texts: Sequence[str], *, scale: int, columns: int
) -> Image.Image:
    """Lay samples out in a grid, enlarged, each over its text.

    Args:
        cells: Pictures of each sample, which stand side by side.
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
            enlarged = picture.resize((side, side), Image.Resampling.NEAREST)
            grid.paste(enlarged, (x + place * side, y))
        pen.multiline_text((x, y + side + 2), text, fill="black", font=font, spacing=1)
    return grid
