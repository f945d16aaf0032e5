"""Loops over blocks that no pipeline of the zoo has: whatever stands between blocks stays exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache import AttachError, Combine, Every, Interval, Taylor

DEPTH, WIDTH = 5, 8


class Block(nn.Module):
    """One or two streams in, as many out."""

    def __init__(self, streams: int = 1) -> None:
        super().__init__()
        self.mix = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(streams)])

    def forward(self, x: Tensor, y: Any = None, *, shift: Tensor | None = None) -> Any:
        out = x + torch.tanh(self.mix[0](x if shift is None else x + shift))
        return out if len(self.mix) == 1 else (out, y + torch.tanh(self.mix[1](y + out.mean())))


class Model(nn.Module):
    """A denoiser whose forward is one of the loops below."""

    def __init__(self, loop: Callable[..., Tensor], streams: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.loop = loop
        self.blocks = nn.ModuleList([Block(streams) for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, timestep: Tensor, **more: Any) -> Tensor:
        return self.head(self.loop(self, x + timestep, **more))


def plain(m: Model, x: Tensor, **_: Any) -> Tensor:
    for block in m.blocks:
        x = block(x)
    return x


def by_index(m: Model, x: Tensor, **_: Any) -> Tensor:
    for i in range(len(m.blocks)):
        x = m.blocks[i](x)
    return x


def sliced(m: Model, x: Tensor, **_: Any) -> Tensor:
    for block in m.blocks[:2]:
        x = block(x)
    for block in m.blocks[2:]:
        x = block(x)
    return x


def zipped_masks(m: Model, x: Tensor, masks: list[Tensor], **_: Any) -> Tensor:
    for block, mask in zip(m.blocks, masks, strict=True):
        x = block(x, shift=mask)
    return x


def added(m: Model, x: Tensor, masks: list[Tensor], **_: Any) -> Tensor:
    for i, block in enumerate(m.blocks):
        x = block(x)
        x = x + masks[i]
    return x


def added_in_place(m: Model, x: Tensor, masks: list[Tensor], **_: Any) -> Tensor:
    for i, block in enumerate(m.blocks):
        x = block(x)
        x += masks[i]
    return x


def popped(m: Model, x: Tensor, masks: list[Tensor], **_: Any) -> Tensor:
    for block in m.blocks:
        x = block(x) + masks.pop()
    return x


def scaled(m: Model, x: Tensor, **_: Any) -> Tensor:
    for block in m.blocks:
        x = 0.9 * block(x)
    return x


def two(m: Model, x: Tensor, **_: Any) -> Tensor:
    y = x.flip(1)
    for block in m.blocks:
        x, y = block(x, y)
    return x + y


def two_and_control(m: Model, x: Tensor, masks: list[Tensor], **_: Any) -> Tensor:
    y = x.flip(1)
    for i, block in enumerate(m.blocks):
        x, y = block(x, y=y)
        if i % 2 == 0:
            x = x + masks[i]
    return x + y


def long_skip(m: Model, x: Tensor, **_: Any) -> Tensor:
    kept = []
    for i, block in enumerate(m.blocks):
        x = block(x + kept.pop() if i > 2 else x)
        if i < 2:
            kept.append(x)
    return x


def collected(m: Model, x: Tensor, **_: Any) -> Tensor:
    total = torch.zeros_like(x)
    for block in m.blocks:
        x = block(x)
        total = total + x
    return total


ONE = [plain, by_index, sliced, zipped_masks, added, added_in_place, popped, scaled, long_skip]
TWO = [two, two_and_control]
# what a stack cannot stand in for: the outputs of inner blocks are used on their own
INNER = [collected]


def build(loop: Callable[..., Tensor]) -> tuple[Model, Callable[[], Tensor]]:
    """Return a model with a loop, and a call of it that is always the same."""
    model = Model(loop, 2 if loop in TWO else 1)
    masks = [torch.randn(2, 3, WIDTH) for _ in range(DEPTH)]
    x = torch.randn(2, 3, WIDTH)
    return model, lambda: model(x.clone(), torch.tensor(1.0), masks=list(masks))


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize(
    ("loop", "site"),
    [(loop, "stack") for loop in (*ONE, *TWO)] + [(loop, "block") for loop in (*ONE, *TWO, *INNER)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_loop(loop: Callable[..., Tensor], site: str, lead: int):
    model, call = build(loop)
    with torch.no_grad():
        expected = call()
        with diffcache.wrapped(model, Combine(Every(2), Taylor(1), site=site, lead=lead)) as handle:
            handle.restart(4)
            for index in range(4):
                assert torch.allclose(call(), expected, atol=1e-5), f"step {index}"
                handle.run().ticks += 1
            ran, skipped = handle.last.calls[-1].counts["blocks"]
            assert (ran, skipped) == (lead, DEPTH - lead)
        assert torch.equal(call(), expected)


@pytest.mark.parametrize("loop", INNER)
def test_a_loop_that_uses_inner_outputs_is_refused_as_a_stack(loop: Callable[..., Tensor]):
    model, call = build(loop)
    diffcache.wrap(model, Interval(every=2))
    with torch.no_grad(), pytest.raises(AttachError, match="changes the output .*use site='block'"):
        call()


def test_no_block_left_to_skip_is_an_error():
    model = Model(plain, 1)
    diffcache.wrap(model, Combine(Every(3), lead=3, tail=2))
    message = "no block left to skip: 5 blocks ran, lead=3, tail=2"
    with torch.no_grad(), pytest.raises(AttachError, match=message):
        model(torch.randn(1, 2, WIDTH), torch.tensor(1.0))


def test_a_block_that_is_left_out_later_is_an_error():
    """The number of blocks follows a value that no argument's look shows."""

    def loop(m: Model, x: Tensor, **_: Any) -> Tensor:
        for block in list(m.blocks)[: 5 if float(x.sum()) > 0 else 3]:
            x = block(x)
        return x

    model = Model(loop, 1)
    with torch.no_grad():
        diffcache.wrap(model, Interval(every=2))
        model(torch.ones(1, 8, WIDTH), torch.tensor(1.0))
        with pytest.raises(AttachError, match="0 of 1 skipped spans ended"):
            model(torch.ones(1, 8, WIDTH), torch.tensor(-5.0))
