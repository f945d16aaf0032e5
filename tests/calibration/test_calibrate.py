"""calibrate on the shipped model: its tables, what it leaves behind, and what it refuses."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

import diffcache
from diffcache import Combine, FittedForecast, Listed, Tables
from diffcache.errors import AttachError, TablesError
from diffcache.features.collect import Collector
from diffcache.offline.calibrate import Plan
from diffcache.offline.tracing import Watch
from diffcache.offline.tune.trial import Bench
from diffcache.pipelines.small.flux import CALL
from diffcache.step import Step
from tests.calibration.shapes_flux import PROMPTS, SETTINGS, STEPS, draw
from tests.zoo.pipes import pipes


def test_the_tables_are_inner_products_of_the_features(pipe, calibrated):
    seen = {}

    class Spy(Collector):
        def site(self):
            return Combine(Listed([0]), site="stack")

        def feature(self, step, site, index, value):
            seen.setdefault((site, index), []).append(value.reshape(-1).double())

        def state(self):
            return {}

        def load(self, state):
            pass

        def tables(self):
            return {}

    from diffcache.offline.tracing import call_pipeline

    expected = 0
    for number, batch in enumerate((PROMPTS[:2], PROMPTS[2:])):
        seen.clear()
        given = {"num_inference_steps": STEPS, **CALL}
        Watch().run(pipe, {"transformer": pipe.transformer}, [Spy()], (0, number),
                    lambda b=batch, n=number, g=given: call_pipeline(pipe, b, n, g))  # fmt: skip
        for features in seen.values():
            stacked = torch.stack(features)
            expected = expected + stacked @ stacked.T
    found = calibrated.tables["products"]
    assert torch.allclose(found, expected, rtol=1e-9)
    assert calibrated.tables.steps == STEPS
    assert calibrated.tables.header["shape"] == [64, 16]


def test_calibrating_leaves_the_pipeline_as_it_was(pipe, calibrated):
    plain = draw(pipe)
    diffcache.calibrate(pipe, FittedForecast(), PROMPTS[:1], **SETTINGS)
    assert torch.equal(draw(pipe), plain)


def test_several_methods_share_a_pass(pipe, calibrated):
    runs = []
    both = diffcache.calibrate(
        pipe, [FittedForecast(computed=2), FittedForecast(computed=3)], PROMPTS,
        progress=lambda *a: runs.append(a), **SETTINGS,
    )  # fmt: skip
    assert runs[-1][1] == 2  # two batches in all, not four
    assert [m.computed for m in both] == [2, 3]
    assert torch.equal(both[0].tables["products"], both[1].tables["products"])


def test_a_run_that_starts_in_the_middle_of_its_schedule():
    case = pipes()["FluxImg2ImgPipeline"]
    img2img = case.build(0)
    img2img.set_progress_bar_config(disable=True)
    given = case.call(img2img, 0, 8)
    del given["generator"]
    assert given["strength"] == 0.6  # 5 of 8 steps
    method = diffcache.calibrate(img2img, FittedForecast(computed=3), [given])
    tables = method.tables
    sigmas = img2img.scheduler.sigmas.double()
    assert tables.steps == 5
    assert (tables["products"].diagonal() > 0).all()
    torch.testing.assert_close(tables["moves"], sigmas[4:] - sigmas[3:-1])
    with diffcache.wrapped(img2img, method):
        img2img(**given, generator=torch.Generator().manual_seed(0))
        assert diffcache.report(img2img).steps_computed == 3
    bench = Bench(img2img, [[given]], 0, {})
    bench.reference(0)
    assert bench.total == 5


def test_the_header_has_the_guidance(pipe, calibrated):
    assert calibrated.tables.header["guidance"] == {
        "guidance_scale": CALL.get("guidance_scale", 3.5), "true_cfg_scale": 1.0
    }  # fmt: skip
    plain, guided = {"prompt": "a"}, {"prompt": "a", "guidance_scale": 2.0}
    given = {"true_cfg_scale": 4.0}
    plan = Plan([guided, guided], call=given)
    assert plan.guidance(pipe) == {"guidance_scale": 2.0, "true_cfg_scale": 4.0}
    assert Plan([plain, guided], call=given).guidance(pipe) == {"true_cfg_scale": 4.0}


def test_a_calibrated_method_can_be_copied_and_pickled(pipe, calibrated, tmp_path):
    saved = replace(calibrated, tables=calibrated.tables.save(tmp_path / "a.safetensors"))
    for method in (calibrated, saved):
        for made in (copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
            assert made == method and repr(made) == repr(method)
            assert made.parts() == method.parts()
    with diffcache.wrapped(pipe, saved):
        expected = draw(pipe)
    with diffcache.wrapped(pipe, made):
        assert torch.equal(draw(pipe), expected)


def test_tables_of_another_run_or_model_are_refused(pipe, calibrated):
    with diffcache.wrapped(pipe, calibrated):
        with pytest.raises(AttachError, match="runs of 5 steps, this one has 6"):
            pipe(PROMPTS[:1], num_inference_steps=6, output_type="latent", **CALL)
        assert len(draw(pipe)) == 1  # and nothing is left behind
    header = {**calibrated.tables.header, "config": "0" * 16}
    other = Tables(header, {n: calibrated.tables[n] for n in calibrated.tables.names()})
    with pytest.raises(
        TablesError,
        match=r"\(.*/transformer\) with config='0{16}', this is Flux.* \(.*/transformer\) with config=",
    ):
        diffcache.wrap(pipe, FittedForecast(computed=3, tables=other))
    from diffusers import FlowMatchHeunDiscreteScheduler

    mine = pipe.scheduler
    try:
        pipe.scheduler = FlowMatchHeunDiscreteScheduler()
        with pytest.raises(TablesError, match="measured on .* with scheduler="):
            diffcache.wrap(pipe, calibrated)
    finally:
        pipe.scheduler = mine


def test_bad_requests_are_refused(pipe):
    with pytest.raises(ValueError, match="takes no tables"):
        diffcache.calibrate(pipe, "taylorseer", PROMPTS, **SETTINGS)
    with pytest.raises(ValueError, match="at least one prompt"):
        diffcache.calibrate(pipe, FittedForecast(), [], **SETTINGS)
    with pytest.raises(ValueError, match="give one of speedup"):
        diffcache.tune(pipe, PROMPTS, **SETTINGS)
    with pytest.raises(ValueError, match="speedup=1: must be above 1"):
        diffcache.tune(pipe, PROMPTS, speedup=1, **SETTINGS)
    with pytest.raises(ValueError, match="at least two batches"):
        diffcache.tune(pipe, PROMPTS[:1], speedup=2, **SETTINGS)


@pytest.mark.parametrize("method", ["bac", "fitted-forecast", "harmonica"])
def test_a_wrapped_pipeline_is_refused_and_stays_wrapped(pipe, method):
    plain = draw(pipe)
    diffcache.wrap(pipe, "interval", every=2, warmup=1)
    wrapped = draw(pipe)
    with pytest.raises(AttachError, match="unwrap it"):
        diffcache.calibrate(pipe, method, PROMPTS[:1], **SETTINGS)
    with pytest.raises(AttachError, match="unwrap it"):
        diffcache.tune(pipe, PROMPTS, speedup=2, **SETTINGS)
    assert torch.equal(draw(pipe), wrapped)
    assert torch.equal(draw(diffcache.unwrap(pipe)), plain)
    assert not pipe.transformer._forward_pre_hooks


def test_a_pipeline_under_another_cache_is_refused(pipe):
    from diffusers import FirstBlockCacheConfig

    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    try:
        with pytest.raises(AttachError, match="already runs under diffusers' "):
            diffcache.calibrate(pipe, FittedForecast(), PROMPTS[:1], **SETTINGS)
    finally:
        pipe.transformer.disable_cache()


def test_compiled_blocks_are_refused_where_modules_are_seen(pipe):
    block = pipe.transformer.transformer_blocks[0]
    block._compiled_call_impl = block._call_impl
    try:
        with pytest.raises(AttachError, match="transformer_blocks.0 is compiled"):
            diffcache.calibrate(pipe, "bac", PROMPTS[:1], **SETTINGS)
    finally:
        block._compiled_call_impl = None


def test_numbers_that_are_not_finite_are_refused(pipe):
    calls = []

    def overflow(module, args, out):
        calls.append(module)
        return torch.full_like(out, torch.inf) if len(calls) == 3 else None

    hook = pipe.transformer.transformer_blocks[0].ff.register_forward_hook(overflow)
    try:
        with pytest.raises(ValueError, match="at step 2 of batch 0 is not finite"):
            diffcache.calibrate(pipe, FittedForecast(), PROMPTS, **SETTINGS)
    finally:
        hook.remove()
    watch, step, one = Watch(), Step(4), torch.tensor([1.0, torch.nan])
    for see in (
        lambda: watch.feature(step, "blocks.0", 0, one),
        lambda: watch.output(step, torch.ones(2, 1), one),
        lambda: watch.probe(step, one),
    ):
        with pytest.raises(ValueError, match="at step 4 .* not finite"):
            see()
