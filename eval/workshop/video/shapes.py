"""Judge films of the causal shapes model: what they keep, and how things move.

>>> truth = draw(8, 60, torch.Generator().manual_seed(HELD_OUT))
>>> by_slice(judge(films, truth), 24)["size"]  # [8, 3], 1.0 where the size was kept

Every number is read from pixels by what the generator of the films guarantees, with no network:
only the shape is colored, so that the color's distance from gray is how much of a pixel it covers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from diffcache.pipelines.small.causal_scenes import (
    CHROMA,
    CHUNK,
    COLORS,
    SHAPES,
    SIZE,
    Clips,
    chroma,
    covers,
    mark_of,
)
from diffcache.psnr import decibels

STILL = 0.2  # pixels a frame below which a film is static
ALIKE = 0.9  # least likeness of a shape and its template
_FAINT = 0.15  # cover below which a pixel shows no shape
_KNOWN = 4.0  # radius that areas and centers of templates are measured at, in pixels


@dataclass(frozen=True)
class Sight:
    """Shape and color that frames show.

    Attributes:
        cover: Share of every pixel that the shape covers, 0..1, float32 `[B, F, 24, 24]`.
        area: Pixels that the shape covers, float32 `[B, F]`.
        center: Center of the covered area, across and down, in pixels, float32 `[B, F, 2]`.
        hue: Hue of the shape, degrees, float32 `[B, F]`.
    """

    cover: Tensor
    area: Tensor
    center: Tensor
    hue: Tensor


def see(films: Tensor) -> Sight:
    """Find the shape in every frame.

    Args:
        films: Films in -1..1, `[B, 3, F, 24, 24]`.

    Raises:
        ValueError: If films have another shape.
    """
    if films.dim() != 5 or films.shape[1] != 3 or films.shape[3:] != (SIZE, SIZE):
        raise ValueError(f"films={list(films.shape)}: must be [B, 3, F, {SIZE}, {SIZE}]")
    color = chroma(films)
    depth = color.square().sum(1).sqrt() / CHROMA
    cover = torch.where(depth < _FAINT, 0.0, depth.clamp(max=1))
    area = cover.sum((2, 3))
    x, y = (color * (cover > 0)[:, None]).sum((3, 4)).unbind(1)
    return Sight(cover, area, _centers(cover), torch.rad2deg(torch.atan2(y, x)))


def likeness(sight: Sight) -> Tensor:
    """Return how much every frame's shape is like each of `SHAPES`, 0..1, `[B, F, 4]`.

    It is the cosine between the cover that is seen and that of a shape of the same center and area.
    """
    kinds = torch.arange(len(SHAPES))
    known = covers(kinds, torch.full((len(SHAPES), 2), SIZE / 2), torch.tensor(_KNOWN))
    # A triangle's center of area is not where it is drawn round.
    lag = (_centers(known) - SIZE / 2) / _KNOWN
    radius = (sight.area[..., None] / known.sum((1, 2))).sqrt() * _KNOWN
    place = sight.center[:, :, None] - lag * radius[..., None]
    template = covers(kinds.expand(radius.shape), place, radius).flatten(3)
    seen = sight.cover.flatten(2)[:, :, None]
    lengths = template.norm(dim=-1) * seen.norm(dim=-1)
    found: Tensor = (template * seen).sum(-1) / lengths.clamp(min=1e-6)
    return found


def _centers(cover: Tensor) -> Tensor:
    """Return centers of area, across and down, in pixels, `[..., 2]`."""
    axis = torch.arange(SIZE) + 0.5
    moments = [(cover * axis).sum((-2, -1)), (cover * axis[:, None]).sum((-2, -1))]
    return torch.stack(moments, -1) / cover.sum((-2, -1)).clamp(min=1e-6)[..., None]


def shows(films: Tensor, shapes: Tensor, colors: Tensor) -> Tensor:
    """Return which frames show what a prompt states, bool `[B, F]`.

    A frame shows a shape where no other is more like it and the likeness is 0.9 or more; its color
    is that of the nearest color word.

    Args:
        films: Films in -1..1, `[B, 3, F, 24, 24]`.
        shapes: Number of the stated shape in `SHAPES`, int64 `[B, F]`.
        colors: Number of the stated color word in `COLORS`, int64 `[B, F]`.
    """
    sight = see(films)
    like, kind = likeness(sight).max(-1)
    apart = _turn(sight.hue[..., None] - torch.tensor(list(COLORS.values()))).abs()
    return (kind == shapes) & (like >= ALIKE) & (apart.argmin(-1) == colors)


def judge(films: Tensor, truth: Clips) -> dict[str, Tensor]:
    """Return what every frame kept of what it should show, and how the shape moved.

    Args:
        films: Films in -1..1, `[B, 3, F, 24, 24]`; their first frames may be given ones.
        truth: Clips that the films were to show, of as many frames.

    Returns:
        float32 `[B, F]` each: `identity`, whether shape and color are as stated; `hue_error`,
        degrees; `size`, area against the truth's; `wall_db`,
        PSNR against the first frame, of pixels away from the shape in both;
        `mark`, share of the mark's cells that are right; `speed`, pixels that the center moved
        since the frame before, against the truth (NaN in the first frame); `moved`, the same in
        pixels.

    Raises:
        ValueError: If films and truth do not fit.
    """
    sight = see(films)
    if sight.area.shape != truth.shapes.shape:
        raise ValueError(
            f"films={list(films.shape)}: truth is of {list(truth.shapes.shape)} clips and frames"
        )
    wanted = see(truth.film()).area
    moved = torch.full_like(sight.area, torch.nan)
    moved[:, 1:] = sight.center.diff(dim=1).norm(dim=-1)
    bits = mark_of(films) > 0.65  # halfway between the grays of the cells
    near = max_pool2d(sight.cover, 3, 1, 1) > 0  # the edge of a shape is fainter than what is seen
    bare = ~near & ~near[:, :1]
    wrong = ((films.float() - films[:, :, :1].float()) / 2).square().mean(1) * bare
    error = wrong.sum((2, 3)) / bare.sum((2, 3)).clamp(min=1)
    return {
        "identity": shows(films, truth.shapes, truth.colors).float(),
        "hue_error": _turn(sight.hue - truth.hue).abs(),
        "size": sight.area / wanted,
        "wall_db": decibels(error),
        "mark": (bits == truth.mark[:, None]).float().mean((2, 3)),
        "speed": moved / truth.velocity.norm(dim=1)[:, None],
        "moved": moved,
    }


def _turn(degrees: Tensor) -> Tensor:
    """Return angles in -180..180."""
    return (degrees + 180) % 360 - 180


def by_slice(found: Mapping[str, Tensor], frames: int) -> dict[str, Tensor]:
    """Return what `judge` found for each slice of time, `[B, slices]` each.

    Speed is the median over a slice, which the frames of a bounce do not move; the others are
    means. To them come `static`, whether the shape moved less than 0.2 pixels a frame, and `jump`,
    how far it moved where a chunk begins against how far within chunks, 1 where seams do not show.

    Args:
        found: Result of `judge`.
        frames: Frames of a slice; the last one may have fewer.
    """
    parts = {key: values.split(frames, 1) for key, values in found.items()}
    table = {
        key: torch.stack([_middle(part) if key == "speed" else part.nanmean(1) for part in cut], 1)
        for key, cut in parts.items()
    }
    seam = torch.arange(found["moved"].shape[1]) % CHUNK == 0
    table["static"] = (table["moved"] < STILL).float()
    table["jump"] = torch.stack([
        _middle(part[:, at]) / _middle(part[:, ~at]).clamp(min=1e-6)
        for part, at in zip(parts["moved"], seam.split(frames), strict=True)
    ], 1)  # fmt: skip
    return table


def _middle(values: Tensor) -> Tensor:
    return values.nanmedian(1).values


def switch_latency(films: Tensor, shapes: Tensor, colors: Tensor, *, last: int = CHUNK) -> Tensor:
    """Return the chunks after a switch until all frames of one show the new prompt, `[B]`.

    0 is the first chunk under the new prompt, infinity where none shows it.

    Args:
        films: Frames from the switch on, in -1..1, `[B, 3, F, 24, 24]`.
        shapes: Number of each new shape in `SHAPES`, int64 `[B]`.
        colors: Number of each new color word in `COLORS`, int64 `[B]`.
        last: Frames of a chunk.
    """
    stated = (numbers[:, None].expand(-1, films.shape[2]) for numbers in (shapes, colors))
    right = torch.stack([part.all(1) for part in shows(films, *stated).split(last, 1)], 1)
    first = right.float().argmax(1).float()
    return torch.where(right.any(1), first, torch.inf)
