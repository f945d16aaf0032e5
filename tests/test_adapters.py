"""Adapters that come and go in a wrapped model, and those of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import diffcache
from tests.internals import marks
from tests.test_exactness import check_exact, gap
from tests.zoo.case import output_tensors
from tests.zoo_runs import CASES, EVERY, PIPES, inputs, run

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


def test_lora_from_a_file(tmp_path: Any):
    from peft.utils import get_peft_model_state_dict

    name = "FluxPipeline"
    pipe = PIPES[name].build(0)
    plain = run(pipe, name)
    lora(pipe)
    state = get_peft_model_state_dict(pipe.transformer)
    type(pipe).save_lora_weights(tmp_path, transformer_lora_layers=state)
    expected = run(diffcache.wrap(pipe, EVERY), name)

    other = diffcache.wrap(PIPES[name].build(0), EVERY)
    other.load_lora_weights(tmp_path)
    assert torch.allclose(run(other, name), expected, atol=1e-6)
    assert marks(other) == "CssCss"
    other.unload_lora_weights()
    diffcache.unwrap(other)
    assert torch.equal(run(other, name), plain)


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
