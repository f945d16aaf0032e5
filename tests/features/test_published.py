"""Published polynomials and ratios: their shapes, what runs with them, the wrong model."""

import math

import pytest
import torch

import diffcache
from diffcache.errors import AttachError
from diffcache.features.magcache import MagCache
from diffcache.features.parts.published import TEACACHE
from diffcache.features.parts.published_ratios import MAGCACHE
from diffcache.features.teacache import BY_TIME, TeaCache
from diffcache.pipelines.zoo.catalog import cases
from diffcache.step import Step

MODELS: dict = {}


def model_of(name):
    """A tiny model of a class, built once."""
    if name not in MODELS:
        MODELS[name] = cases()[name].build()
    return MODELS[name]


def fits(method):
    """Attach to the model that it is for, be refused on another, run one step."""
    name = method.models[0]
    case, model = cases()[name], model_of(name)
    with torch.no_grad(), diffcache.wrapped(model, method):
        model(**case.kwargs(model, 0, step=0, steps=4))
    other = "SD3Transformer2DModel" if name != "SD3Transformer2DModel" else "DiTTransformer2DModel"
    with pytest.raises(AttachError, match=f"for {name}, and this is {other}; calibrate"):
        diffcache.wrap(model_of(other), method)


@pytest.mark.parametrize("name", TEACACHE)
def test_published_polynomials_are_attached_to_their_models_alone(name):
    method = TeaCache.published(name)
    assert len(method.coefficients) == 5 and all(map(math.isfinite, method.coefficients))
    assert 0 < method.threshold < 1
    timed = method.input in ("time", "time-projection")
    assert timed == (method.models[0] in BY_TIME)
    assert name.endswith("-ret") == (method.input == "time-projection")
    if name.endswith("-ret"):
        assert (method.warmup, method.last) == (5, False)
    assert TeaCache.published(name, 0.03).threshold == 0.03
    assert eval(repr(method)) == method
    fits(method)


@pytest.mark.parametrize("name", MAGCACHE)
def test_published_ratios_are_attached_to_their_models_alone(name):
    method = MagCache.published(name)
    lists = method.parts().when.ratios
    assert len(lists) == (2 if name.startswith(("wan", "qwen")) else 1)
    steps = {"flux": 28, "wan2.1-i2v": 40}
    total = next((n for start, n in steps.items() if name.startswith(start)), 50)
    assert {len(row) for row in lists} == {total}
    for row in lists:
        assert row[0] == 1 and all(0.5 < value < 1.7 for value in row)
    if len(lists) == 2:  # of two branches in turn, whose neighbors are alike
        assert max(abs(a - b) for a, b in zip(*lists, strict=True)) < 0.02
    assert eval(repr(method)) == method
    when, computed = method.parts().when, 0
    state = when.init()
    for index in range(total):
        if when.should_compute(state, Step(index, total=total), None):
            when.computed(state, Step(index, total=total), None)
            computed += 1
    assert total / 5 < computed < total * 0.8
    fits(method)


def test_the_flux_ratios_are_those_of_diffusers():
    from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS

    ratios = MagCache.published("flux.1-dev").ratios
    assert torch.allclose(torch.tensor(ratios), FLUX_MAG_RATIOS, atol=1e-6)


def test_unknown_models_are_refused_with_those_there_are():
    for method in (TeaCache, MagCache):
        with pytest.raises(ValueError, match=r"model='flux2': published are flux.1-dev, "):
            method.published("flux2")
