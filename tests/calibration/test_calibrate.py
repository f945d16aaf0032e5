"""Calibration on the shipped model: its tables, the prompts it takes, what it leaves behind and refuses."""

import copy
import pickle
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import diffcache
from diffcache import Combine, FittedForecast, Listed, Tables, TemporalTable
from diffcache.digest import bits_of, content
from diffcache.errors import AttachError, TablesError
from diffcache.eval.offline import inputs_of
from diffcache.eval.runs.draw import Drawer
from diffcache.eval.runs.folder import batches
from diffcache.eval.runs.record import calibrated_on
from diffcache.eval.runs.task import Task
from diffcache.features.collect import Collector, RunInfo
from diffcache.offline.calibrate import CollectPlan, header_of, prompt_hash
from diffcache.offline.tracing import Tracer, call_pipeline
from diffcache.offline.tune.trial import Trials
from diffcache.step import Step
from tests.calibration.shipped import CALL, PROMPTS, SETTINGS, STEPS, draw
from tests.shipped import DIRECTORY
from tests.zoo.pipes import pipes


def test_the_tables_are_inner_products_of_the_features(pipe, calibrated):
    seen = {}

    class Spy(Collector):
        def site(self):
            return Combine(Listed([0]), site="stack")

        def feature(self, step, site, index, value):
            seen.setdefault((site, index), []).append(value.reshape(-1).double())

        state = load = tables = None

    expected = 0
    for number, batch in enumerate((PROMPTS[:2], PROMPTS[2:])):
        seen.clear()
        run = partial(call_pipeline, pipe, batch, number, {"num_inference_steps": STEPS, **CALL})
        Tracer().run(pipe, {"transformer": pipe.transformer}, [Spy()], (0, number), run)
        for features in seen.values():
            stacked = torch.stack(features)
            expected = expected + stacked @ stacked.T
    found = calibrated.tables["products"]
    assert torch.allclose(found, expected, rtol=1e-9)
    assert calibrated.tables.steps == STEPS
    assert calibrated.tables.header["shape"] == [16, 48]


def test_several_methods_share_a_pass(pipe, calibrated):
    runs = []
    methods = [FittedForecast(computed=2), FittedForecast(computed=3)]
    both = diffcache.calibrate(pipe, methods, PROMPTS, progress=lambda *a: runs.append(a), **SETTINGS)
    assert runs[-1][1] == 2  # two batches in all, not four
    assert [m.computed for m in both] == [2, 3]
    assert torch.equal(both[0].tables["products"], both[1].tables["products"])


def test_a_run_that_starts_in_the_middle_of_its_schedule():
    case = pipes()["FluxImg2ImgPipeline"]
    img2img = case.build(0)
    given = case.prompt(img2img, 0, 8)
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
    bench = Trials(img2img, [[given]], 0, {})
    bench.reference(0)
    assert bench.total == 5


def test_the_header_has_the_guidance(pipe, calibrated):
    scale = CALL.get("guidance_scale", 3.5)
    assert calibrated.tables.header["guidance"] == {"guidance_scale": scale, "true_cfg_scale": 1.0}
    plain, guided = {"prompt": "a"}, {"prompt": "a", "guidance_scale": 2.0}
    given = {"true_cfg_scale": 4.0}
    plan = CollectPlan([guided, guided], call=given)
    assert plan.guidance(pipe) == {"guidance_scale": 2.0, "true_cfg_scale": 4.0}
    assert CollectPlan([plain, guided], call=given).guidance(pipe) == {"true_cfg_scale": 4.0}


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
        TablesError, match=r"\(.*/transformer\) with config='0{16}', this is Flux.* \(.*/transformer\) with config="
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


def test_a_wrapped_pipeline_is_refused_and_stays_wrapped(pipe):
    plain = draw(pipe)
    diffcache.wrap(pipe, "interval", every=2, warmup=1)
    wrapped = draw(pipe)
    for method in ("bac", "fitted-forecast", "harmonica"):
        with pytest.raises(AttachError, match="unwrap it"):
            diffcache.calibrate(pipe, method, PROMPTS[:1], **SETTINGS)
    with pytest.raises(AttachError, match="unwrap it"):
        diffcache.tune(pipe, PROMPTS, speedup=2, **SETTINGS)
    assert torch.equal(draw(pipe), wrapped)
    assert torch.equal(draw(diffcache.unwrap(pipe)), plain)
    assert not pipe.transformer._forward_pre_hooks


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
    watch, step, one = Tracer(), Step(4), torch.tensor([1.0, torch.nan])
    for see in (
        lambda: watch.feature(step, "blocks.0", 0, one),
        lambda: watch.output(step, torch.ones(2, 1), one),
        lambda: watch.probe(step, one),
    ):
        with pytest.raises(ValueError, match="at step 4 .* not finite"):
            see()


@pytest.mark.parametrize("method", ["fitted-forecast", "ertacache", "magcache", "teacache"])
def test_a_run_whose_guidance_ends_is_measured_only_where_steps_need_not_be_alike(method):
    from diffusers.callbacks import SD3CFGCutoffCallback

    cut = SD3CFGCutoffCallback(cutoff_step_ratio=None, cutoff_step_index=2)
    case = pipes()["StableDiffusion3Pipeline"]
    pipe = case.build(0)
    call = {"callback_on_step_end": cut, "callback_on_step_end_tensor_inputs": cut.tensor_inputs}
    prompts = [{**case.prompt(pipe, 0, 5), **call}]
    if method in ("magcache", "teacache"):
        tables = diffcache.calibrate(pipe, method, prompts).tables
        assert method == "magcache" or len(tables["points"]) == 3  # of steps 0 to 2, and 3 to 4
        return
    with pytest.raises(ValueError, match=r"is \[1, 4, 8, 8\] at step 3 and was \[2"):
        diffcache.calibrate(pipe, method, prompts)


def test_a_run_that_its_pipeline_ends_early_has_the_steps_that_are_taken():
    case = pipes()["StableDiffusionXLPipeline"]
    pipe = case.build(0)
    call = {**case.prompt(pipe, 0, 7), "denoising_end": 0.5}
    with diffcache.wrapped(pipe, diffcache.calibrate(pipe, FittedForecast(computed=2), [call])) as handle:
        pipe(**call)
    assert handle.method.tables.header["steps"] == len(handle.last.calls) == 3


@pytest.mark.parametrize("prompts", ["", "pictures", "sticker-films", "own.txt"])
@pytest.mark.parametrize("own", [True, False])
def test_the_command_line_draws_no_prompts_and_noise_of_an_evaluation(prompts: str, own: bool, tmp_path: Path) -> None:
    model = "sticker-flux"
    if own:  # a user's own pipeline: any whose folder is not called sticker-
        model = str(tmp_path / "my-flux")
        shutil.copytree(DIRECTORY, model, copy_function=shutil.copyfile)
    if prompts == "own.txt":
        texts = [f"prompt {number}" for number in range(40)]
        (tmp_path / prompts).write_text("\n".join(texts))
        prompts = str(tmp_path / prompts)
    inputs = inputs_of(Task(model=model, prompts=prompts, samples=16, seed=3))
    held = f"held-out:{prompts}" if prompts.endswith(".txt") else prompts
    drawer = Drawer(Task(model=model, prompts=held, samples=256))
    evaluated = {drawer.prompts[number] for number in range(256)}
    assert len(set(inputs.prompts)) > 8
    assert not evaluated & set(inputs.prompts)
    seeds = {s for b in batches(drawer.prompts.texts, 256, 8, 0) for s in b.seeds}
    used = {torch.Generator().manual_seed(inputs.seed + i).get_state().numpy().tobytes() for i in range(4)}
    assert not used & {torch.Generator().manual_seed(s).get_state().numpy().tobytes() for s in seeds}
    assert inputs.seed != inputs_of(Task(model=model, prompts=prompts, samples=1, seed=4)).seed


def test_tables_keep_hashes_of_their_prompts(calibrated) -> None:
    assert calibrated.tables.header["prompt_hashes"] == [prompt_hash(PROMPTS[0])]
    plan = CollectPlan([{"prompt": ["a", "b"], "image": 1}, {"prompt": "b"}, 7, {"observation": 2}])
    header = header_of(FittedForecast(), {}, plan)
    assert header["prompt_hashes"] == sorted([prompt_hash("a"), prompt_hash("b")])


def test_an_evaluation_on_prompts_of_the_calibration_says_so(calibrated) -> None:
    texts = [PROMPTS[0], "another", "a third one"]

    def said(method, prompts):
        drawn = batches(prompts, 6, 2, 0)
        return calibrated_on(SimpleNamespace(plan=SimpleNamespace(methods={"x": method}), batches=drawn))

    for method in (calibrated, TemporalTable(calibrated)):
        (text,) = said(method, texts)
        assert text.startswith("x: 1 of the 3 prompts are among those that its tables")
        assert said(method, texts[1:]) == []
    assert said(FittedForecast(), texts) == said(object(), texts) == []


def interrupted(pipe, prompts, out, method):
    def stop(number, total, word):
        if number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        diffcache.calibrate(pipe, method, prompts, out=out, progress=stop, **SETTINGS)


def test_an_interrupted_calibration_goes_on(pipe, calibrated, tmp_path):
    out, method = tmp_path / "a.safetensors", FittedForecast(computed=3)
    interrupted(pipe, PROMPTS, out, method)
    assert not out.exists() and (tmp_path / "a.safetensors.part").exists()
    with pytest.raises(TablesError, match="of another calibration"):
        diffcache.calibrate(pipe, method, PROMPTS, out=out, seed=1, **SETTINGS)
    done = []
    made = diffcache.calibrate(pipe, method, PROMPTS, out=out, progress=lambda *a: done.append(a[0]), **SETTINGS)
    assert done == [1, 2]  # the first batch was not run again
    assert made.tables == calibrated.tables
    assert Tables.load(out) == calibrated.tables
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors"]


def test_inputs_count_by_their_content():
    def noise(seed):
        return torch.Generator().manual_seed(seed)

    def inputs():
        big = torch.zeros(1, 64, 24, dtype=torch.bfloat16)  # its print leaves the middle out
        return {"embeds": big, "array": np.arange(4), "noise": [noise(1), "a", 1], "picture": Image.new("RGB", (8, 8))}

    first = inputs()
    assert content(first) == content(inputs())
    middle = first["embeds"].clone()
    middle[0, 30, 12] = 1
    assert repr(middle) == repr(first["embeds"])
    others = [
        {"embeds": middle},
        {"embeds": first["embeds"].float()},
        {"embeds": first["embeds"].reshape(64, 24)},
        {"array": np.arange(4)[::-1]},
        {"array": np.arange(4, dtype=np.int16)},
        {"noise": [noise(2), "a", 1]},
        {"noise": [noise(1), "a", "1"]},
        {"picture": Image.new("RGB", (8, 8), (1, 0, 0))},
        {"picture": Image.new("RGB", (4, 16))},
    ]
    for other in others:
        assert content({**first, **other}) != content(first), other
        assert CollectPlan([{**first, **other}]).about() != CollectPlan([first]).about()
        assert CollectPlan(["a"], call={**first, **other}).about() != CollectPlan(["a"], call=first).about()
    assert CollectPlan([inputs()], call=inputs()).about() == CollectPlan([first], call=first).about()


def test_a_damaged_state_says_to_delete_it(pipe, tmp_path):
    out, state = tmp_path / "a.st", tmp_path / "a.st.part"
    interrupted(pipe, PROMPTS, out, FittedForecast())
    for held in (b"", state.read_bytes()[:100], b"nonsense"):
        state.write_bytes(held)
        with pytest.raises(TablesError, match="a.st.part: .*damaged.*; delete it"):
            diffcache.calibrate(pipe, FittedForecast(), PROMPTS, out=out, **SETTINGS)
    Tables({"method": "x"}, {}).save(state)
    with pytest.raises(TablesError, match="has no 'about'.*; delete it"):
        diffcache.calibrate(pipe, FittedForecast(), PROMPTS, out=out, **SETTINGS)


def test_tables_that_cannot_be_written_leave_the_state(pipe, calibrated, tmp_path, monkeypatch):
    def full(tensors, path, metadata=None):
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    out = tmp_path / "a.safetensors"
    method, done = FittedForecast(computed=3), []
    with monkeypatch.context() as patch:
        patch.setattr("diffcache.features.tables.save_file", full)
        with pytest.raises(OSError, match="No space"):
            diffcache.calibrate(pipe, method, PROMPTS, out=out, **SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors.part"]
    made = diffcache.calibrate(pipe, method, PROMPTS, out=out, progress=lambda *a: done.append(a[0]), **SETTINGS)
    assert done == [2] and made.tables == calibrated.tables  # no batch was run again
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize(
    "view",
    [torch.tensor(3.0).expand(1), torch.tensor([[1, 2], [3, 4]]).t(), torch.arange(8)[::3], torch.zeros(0)],
    ids=["repeated", "transposed", "strided", "empty"],
)
def test_a_view_counts_as_what_it_shows(view: torch.Tensor) -> None:
    plain = torch.tensor(view.tolist(), dtype=view.dtype)
    assert content(view) == content(plain) != content(plain.new_ones(9))
    assert torch.equal(bits_of(view), bits_of(plain))
    assert Tables({}, {"a": view}).digest == Tables({}, {"a": plain}).digest


@pytest.mark.parametrize("method", [FittedForecast(site="model"), diffcache.ERTACache(9.0)])
def test_a_pipeline_may_write_to_the_outputs_that_are_measured(method):
    states = []
    for factor in (1.0, 3.0):
        collector, outs = method.collector(), torch.arange(1.0, 9).view(4, 1, 2)
        for number in range(collector.passes):
            collector.begin(RunInfo(number, 0, torch.ones(4), None, 4))
            for index, out in enumerate(outs.clone()):
                collector.output(Step(index), torch.zeros(1, 2), out)
                out *= factor
            collector.end()
        states.append(collector.tables())
    assert all(torch.equal(one, states[1][name]) for name, one in states[0].items())
