from __future__ import annotations

import re

import diffusers
import pytest
import torch
from torch import nn

from diffcache.pipelines.demo.describe import EXCLUDED, exported_denoisers
from tests.zoo.case import Case, output_tensor, output_tensors
from tests.zoo.catalog import cases

CASES = cases()

pytestmark = pytest.mark.usefixtures("eager")


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


def test_names_follow_the_class():
    for name, case in CASES.items():
        assert name == case.name
        assert re.fullmatch(rf"{case.cls}(-[a-z0-9-]+)?", name)


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


def test_seeds_decide_weights_and_inputs():
    case = CASES["FluxTransformer2DModel"]
    state = torch.random.get_rng_state()
    one, same, other = case.build(1), case.build(1), case.build(2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(next(one.parameters()), next(other.parameters()))
    a, b, c = (case.kwargs(one, seed)["hidden_states"] for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert case.build(dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "ZImageTransformer2DModel"])
def test_trajectory_is_smooth(name: str):
    case = CASES[name]
    model = case.build()
    steps = [case.kwargs(model, 0, step, 12) for step in range(12)]
    times = [step[case.timestep].max().item() for step in steps]
    assert times == sorted(times, reverse=not case.rising) and len(set(times)) == 12
    (latent,) = case.latents
    flats = [torch.cat([t.flatten() for t in output_tensors(step[latent])]) for step in steps]
    near, wide = far(flats[0], flats[1]), far(flats[0], flats[11])
    assert 0 < near < wide / 5
