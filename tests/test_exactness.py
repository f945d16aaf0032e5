"""Skipping on inputs a model just saw changes nothing: every class of the zoo, whose cases are whole, and awkward loops."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache import AttachError, Interval
from diffcache.pipelines.demo.describe import EXCLUDED, exported_denoisers
from tests.zoo.case import Case, output_tensor, output_tensors
from tests.zoo.catalog import cases
from tests.zoo_runs import inputs, steps

Made = tuple[Case, nn.Module, dict[str, list[Tensor]]]

CASES = cases()
VARIANTS = [(name, extra) for name in sorted(CASES) for extra in CASES[name].extras]
REFUSED = {("UniDiffuserModel", "stack"), ("UNet1DModel", "module")}
TOLERANCE = 1e-6  # relative to the largest value of the output

pytestmark = pytest.mark.usefixtures("eager")


@cache
def built(name: str) -> Made:
    """Build a model, with what it returns uncached for the usual inputs and for every variant."""
    built.cache_clear()  # keep one
    case = CASES[name]
    model = case.build(0)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        outputs = {extra: output_tensors(model(**inputs(case, model, extra))) for extra in ("", *case.extras)}
    return case, model, outputs


@pytest.fixture(scope="module", params=sorted(CASES))
def made(request) -> Made:
    """Return each model in its turn, so that the tests of it come one after the other."""
    return built(request.param)


def gap(out: Any, expected: list[Tensor]) -> float:
    """Largest difference, relative to the largest expected value."""
    scale = max(float(tensor.float().abs().max()) for tensor in expected)
    assert scale > 1e-2
    found = output_tensors(out)
    assert [t.shape for t in found] == [t.shape for t in expected]
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / scale


def check_exact(
    model: nn.Module, make: Callable[[], dict[str, Any]], site: str, expected: list[Tensor] | None = None
) -> None:
    """Computed and skipped steps on the same inputs return what the uncached model returns.

    Computed steps are bit for bit what the model returns. The second step relies on what the
    traced call left, the fourth on what the taps record.
    """
    expected = expected or output_tensors(model(**make()))
    with diffcache.wrapped(model, Interval(every=2, site=site)) as handle:
        for index in steps(handle, 4):
            error = gap(model(**make()), expected)
            assert error <= (TOLERANCE if index % 2 else 0), f"step {index}"
        assert [call.computed for call in handle.last.calls] == [True, False] * 2
        for call in handle.last.calls[1::2]:
            assert all(ran == 0 < skipped for ran, skipped in call.counts.values())
    assert gap(model(**make()), expected) == 0


@pytest.mark.parametrize("site", ["stack", "block", "module"])
def test_skipping_on_the_same_inputs_changes_nothing(made: Made, site: str):
    case, model, outputs = made
    refused = (case.name, site) in REFUSED
    for extra in ("", *(() if site == "module" else case.extras)):
        with pytest.raises(AttachError, match="use site=") if refused else nullcontext():
            check_exact(model, partial(inputs, case, model, extra), site, outputs[extra])


@pytest.mark.parametrize("name", ["UniDiffuserModel", "FluxTransformer2DModel", "UNet2DConditionModel"])
def test_the_model_site_needs_no_wiring(name: str):
    case, model, outputs = built(name)
    check_exact(model, partial(inputs, case, model), "model", outputs[""])


def test_a_model_without_a_timestep_needs_a_scheduler():
    case = CASES["UVit2DModel"]
    model = case.build(0)
    diffcache.wrap(model, Interval(every=2))
    with pytest.raises(AttachError, match="no timestep to tell its steps by; wrap the pipeline"):
        model(**inputs(case, model))


@pytest.mark.parametrize("site", ["stack", "block", "module"])
@pytest.mark.parametrize(("name", "extra"), [v for v in VARIANTS if v[1] in ("controlnet", "adapter", "skip_layers")])
def test_control_that_starts_and_stops_is_computed_anew(name: str, extra: str, site: str):
    case, model, expected = built(name)
    plan = [extra, extra, "", "", extra, extra]
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
    case, model, _ = built(name)
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
    case, model, outputs = built("SD3Transformer2DModel")
    variants = ("", "skip_layers")
    both, expected = [inputs(case, model, v) for v in variants], [outputs[v] for v in variants]
    with diffcache.wrapped(model, Interval(every=3, site=site)) as handle:
        for index in steps(handle, 7):
            for branch in (0, 1) if index in (1, 2, 3, 4) else (0,):
                assert gap(model(**both[branch]), expected[branch]) <= TOLERANCE
        marks = ["".join("sC"[call.computed] for call in handle.last.calls if call.branch == b) for b in (0, 1)]
    assert marks == ["CssCssC", "CsCs"]


def block_list(model: nn.Module, path: str) -> nn.ModuleList:
    found = model
    for part in path.split("."):
        found = found[part] if isinstance(found, nn.ModuleDict) else getattr(found, part)
    return found


def flat(out) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in output_tensors(out)])


def far(left: torch.Tensor, right: torch.Tensor) -> float:
    return (left - right).abs().max().item()


def test_every_exported_denoiser_is_a_case_or_excluded():
    have = {case.cls for case in CASES.values()}
    names = exported_denoisers()
    assert len(names) > 60
    assert [name for name in names if name not in have and name not in EXCLUDED] == []
    assert have & set(EXCLUDED) == set()
    assert all(EXCLUDED.values())


def test_a_name_that_cannot_be_imported_is_no_denoiser(monkeypatch):
    """Some pipelines of diffusers 0.36 fail on a transformers that it does not know."""
    whole = exported_denoisers()
    monkeypatch.setattr(diffusers, "__dir__", lambda: [*whole, "HunyuanDiTControlNetPipeline"])

    def fail(name):
        raise RuntimeError(f"Failed to import {name}")

    monkeypatch.delitem(vars(diffusers), "HunyuanDiTControlNetPipeline", raising=False)
    monkeypatch.setattr(diffusers, "_get_module", fail)
    assert exported_denoisers() == whole


def test_case(made: Made):
    case, model, outputs = made
    assert type(model).__name__ == case.cls and not model.training

    with torch.set_grad_enabled(case.name not in NO_SLOPES):
        made = model(**case.kwargs(model, 0, 3))
        out = flat(made)
    main = output_tensor(made).detach()
    assert torch.isfinite(out).all() and out.dtype == torch.float32
    assert main.std() > 1e-2

    later = case.kwargs(model, 0, 9)
    changed = case.kwargs(model, 0, 3)
    changed.update({latent: later[latent] for latent in case.latents})
    assert far(output_tensor(model(**changed)), main) > 1e-3
    if case.timestep:
        changed = case.kwargs(model, 0, 3)
        changed.update({time: later[time] for time in (case.timestep, *case.times)})
        assert far(output_tensor(model(**changed)), main) > 1e-3
    check_blocks(case, model, out)
    for extra in case.extras:
        assert far(outputs[extra][0], outputs[""][0]) > 1e-2


# Their attention has no backward pass on a CPU: blocks are changed one by one.
NO_SLOPES = ("AnyFlowFARTransformer3DModel", "Kandinsky6SRTransformer3DModel", "WanAnimate2Transformer3DModel")


def check_blocks(case: Case, model: nn.Module, out: torch.Tensor) -> None:
    """Every list is long enough, and the output depends on every block."""
    if case.name not in NO_SLOPES:
        with torch.enable_grad():
            out.square().sum().backward()
    for path in case.blocks:
        blocks = block_list(model, path)
        assert isinstance(blocks, nn.ModuleList)
        assert len(blocks) >= 4 or case.short.get(path), f"{path} has {len(blocks)} blocks"
        for index, block in enumerate(blocks):
            weights = [p for p in block.parameters() if p.is_floating_point()]
            if case.name not in NO_SLOPES:
                moved = max(float(p.grad.abs().max()) for p in weights if p.grad is not None)
            else:
                for p in weights:
                    p.mul_(2)  # and back without rounding
                moved = far(flat(model(**case.kwargs(model, 0, 3))), out)
                for p in weights:
                    p.div_(2)
            assert moved > 1e-4, f"the output does not depend on {path}[{index}]"
    model.zero_grad()
