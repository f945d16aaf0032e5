"""The error that gates compare with their threshold, at the sizes of their probes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from diffcache.eval.workshop.kernels.case import KernelCase
from diffcache.eval.workshop.kernels.forecast import SIZES
from diffcache.kernels import distance


def _ratio(values: Tensor, reference: Tensor) -> Tensor:
    """Divide means in the dtype of the probe, as TeaCache's own code does."""
    return (values - reference).abs().mean() / reference.abs().mean()


def _launch(values: Tensor, reference: Tensor) -> Any:
    change, scale = distance.SUMS(values, reference).unbind()
    return change / scale


def _plain(values: Tensor, reference: Tensor) -> Tensor:
    change, scale = distance.sums_twin(values, reference).unbind()
    return change / scale


def cases() -> list[KernelCase]:
    """Return the rows of the benchmark."""
    found = []
    for model, shape in SIZES.items():

        def make(
            device: torch.device, tiny: bool, shape: tuple[int, int] = shape
        ) -> tuple[Tensor, ...]:
            size = (8, 64) if tiny else shape
            return torch.randn(2, *size, device=device, dtype=torch.bfloat16).unbind()

        ways = {
            "kernel": _launch, "plain": _plain, "as published": _ratio,
            "torch.compile": torch.compile(_plain),
        }  # fmt: skip
        found.append(
            KernelCase(
                "l1_sums", model, f"{list(shape)} bfloat16", make, ways, 2 * 2 * math.prod(shape),
                target={"as published": 3.5},
            )
        )  # fmt: skip
    return found
