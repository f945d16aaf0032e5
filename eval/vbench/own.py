"""Film dimensions that need no weights but our own; none of them is VBench's, save for one formula.

`temporal_flickering` is VBench's own formula, which needs no weights, on whatever films are given
(VBench itself drops films that move first). Every other key starts with `lite_`: the question is
VBench's, the means are optical flow, statistics of a picture, or the project's own features. Their
numbers compare films of the same prompts and size with each other and with nothing else.
Flow sees motion in noise: read `lite_dynamic_degree` beside `lite_noise_sigma`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import cv2
import numpy as np
import torch
from torch.nn import functional

from diffcache.eval.metrics import lite
from diffcache.eval.vbench import flow
from diffcache.eval.vbench.flow import Bytes, Mask

BLOCK_SIDES = (4, 8, 16)  # px: patches of autoencoders and transformers, and their multiples
_MOVED_GREY_LEVELS = 16
_SMALLEST_SHARE = 0.1
_SHORTEST_SIDE = 17  # px: one block border of the largest kind
_SHORTEST_FILM = 3  # frames
BY_FLOW = (
    "lite_motion_smoothness",
    "lite_warp_error",
    "lite_dynamic_degree",
    "lite_dynamic_motion",
)
# "up": more is better; "none": neither end is good by itself.
DIRECTIONS: dict[str, str] = {
    "temporal_flickering": "up",
    "lite_motion_smoothness": "up",
    "lite_warp_error": "down",
    "lite_dynamic_degree": "none",
    "lite_dynamic_motion": "none",
    "lite_sharpness": "none",
    "lite_noise_sigma": "down",
    "lite_blockiness": "down",
    "lite_subject_consistency": "up",
    "lite_background_consistency": "up",
}


def measure(
    frames: torch.Tensor, fps: float, keys: Sequence[str] | None = None
) -> dict[str, float]:
    """Measure the own dimensions of one film.

    Args:
        frames: `[F, 3, H, W]` uint8, RGB, at least three frames and 17 px a side.
        fps: Frames per second, at most eight of which are looked at for `lite_dynamic_degree`.
        keys: Of `DIRECTIONS`; None for all.

    Returns:
        Values by key, in the order of `DIRECTIONS`.

    Raises:
        ValueError: The film is no such tensor, too short or too small, or a key is unknown.
    """
    wanted = choose(keys)
    check(frames)
    if not 0 < fps < float("inf"):
        raise ValueError(f"fps must be a positive number of frames per second, not {fps}")
    film = np.ascontiguousarray(frames.permute(0, 2, 3, 1).cpu().numpy())
    greys = np.stack([flow.grey(frame) for frame in film])
    side = min(greys.shape[1:])
    motion = cache(lambda: _motion(greys, fps))
    table: dict[str, Callable[[], float]] = {
        "temporal_flickering": lambda: temporal_flickering(film),
        "lite_motion_smoothness": lambda: _motion_smoothness(film),
        "lite_warp_error": lambda: _warp_error(film, greys),
        "lite_dynamic_degree": lambda: float(_is_dynamic(motion(), side)),
        "lite_dynamic_motion": lambda: float(np.mean(motion())) / (side / 256),
        "lite_sharpness": lambda: _over_frames(sharpness, greys),
        "lite_noise_sigma": lambda: _over_frames(noise_sigma, greys),
        "lite_blockiness": lambda: _over_frames(blockiness, greys),
        "lite_subject_consistency": lambda: consistency(lite.embed(frames.cpu())),
        "lite_background_consistency": lambda: consistency(lite.embed(background(frames))),
    }
    return {key: table[key]() for key in wanted}


def choose(keys: Sequence[str] | None) -> list[str]:
    """Check keys and return them once each, in the order of `DIRECTIONS`.

    Raises:
        ValueError: A key is unknown.
    """
    unknown = [key for key in keys or () if key not in DIRECTIONS]
    if unknown or (keys is not None and not keys):
        raise ValueError(
            f"unknown own dimension {', '.join(unknown) or '(none given)'}: must be of "
            f"{', '.join(DIRECTIONS)}"
        )
    return [key for key in DIRECTIONS if keys is None or key in keys]


def check(frames: torch.Tensor) -> None:
    """Check that a film can be measured.

    Raises:
        ValueError: It is no uint8 `[F, 3, H, W]`, too short or too small.
    """
    if frames.ndim != 4 or frames.shape[1] != 3 or frames.dtype != torch.uint8:
        raise ValueError(
            f"a film must be uint8 [F, 3, H, W], not {frames.dtype} {list(frames.shape)}"
        )
    count, _, height, width = frames.shape
    if count < _SHORTEST_FILM or min(height, width) < _SHORTEST_SIDE:
        raise ValueError(
            f"a film needs {_SHORTEST_FILM} frames and {_SHORTEST_SIDE} px a side or more, but has "
            f"{count} of {height} x {width}"
        )


def temporal_flickering(film: Bytes) -> float:
    """Return VBench's score: one minus the mean absolute change between frames.

    `(255 - mean_t mean_px |F_t - F_{t+1}|) / 255`; sums in float32 over B, G, R as in VBench, so
    that the values are equal to the last bit.

    Args:
        film: `[F, H, W, 3]` uint8, RGB.
    """
    pictures = (np.ascontiguousarray(frame[..., ::-1], dtype=np.float32) for frame in film)
    changes = [np.mean(np.abs(a - b)) for a, b in pairwise(pictures)]
    return (255.0 - float(np.mean(np.array(changes)))) / 255.0


def _motion_smoothness(film: Bytes) -> float:
    """Return how well every odd frame is guessed from its neighbours.

    VBench's protocol: `(255 - mean |F_odd - guess|) / 255`; the guess is made by bidirectional
    optical flow in place of the network AMT-S, and not rounded to whole grey levels.
    """
    errors = [
        np.mean(np.abs(film[i] - flow.midpoint(film[i - 1], film[i + 1])), dtype=np.float64)
        for i in range(1, len(film) - 1, 2)
    ]
    return (255.0 - float(np.mean(errors))) / 255.0


def _warp_error(film: Bytes, greys: Bytes) -> float:
    """Return the mean absolute difference of every frame to the warped frame before it, over 255.

    Counted where flow there and back agree (Lai et al., ECCV 2018, equation 1, with absolute in
    place of squared differences); over the whole frame where no pixel's does.
    """
    errors = []
    for before, after in pairwise(range(len(film))):
        there = flow.flow(greys[before], greys[after])
        back = flow.flow(greys[after], greys[before])
        difference = np.abs(film[after] - flow.sample(film[before], back)).mean(-1)
        kept = flow.consistent(back, there)
        errors.append(difference[kept].mean() if kept.any() else difference.mean())
    return float(np.mean(errors, dtype=np.float64)) / 255.0


def _motion(greys: Bytes, fps: float) -> list[float]:
    """Return the mean of the 5 % longest flow vectors, in pixels, at about eight frames a second.

    A film that is too short to be thinned out so far is thinned out less.
    """
    interval = min(max(1, round(fps / 8)), len(greys) - 1)
    kept = greys[::interval]
    return [flow.strongest(flow.flow(a, b)) for a, b in pairwise(kept)]


def _is_dynamic(motion: list[float], side: int) -> bool:
    """Return whether enough pairs of frames move enough.

    VBench's rule: at least `round(4 n / 16)` of the pairs of `n` frames above `6 side / 256` px;
    with at least one pair, where VBench asks none of films of two frames.
    """
    needed = max(1, round(4 * (len(motion) + 1) / 16))
    return sum(length > 6.0 * (side / 256.0) for length in motion) >= needed


def sharpness(picture: Bytes) -> float:
    """Return the variance of the Laplacian, in squared grey levels (Pech-Pacheco, ICPR 2000).

    Args:
        picture: `[H, W]` uint8.
    """
    return float(cv2.Laplacian(picture, cv2.CV_64F).var())


def noise_sigma(picture: Bytes) -> float:
    """Return the standard deviation of the noise, in grey levels (Immerkaer, CVIU 1996, eq. 6).

    Args:
        picture: `[H, W]` uint8.
    """
    mask = np.array([[1, -2, 1], [-2, 4, -2], [1, -2, 1]], dtype=np.float64)
    inner = cv2.filter2D(picture, cv2.CV_64F, mask)[1:-1, 1:-1]
    return float(np.sqrt(np.pi / 2) * np.abs(inner).mean() / 6)


def blockiness(picture: Bytes) -> float:
    """Return how much steeper a picture is across block borders than elsewhere.

    The mean absolute step between neighbours across borders over that between all others, both
    plus a tenth of a grey level, for the block side of 4, 8 or 16 px where it is largest; 1 without
    blocks. After Wang, Bovik and Evans, ICIP 2000, section 2, in space instead of frequency.

    Args:
        picture: `[H, W]` uint8, at least 17 px a side.
    """
    values = picture.astype(np.float64)
    across = np.abs(np.diff(values, axis=1)).mean(0)
    down = np.abs(np.diff(values, axis=0)).mean(1)
    ratios = []
    for side in BLOCK_SIDES:
        border = np.concatenate([steps[side - 1 :: side] for steps in (across, down)])
        other = np.concatenate([np.delete(s, np.s_[side - 1 :: side]) for s in (across, down)])
        ratios.append((border.mean() + 0.1) / (other.mean() + 0.1))
    return float(max(ratios))


def _over_frames(statistic: Callable[[Bytes], float], greys: Bytes) -> float:
    return float(np.mean([statistic(picture) for picture in greys]))


def background(frames: torch.Tensor) -> torch.Tensor:
    """Return a film whose subject is painted over with the mean colour of the rest of each frame.

    Args:
        frames: `[F, 3, H, W]` uint8.

    Returns:
        The same shape, uint8, on the CPU.
    """
    painted = frames.cpu().clone()
    greys = np.stack([flow.grey(f) for f in painted.permute(0, 2, 3, 1).contiguous().numpy()])
    hidden = torch.from_numpy(subject(greys))
    for frame in painted:
        colour = frame[:, ~hidden].double().mean(1).round().to(torch.uint8)
        frame[:, hidden] = colour[:, None]
    return painted


def subject(greys: Bytes) -> Mask:
    """Return the pixels that are taken for the subject of a film.

    Those whose grey level changes in the course of the film by more than 16 levels and Otsu's
    threshold of these changes, and their neighbours within 2 px. If nothing changes so much, or
    almost everything does (as with a moving camera), the middle half of height and width.

    Args:
        greys: `[F, H, W]` uint8.

    Returns:
        `[H, W]` bool, true for between nothing and nine tenths of the pixels.
    """
    change = np.asarray(greys.max(0) - greys.min(0), dtype=np.uint8)
    threshold, _ = cv2.threshold(change, 0, 255, cv2.THRESH_BINARY + cv2.THRESH_OTSU)
    moved = change > max(threshold, _MOVED_GREY_LEVELS)
    if moved.any():
        grown = cv2.dilate(moved.astype(np.uint8), np.ones((5, 5), dtype=np.uint8)) > 0
        if grown.mean() <= 1 - _SMALLEST_SHARE:
            return np.asarray(grown, dtype=np.bool_)
    height, width = change.shape
    middle = np.zeros((height, width), dtype=np.bool_)
    middle[height // 4 : height - height // 4, width // 4 : width - width // 4] = True
    return middle


def consistency(features: torch.Tensor) -> float:
    """Return the mean of `(cos(f_{i-1}, f_i) + cos(f_0, f_i)) / 2`, each cosine at least 0.

    VBench's formula for subject and background (arXiv 2311.17982, supplementary).

    Args:
        features: `[F, D]`, at least two frames.
    """
    f = functional.normalize(features.double(), dim=1)
    before = (f[:-1] * f[1:]).sum(1).clamp(min=0)
    first = (f[:1] * f[1:]).sum(1).clamp(min=0)
    return float(((before + first) / 2).mean())
