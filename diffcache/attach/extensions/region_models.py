"""The classes of denoisers that can compute a few rows, and how their arguments change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _flux_grid(given: dict[str, Any]) -> tuple[int, int]:
    ids = given["img_ids"]
    ids = ids[0] if ids.dim() == 3 else ids
    first = ids[ids[:, 0] == 0]
    height, width = (first[:, 1:].amax(dim=0) + 1).long().tolist()
    return int(height), int(width)


def _qwen_grid(given: dict[str, Any]) -> tuple[int, int]:
    shapes = given["img_shapes"][0]
    frames, height, width = shapes[0] if isinstance(shapes, list) else shapes
    return int(frames * height), int(width)


def _qwen_shapes(given: dict[str, Any], rows: int) -> dict[str, Any]:
    # which only tells it which rows are noisy: all that are present
    return {"img_shapes": [[(1, 1, rows)]] * len(given["img_shapes"])}


@dataclass(frozen=True)
class Kind:
    """Support of one class of denoisers.

    Attributes:
        grid: Reads height and width of the token grid off a call's arguments.
        reshape: Returns the other arguments to change when only M rows are given; None for none.
    """

    grid: Callable[[dict[str, Any]], tuple[int, int]]
    reshape: Callable[[dict[str, Any], int], dict[str, Any]] | None = None


KINDS = {
    "FluxTransformer2DModel": Kind(_flux_grid),
    "QwenImageTransformer2DModel": Kind(_qwen_grid, _qwen_shapes),
}
