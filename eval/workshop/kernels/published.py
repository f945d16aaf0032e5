"""Rows of kernels whose times others published, to hold expected times against.

Our own kernel of the same attention stands for theirs: what is compared is a time that our code is
expected to take with one that theirs took, on the device that they name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from diffcache.eval.kernels.attention import Sizes, _attention, _given
from diffcache.eval.kernels.case import KernelCase
from diffcache.kernels.attention import FORWARD
from diffcache.kernels.dispatch import Operator
from diffcache.kernels.int8 import INT8


@dataclass(frozen=True)
class Published:
    """A published time of a kernel.

    Attributes:
        name: Whose kernel, and of what.
        device: One of `diffcache.eval.cost.expected.CHIPS`.
        us: Microseconds.
        source: Paper or page, and the number in it.
        sizes: Query heads, key heads, queries, keys, channels.
        operator: Our kernel of the same attention.
    """

    name: str
    device: str
    us: float
    source: str
    sizes: Sizes
    operator: Operator = FORWARD

    def case(self) -> KernelCase:
        """Return the row of our kernel at these sizes."""
        asking, heads, count, width, size = self.sizes
        given = _given if self.operator is FORWARD else lambda *qkv: (*qkv, size**-0.5)
        ways = {"kernel": lambda q, k, v: self.operator(*given(q, k, v))}
        moved = 2 * 2 * size * (asking * count + heads * width)
        return KernelCase(self.operator.name, self.name, f"{list(self.sizes)}", _attention(self.sizes), ways, moved)


def published() -> Iterator[Published]:
    """Yield the times that are compared."""
    long: Sizes = (16, 16, 16384, 16384, 128)
    flux: Sizes = (24, 24, 4608, 4608, 128)
    wide: Sizes = (128, 128, 8192, 8192, 128)  # a batch of 4
    for name, device, tera, source, sizes, operator in (
        ("FlashAttention-2, 16k", "a100", 230, "arXiv 2307.08691: up to 230 TFLOPs/s, forward", long, FORWARD),
        ("FlashAttention-2 in torch, FLUX.1", "h100", 329, "pytorch issue 142132: 329 TFLOP/s", flux, FORWARD),
        ("FlashAttention-2, 8k", "4090", 165, "SageAttention, arXiv 2410.02367: 165 TOPS", wide, FORWARD),
        ("SageAttention, 8k", "4090", 340, "arXiv 2410.02367: 340 TOPS", wide, INT8),
    ):
        asking, _, count, width, size = sizes
        us = 4 * asking * count * width * size / tera / 1e6  # at a rate of 10^12 operations a second
        yield Published(name, device, us, source, sizes, operator)
    for width, us in ((65536, 64.4), (131072, 106.6)):
        source, sizes = f"pytorch.org/blog/flash-decoding: {us} µs", (16, 2, 1, width, 128)
        yield Published(f"Flash-Decoding, {width} keys", "a100", us, source, sizes)
