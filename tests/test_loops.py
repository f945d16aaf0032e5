"""Loops over blocks: how they are learned, without random numbers of the run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache import Combine, Every, FirstBlock, Gate, Interval, Taylor
from diffcache.features.combine import FeatureMethod
from diffcache.features.parts.quantize import WatchLayers

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
            handle.restart(range(4))
            for index in range(4):
                assert torch.allclose(call(), expected, atol=1e-5), f"step {index}"
                handle.run().ticks += 1
            ran, skipped = handle.last.calls[-1].counts["blocks"]
            assert (ran, skipped) == (lead, DEPTH - lead)
        assert torch.equal(call(), expected)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(8, 8) for _ in range(4))
        self.heads = 1

    def forward(self, hidden_states):
        weights = self.to_q(hidden_states) @ self.to_k(hidden_states).mT
        return self.to_out(weights.softmax(-1) @ self.to_v(hidden_states))


class AgainBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.ff = Attention(), nn.Linear(8, 8)

    def forward(self, hidden_states, temb):
        hidden_states = hidden_states + self.attn(hidden_states + temb)
        return hidden_states + self.ff(hidden_states).tanh()


class Noisy(nn.Module):
    """Adds noise to its sample, as dropout does; the text's blocks are no chain in one list."""

    def __init__(self):
        super().__init__()
        self.refiner = nn.ModuleList(AgainBlock() for _ in range(2))
        self.blocks = nn.ModuleList(AgainBlock() for _ in range(3))
        self.projections = nn.ModuleList(AgainBlock() for _ in range(3))

    def forward(self, hidden_states, timestep, text):
        time = timestep.view(-1, 1, 1)
        for block in self.refiner:
            text = block(text, time)
        captions = sum(projection(text * 1, time) for projection in self.projections)
        hidden_states = hidden_states + torch.randn_like(hidden_states)
        hidden_states = hidden_states + captions.mean(1, keepdim=True)
        for block in self.blocks:
            hidden_states = block(hidden_states, time)
        return hidden_states


def made():
    torch.manual_seed(0)
    return Noisy().eval()


def run(model):
    """Return the outputs of a run, and a number that is drawn after it."""
    torch.manual_seed(1)
    text, outs = torch.ones(1, 3, 8), []
    with torch.no_grad():
        for index in range(3):
            outs.append(model(torch.full((1, 4, 8), index / 9), torch.tensor([9.0 - index]), text))
    return [*outs, torch.randn(1)]


@pytest.mark.parametrize("method", [Interval(1), FirstBlock(1e-9), Combine(Gate(1e-9, of="modulated"))])
def test_what_learning_runs_draws_no_random_numbers_of_the_run(method):
    model = made()
    expected = run(model)
    with diffcache.wrapped(model, method):
        assert all(map(torch.equal, run(model), expected))


class Watcher:
    """Notes what every layer is given."""

    wants_dense = False

    def __init__(self):
        self.seen = {}

    def excludes(self, name):
        return False

    def layer(self, name, weight, bias):
        self.seen[name] = []

    def plan(self):
        return None

    def given(self, name, index, value):
        self.seen[name].append((index, value.clone()))


@dataclass(frozen=True)
class Watching(FeatureMethod):
    """An interval of 1 that shows the layers to a watcher."""

    watcher: Watcher

    def parts(self):
        return Interval(1).parts()

    def abilities(self):
        return (*super().abilities(), WatchLayers(self.watcher))


def test_a_watcher_of_layers_sees_each_call_of_a_run_once_and_no_made_up_numbers():
    model, watcher = made(), Watcher()
    with diffcache.wrapped(model, Watching(watcher)):
        run(model)
    assert len(watcher.seen) == 8 * 5
    for seen in watcher.seen.values():
        assert [index for index, _ in seen] == [0, 1, 2]
        assert all(value.isfinite().all() for _, value in seen)
