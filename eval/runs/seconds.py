"""Time of scoring: seconds a picture of every value that a run computes, by device."""

from __future__ import annotations

import io
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate

from diffcache.eval.cost.interleave import Call, Turn, measure
from diffcache.eval.metrics import lite, pixels
from diffcache.eval.record import Setting
from diffcache.eval.runs.extractors import at_hand
from diffcache.eval.runs.folder import encoded, sha256

_ROUNDS = 3
_PROMPT = "a red kite over the sea"
_COARSE, _NOISE = 32, 0.02  # cells a side of the colors, and grain, so that files are as of photos


def seconds_a_picture(side: int) -> dict[str, dict[str, float]]:
    """Return seconds a picture of every value, medians of three calls, by device.

    On the CPU with one thread, as runs score; they use as many at once as there are cores.

    Args:
        side: Side of the square pictures, pixels.

    Returns:
        Device -> value -> seconds. Files are written and read by the CPU.
    """
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {device: _on(device, side) for device in devices}
    finally:
        torch.set_num_threads(threads)


def _on(device: str, side: int) -> dict[str, float]:
    one, other = _pictures(side)
    file = encoded(one[0])
    networks = at_hand(device, films=False)
    a, b = networks.placed(one), networks.placed(other)
    work: dict[str, tuple[Callable[[], Any], int]] = {}
    if device == "cpu":
        work["write PNG"] = lambda: encoded(one[0]), 1
        work["read PNG"] = lambda: np.array(Image.open(io.BytesIO(file)).convert("RGB")), 1
        work["SHA-256"] = lambda: sha256(file), 1
    work |= {
        "psnr_db": (lambda: pixels.psnr(a, b), len(a)),
        "ssim and ms_ssim": (lambda: pixels.both_ssim(a, b), len(a)),
        "lpips_lite": (lambda: lite.lpips_lite(a, b), len(a)),
        "features_lite": (lambda: lite.embed(a), len(a)),
        "probabilities_lite": (lambda: lite.class_probabilities(a), len(a)),
    }
    perceptual, sets, clip = networks.lpips, networks.inception, networks.clip
    if perceptual is not None:
        work["lpips"] = lambda: perceptual.distances(a, b), len(a)
    if sets is not None:
        work["features and probabilities of Inception"] = lambda: sets(a), len(a)
    if clip is not None:
        work["clip_score"] = lambda: clip(one, [_PROMPT] * len(one)), len(one)
    calls: dict[str, Call | Turn] = {name: call for name, (call, _) in work.items()}
    timings = measure(calls, _ROUNDS, 1, Setting(torch.device(device)))  # networks load at first
    return {name: median(timings.seconds[name]) / count for name, (_, count) in work.items()}


def _pictures(side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two sets of two pictures, uint8 [2, 3, side, side]."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(4, 3, _COARSE, _COARSE, generator=generator)
    smooth = interpolate(coarse, (side, side), mode="bicubic")
    grain = _NOISE * torch.randn(smooth.shape, generator=generator)
    made = ((smooth + grain).clamp(0, 1) * 255).round().to(torch.uint8)
    return made[:2], made[2:]
