"""Skipping on inputs a model just saw changes nothing: every class of the zoo, whose cases are whole, and awkward loops."""

from collections.abc import Callable
from functools import cache
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


@pytest.mark.parametrize(
    ("name", "extra", "site"),
    [(*each, site) for each in VARIANTS for site in ("stack", "block", *([] if each[1] else ["module"]))],
)
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


def test_a_model_without_a_timestep_needs_a_scheduler():
    case = CASES["UVit2DModel"]
    model = case.build(0)
    diffcache.wrap(model, Interval(every=2))
    with pytest.raises(AttachError, match="no timestep to tell its steps by; wrap the pipeline"):
        model(**inputs(case, model))


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


@pytest.mark.parametrize("name", sorted(CASES))
def test_case(name: str):
    case = CASES[name]
    model = case.build()
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
                    p.mul_(1.1)
                moved = far(flat(model(**case.kwargs(model, 0, 3))), out)
                for p in weights:
                    p.div_(1.1)
            assert moved > 1e-4, f"the output does not depend on {path}[{index}]"


@pytest.mark.parametrize(("name", "extra"), [(name, extra) for name in sorted(CASES) for extra in CASES[name].extras])
def test_extras_change_the_output(name: str, extra: str):
    case = CASES[name]
    model = case.build()
    plain = output_tensor(model(**case.kwargs(model, 0)))
    more = case.extras[extra]
    first = output_tensor(model(**case.kwargs(model, 0), **more(model, 0)))
    assert far(first, plain) > 1e-2
    assert torch.equal(first, output_tensor(model(**case.kwargs(model, 0), **more(model, 0))))
