"""Pixel fidelity of 8-bit pictures: PSNR, SSIM, MS-SSIM, and the flicker of films.

All functions compare two tensors, uint8 [N, 3, H, W] of one shape, the uncached one and its counterpart, and raise
ValueError for others; which comes first does not matter. Take the pictures as they were made or from lossless files:
a lossy video file alone limits PSNR to about 32 dB. A film is a tensor of pictures, so its values per frame come
from the same functions. SSIM and MS-SSIM agree with torchmetrics 1.9 to rounding; they are written out here with a
separable window, which is many times faster in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from diffcache.psnr import decibels
from diffcache.psnr import psnr as sample_psnr

VALUES_AT_ONCE = 2**20  # float64 values of one input, 8 MiB; SSIM holds about 20 times that
RADIUS, SIGMA = 5, 1.5  # of the window, pixels
LUMINANCE, CONTRAST = 0.01**2, 0.03**2  # C1 and C2 for a data range of 1
# Wang et al. 2003, section 3.2: the weights of the scales, finest first.
SCALE_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of every picture, 10 log10(1 / MSE).

    Args:
        a: Pictures or film, uint8 [N, 3, H, W].
        b: Pictures or film of the same shape, uint8.

    Returns:
        float64 [N] on the CPU, in dB. A mean squared error below 1e-10 of the squared data range counts as equal and
        gives the cap, 100 dB, so that means stay finite.

    Raises:
        ValueError: If dtypes or shapes are not as above.
    """
    return _per_picture(sample_psnr, a, b)


def pooled_psnr(a: Tensor, b: Tensor) -> float:
    """Return one PSNR in dB from the mean squared error over all pictures (torchmetrics' default).

    It is never above the mean of `psnr`: a few bad pictures dominate it. Capped at 100 dB.

    Args:
        a: Pictures or film, uint8 [N, 3, H, W].
        b: Pictures or film of the same shape, uint8.

    Raises:
        ValueError: If dtypes or shapes are not as above.
    """
    errors = _per_picture(lambda x, y: (x - y).square().mean(dim=(1, 2, 3)), a, b)
    return float(decibels(errors.mean()))


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Return the structural similarity of every picture (Wang et al. 2004), at most 1.

    Gaussian window 11 x 11 with sigma 1.5, K1 = 0.01, K2 = 0.03, per color channel, mean over channels and pixels.
    Departure from the paper, as torchmetrics does it: borders are reflected and every pixel counts, where the paper
    keeps only whole windows.

    Args:
        a: Pictures or film, uint8 [N, 3, H, W], both sides at least 11 pixels.
        b: Pictures or film of the same shape, uint8.

    Returns:
        float64 [N] on the CPU, dimensionless.

    Raises:
        ValueError: If dtypes, shapes or sides are not as above.
    """
    check_pairs(a, b)
    side = 2 * RADIUS + 1
    if min(a.shape[-2:]) < side:
        raise ValueError(f"SSIM needs sides of {side} pixels or more, got {_size(a)}; use psnr")
    return _per_picture(lambda x, y: _similarity(x, y)[0], a, b)


def ms_ssim(a: Tensor, b: Tensor) -> Tensor:
    """Return the multi-scale structural similarity of every picture (Wang et al. 2003), 0 to 1.

    Five scales with the paper's weights where both sides have 176 pixels or more, so that the coarsest scale holds a
    whole 11 x 11 window. Smaller pictures have fewer scales, the finest ones: four from 88 pixels, three from 44, two
    from 22, with the weights rescaled to sum to 1. `ms_ssim_variant` says which; values of different variants are not
    comparable. Negative terms count as 0, as in torchmetrics.

    Args:
        a: Pictures or film, uint8 [N, 3, H, W], both sides at least 22 pixels.
        b: Pictures or film of the same shape, uint8.

    Returns:
        float64 [N] on the CPU, dimensionless.

    Raises:
        ValueError: If dtypes, shapes or sides are not as above.
    """
    return both_ssim(a, b)[1]


def both_ssim(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return `ssim` and `ms_ssim`, whose finest scale is the same, in half the time.

    Args:
        a: Pictures or film, uint8 [N, 3, H, W], both sides at least 22 pixels.
        b: Pictures or film of the same shape, uint8.

    Raises:
        ValueError: If dtypes, shapes or sides are not as above.
    """
    check_pairs(a, b)
    scales = _scales(a.shape[-2], a.shape[-1])
    weights = SCALE_WEIGHTS[:scales]
    if scales < len(SCALE_WEIGHTS):
        weights = tuple(weight / sum(weights) for weight in weights)

    def values(x: Tensor, y: Tensor) -> Tensor:
        single, product = torch.tensor(0.0), torch.ones(len(x), dtype=x.dtype, device=x.device)
        for scale, weight in enumerate(weights, start=1):
            whole, contrast = _similarity(x, y)
            single = whole if scale == 1 else single
            term = whole if scale == scales else contrast
            product = product * term.clamp(min=0) ** weight
            x, y = avg_pool2d(x, 2), avg_pool2d(y, 2)
        return torch.stack([single, product], dim=1)

    single, product = _per_picture(values, a, b).reshape(-1, 2).unbind(dim=1)
    return single, product


def ms_ssim_variant(height: int, width: int) -> str:
    """Name the variant of MS-SSIM that pictures of this size get, for reports.

    Args:
        height: Pixels.
        width: Pixels.

    Raises:
        ValueError: If a side is below 22 pixels, too small for two scales.
    """
    scales = _scales(height, width)
    full = len(SCALE_WEIGHTS)
    return f"{full} scales" if scales == full else f"{scales} of {full} scales, weights rescaled"


def temporal_error(a: Tensor, b: Tensor) -> float:
    """Return how much the frame-to-frame changes of two films differ: flicker, stutter, jitter.

    The mean over pixels of |(a[f+1] - a[f]) - (b[f+1] - b[f])| / 255, dimensionless: 0 for equal films and for films
    with a constant offset, at most 2.

    Args:
        a: Film, uint8 [F, 3, H, W], two frames or more.
        b: Film of the same shape, uint8.

    Raises:
        ValueError: If dtypes or shapes are not as above.
    """
    check_pairs(a, b)
    if len(a) < 2:
        raise ValueError("temporal_error needs two frames or more, got a film of 1")
    total = 0
    step = _pictures_at_once(a)
    for start in range(0, len(a) - 1, step):
        stop = start + step + 1
        moved_a, moved_b = (film[start:stop].to(torch.int32).diff(dim=0) for film in (a, b))
        total += int((moved_a - moved_b).abs().sum())
    return total / (255 * (len(a) - 1) * a[0].numel())


def check_pictures(pictures: Tensor, name: str = "pictures") -> None:
    """Raise ValueError, with the name in it, unless a tensor is uint8 [N, 3, H, W], N not 0."""
    shape = list(pictures.shape)
    if pictures.dtype != torch.uint8 or len(shape) != 4 or shape[1] != 3 or not pictures.numel():
        raise ValueError(
            f"{name} must be uint8 [N, 3, H, W], not {pictures.dtype} {shape}: 8-bit values as "
            "they are stored; convert with (x * 255).round().clamp(0, 255).to(torch.uint8)"
        )


def check_pairs(a: Tensor, b: Tensor) -> None:
    """Raise ValueError unless both are uint8 [N, 3, H, W] of one shape, N at least 1."""
    check_pictures(a, "the first pictures")
    check_pictures(b, "the second pictures")
    if a.shape[2:] != b.shape[2:]:
        raise ValueError(
            f"pictures of different sizes, {_size(a)} and {_size(b)}; compare equal sizes, "
            "resizing would change the result"
        )
    if len(a) != len(b):
        raise ValueError(f"{len(a)} pictures against {len(b)}; a pairwise metric needs the same samples in both")


def _per_picture(metric: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Apply a metric of float64 pictures in [0, 1] to a few pictures at a time."""
    check_pairs(a, b)
    step = _pictures_at_once(a)
    # In float32 the variances of flat areas, differences of squares, lose their digits.
    parts = [
        metric(x.to(torch.float64) / 255, y.to(torch.float64) / 255)
        for x, y in zip(a.split(step), b.split(step), strict=True)
    ]
    return torch.cat([part.reshape(-1) for part in parts]).cpu()


def _similarity(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means of SSIM over all pixels and of its contrast term over whole windows, [N]."""
    x, y = (pad(picture, (RADIUS,) * 4, mode="reflect") for picture in (x, y))
    mean_x, mean_y = _blur(x), _blur(y)
    product = mean_x * mean_y
    squares = mean_x.square() + mean_y.square()
    # Rounding must not make a variance negative: that would move flat areas.
    variances = (_blur(x * x) - mean_x.square()).clamp(min=0)
    variances += (_blur(y * y) - mean_y.square()).clamp(min=0)
    covariance = _blur(x * y) - product
    contrast = (2 * covariance + CONTRAST) / (variances + CONTRAST)
    whole = contrast * (2 * product + LUMINANCE) / (squares + LUMINANCE)
    inner = contrast[..., RADIUS:-RADIUS, RADIUS:-RADIUS]
    return whole.mean(dim=(1, 2, 3)), inner.mean(dim=(1, 2, 3))


def _blur(pictures: Tensor) -> Tensor:
    """Return Gaussian-weighted means over every whole window, [N, 3, H - 10, W - 10]."""
    weights = [math.exp(-0.5 * (shift / SIGMA) ** 2) for shift in range(-RADIUS, RADIUS + 1)]
    for dim in (-1, -2):
        size = pictures.shape[dim] - 2 * RADIUS
        blurred = pictures.narrow(dim, 0, size) * (weights[0] / sum(weights))
        for start, weight in enumerate(weights[1:], start=1):
            blurred.add_(pictures.narrow(dim, start, size), alpha=weight / sum(weights))
        pictures = blurred
    return pictures


def _pictures_at_once(pictures: Tensor) -> int:
    return max(1, VALUES_AT_ONCE // pictures[0].numel())


def _size(pictures: Tensor) -> str:
    return f"{pictures.shape[-2]} x {pictures.shape[-1]}"


def _scales(height: int, width: int) -> int:
    window = 2 * RADIUS + 1
    for scales in range(len(SCALE_WEIGHTS), 1, -1):
        if min(height, width) // 2 ** (scales - 1) >= window:
            return scales
    raise ValueError(f"MS-SSIM needs sides of {2 * window} pixels or more, got {height} x {width}; use ssim")
