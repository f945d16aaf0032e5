"""Offloaded models: weights that come and go around blocks that may not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache import Combine, Every, Interval, Taylor, TeaCache
from tests.internals import marks
from tests.zoo.catalog import cases
from tests.zoo.pipes import pipes

CASES, PIPES = cases(), pipes()
STEPS = 6
CPU = torch.device("cpu")
METHODS = [
    Interval(every=3),
    Combine(Every(3), Taylor(1), site="block"),
    Combine(Every(3), Taylor(1), lead=1, tail=1),
    Interval(every=3, site="module"),
    TeaCache(0.5, (1.0, 0.0)),  # which looks into the first block
]
IDS = ["stack", "block", "lead and tail", "module", "a look inside"]

pytestmark = pytest.mark.usefixtures("quiet")


def trajectory(model: nn.Module, name: str) -> list[Tensor]:
    case = CASES[name]
    return [model(**case.kwargs(model, 0, s, STEPS)).sample.clone() for s in range(STEPS)]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


OFFLOADS = [
    dict(offload_type="block_level", num_blocks_per_group=1),
    dict(offload_type="block_level", num_blocks_per_group=2),
    dict(offload_type="leaf_level"),
]


@pytest.mark.parametrize("method", METHODS, ids=IDS)
@pytest.mark.parametrize("settings", OFFLOADS, ids=["one block", "two blocks", "leaves"])
@pytest.mark.parametrize("order", ["offload first", "cache first"])
def test_group_offloading(settings: dict[str, Any], method: Any, order: str):
    from diffusers.hooks import apply_group_offloading

    name = "FluxTransformer2DModel"
    plain = trajectory(CASES[name].build(0), name)
    twin = diffcache.wrap(CASES[name].build(0), method)
    expected = trajectory(twin, name)
    model = CASES[name].build(0)
    if order == "cache first":
        diffcache.wrap(model, method)
    apply_group_offloading(model, onload_device=CPU, offload_device=CPU, **settings)
    if order == "offload first":
        diffcache.wrap(model, method)
    assert same(trajectory(model, name), expected)
    assert "s" in marks(model) == marks(twin)
    diffcache.unwrap(model)
    assert same(trajectory(model, name), plain)


def as_with_streams(model: nn.Module) -> list[str]:
    """Make group offloading behave as on an accelerator with prefetching streams.

    Offloaded weights are NaN until their group is loaded; the order of the groups is traced in
    the first forward, and each group loads the next one.
    """
    from diffusers.hooks.group_offloading import (
        _GROUP_OFFLOADING,
        GroupOffloadingConfig,
        GroupOffloadingType,
        ModuleGroup,
        _apply_lazy_group_offloading_hook,
    )

    loads: list[str] = []
    groups: dict[int, Any] = {}
    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        hook = registry.get_hook(_GROUP_OFFLOADING) if registry is not None else None
        if hook is not None:
            groups[id(hook.group)] = hook.group
    for group in groups.values():
        tensors = [*group.parameters, *group.buffers]
        tensors += [t for m in group.modules for t in (*m.parameters(), *m.buffers())]
        saved = [(tensor, tensor.data.clone()) for tensor in tensors]

        def onload(saved: Any = saved) -> None:
            loads.append("onload")
            for tensor, data in saved:
                tensor.data = data

        def offload(saved: Any = saved) -> None:
            loads.append("offload")
            for tensor, data in saved:
                if data.is_floating_point():
                    tensor.data = torch.full_like(data, float("nan"))

        group.onload_, group.offload_ = onload, offload
        offload()
    kind = GroupOffloadingType.BLOCK_LEVEL
    config = GroupOffloadingConfig(CPU, CPU, kind, True, False, False)
    rest = ModuleGroup([], CPU, CPU, offload_leader=model, onload_leader=model)
    _apply_lazy_group_offloading_hook(model, rest, config=config)
    loads.clear()
    return loads


@pytest.mark.parametrize("method", METHODS, ids=IDS)
@pytest.mark.parametrize("settings", OFFLOADS[::2], ids=["blocks", "leaves"])
def test_a_block_behind_a_skipped_one_finds_its_weights(settings: dict[str, Any], method: Any):
    from diffusers.hooks import apply_group_offloading

    name = "FluxTransformer2DModel"
    expected = trajectory(diffcache.wrap(CASES[name].build(0), method), name)
    model = CASES[name].build(0)
    apply_group_offloading(model, onload_device=CPU, offload_device=CPU, **settings)
    loads = as_with_streams(model)
    diffcache.wrap(model, method)
    assert same(trajectory(model, name), expected)
    first = len(loads)
    assert same(trajectory(model, name), expected)
    diffcache.unwrap(model)
    cached = len(loads) - first
    loads.clear()
    outs = trajectory(model, name)
    assert all(torch.isfinite(out).all() for out in outs)
    runs_all_blocks = method.parts().site == "module" and "num_blocks_per_group" in settings
    assert cached == len(loads) if runs_all_blocks else cached < len(loads)


@pytest.mark.parametrize("method", METHODS[:2], ids=IDS[:2])
@pytest.mark.parametrize("kind", ["model", "sequential"])
def test_accelerates_offload_hooks(kind: str, method: Any):
    from accelerate import cpu_offload, cpu_offload_with_hook
    from accelerate.hooks import remove_hook_from_module

    pipe_case = PIPES["FluxPipeline"]
    pipe = pipe_case.build(0)
    plain = pipe_case.run(pipe, 0, STEPS)
    expected = pipe_case.run(diffcache.wrap(pipe, method), 0, STEPS)
    if kind == "model":
        _, hook = cpu_offload_with_hook(pipe.transformer, CPU)
        assert torch.equal(pipe_case.run(pipe, 0, STEPS), expected)
        hook.offload()
        hook.remove()
    else:
        cpu_offload(pipe.transformer, CPU)
        assert torch.equal(pipe_case.run(pipe, 0, STEPS), expected)
        assert any(p.device.type == "meta" for p in pipe.transformer.parameters())
        remove_hook_from_module(pipe.transformer, recurse=True)
    assert marks(pipe) == "CssCss"
    assert torch.equal(pipe_case.run(pipe, 0, STEPS), expected)
    diffcache.unwrap(pipe)
    assert torch.equal(pipe_case.run(pipe, 0, STEPS), plain)


@pytest.mark.parametrize("method", METHODS[:-1], ids=IDS[:-1])
def test_layerwise_casting(method: Any):
    name = "FluxTransformer2DModel"
    model = CASES[name].build(0)
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    plain = trajectory(model, name)
    diffcache.wrap(model, method)
    outs = trajectory(model, name)
    assert marks(model) == "CssCss"
    assert torch.equal(outs[0], plain[0]) and torch.equal(outs[3], trajectory(model, name)[3])
    diffcache.unwrap(model)
    assert same(trajectory(model, name), plain)
