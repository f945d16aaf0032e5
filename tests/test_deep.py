"""Site `deep`: a UNet split between the layers of its blocks, as DeepCache and CacheQuant do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache import Interval
from diffcache.attach.handle import Handle
from diffcache.features.combine import Combine
from diffcache.features.parts.when import Every
from tests.zoo.case import output_tensors
from tests.zoo.catalog import cases

CASES = cases()
WITHOUT = ("Kandinsky3UNet", "StableCascadeUNet", "UNet1DModel", "UNet2DModel-skip")
SPLIT = [name for name in sorted(CASES) if "UNet" in name and name not in WITHOUT]

pytestmark = pytest.mark.usefixtures("no_gradients")


def deep(layers: int = 1, every: int = 2) -> Combine:
    """DeepCache at branch `layers - 1`."""
    return Combine(Every(every), site="deep", lead=layers, tail=layers)


def inputs(name: str, model: nn.Module, extra: str = "", step: int = 0) -> dict[str, Any]:
    case = CASES[name]
    return case.kwargs(model, 0, step) | (case.extras[extra](model, step) if extra else {})


def run(model: nn.Module, given: list[dict[str, Any]], handle: Handle) -> list[Tensor]:
    """Walk through a run that a scheduler would announce; the outputs."""
    outs = []
    handle.restart(given)
    for kwargs in given:
        with diffcache.branch("one"):  # whose conditions may change with the step
            outs += output_tensors(model(**kwargs))
        handle.run().ticks += 1
    return outs


def gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", SPLIT)
def test_skipping_on_what_was_just_seen_changes_nothing(name: str) -> None:
    model = CASES[name].build(0)
    before = {key: (type(m), set(m.__dict__)) for key, m in model.named_modules()}
    for extra in ("", *CASES[name].extras):
        expected = output_tensors(model(**inputs(name, model, extra)))
        for layers in (1,) if name == "UNetControlNetXSModel" else (2,) if extra else (1, 4):
            with Handle(model, {"model": model}, deep(layers)) as handle:
                outs = run(model, [inputs(name, model, extra) for _ in range(4)], handle)
                calls = handle.last.calls
            assert [call.computed for call in calls] == [True, False] * 2
            assert all(gap(out, expected[n % len(expected)]) < 1e-6 for n, out in enumerate(outs))
            ran, skipped = map(sum, zip(*calls[1].counts.values(), strict=True))
            assert 0 < ran < skipped or layers == 4
        with Handle(model, {"model": model}, deep(every=1)) as handle:
            outs = run(model, [inputs(name, model, extra)], handle)
        assert all(map(torch.equal, outs, expected))
    assert before == {key: (type(m), set(m.__dict__)) for key, m in model.named_modules()}


def deepcache(model: nn.Module, feature: Tensor, given: dict[str, Any]) -> Tensor:
    """Return a UNet's output where only its last layer runs, worked out by hand."""
    emb = model.time_embedding(model.time_proj(given["timestep"].reshape(-1)))
    if "added_cond_kwargs" in given:
        more = given["added_cond_kwargs"]
        ids = model.add_time_proj(more["time_ids"].flatten()).reshape(len(more["time_ids"]), -1)
        emb = emb + model.add_embedding(torch.cat([more["text_embeds"], ids], -1))
    skip = model.conv_in(given["sample"])
    if "down_block_additional_residuals" in given:
        skip = skip + given["down_block_additional_residuals"][0]
    last = model.up_blocks[-1]
    hidden = last.resnets[-1](torch.cat([feature, skip], 1), emb)
    if hasattr(last, "attentions"):
        hidden = last.attentions[-1](hidden, given.get("encoder_hidden_states")).sample
    return model.conv_out(model.conv_act(model.conv_norm_out(hidden)))


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("UNet2DConditionModel", ""),
        ("UNet2DConditionModel", "controlnet"),
        ("UNet2DConditionModel-sdxl", ""),
        ("UNet2DModel", ""),
        ("UNet2DConditionModel", "lora"),
    ],
)
def test_a_skipped_step_is_deepcaches(name: str, extra: str) -> None:
    model = CASES[name].build(0)
    if extra == "lora":
        from peft import LoraConfig

        extra, targets = "", ["to_q", "conv1", "conv_shortcut"]
        model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    given = [inputs(name, model, extra, step) for step in range(4)]
    last, features = model.up_blocks[-1], []
    enter = last.attentions[-2] if hasattr(last, "attentions") else last.resnets[-2]
    hook = enter.register_forward_hook(lambda _, __, out: features.append(output_tensors(out)[0]))
    full = [output_tensors(model(**kwargs))[0] for kwargs in given]
    hook.remove()
    with Handle(model, {"model": model}, Interval(every=2, site="deep")) as handle:
        outs = run(model, given, handle)
    for step in (1, 3):
        assert gap(outs[step], deepcache(model, features[step - 1], given[step])) < 1e-5
        assert gap(outs[step], full[step]) > 1e-3
        assert torch.equal(outs[step - 1], full[step - 1])


@pytest.mark.parametrize("site", ["deep", "stack"])
def test_every_guidance_call_runs_the_layers_that_the_last_ones_read(site: str) -> None:
    name = "UNet2DConditionModel"
    model = CASES[name].build(0)
    given = [inputs(name, model), inputs(name, model)]
    given[1]["encoder_hidden_states"] = -given[1]["encoder_hidden_states"]
    expected = [output_tensors(model(**kwargs))[0] for kwargs in given]
    method = Combine(Every(2), site=site, lead=2, tail=2, feature="output")
    with Handle(model, {"model": model}, method) as handle:
        handle.restart(range(2))
        for _ in range(2):
            for kwargs, wanted in zip(given, expected, strict=True):
                assert gap(output_tensors(model(**kwargs))[0], wanted) < 1e-6
            handle.run().ticks += 1
        assert [call.computed for call in handle.last.calls] == [True, True, False, False]


def test_a_transformer_is_cached_at_its_stack() -> None:
    name = "SD3Transformer2DModel"
    model, outs = CASES[name].build(0), []
    given = [inputs(name, model, step=step) for step in range(4)]
    for site in ("deep", "stack"):
        method = Combine(Every(2), site=site, lead=1, tail=1)
        with Handle(model, {"model": model}, method) as handle:
            outs.append(run(model, given, handle))
    assert all(map(torch.equal, *outs))
