"""Gradients through a wrapped denoiser: as if it were not wrapped."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache import CacheWarning, Combine, Every, Taylor
from tests.internals import marks
from tests.zoo.catalog import cases

CASE = cases()["FluxTransformer2DModel"]
SITES = ["stack", "block", "module", "model"]
STEPS = 4


def gradients(model: nn.Module, step: int) -> list[Tensor]:
    """Return the output of a training step and the gradients of every parameter."""
    model.zero_grad(set_to_none=True)
    out = model(**CASE.kwargs(model, 0, step, STEPS)).sample
    out.square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("site", SITES)
def test_training_is_that_of_the_unwrapped_model_and_said_once(site: str, checkpointing: bool):
    model = CASE.build(0).train()
    if checkpointing:
        model.enable_gradient_checkpointing()
    plain = [gradients(model, step) for step in range(STEPS)]
    with diffcache.wrapped(model, Combine(Every(3), Taylor(1), site=site)) as handle:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(STEPS):
                for mine, theirs in zip(gradients(model, step), plain[step], strict=True):
                    assert torch.equal(mine, theirs)
        texts = [str(w.message) for w in caught if w.category is CacheWarning]
        assert len(texts) == 1 and "gradients are on, so every block is computed" in texts[0]
        assert handle.held_bytes() == 0


def test_a_step_with_gradients_within_a_run_starts_it_anew():
    model = CASE.build(0)
    with diffcache.wrapped(model, Combine(Every(9))), warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        for step in range(6):
            with torch.set_grad_enabled(step == 3):
                out = model(**CASE.kwargs(model, 0, step, 6)).sample
            assert out.requires_grad == (step == 3)
            if step == 4:  # its features would be of before
                assert marks(model) == "C"
        assert marks(model) == "Cs"


@pytest.mark.parametrize("given", ["sample", "condition"])
def test_a_frozen_model_is_cached_until_its_inputs_ask_for_gradients(given: str):
    model = CASE.build(0).requires_grad_(False)
    with diffcache.wrapped(model, Combine(Every(3))) as handle:
        for step in range(4):
            model(**CASE.kwargs(model, 0, step, STEPS))
        assert marks(model) == "CssC" and handle.held_bytes() > 0
        kwargs = CASE.kwargs(model, 0, 1, STEPS)
        name = "hidden_states" if given == "sample" else "encoder_hidden_states"
        kwargs[name].requires_grad_()
        with pytest.warns(CacheWarning, match="gradients are on"):
            model(**kwargs).sample.sum().backward()
        assert kwargs[name].grad.abs().max() > 0
