"""Adapters and offload, while a model is wrapped."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache import Combine, Every, Interval, Taylor, TeaCache
from tests.internals import marks
from tests.test_exactness import check_exact, gap
from tests.zoo.case import output_tensors
from tests.zoo_runs import CASES, EVERY, PIPES, inputs, run, sample

pytestmark = pytest.mark.usefixtures("quiet")


def lora(pipe: Any) -> None:
    from peft import LoraConfig

    torch.manual_seed(5)
    targets = ["to_q", "to_v", "proj_mlp", "to_out.0"]
    pipe.transformer.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False))


@pytest.mark.parametrize(
    "method", [EVERY, diffcache.TaylorSeer(every=3, warmup=1, site="module")], ids=["stack", "module"]
)
def test_lora_loaded_and_unloaded_while_wrapped(method: Any):
    name = "FluxPipeline"
    pipe = PIPES[name].build(0)
    plain = run(pipe, name)
    tuned = PIPES[name].build(0)
    lora(tuned)
    diffcache.wrap(tuned, method)
    expected = run(tuned, name)

    diffcache.wrap(pipe, method)
    cached = run(pipe, name)
    lora(pipe)
    out = run(pipe, name)
    assert torch.equal(out, expected) and not torch.allclose(out, cached, atol=1e-3)
    assert "s" in marks(pipe)
    pipe.transformer.delete_adapters("default")
    pipe.unload_lora_weights()
    assert torch.equal(run(pipe, name), cached)
    diffcache.unwrap(pipe)
    assert torch.equal(run(pipe, name), plain)


TOKENS, EMBEDDED = 4, 10


def with_ip_adapter(model: Any, width: int, weights: dict[str, Any]) -> Any:
    """Load an image adapter of drawn weights."""
    proj = {
        "proj.weight": torch.randn(TOKENS * width, EMBEDDED) / EMBEDDED**0.5,
        "proj.bias": torch.zeros(TOKENS * width),
        "norm.weight": torch.ones(width),
        "norm.bias": torch.zeros(width),
    }
    model._load_ip_adapter_weights([{"image_proj": proj, "ip_adapter": weights}])
    return model


def unet_with_ip_adapter() -> tuple[nn.Module, dict[str, Any]]:
    case = CASES["UNet2DConditionModel"]
    model = case.build(0)
    width = model.config.cross_attention_dim
    names = [name for name in model.attn_processors if name.endswith("attn2.processor")]
    weights: dict[str, Any] = {}
    for number, name in enumerate(names):
        inner = model.get_submodule(name.removesuffix(".processor")).to_k.out_features
        for part in ("to_k_ip", "to_v_ip"):
            weights[f"{2 * number + 1}.{part}.weight"] = torch.randn(inner, width) / width**0.5
    given = inputs(case, with_ip_adapter(model, width, weights))
    given["added_cond_kwargs"] = {"image_embeds": [torch.randn(2, 1, EMBEDDED)]}
    return model, given


def flux_with_ip_adapter() -> tuple[nn.Module, dict[str, Any]]:
    case = CASES["FluxTransformer2DModel"]
    model = case.build(0)
    width = model.config.joint_attention_dim
    inner = model.config.num_attention_heads * model.config.attention_head_dim
    weights: dict[str, Any] = {}
    for block in range(model.config.num_layers):
        for name in ("to_k_ip", "to_v_ip"):
            weights[f"{block}.{name}.weight"] = torch.randn(inner, width) / width**0.5
            weights[f"{block}.{name}.bias"] = torch.zeros(inner)
    given = inputs(case, with_ip_adapter(model, width, weights))
    given["joint_attention_kwargs"] = {"ip_adapter_image_embeds": [torch.randn(2, 1, EMBEDDED)]}
    return model, given


@pytest.mark.parametrize("site", ["stack", "block", "module"])
@pytest.mark.parametrize("make", [unet_with_ip_adapter, flux_with_ip_adapter])
def test_ip_adapter(make: Callable[[], tuple[nn.Module, dict[str, Any]]], site: str):
    model, given = make()
    key = next(k for k in ("added_cond_kwargs", "joint_attention_kwargs") if k in given)
    (name, embeds), *_ = given[key].items()
    other = {**given, key: {name: [-embeds[0]]}}
    assert gap(model(**other), output_tensors(model(**given))) > 1e-4
    check_exact(model, lambda: {**given, key: {name: list(embeds)}}, site)


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


def trajectory(model: nn.Module, name: str) -> Tensor:
    return sample(CASES[name], model, STEPS)


OFFLOADS = [
    dict(offload_type="block_level", num_blocks_per_group=1),
    dict(offload_type="block_level", num_blocks_per_group=2),
    dict(offload_type="leaf_level"),
]


@pytest.mark.parametrize("order", ["offload first", "cache first"])
@pytest.mark.parametrize(
    ("settings", "method"), [(OFFLOADS[place % 3], method) for place, method in enumerate(METHODS)], ids=IDS
)
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
    assert torch.equal(trajectory(model, name), expected)
    assert "s" in marks(model) == marks(twin)
    diffcache.unwrap(model)
    assert torch.equal(trajectory(model, name), plain)


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


@pytest.mark.parametrize(
    ("settings", "method"), [(OFFLOADS[0], method) for method in METHODS] + [(OFFLOADS[2], METHODS[0])]
)
def test_a_block_behind_a_skipped_one_finds_its_weights(settings: dict[str, Any], method: Any):
    from diffusers.hooks import apply_group_offloading

    name = "FluxTransformer2DModel"
    expected = trajectory(diffcache.wrap(CASES[name].build(0), method), name)
    model = CASES[name].build(0)
    apply_group_offloading(model, onload_device=CPU, offload_device=CPU, **settings)
    loads = as_with_streams(model)
    diffcache.wrap(model, method)
    assert torch.equal(trajectory(model, name), expected)
    first = len(loads)
    assert torch.equal(trajectory(model, name), expected)
    diffcache.unwrap(model)
    cached = len(loads) - first
    loads.clear()
    outs = trajectory(model, name)
    assert torch.isfinite(outs).all()
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
    assert torch.equal(trajectory(model, name), plain)
