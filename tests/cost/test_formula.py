"""FLOPs by formula, against closed forms and real runs."""

import pytest
import torch

from diffcache.attach.inputs import INPUTS, Size, inputs_of
from diffcache.eval.cost import flops, formula
from diffcache.pipelines.small import flux
from tests.zoo.catalog import cases


def wan_form(config, tokens, text):
    D = config["num_attention_heads"] * config["attention_head_dim"]
    patch = config["patch_size"][0] * config["patch_size"][1] * config["patch_size"][2]
    C = config["in_channels"] * patch
    vectors = config["freq_dim"] * D + D * D + D * 6 * D
    prompt = text * (config["text_dim"] * D + D * D)
    own = tokens * 4 * D * D + 2 * tokens * tokens * D
    cross = (2 * tokens + 2 * text) * D * D + 2 * tokens * text * D
    block = own + cross + tokens * 2 * D * config["ffn_dim"]
    return 2 * (vectors + prompt + 2 * tokens * C * D + config["num_layers"] * block)


@pytest.mark.parametrize("cls", INPUTS)
def test_the_formula_counts_as_a_real_run(cls):
    case = cases()[cls]
    model = case.build(0)
    film = INPUTS[cls].temporal > 1
    text = model.config.get("max_text_seq_length", 6)
    spatial, temporal = INPUTS[cls].spatial, INPUTS[cls].temporal
    size = Size(8 * spatial, 4 * spatial, 1 + temporal if film else 1, text, batch=2)
    real = formula.count_call(model, inputs_of(cls, model.config, size, device="cpu"))
    fields = (size.height, size.width, size.frames, size.text_tokens, size.batch)
    assert formula.formula_flops({"_class_name": cls, **case.config}, *fields) == real
    assert 0 < real.attention < real.total and real.rest > 0
    assert real.blocks + real.rest == real.total


def test_flux_dev_and_wan_by_closed_form(flux_form):
    """At their real widths, with few layers: that of Flux has 19 and 38, that of Wan 30."""
    config = dict(
        _class_name="FluxTransformer2DModel", in_channels=64, num_layers=2, num_single_layers=3,
        attention_head_dim=128, num_attention_heads=24, joint_attention_dim=4096,
        pooled_projection_dim=768, guidance_embeds=True, axes_dims_rope=(16, 56, 56),
    )  # fmt: skip
    found = formula.formula_flops(config, 1024, 1024, text_tokens=512)
    total, blocks, attention = flux_form(config, 64 * 64, 512)
    assert (found.total, found.blocks, found.attention) == (total, blocks, attention)
    config = dict(
        _class_name="WanTransformer3DModel", patch_size=(1, 2, 2), num_attention_heads=12,
        attention_head_dim=128, in_channels=16, out_channels=16, text_dim=4096, freq_dim=256,
        ffn_dim=8960, num_layers=3,
    )  # fmt: skip
    found = formula.formula_flops(config, 480, 832, frames=81)
    assert found.total == wan_form(config, 21 * 30 * 52, 512)


def test_a_directory_brings_its_compression(pipe, call):
    found = formula.formula_flops(flux.DIRECTORY, 64, 64, text_tokens=flux.TEXT_TOKENS)
    assert found.total == flops.count(pipe, call()).per_step
    alone = formula.resolve(flux.DIRECTORY / "transformer")
    assert alone.cls == "FluxTransformer2DModel" and alone.compression is None


def test_inputs_of_ones_own():
    case = cases()["AllegroTransformer3DModel"]
    model = case.build(0)
    inputs = case.kwargs(model, 0)
    there = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    assert formula.count_on_meta(case.cls, case.config, there) == formula.count_call(model, inputs)


def test_a_forward_that_needs_values_is_a_clear_error():
    case = cases()["OmniGenTransformer2DModel"]
    inputs = case.kwargs(case.build(0), 0)
    there = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    with pytest.raises(ValueError, match="OmniGenTransformer2DModel: cannot be called"):
        formula.count_on_meta(case.cls, case.config, there)
