"""Look-ups of a temporal table: modules that the sample cannot reach, keyed by content."""

import types

import pytest
import torch
from torch import nn

import diffcache
from diffcache.attach.extensions.lookup_sites import time_sites
from diffcache.features.temporal_table import TemporalTable
from tests.features.temporal_toys import ALL, Block, Toy, counts, table_of, toy, toy_run
from tests.internals import state_of


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("", []),
        ("random", ["blocks.0.mod"]),
        ("reads", ["blocks.0.mod", "blocks.0.act", "blocks.1.mod", "blocks.1.act"]),
        ("masks", ["blocks.0.mod", "blocks.0.act", "blocks.1.mod", "blocks.1.act"]),
        ("attribute", ["blocks.0.mod"]),
        ("twice", ["blocks.0.mod"]),
        ("writes", ["blocks.0.act"]),
    ],
)
def test_only_what_the_sample_cannot_reach_is_tapped(kind, missing):
    model = toy(kind)
    model.blocks[0].drop.train(kind == "random")
    before = state_of(model)
    x, t = torch.randn(2, 5, 6), torch.rand(2)
    found = time_sites(model, lambda: model(x, t), {"timestep": t}, [x])
    assert sorted(site.path for site in found) == sorted(set(ALL) - set(missing))
    assert all(site.arguments == {"timestep"} for site in found)
    weights = {s.path: [name for _, name in s.weights] for s in found}
    assert weights["first"] == ["weight", "bias"]
    if "blocks.1.mod" not in missing:
        assert weights["blocks.1.mod"] == ["weight", "bias"] * 2  # its own and those of `first`
    assert state_of(model) == before
    if kind in ("reads", "masks", "attribute", "twice", "writes"):
        plain = toy_run(model)
        with diffcache.wrapped(model, TemporalTable()):
            assert torch.equal(toy_run(model), plain)
            assert torch.equal(toy_run(model), plain)


def test_what_is_inside_compiled_blocks_stays_there():
    model = toy()
    plain = toy_run(model)
    for block in model.blocks:
        block.compile(backend="eager")
    with diffcache.wrapped(model, TemporalTable()) as handle:
        for _ in range(2):
            assert torch.equal(toy_run(model), plain)
        assert list(table_of(handle).taps) == ["first"]
        assert counts(handle) == [(0, 1)] * 3
    torch._dynamo.reset()


def test_a_sample_that_shares_memory_with_a_condition_is_no_condition():
    model, both = toy(), torch.randn(2, 6, 6)
    x, t = both[:, :5], both[:, 5, 0]
    found = time_sites(model, lambda: model(x, t), {"timestep": t}, [x])
    assert found == []


class Mixed(nn.Module):
    """Nothing in it sees the timestep alone."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(6), Block(6)])

    def forward(self, hidden_states, timestep):
        mixed = timestep[:, None] + hidden_states.mean(1)
        for block in self.blocks:
            hidden_states = block(hidden_states, mixed)
        return hidden_states


class Attends(Toy):
    """Attends with flex attention, as far as its processor says."""

    def __init__(self):
        super().__init__()
        self.processor = types.SimpleNamespace(_attention_backend="flex")


class Fails(Toy):
    """Does not run where operations are followed."""

    def forward(self, hidden_states, timestep):
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        if any(type(mode).__name__ == "_Origins" for mode in modes):
            raise NotImplementedError("no rule for this operation")
        return super().forward(hidden_states, timestep)


@pytest.mark.parametrize(
    ("cls", "match"),
    [
        (Mixed, "no module was seen"),
        (Attends, "cannot be followed .it attends with flex attention"),
        (Fails, "cannot be followed .no rule for this operation"),
    ],
)
def test_where_nothing_can_be_looked_up_it_says_so_and_computes(cls, match):
    model = cls().eval().requires_grad_(False)
    plain = toy_run(model)
    with diffcache.wrapped(model, TemporalTable()) as handle:
        with pytest.warns(diffcache.CacheWarning, match=match):
            found = toy_run(model)
        assert torch.equal(found, plain) and torch.equal(toy_run(model), plain)
        assert counts(handle) == [None] * 3


def test_plain_arguments_and_dtypes_and_batches_are_part_of_the_key():
    model = toy()
    label = torch.randn(6)
    settings = [{}, {"label": label}, {"label": label, "scale": 2.0}, {"label": label + 1}]
    plains = [toy_run(model, **more) for more in settings]
    alone = toy_run(model, batch=1)
    with diffcache.wrapped(model, TemporalTable()):
        for _ in range(2):
            for more, plain in zip(settings, plains, strict=True):
                assert torch.equal(toy_run(model, **more), plain)
            assert torch.equal(toy_run(model, batch=1), alone)
        label.mul_(-1)  # the same tensor, written to
        found = toy_run(model, label=label)
    assert torch.equal(found, toy_run(model, label=label))
