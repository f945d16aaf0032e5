"""Temporal tables are dropped with the weights that they were computed with."""

import pytest
import torch
from torch import nn

import diffcache
from diffcache.attach.extensions.lookup_weights import Weights, checksum
from diffcache.features.temporal_table import TemporalTable
from tests.features.temporal_toys import counts, toy, toy_run


class Adapter(nn.Module):
    """Wraps a linear layer as adapters do."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora = nn.ModuleDict({"one": nn.Linear(base.in_features, base.out_features)})
        self.scaling = {"one": 0.5}
        self.requires_grad_(False)

    def forward(self, value):
        return self.base_layer(value) + self.scaling["one"] * self.lora["one"](value)


def grow(model):
    model.blocks[0].mod.weight.mul_(2)


def grow_data(model):
    model.blocks[0].mod.weight.data += 1


def grow_upstream(model):
    model.first.bias.data.add_(1)


def move_columns(model):
    weight = model.blocks[1].mod.weight
    weight.data.copy_(weight.data.flip(1).clone())


def replace(model):
    model.blocks[0].mod = Adapter(model.blocks[0].mod)


def replace_upstream(model):
    model.first = Adapter(model.first)


def new_parameter(model):
    model.blocks[1].mod.bias = nn.Parameter(torch.ones(6), requires_grad=False)


def load(model):
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})


CHANGES = [grow, grow_data, grow_upstream, move_columns, replace, replace_upstream, new_parameter,
           load]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_weights_drops_the_table(change):
    model, twin = toy(), toy()
    with torch.no_grad():
        change(twin)
    plain, after = toy_run(model), toy_run(twin)
    assert not torch.equal(plain, after)
    with diffcache.wrapped(model, TemporalTable()) as handle, torch.no_grad():
        assert torch.equal(toy_run(model), plain)
        torch.manual_seed(0)
        twin_seed = torch.random.get_rng_state()
        toy()  # as many random numbers as the twin drew before its change
        change(model)
        torch.random.set_rng_state(twin_seed)
        if change not in (replace, replace_upstream):
            assert torch.equal(toy_run(model), after)
        changed = toy_run(model)
        assert torch.equal(toy_run(model), changed)
        assert all(ran == 0 for ran, _ in counts(handle))
    assert torch.equal(toy_run(model), changed) and not torch.equal(changed, plain)


def test_the_scale_of_an_adapter_drops_the_table():
    model = toy()
    replace(model)
    replace_upstream(model)
    with diffcache.wrapped(model, TemporalTable()), torch.no_grad():
        for path in ("first", "blocks.0.mod"):
            toy_run(model)
            model.get_submodule(path).scaling["one"] += 0.25
            found = toy_run(model)
            assert torch.equal(found, toy_run(model))
            assert not torch.equal(found, toy_run(toy()))
            kept = found
        model.first.scaling["one"] = model.first.scaling["one"]
        assert torch.equal(toy_run(model), kept)
    assert torch.equal(toy_run(model), kept)


def test_weights_that_only_move_keep_the_table():
    model = toy()
    plain = toy_run(model)
    with diffcache.wrapped(model, TemporalTable()) as handle:
        toy_run(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        assert torch.equal(toy_run(model), plain)
        assert all(ran == 0 for ran, _ in counts(handle))


def test_a_change_within_a_run_is_seen():
    model = toy()
    x, times = torch.randn(1, 5, 6), [torch.tensor([t]) for t in (1.0, 0.5)]
    with diffcache.wrapped(model, TemporalTable()), torch.no_grad():
        for t in times:
            model(x, timestep=t)
        model(x, timestep=times[0])  # a second run starts
        model.blocks[0].mod.weight.mul_(3)
        found = model(x, timestep=times[1])
    assert torch.equal(found, model(x, times[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_checksums_tell_contents_apart(dtype):
    assert checksum(torch.ones(1).expand(1)) == checksum(torch.ones(1))
    for shape in [(), (1,), (3, 5), (64, 17), (8, 640)]:
        one = (torch.randn(shape) * 50).to(dtype)
        assert checksum(one) == checksum(one.clone())
        changed = one.clone().reshape(-1)
        changed[-1] = 0 if changed[-1] else 1
        assert checksum(changed.reshape(shape)) != checksum(one)
    assert checksum(torch.arange(9.0)) != checksum(torch.arange(9.0).flip(0))
    assert checksum(torch.arange(9.0)[1:4]) == checksum(torch.tensor([1.0, 2.0, 3.0]))


def test_weights_without_contents_never_count_as_unchanged():
    layer = nn.Linear(3, 3, device="meta")
    weights = Weights(nn.ModuleList([layer]), [(layer, "weight")])
    assert weights.changed(starts=True) and not weights.changed(starts=False)
