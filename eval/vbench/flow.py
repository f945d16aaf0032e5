"""Dense optical flow between frames, and what is warped with it.

Flow is Farneback's (SCIA 2003) as OpenCV computes it, on grey pictures at the size given. Shifts of
more than about 5 px a frame are lost where a frame has fewer than 64 px a side: its pyramid has no
coarser level then. Enlarging such frames first was measured to make flow worse, not better.
"""

from __future__ import annotations

import cv2
import numpy as np
import numpy.typing as npt

SHORTEST_SIDE = 64  # px: below, large shifts are lost
Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


def grey(frame: Bytes) -> Bytes:
    """Return the luma of a frame.

    Args:
        frame: `[H, W, 3]` uint8, RGB.

    Returns:
        `[H, W]` uint8.
    """
    return np.asarray(cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY), dtype=np.uint8)


def flow(one: Bytes, other: Bytes) -> Array:
    """Return where every pixel of `one` is found in `other`.

    Args:
        one: `[H, W]` uint8.
        other: `[H, W]` uint8.

    Returns:
        `[H, W, 2]` float32: shift to the right and downwards, in pixels.
    """
    start = np.zeros((*one.shape, 2), dtype=np.float32)
    # pyramid scale and levels, window, iterations, size and width of the polynomial, flags
    found = cv2.calcOpticalFlowFarneback(one, other, start, 0.5, 3, 15, 3, 5, 1.2, 0)
    return np.asarray(found, dtype=np.float32)


def sample(picture: Array | Bytes, shift: Array) -> Array:
    """Return a picture read at every pixel's place plus a shift, bilinear, edges repeated.

    Args:
        picture: `[H, W]` or `[H, W, C]`, float32 or uint8.
        shift: `[H, W, 2]` float32, in pixels.

    Returns:
        The same shape, float32.
    """
    height, width = shift.shape[:2]
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float32)
    read = cv2.remap(
        picture.astype(np.float32),
        columns + shift[..., 0],
        rows + shift[..., 1],
        cv2.INTER_LINEAR,
        borderMode=cv2.BORDER_REPLICATE,
    )
    return np.asarray(read, dtype=np.float32)


def midpoint(one: Bytes, other: Bytes) -> Array:
    """Return the picture half-way between two frames, both warped towards it by half the flow.

    Args:
        one: `[H, W, 3]` uint8, RGB.
        other: `[H, W, 3]` uint8, RGB.

    Returns:
        `[H, W, 3]` float32 in 0..255.
    """
    first, last = grey(one), grey(other)
    there, back = flow(first, last), flow(last, first)
    half = np.float32(0.5)
    between: Array = half * (sample(one, half * back) + sample(other, half * there))
    return between


def consistent(there: Array, back: Array) -> Mask:
    """Return the pixels whose flow back undoes their flow there.

    Criterion of Sundaram, Brox and Keutzer (ECCV 2010), equation 5, with its constants; a pixel
    that leaves the frame does not count either.

    Args:
        there: `[H, W, 2]` float32, in pixels.
        back: `[H, W, 2]` float32, of the frame that `there` leads to.

    Returns:
        `[H, W]` bool.
    """
    height, width = there.shape[:2]
    returned = sample(back, there)
    gap = np.square(there + returned).sum(-1)
    length = np.square(there).sum(-1) + np.square(returned).sum(-1)
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float32)
    x, y = columns + there[..., 0], rows + there[..., 1]
    inside = (x >= 0) & (x <= width - 1) & (y >= 0) & (y <= height - 1)
    return np.asarray((gap < 0.01 * length + 0.5) & inside, dtype=np.bool_)


def strongest(shift: Array, share: float = 0.05) -> float:
    """Return the mean length of the longest flow vectors.

    Args:
        shift: `[H, W, 2]` float32, in pixels.
        share: Part of the vectors that is looked at, at least one of them.

    Returns:
        Length in pixels.
    """
    lengths = np.sort(np.hypot(shift[..., 0], shift[..., 1]).ravel())
    count = max(1, int(lengths.size * share))
    return float(lengths[-count:].astype(np.float64).mean())
