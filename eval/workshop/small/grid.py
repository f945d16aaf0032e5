"""Lay samples of small models out in a grid, each over its text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont


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
