"""Toys with and without conditions, and calls of theirs that are made alone."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import diffcache
from diffcache import CacheWarning, Interval

EVERY = Interval(every=3)
STEPS = 6


class Attention(nn.Module):
    """Stands for an attention: the anatomy goes by its name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value = nn.Linear(width, width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.value(hidden_states)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attn = Attention(width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + torch.tanh(self.attn(hidden_states))


class Toy(nn.Module):
    """Takes any condition, which is added to the sample."""

    def __init__(self, depth: int = 4, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, hidden_states: Tensor, timestep: Any, cond: Any = None) -> Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states if cond is None else hidden_states * cond + cond

    def forward_with_cfg(self, *args: Any) -> Tensor:
        return self.forward(*args)


def noise(number: int) -> Tensor:
    return torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(number))


def sample(number: int) -> Tensor:
    """Return a sample of the trajectory that a number is of: 100 numbers are steps of one."""
    return noise(number // 100 * 100) + 0.3 * noise(number)


COND = [torch.full((1, 8, 8), value) for value in (1.0, -1.0, 0.5)]
PLAIN = Toy()  # what every output is compared with
Call = tuple[Tensor, float, Any]  # sample, timestep, condition


def alone(calls: Sequence[Call]) -> list[Tensor]:
    """Return the outputs of one run of one branch under the cache."""
    model = diffcache.wrap(Toy(), EVERY)
    with diffcache.run(model, steps=len(calls)):
        return [model(*call) for call in calls]


def is_own(out: Tensor, calls: Sequence[Call]) -> bool:
    """Return whether the last call, of no condition, was computed, or skipped with features of the calls before."""
    x = calls[-1][0]
    return any(torch.allclose(out, x + PLAIN(*call) - call[0], atol=1e-5) for call in reversed(calls))


def track(number: int, start: int = 9, cond: Any = None, steps: int = STEPS) -> list[Call]:
    """Return the calls of one trajectory."""
    return [(sample(100 * number + i), float(start - i), cond) for i in range(steps)]


def said(caught: Sequence[warnings.WarningMessage], words: str) -> int:
    return sum(words in str(w.message) for w in caught if w.category is CacheWarning)
