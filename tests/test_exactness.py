"""Skipping on inputs a model just saw changes nothing: every class of the zoo, and awkward loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache import AttachError, Interval
from tests.zoo.case import output_tensors
from tests.zoo.catalog import cases
from tests.zoo_runs import inputs, steps

CASES = cases()
VARIANTS = [(name, extra) for name in sorted(CASES) for extra in ("", *CASES[name].extras)]
REFUSED = {("UniDiffuserModel", "stack"), ("UNet1DModel", "module")}
TOLERANCE = 1e-6  # relative to the largest value of the output

pytestmark = pytest.mark.usefixtures("eager")


@cache
def built(name: str) -> nn.Module:
    built.cache_clear()  # keep one
    return CASES[name].build(0)


def gap(out: Any, expected: list[Tensor]) -> float:
    """Largest difference, relative to the largest expected value."""
    scale = max(float(tensor.float().abs().max()) for tensor in expected)
    assert scale > 1e-2
    found = output_tensors(out)
    assert [t.shape for t in found] == [t.shape for t in expected]
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / scale


def check_exact(model: nn.Module, make: Callable[[], dict[str, Any]], site: str) -> None:
    """Computed and skipped steps on the same inputs return what the uncached model returns.

    Computed steps are bit for bit what the model returns. The second step relies on what the
    traced call left, the fourth on what the taps record.
    """
    expected = output_tensors(model(**make()))
    with diffcache.wrapped(model, Interval(every=2, site=site)) as handle:
        for index in steps(handle, 4):
            error = gap(model(**make()), expected)
            assert error <= (TOLERANCE if index % 2 else 0), f"step {index}"
        assert [call.computed for call in handle.last.calls] == [True, False] * 2
        for call in handle.last.calls[1::2]:
            assert all(ran == 0 < skipped for ran, skipped in call.counts.values())
    assert gap(model(**make()), expected) == 0


@pytest.mark.parametrize("site", ["stack", "block", "module"])
@pytest.mark.parametrize(("name", "extra"), VARIANTS)
def test_skipping_on_the_same_inputs_changes_nothing(name: str, extra: str, site: str):
    case, model = CASES[name], built(name)
    if (name, site) in REFUSED:
        with pytest.raises(AttachError, match="use site="):
            check_exact(model, lambda: inputs(case, model, extra), site)
        return
    check_exact(model, lambda: inputs(case, model, extra), site)


@pytest.mark.parametrize("name", ["UniDiffuserModel", "FluxTransformer2DModel", "UNet2DConditionModel"])
def test_the_model_site_needs_no_wiring(name: str):
    case, model = CASES[name], built(name)
    check_exact(model, lambda: inputs(case, model), "model")


def test_a_wiring_that_is_not_exact_is_refused_and_leaves_the_model_usable():
    case = CASES["UniDiffuserModel"]
    model = case.build(0)
    expected = output_tensors(model(**inputs(case, model)))
    diffcache.wrap(model, Interval(every=2, site="stack"))
    for _ in range(2):  # every time, not only the first
        with pytest.raises(AttachError, match="changes the output by .* use site='block' or site='model'"):
            model(**inputs(case, model))
    diffcache.unwrap(model)
    assert gap(model(**inputs(case, model)), expected) == 0


def test_a_model_without_a_timestep_needs_a_scheduler():
    case = CASES["UVit2DModel"]
    model = case.build(0)
    diffcache.wrap(model, Interval(every=2))
    with pytest.raises(AttachError, match="no timestep to tell its steps by; wrap the pipeline"):
        model(**inputs(case, model))


def test_what_is_no_denoiser_is_refused_at_once():
    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModel

    blocks = {
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "block_out_channels": [4, 4],
        "norm_num_groups": 2,
    }
    text = CLIPTextConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2)
    for model, words in (
        (AutoencoderKL(**blocks), "an autoencoder, whose forward pipelines never call"),
        (CLIPTextModel(text), "a language model or text encoder"),
    ):
        before = set(vars(model))
        with pytest.raises(AttachError, match=f"is {words}.*wrap the pipeline, or its transformer"):
            diffcache.wrap(model, Interval(every=2))
        assert set(vars(model)) == before and not model._forward_hooks


# what changes in the middle of a run --------------------------------------------------------


@pytest.mark.parametrize("site", ["stack", "block", "module"])
@pytest.mark.parametrize(("name", "extra"), [v for v in VARIANTS if v[1] in ("controlnet", "adapter", "skip_layers")])
def test_control_that_starts_and_stops_is_computed_anew(name: str, extra: str, site: str):
    case, model = CASES[name], built(name)
    plan = [extra, extra, "", "", extra, extra]
    expected = {which: output_tensors(model(**inputs(case, model, which))) for which in {"", extra}}
    with diffcache.wrapped(model, Interval(every=9, site=site)) as handle:
        for index in steps(handle, len(plan)):
            out = model(**inputs(case, model, plan[index]))
            assert gap(out, expected[plan[index]]) <= TOLERANCE, f"step {index}"
        calls = handle.last.calls
    assert [call.computed for call in calls] == [True, False] * 3
    assert [call.reason for call in calls[::2]] == ["first call", "inputs changed", "inputs changed"]


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("FluxTransformer2DModel", "block"),
        ("SD3Transformer2DModel", "block"),
        ("FluxTransformer2DModel", "stack"),
        ("SD3Transformer2DModel", "stack"),
        ("QwenImageTransformer2DModel", "stack"),
        ("ChromaTransformer2DModel", "stack"),
    ],
)
def test_control_is_added_live_between_skipped_blocks(name: str, site: str):
    """Control that ends keeps its tensors in most pipelines; their scale falls to zero."""
    case, model = CASES[name], built(name)
    outs = []
    with diffcache.wrapped(model, Interval(every=9, site=site)) as handle:
        for index in steps(handle, 3):
            given = inputs(case, model, "controlnet")
            if index == 2:
                more = case.extras["controlnet"](model, 0)
                given.update({key: _zeros(value) for key, value in more.items()})
            outs.append(output_tensors(model(**given)))
        assert [call.computed for call in handle.last.calls] == [True, False, False]
    assert max(float((a - b).abs().max()) for a, b in zip(*outs[1:], strict=True)) > 1e-2


def _zeros(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    return type(value)(map(_zeros, value))


@pytest.mark.parametrize("site", ["stack", "block", "module"])
def test_skip_layer_guidance_is_a_branch_of_its_own(site: str):
    case = CASES["SD3Transformer2DModel"]
    model = case.build(0)
    both = [inputs(case, model), inputs(case, model, "skip_layers")]
    expected = [output_tensors(model(**given)) for given in both]
    with diffcache.wrapped(model, Interval(every=3, site=site)) as handle:
        for index in steps(handle, 7):
            for branch in (0, 1) if index in (1, 2, 3, 4) else (0,):
                assert gap(model(**both[branch]), expected[branch]) <= TOLERANCE
        marks = ["".join("sC"[call.computed] for call in handle.last.calls if call.branch == b) for b in (0, 1)]
    assert marks == ["CssCssC", "CsCs"]
