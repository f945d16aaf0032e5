"""Swapping layers for quantized ones leaves no trace, whatever happens to the model meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffcache.attach.extensions.quantize import QuantizedLayers, WatchedLayers, watch
from diffcache.errors import AttachError
from diffcache.features.parts.quantize import WatchLayers
from diffcache.offline.quantize_layers import LayerCalibration
from diffcache.quant.calibrate import grid_of, weight_grid
from diffcache.quant.plan import LayerPlan, QuantPlan
from diffcache.step import CURRENT, Step


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])
        self.blocks[1].add_module("again", self.blocks[0][0])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Adapter(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x)


def plan_for(model: nn.Module, *names: str) -> QuantPlan:
    grids = {name: weight_grid(model.get_submodule(name).weight, 8) for name in names}
    ranges = grid_of(torch.tensor([-5.0]), torch.tensor([5.0]), 8)
    return QuantPlan("w8a8", {name: LayerPlan(*grid, *ranges) for name, grid in grids.items()})


@pytest.fixture(autouse=True)
def first_step():
    token = CURRENT.set(SimpleNamespace(step=Step(0), repeats=False, writes=False))
    with torch.no_grad():
        yield
    CURRENT.reset(token)


def snapshot(model: nn.Module) -> list[tuple[str, nn.Module, dict]]:
    return [(n, m, dict(m.__dict__)) for n, m in model.named_modules(remove_duplicate=False)]


def test_layers_come_back_at_every_path() -> None:
    model, x = Model(), torch.randn(3, 4)
    expected, before = model(x), snapshot(model)
    seen: list[str] = []
    model.first.register_forward_pre_hook(lambda *_: seen.append("pre"))
    layers = QuantizedLayers(model, plan_for(model, "first", "blocks.0.0"))
    assert model.blocks[1].again is model.blocks[0][0] is layers.layers["blocks.0.0"]
    assert type(model.blocks[1][0]) is nn.Linear
    assert 0 < float((model(x) - expected).abs().max()) < 0.1 and seen == ["pre"]
    model.first.register_forward_hook(lambda *_: seen.append("post"))
    model(x)
    assert seen == ["pre", "pre", "post"]
    layers.remove()
    for (name, module, state), (other, twin, now) in zip(snapshot(model), before, strict=True):
        assert name == other and module is twin and state.keys() == now.keys()
    model(x)
    assert seen[3:] == ["pre", "post"]  # hooks added meanwhile are kept
    assert torch.equal(model(x), expected)


def test_an_adapter_put_on_meanwhile_keeps_the_dense_layer() -> None:
    model = Model()
    dense = model.first
    layers = QuantizedLayers(model, plan_for(model, "first"))
    model.first = Adapter(model.first)
    layers.remove()
    assert model.first.base is dense


def test_a_model_cast_meanwhile_fits_together() -> None:
    model = Model()
    layers = QuantizedLayers(model, plan_for(model, "first"))
    model.double()
    layers.remove()
    assert model(torch.randn(2, 4).double()).dtype == torch.float64


def test_bytes_are_reported() -> None:
    model = Model()
    layers = QuantizedLayers(model, plan_for(model, "first", "blocks.0.0"))
    assert layers.dense_bytes == 2 * 16 * 4
    assert layers.quantized_bytes == 2 * (16 + 4 * 4 * 4)  # codes, two sums, factor and shift


def test_layers_without_weights_here_are_refused() -> None:
    model = Model()
    plan = plan_for(model, "first")
    model.first = nn.Linear(4, 4, device="meta")
    with pytest.raises(AttachError, match="first has its weight on meta.*before the model is"):
        QuantizedLayers(model, plan)


def test_only_layers_inside_blocks_are_watched() -> None:
    model, watcher = Model(), LayerCalibration("w8a8", (), (), False)
    watcher.enter("ranges", 1)
    before = snapshot(model)
    watched = WatchedLayers(model, ("blocks",), watcher)
    model(torch.randn(3, 4))
    assert set(watcher.ranges) == {"blocks.0.0", "blocks.1.0"}
    watched.remove()
    for (_, _, state), (_, _, now) in zip(snapshot(model), before, strict=True):
        assert all(state[key] is value or state[key] == value for key, value in now.items())


def test_modes_and_gradients_reach_the_layers_that_are_put_back() -> None:
    model = Model()
    names = [name for name, _ in model.named_parameters()]
    layers = QuantizedLayers(model, plan_for(model, "first", "blocks.0.0"))
    assert [name for name, _ in model.named_parameters()] == names
    model.eval().requires_grad_(False)
    assert not layers.layers["first"].training and not model.first.dense.training
    layers.remove()
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    layers.put()
    model.train().requires_grad_(True)
    layers.remove()
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_compiled_parts_of_blocks_are_not_watched() -> None:
    model, watcher = Model(), LayerCalibration("w8a8", (), (), False)
    lists = (SimpleNamespace(key="blocks"),)
    denoiser: Any = SimpleNamespace(model=model, anatomy=SimpleNamespace(lists=lists, singles=()))
    model.first._compiled_call_impl = model.first._call_impl  # outside the blocks
    watch(denoiser, WatchLayers(watcher)).remove()
    layer = model.get_submodule("blocks.1.0")
    layer._compiled_call_impl = layer._call_impl
    with pytest.raises(AttachError, match="blocks.1.0 is compiled.*before you compile"):
        watch(denoiser, WatchLayers(watcher))
    assert not any(module._forward_pre_hooks for module in model.modules())
