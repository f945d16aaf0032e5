"""Published polynomials and ratios: their shapes, what runs with them, the wrong model."""

import math
import re
from dataclasses import replace

import pytest
import torch

import diffcache
from diffcache.attach.fingerprint import facts_of
from diffcache.catalog import make_method
from diffcache.errors import AttachError, UncalibratedError
from diffcache.features.magcache import MagCache
from diffcache.features.profilingdit import ProfilingDiT
from diffcache.features.teacache import BY_TIME, TeaCache
from diffcache.presets.published import models, published_settings
from tests.internals import computed_steps
from tests.real_models import REAL, as_real, model_of
from tests.zoo.catalog import cases


def refused(model, method):
    with pytest.raises(AttachError) as error:
        diffcache.wrap(model, method)
    return str(error.value)


def fits(method):
    """Attach to the model that it is for, be refused on others, run one step."""
    case, wrapped = cases()[models()[method.model.removesuffix("-ret")].model], diffcache.wrapped
    with as_real(method.model) as model, torch.no_grad(), wrapped(model, method):
        arguments = case.kwargs(model, 0, step=0, steps=4)
    assert "num_layers=" in refused(model, method)  # tiny
    with wrapped(model, type(method).published(method.model, model="")), torch.no_grad():
        model(**arguments)
    with as_real(method.model, num_layers=7) as model:
        assert re.search(r"num_layers=7 instead of \d\d; .*calibrate", refused(model, method))
    other = "SD3Transformer2DModel"
    assert f"this {other} is another: it is no {case.name}" in refused(model_of(other), method)


def facts_of_real(name, pipeline=None, folder=""):
    with as_real(name) as model:
        return {**facts_of(model, None), "pipeline": pipeline, "folder": folder}


@pytest.mark.parametrize("name", sorted(REAL))
def test_every_model_fits_its_own_configuration_and_no_other_of_its_class(name):
    facts = facts_of_real(name)
    for other in REAL:
        same = REAL[other] == REAL[name]
        assert (not models()[other].differs(facts)) == same, other
    assert not models()[name].differs(facts)


def test_pipelines_and_folders_tell_models_of_one_size_apart():
    def found(method, name, pipeline=None, folder=""):
        return method.published_for(facts_of_real(name, pipeline, folder))

    assert found(MagCache, "flux.1-dev", "FluxImg2ImgPipeline") == "flux.1-dev"
    assert found(MagCache, "flux.1-dev", "FluxKontextPipeline") == "flux.1-kontext-dev"
    assert found(MagCache, "flux.1-dev", folder="FLUX.1-Kontext-dev/transformer").endswith("t-dev")
    assert found(MagCache, "qwen-image", "QwenImagePipeline") == "qwen-image"
    assert found(MagCache, "qwen-image", "QwenImageEditPlusPipeline") == "qwen-image-edit"
    assert found(MagCache, "qwen-image", "QwenImageLayeredPipeline") == ""
    assert found(TeaCache, "wan2.1-t2v-14b", "WanPipeline") == "wan2.1-t2v-14b"  # not -ret
    assert found(TeaCache, "wan2.1-t2v-14b", "WanPipeline with transformer_2") == ""  # Wan2.2
    i2v = (TeaCache, "wan2.1-i2v-14b-720p", "WanImageToVideoPipeline")
    assert found(*i2v, "Wan2.1-I2V-14B-480P-Diffusers/transformer") == "wan2.1-i2v-14b-480p"
    with pytest.raises(AttachError, match="say model='wan2.1-i2v-14b-480p' or model='wan2.1-i2v"):
        found(*i2v)
    with pytest.raises(AttachError, match="say model='hunyuanvideo-720p' or "):
        found(MagCache, "hunyuanvideo")
    assert found(TeaCache, "hunyuanvideo") == found(ProfilingDiT, "hunyuanvideo") == "hunyuanvideo"


def test_numbers_of_another_model_of_the_class_are_refused_with_the_right_one_named():
    large, small = TeaCache.published("wan2.1-t2v-14b"), TeaCache.published("wan2.1-t2v-1.3b-ret")
    with as_real("wan2.1-t2v-14b") as model:
        message = refused(model, small)
        assert "num_layers=40 instead of 30; num_attention_heads=40 instead of 12" in message
        assert "take those of model='wan2.1-t2v-14b' or model='wan2.1-t2v-14b-ret', or" in message
        assert "in_channels=16 instead of 36" in refused(model, MagCache.published("wan2.1-i2v-14b-480p"))
    with as_real("cogvideox-5b") as model:
        assert "take those of model='cogvideox-5b'" in refused(model, TeaCache.published("cogvideox-2b"))
    facts = facts_of_real("flux.1-dev", "FluxPipeline")
    with pytest.raises(AttachError, match="its pipeline is FluxPipeline; take .*'flux.1-dev'"):
        MagCache.published("flux.1-kontext-dev").check_model(facts)
    with pytest.raises(AttachError, match="model='wan3': published are consisid"):
        replace(large, model="wan3").check_model(facts)


def test_a_name_without_tables_takes_what_is_published_for_the_model():
    with as_real("wan2.1-t2v-1.3b") as model:
        for method, settings in (("teacache", {"threshold": 0.25}), ("magcache:longest=3", {})):
            with diffcache.wrapped(model, method, **settings) as handle:
                assert handle.method.model == "wan2.1-t2v-1.3b"
                assert handle.method.threshold == settings.get("threshold", 0.12)
        with diffcache.wrapped(model, "teacache", model="wan2.1-t2v-1.3b-ret") as handle:
            assert (handle.method.threshold, handle.method.warmup) == (0.1, 5)
        with diffcache.wrapped(model, "teacache", coefficients=(1, 0)) as handle:
            assert handle.method.threshold == 0.25 and handle.method.model == ""
        with pytest.raises(UncalibratedError, match=r"no tables.*published\(NAME\) is for consisid"):
            diffcache.wrap(model, TeaCache())
    with pytest.raises(UncalibratedError, match="no tables"):
        diffcache.wrap(model, "teacache")  # tiny
    assert make_method("profilingdit", model="wan2.1-14b") == ProfilingDiT.published("wan2.1-14b")


@pytest.mark.parametrize("name", published_settings("teacache"))
def test_published_polynomials_are_attached_to_their_models_alone(name):
    method = TeaCache.published(name)
    assert len(method.coefficients) in (5, 6) and all(map(math.isfinite, method.coefficients))
    assert 0 < method.threshold < 1
    timed = method.input in ("time", "time-projection")
    assert timed == (models()[name.removesuffix("-ret")].model in BY_TIME)
    assert name.endswith("-ret") == (method.input == "time-projection")
    if name.endswith("-ret"):
        assert (method.warmup, method.last) == (5, False)
    assert TeaCache.published(name, threshold=0.03).threshold == 0.03
    assert eval(repr(method)) == method
    fits(method)


@pytest.mark.parametrize("name", published_settings("magcache"))
def test_published_ratios_are_attached_to_their_models_alone(name):
    method = MagCache.published(name)
    lists = method.parts().when.ratios
    assert len(lists) == (2 if name.startswith(("wan", "qwen", "hunyuanvideo-1.5")) else 1)
    steps = {"flux": 28, "wan2.1-i2v": 40}
    total = next((n for start, n in steps.items() if name.startswith(start)), 50)
    assert {len(row) for row in lists} == {total}
    for row in lists:
        assert row[0] == 1 and all(0.5 < value < 1.7 for value in row)
    if len(lists) == 2:  # of two branches in turn, whose neighbors are alike
        assert max(abs(a - b) for a, b in zip(*lists, strict=True)) < 0.02
    assert eval(repr(method)) == method
    assert total / 5 < len(computed_steps(method, total)) < total * 0.8
    fits(method)


def test_the_flux_ratios_are_those_of_diffusers():
    from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS

    ratios = MagCache.published("flux.1-dev").ratios
    assert torch.allclose(torch.tensor(ratios), FLUX_MAG_RATIOS, atol=1e-6)
