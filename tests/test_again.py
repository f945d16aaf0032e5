"""Running a denoiser once more, to learn it, leaves no trace in what it draws and who watches."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import diffcache
from diffcache import Combine, FirstBlock, Gate, Interval
from diffcache.features.combine import FeatureMethod
from diffcache.features.parts.quantize import WatchLayers


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(8, 8) for _ in range(4))
        self.heads = 1

    def forward(self, hidden_states):
        weights = self.to_q(hidden_states) @ self.to_k(hidden_states).mT
        return self.to_out(weights.softmax(-1) @ self.to_v(hidden_states))


class Block(nn.Module):
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
        self.refiner = nn.ModuleList(Block() for _ in range(2))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.projections = nn.ModuleList(Block() for _ in range(3))

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
