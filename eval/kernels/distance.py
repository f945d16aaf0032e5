"""The error that gates compare with their threshold, at the sizes of their probes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from diffcache.eval.kernels.case import SIZES, KernelCase, compiled, tensors
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


def cases() -> Iterator[KernelCase]:
    """Yield the rows of the benchmark."""
    for model, shape in SIZES.items():
        ways = {"kernel": _launch, "plain": _plain, "as published": _ratio, "torch.compile": compiled(_plain)}
        yield KernelCase(
            "l1_sums",
            model,
            f"{list(shape)} bfloat16",
            tensors(2, shape),
            ways,
            2 * 2 * math.prod(shape),
            target={"as published": 3.5},
        )
