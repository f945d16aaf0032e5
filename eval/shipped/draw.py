"""Draw samples of the shipped models, each from noise of its own, and lay them out in a grid."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, FluxKontextPipeline, WanPipeline
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from tqdm import tqdm

from diffcache.pipelines.small import flux, kontext, wan


def outputs_of(
    pipe: DiffusionPipeline, columns: Sequence[Any], steps: int, seed: int, batch: int, **call: Any
) -> Iterator[Any]:
    """Call a pipeline on some samples at a time; sample i starts from the noise of seed + i.

    Args:
        pipe: The pipeline.
        columns: First arguments of the call, each with an entry for every sample.
        steps: Sampling steps.
        seed: Seed of the first sample.
        batch: Samples drawn at once.
        **call: Further arguments.
    """
    for start in tqdm(range(0, len(columns[0]), batch), desc=f"{steps} steps", leave=False):
        part = [column[start : start + batch] for column in columns]
        seeds = range(seed + start, seed + start + len(part[0]))
        noise = [torch.Generator("cpu").manual_seed(number) for number in seeds]
        yield pipe(*part, num_inference_steps=steps, generator=noise, **call)


def draw_pictures(
    pipe: DiffusionPipeline, prompts: Sequence[Any], *, steps: int, seed: int, batch: int = 32,
    call: Mapping[str, Any] = flux.CALL,
) -> list[Image.Image]:  # fmt: skip
    """Draw one picture for each prompt, a text or class; see `outputs_of`."""
    made = outputs_of(pipe, [list(prompts)], steps, seed, batch, **call)
    return [picture for output in made for picture in output.images]


def draw_films(
    pipe: WanPipeline, prompts: Sequence[str], *, steps: int, seed: int, **call: Any
) -> Tensor:
    """Film each prompt; see `outputs_of`.

    Args:
        pipe: The pipeline.
        prompts: Prompts to film.
        steps: Sampling steps.
        seed: Seed of the first film.
        **call: Arguments that replace those of `wan.CALL`.

    Returns:
        Films uint8 [B, F, 64, 64, 3].
    """
    made = outputs_of(pipe, [list(prompts)], steps, seed, 16, **{**wan.CALL, **call})
    films = [torch.from_numpy(output.frames) for output in made]
    return torch.cat(films).mul(255).round().to(torch.uint8)


def edit_pictures(
    pipe: FluxKontextPipeline, before: Tensor, texts: Sequence[str], *, steps: int, seed: int,
    batch: int = 16, each: Callable[[int], None] = lambda count: None,
) -> Tensor:  # fmt: skip
    """Edit pictures; see `outputs_of`.

    Args:
        pipe: The pipeline.
        before: Reference pictures, uint8 [B, 3, 64, 64].
        texts: One instruction for each.
        steps: Sampling steps.
        seed: Seed of the first picture.
        batch: Pictures edited at once.
        each: Callback that is given the number of pictures of every run, after it.

    Returns:
        The results, uint8 [B, 3, 64, 64].
    """
    columns, made = (before.float() / 255, list(texts)), []
    for output in outputs_of(pipe, columns, steps, seed, batch, output_type="np", **kontext.CALL):
        each(len(output.images))
        made.append(torch.from_numpy(np.round(output.images * 255).astype(np.uint8)))
    return torch.cat(made).permute(0, 3, 1, 2).contiguous()


def image_of(picture: Tensor) -> Image.Image:
    """Return a picture, uint8 [3, H, W], as PIL takes it."""
    return Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())


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
    return grid.quantize(128, dither=Image.Dither.NONE)
