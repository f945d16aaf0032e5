"""Films of one shape that bounces about a room: some attributes a prompt states, most only history.

A prompt names the shape and its color and may change from frame to frame. Nothing but the frames
before tells the exact hue, the size, the velocity, the pattern on the wall and the four cells of a
mark in the corner, so that a cache which drops frames may lose them.

>>> clips = draw(8, 24, torch.Generator().manual_seed(HELD_OUT))
>>> films = clips.film()  # [8, 3, 24, 24, 24] in -1..1

Everything but the shape is gray, so that the hue, the center and the area of the shape can be read
exactly from any picture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from diffcache.pipelines.small.scenes import edge_distance

SIZE = 24
FRAMES, CHUNK = 24, 3
SHAPES = ("square", "triangle", "ring", "cross")
COLORS = {"red": 0.0, "yellow": 60.0, "green": 120.0, "blue": 240.0, "purple": 300.0}  # degrees
OFFSET = 20.0  # most degrees between the hue of a shape and that of its color word
RADII = (3, 4)
# Shapes move by whole pixels, so that a model this small has to learn few pictures of them.
VELOCITIES = [(x, y) for x in (-1, 0, 1) for y in (-1, 0, 1) if x or y]  # pixels a frame
CHROMA = 0.6  # distance of a shape's color from gray, in RGB of 0..1
ROOM = ((1.0, 23.0), (5.0, 23.0))  # where a shape may be: across, down
HELD_OUT = 1 << 40  # seeds from here on are never trained on

_FRAME = 0.1  # gray of the walls round the room
_WALL = 0.17  # most that the pattern differs from middle gray
_CELLS = (0.35, 0.95)  # grays of a mark's cells
_MARK = (8, 1)  # column and row of the mark, two cells by two of two pixels each
_GRAY_TO_COLOR = torch.tensor([[2.0, -1.0, -1.0], [0.0, 3**0.5, -(3**0.5)]]) / 6**0.5


@dataclass(frozen=True)
class Clips:
    """Content of B films of F frames.

    Attributes:
        shapes: Number of the shape in `SHAPES`, int64 `[B, F]`.
        colors: Number of the color word in `COLORS`, int64 `[B, F]`.
        offset: Degrees from the hue of the word, float32 `[B]`.
        radius: Pixels, float32 `[B]`.
        start: Center in the first frame, across and down, float32 `[B, 2]`.
        velocity: Pixels a frame, float32 `[B, 2]`.
        wall: Grays of the room without a shape, 0..1, float32 `[B, 24, 24]`.
        mark: Cells of the mark, bool `[B, 2, 2]`.
    """

    shapes: Tensor
    colors: Tensor
    offset: Tensor
    radius: Tensor
    start: Tensor
    velocity: Tensor
    wall: Tensor
    mark: Tensor

    @property
    def hue(self) -> Tensor:
        """Hue of the shape, degrees, float32 `[B, F]`."""
        return torch.tensor(list(COLORS.values()))[self.colors] + self.offset[:, None]

    @property
    def prompts(self) -> list[list[str]]:
        """Prompt of every frame, `[B][F]`."""
        pairs = zip(self.shapes.tolist(), self.colors.tolist(), strict=True)
        return [
            [prompt(shape, color) for shape, color in zip(*pair, strict=True)] for pair in pairs
        ]

    def centers(self) -> Tensor:
        """Return where the shape is, reflected by the walls without loss, float32 `[B, F, 2]`."""
        time = torch.arange(self.shapes.shape[1])[None, :, None]
        straight = self.start[:, None] + time * self.velocity[:, None]
        room = torch.tensor(ROOM)
        low = room[:, 0] + self.radius[:, None, None]
        width = room[:, 1] - self.radius[:, None, None] - low
        folded = (straight - low) % (2 * width)
        return low + torch.minimum(folded, 2 * width - folded)

    def film(self) -> Tensor:
        """Draw the films, float32 `[B, 3, F, 24, 24]` in -1..1."""
        cover = covers(self.shapes, self.centers(), self.radius[:, None])[:, None]
        shade = 0.5 + CHROMA * color_of(self.hue).movedim(-1, 1)[..., None, None]
        return 2 * (self.wall[:, None, None] * (1 - cover) + shade * cover) - 1

    def lasting(self, frames: int) -> Clips:
        """Return the same clips with another number of frames; the last prompt goes on."""
        at = torch.arange(frames).clamp(max=self.shapes.shape[1] - 1)
        return replace(self, shapes=self.shapes[:, at], colors=self.colors[:, at])


def prompt(shape: int, color: int) -> str:
    """Write a prompt.

    Args:
        shape: Number in `SHAPES`.
        color: Number in `COLORS`.
    """
    return f"a {list(COLORS)[color]} {SHAPES[shape]}"


def parse(text: str) -> tuple[int, int]:
    """Return the numbers of the shape and of the color that a prompt states.

    Raises:
        ValueError: If it does not name one shape and one color.
    """
    words = text.lower().split()
    found = [
        [number for number, name in enumerate(names) if name in words]
        for names in (SHAPES, tuple(COLORS))
    ]
    if any(len(numbers) != 1 for numbers in found):
        raise ValueError(
            f"prompt={text!r}: must name one of {', '.join(SHAPES)} and one of "
            f"{', '.join(COLORS)}, such as {prompt(0, 0)!r}"
        )
    return found[0][0], found[1][0]


def draw(count: int, frames: int, generator: torch.Generator, *, switched: float = 0.0) -> Clips:
    """Draw clips; the same state of the generator gives the same clips.

    Args:
        count: Number of clips.
        frames: Frames of each.
        generator: Generator on the CPU.
        switched: Share of clips whose prompt changes once, at the start of a chunk.
    """

    def even(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    def words(most: int) -> Tensor:
        return torch.randint(most, (count, 2), generator=generator)

    last = -(-frames // CHUNK)
    at = CHUNK * torch.randint(1, max(last, 2), (count, 1), generator=generator)
    later = (torch.arange(frames) >= at) & (even(count, 1) < switched)
    shapes, colors = (
        torch.where(later, pair[:, 1:], pair[:, :1])
        for pair in (words(len(SHAPES)), words(len(COLORS)))
    )
    radius = torch.tensor(RADII)[torch.randint(len(RADII), (count,), generator=generator)].float()
    room = torch.tensor(ROOM)
    low, high = room[:, 0] + radius[:, None], room[:, 1] - radius[:, None]
    start = low + torch.floor((high - low + 1) * even(count, 2))
    way = torch.randint(len(VELOCITIES), (count,), generator=generator)
    velocity = torch.tensor(VELOCITIES)[way]
    mark = even(count, 2, 2) < 0.5
    offset, waves = even(count, low=-OFFSET, high=OFFSET), even(count, 4, 2)
    return Clips(
        shapes,
        colors,
        offset,
        radius,
        torch.minimum(start, high),
        velocity.float(),
        _walls(mark, waves),
        mark,
    )


def _walls(mark: Tensor, waves: Tensor) -> Tensor:
    """Return rooms: a frame, a pattern of four slow waves, and a mark above.

    Args:
        mark: Bool `[B, 2, 2]`.
        waves: Phases and weights of the waves, 0..1, `[B, 4, 2]`.
    """
    axis = (torch.arange(SIZE) + 0.5) / SIZE
    turns = torch.tensor([[1.0, 0.3], [0.3, 1.0], [1.0, 1.0], [1.0, -1.0]])
    x, y = axis[None, None, :], axis[None, :, None]
    phase = turns[:, :1, None] * x + turns[:, 1:, None] * y + waves[:, :, :1, None]
    pattern = (waves[:, :, 1:, None] * (2 * math.pi * phase).sin()).sum(1)
    pattern = pattern * _WALL / pattern.abs().amax((1, 2), keepdim=True)
    wall = torch.full((len(mark), SIZE, SIZE), _FRAME)
    (left, right), (top, bottom) = ((int(a), int(b)) for a, b in ROOM)
    wall[:, top:bottom, left:right] = 0.5 + pattern[:, top:bottom, left:right]
    column, row = _MARK
    cells = torch.where(mark, _CELLS[1], _CELLS[0]).repeat_interleave(2, 1).repeat_interleave(2, 2)
    wall[:, row : row + 4, column : column + 4] = cells
    return wall


def covers(shapes: Tensor, centers: Tensor, radius: Tensor) -> Tensor:
    """Return how much of every pixel a shape covers, 0..1, float32 `[..., 24, 24]`.

    Args:
        shapes: Number of the shape in `SHAPES`, int64 `[...]`.
        centers: Across and down, in pixels, `[..., 2]`.
        radius: Pixels, `[...]` or what broadcasts to it.
    """
    axis = np.arange(SIZE) + 0.5
    flat = centers.reshape(-1, 2).double().numpy()
    size = radius.expand(shapes.shape).reshape(-1).double().numpy()
    kinds = shapes.reshape(-1).numpy()
    found = np.zeros((len(flat), SIZE, SIZE), np.float32)
    for kind, name in enumerate(SHAPES):
        chosen = np.flatnonzero(kinds == kind)
        u = axis[None, None, :] - flat[chosen, 0, None, None]
        v = axis[None, :, None] - flat[chosen, 1, None, None]
        u, v = np.broadcast_arrays(u, v)
        distance = edge_distance(name, u, v, size[chosen, None, None])
        found[chosen] = np.clip(0.5 - distance, 0, 1)
    return torch.from_numpy(found).reshape(*shapes.shape, SIZE, SIZE)


def color_of(hue: Tensor) -> Tensor:
    """Return the direction from gray to a hue, of length 1 in RGB, float32 `[..., 3]`.

    Args:
        hue: Degrees, `[...]`.
    """
    turn = torch.deg2rad(hue)
    return torch.stack([turn.cos(), turn.sin()], -1) @ _GRAY_TO_COLOR


def chroma(films: Tensor) -> Tensor:
    """Return how far pixels are from gray, along the two axes of `color_of`, in RGB of 0..1.

    Args:
        films: Films in -1..1, `[B, 3, ...]`.

    Returns:
        `[B, 2, ...]`.
    """
    return torch.einsum("ac,bc...->ba...", _GRAY_TO_COLOR, films.float() / 2)


def mark_of(films: Tensor) -> Tensor:
    """Return the grays of a mark's cells, 0..1, `[B, F, 2, 2]`.

    Args:
        films: Films in -1..1, `[B, 3, F, 24, 24]`.
    """
    column, row = _MARK
    cells = films.float().mean(1)[..., row : row + 4, column : column + 4] / 2 + 0.5
    return cells.reshape(*cells.shape[:2], 2, 2, 2, 2).mean((-1, -3))
