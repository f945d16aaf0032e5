"""Toy models that look at a timestep, and what a temporal table of them holds."""

import torch
from torch import nn

from diffcache.attach.extensions.lookup import COUNTED


class Block(nn.Module):
    def __init__(self, size, kind=""):
        super().__init__()
        self.kind = kind
        self.mod = nn.Linear(size, size)
        self.squeeze = nn.Linear(size, size)
        self.drop = nn.Dropout(0.5)
        self.act = nn.Sequential(nn.SiLU(inplace=kind == "writes"), nn.Linear(size, size))
        self.scaling = 1.0
        self.secret = torch.ones(size)

    def forward(self, hidden_states, temb):
        given = temb
        if self.kind == "random":
            given = self.drop(temb)
        elif self.kind == "reads":  # what is computed depends on the sample
            given = temb if hidden_states.sum().item() > 0 else -temb
        elif self.kind == "attribute":  # a tensor that nobody knows of
            given = temb + self.secret
        elif self.kind == "masks":  # its shape depends on the sample
            given = temb + hidden_states[hidden_states > 0].shape[0]
        scale = self.mod(given) * self.scaling
        if self.kind == "twice":
            scale = scale + self.mod(2 * given)
        squeezed = self.squeeze(hidden_states.mean(1))
        return hidden_states + scale[:, None] * torch.tanh(squeezed)[:, None] + self.act(temb)[:, None]


class Toy(nn.Module):
    def __init__(self, kind="", size=6):
        super().__init__()
        self.first = nn.Linear(1, size)
        self.blocks = nn.ModuleList([Block(size, kind), Block(size)])

    def forward(self, hidden_states, timestep, label=None, scale=1.0):
        temb = torch.cos(self.first(timestep.reshape(-1, 1)))
        if label is not None:
            temb = temb + label * scale
        for block in self.blocks:
            hidden_states = block(hidden_states, temb)
        return hidden_states


def toy(kind=""):
    torch.manual_seed(0)
    return Toy(kind).eval().requires_grad_(False)


def toy_run(model, steps=3, batch=2, **more):
    x = torch.randn(batch, 6, 6, generator=torch.Generator().manual_seed(1))
    outs = []
    for s in range(steps):
        t = torch.full((batch,), 1.0 - s / 8)
        outs.append(model(hidden_states=x + s, timestep=t, **more))
    return torch.stack(outs)


ALL = ["blocks.0.mod", "blocks.0.act", "blocks.1.mod", "blocks.1.act", "first"]


def table_of(handle):
    return handle.denoisers[0].extensions[-1]


def counts(handle):
    return [call.counts.get(COUNTED) for call in handle.last.calls]
