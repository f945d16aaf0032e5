"""Operations and bytes of a decoding at the size of LLaDA-8B, by formula, beside published speeds.

The policies are asked for their rows while random masks are decided: their row sets depend on which
tokens are decided and when, not on what they are. No model is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from diffcache.dllm import ALL, Decoding, Sampler, Schedule
from diffcache.eval.workshop.dllm.rows import Row

_VOCABULARY = 8  # of the random logits
_MASK = 7


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model.

    Attributes:
        layers: Number of layers.
        width: Channels.
        inner: Channels within an MLP, which has a gate.
        heads: Query heads, as many as key-value heads.
        vocabulary: Tokens.
        bytes: Bytes of a number.
    """

    layers: int = 32
    width: int = 4096
    inner: int = 12288
    heads: int = 32
    vocabulary: int = 126_464
    bytes: int = 2

    @property
    def weights(self) -> int:
        """Weights of all layers' linear maps and the head."""
        each = 4 * self.width**2 + 3 * self.width * self.inner
        return self.layers * each + self.width * self.vocabulary

    def flops(self, rows: int, total: int) -> float:
        """Return the operations of a forward.

        Args:
            rows: Rows that are computed.
            total: Keys that each of them sees.
        """
        return 2.0 * rows * (self.weights + self.layers * 2 * total * self.width)

    def traffic(self, rows: int, total: int) -> float:
        """Return the bytes that a forward has to read and write: weights, and keys and values.

        Args:
            rows: Rows whose keys and values are written.
            total: Rows whose keys and values are read.
        """
        return float(self.bytes * (self.weights + self.layers * 2 * (rows + total) * self.width))


@dataclass(frozen=True)
class Device:
    """Peaks of an accelerator, by its maker.

    Attributes:
        name: Name.
        flops: Operations a second, bfloat16, dense.
        bandwidth: Bytes a second.
    """

    name: str
    flops: float
    bandwidth: float

    def seconds(self, flops: float, traffic: float) -> float:
        """Return the least time of a forward: that of its operations, or of its bytes."""
        return max(flops / self.flops, traffic / self.bandwidth)


A6000 = Device("RTX A6000", 154.8e12, 768e9)
A100 = Device("A100 80GB", 312e12, 2039e9)


@dataclass(frozen=True)
class Reported:
    """A published speed-up on LLaDA-8B-Instruct, GSM8K.

    Attributes:
        row: The way of decoding.
        device: Device of the measurement.
        prompt: Tokens of the prompts, about.
        speedup: Tokens a second by those without a cache.
        source: Paper and table that state it.
        why: Reason why it is not what the formula says.
    """

    row: Row
    device: Device
    prompt: int
    speedup: float
    source: str
    why: str


# Prompts: five worked problems and a question are about a thousand tokens.
REPORTED = (
    Reported(
        Row("dKV-Cache decode, every 8", "dkv-cache:every=8"), A6000, 1000, 27.50 / 14.31,
        "arXiv 2505.15781, table 1",
        "the published code copies the keys and values of every layer at every step",
    ),
    Reported(
        Row("dKV-Cache greedy", "dkv-cache:variant=greedy", by="random"), A6000, 1000,
        25.47 / 15.16, "arXiv 2505.15781, table 1",
        "half of the steps compute everything, as the formula says; the others are small",
    ),
    Reported(
        Row("Fast-dLLM prefix", "fast-dllm"), A100, 1000, 21.2 / 6.7, "arXiv 2505.22618, table 1",
        "at batch 1 most steps wait for the host and for weights, not for operations",
    ),
)  # fmt: skip


def schedule_cost(
    row: Row, prompt: int, size: ModelSize, device: Device, length: int = 256, block: int = 32
) -> dict[str, float]:
    """Return rows, operations, bytes and least seconds of one answer.

    Args:
        row: Way to decode, one token a step.
        prompt: Tokens of the prompt.
        size: Model.
        device: Device of the seconds.
        length: Tokens of the answer.
        block: Tokens of a block.
    """
    policy = row.made()
    sampler = Sampler(by="random") if policy is None or row.by == "random" else Sampler()
    decoding = Decoding(
        torch.zeros(1, prompt, dtype=torch.int64), Schedule(length, block), sampler, _MASK
    )
    generator = torch.Generator().manual_seed(0)
    total = prompt + length
    sums = {"rows": 0.0, "flops": 0.0, "bytes": 0.0, "seconds": 0.0}
    while not decoding.is_finished:
        plan = ALL if policy is None else policy.plan(decoding.state)
        count = plan.count(total)
        flops, traffic = size.flops(count, total), size.traffic(count, total)
        parts = (float(count), flops, traffic, device.seconds(flops, traffic))
        sums = {name: sums[name] + part for name, part in zip(sums, parts, strict=True)}
        decoding.commit(torch.randn(1, count, _VOCABULARY, generator=generator), plan)
    return sums


def measure(size: ModelSize | None = None) -> list[dict[str, Any]]:
    """Return the schedules whose speed is published, beside those speeds."""
    size = ModelSize() if size is None else size
    found = []
    for known in REPORTED:
        plain, cached = (
            schedule_cost(row, known.prompt, size, known.device)
            for row in (Row("uncached", by=known.row.by), known.row)
        )
        found.append({
            "name": known.row.name, "policy": known.row.policy, "prompt": known.prompt,
            "device": known.device.name, "reported": known.speedup, "source": known.source,
            "why": known.why, **{f"{key}_ratio": plain[key] / cached[key] for key in plain},
        })  # fmt: skip
    return found
