"""Costs before a run, against runs and the record of kernels: operations, steps, bytes and times."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import diffcache
from diffcache import Combine, Listed, Site, Table
from diffcache.attach.inputs import INPUTS, Size, inputs_of
from diffcache.cli import app
from diffcache.eval.cost import expected, flops
from diffcache.eval.cost.predict import kinds_of
from diffcache.eval.cost.roofline import Device, Roofline
from diffcache.eval.kernels.tiles import tiles
from diffcache.eval.options import AS_SAVED
from diffcache.eval.record import ROOT
from diffcache.eval.workshop.kernels import page
from diffcache.files import read_json
from diffcache.memory import compression_of, size_of
from diffcache.pipelines.load import load
from diffcache.run_report import human
from tests.internals import noting
from tests.zoo.catalog import cases
from tests.zoo.pipes import pipes

STEPS = 4
METHODS = [
    "taylorseer:every=2,warmup=1",
    "taylorseer:every=2,warmup=1,order=2,site=module",  # fewer records than its forecast may hold
]
SHIPPED = [f"sticker-{name}" for name in ("flux", "dit", "wan", "kontext")]


def shipped(name):
    """A shipped pipeline, its call of a few steps, and what `predict` is told of it."""
    from PIL import Image

    pipe, defaults = load(name, "float32", "cpu", AS_SAVED)
    call = {**defaults, "num_inference_steps": STEPS, "output_type": "latent"}
    if "dit" in name:
        call |= {"class_labels": [1]}
        del call["output_type"]
    else:
        call |= {"prompt": "a fox"}
    if "kontext" in name:
        side = defaults.get("height", 64)
        call |= {"image": Image.new("RGB", (side, side)), "max_area": side * side}
    return pipe, call


def run(pipe, call, method):
    """The report of a run, and the shape of its prompt."""
    (model,) = {id(m): m for m in flops.denoisers(pipe).values()}.values()
    torch.manual_seed(0)
    with noting(model) as seen, diffcache.wrapped(pipe, method), torch.no_grad():
        pipe(**call)
        report = diffcache.report(pipe)
    text = seen[0].get("encoder_hidden_states")
    return report, None if text is None else text.shape[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_models_cost_and_hold_what_was_predicted(name):
    pipe, call = shipped(name)
    whole = STEPS * flops.count(pipe, {**call, "num_inference_steps": 2}).per_step
    for method in METHODS:
        report, text = run(pipe, call, method)
        said = diffcache.predict(name, method, steps=STEPS, text_tokens=text)
        assert said.is_exact and said.steps == STEPS
        assert said.most.steps == report.steps_computed
        assert said.uncached.flops == whole
        assert said.most.flops == whole - report.flops_saved
        # it speaks of bfloat16, and the models are float32
        assert 2 * said.held_bytes == report.peak_bytes > 0
    live = diffcache.predict(pipe, method, **asked(said))
    assert live.most.flops == said.most.flops and live.held_bytes == report.peak_bytes


def asked(said):
    """What a prediction is asked for to be that of the same calls of one sample."""
    size = {name: getattr(said.size, name) for name in ("height", "width", "frames", "text_tokens")}
    return dict(size, steps=said.steps, guidance=said.calls * said.size.batch == 2)


@pytest.fixture(scope="module", params=INPUTS)
def sized(request):
    """A model of each class, a size that it takes, and what a prediction of that is asked for."""
    model, known = cases()[request.param].build(0), INPUTS[request.param]
    text = model.config.get("max_text_seq_length", 6)
    frames = 1 + known.temporal * (known.temporal > 1)
    size = Size(8 * known.spatial, 4 * known.spatial, frames, text, batch=2)
    return model, size, {key: getattr(size, key) for key in ("height", "width", "frames", "text_tokens", "batch")}


def test_every_class_is_counted_as_a_real_run(sized):
    """Blocks that are alike run once, and the count is that of all of them."""
    model, size, asked = sized
    said = diffcache.predict(model, "first-block", steps=7, guidance=False, **asked)
    with torch.no_grad(), flops.counting({"": model}) as real:
        model(**inputs_of(type(model).__name__, model.config, size, device="cpu"))
    assert said.uncached.flops == said.most.flops == 7 * real.total
    assert (said.most.steps, said.least.steps, said.is_exact) == (7, 1, False)
    assert {"model": said.held_bytes} == diffcache.expected_bytes(model, "first-block", **asked)


FLUX = {"height": 64, "steps": 5, "text_tokens": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Configurations alone of a pipeline: no weights, no other parts."""
    case = cases()["FluxTransformer2DModel"]
    made = tmp_path_factory.mktemp("configurations")
    (made / "transformer").mkdir()
    (made / "model_index.json").write_text(
        json.dumps({"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]})
    )
    config = {"_class_name": "FluxTransformer2DModel", **case.config}
    (made / "transformer" / "config.json").write_text(json.dumps(config))
    return made


def test_a_folder_a_file_and_a_configuration_say_the_same(folder):
    file = folder / "transformer" / "config.json"
    found = [
        diffcache.predict(target, "interval:every=2", **FLUX)
        for target in (folder, str(file.parent), file, json.loads(file.read_text()))
    ]
    assert len({(said.most, said.held_bytes) for said in found}) == 1
    assert found[0].most.steps == 3 and "3 computed" in repr(found[0])


def test_seconds_are_those_of_the_device(folder):
    slow, fast = (
        diffcache.predict(folder, "interval:every=2", device=Device("mine", *peaks), **FLUX)
        for peaks in ((1, 1e9), (2, 1e9))
    )
    whole = slow.uncached
    assert whole.seconds == pytest.approx(2 * fast.uncached.seconds)
    assert whole.seconds == pytest.approx(whole.flops / 1e12, rel=1e-3), "all of it arithmetic"
    wide = diffcache.predict(folder, "interval:every=2", device=Device("mine", 1e9, 1), **FLUX)
    assert wide.uncached.seconds > wide.weight_bytes / 1e9 * 5, "weights are read at every step"


def test_methods_and_lengths_that_do_not_fit_are_refused(folder):
    with pytest.raises(ValueError, match="holds more than features, which only a run can tell"):
        diffcache.predict(folder, "temporal-table", **FLUX)
    with pytest.raises(ValueError, match="steps=5: .* is made for runs of 9 steps"):
        diffcache.predict(folder, Combine(Listed([0, 4], total=9)), **FLUX)
    config = folder / "transformer" / "config.json"
    with pytest.raises(ValueError, match="steps=None: there is no pipeline"):
        diffcache.predict(config, "interval", height=64)
    two = folder / "transformer_2"
    two.mkdir()
    (two / "config.json").write_text(config.read_text())
    with pytest.raises(ValueError, match="predict each of them, by its own folder"):
        diffcache.predict(folder, "interval", **FLUX)
    shutil.rmtree(two)


def test_the_command_line_prints_and_writes(folder, tmp_path):
    file = tmp_path / "said.json"
    words = "--method interval:every=2 --height 64 --steps 5 --text-tokens 8 --device 4090"
    done = CliRunner().invoke(app, ["predict", str(folder), *words.split(), "--json", str(file)])
    assert done.exit_code == 0, done.output
    said = json.loads(file.read_text())
    assert said["most"]["steps"] == 3 and said["device"]["title"] == "GeForce RTX 4090"
    assert "on GeForce RTX 4090 (165.2 TFLOPS, 1008 GB/s)" in done.output


def test_every_site_decides_for_itself():
    steps = {"a": (0, 2), "b": (0, 1)}
    kinds = kinds_of(Table(steps), 3, 1, skips=True)
    ran = [sorted(kind[0][1]) for kind in kinds]
    assert ran == [["a", "b"], ["b"], ["a"]]


FOLDER = ROOT / "assets" / "bench"
# Two loops: one over `width`, in shares of the programs; one that only the first program turns.
TEXT = """
module {
  tt.func public @kernel(%q: !tt.ptr<bf16>, %width: i32) attributes {noinline = false} {
    %c64_i32 = arith.constant 64 : i32 loc(#loc3)
    %c0_i32 = arith.constant 0 : i32
    %c1_i32 = arith.constant 1 : i32
    %0 = tt.get_program_id x : i32 loc(#loc9)
    %1 = tt.get_num_programs x : i32
    %2 = arith.divsi %width, %c64_i32 : i32
    %3 = arith.divsi %2, %1 : i32
    %4 = arith.muli %0, %3 : i32
    %5 = arith.addi %4, %3 overflow<nsw> : i32
    %asked = tt.load %q : !tt.ptr<bf16>
    %6:2 = scf.for %turn = %4 to %5 step %c1_i32 iter_args(%a = %x, %b = %y) -> (tensor<16x64xf32>) : i32 {
      %key = tt.load %p, %m, %n : tensor<128x64x!tt.ptr<bf16>> loc(#loc1)
      %dot = tt.dot %q, %key, %c : tensor<16x128xbf16> * tensor<128x64xbf16> -> tensor<16x64xf32>
      scf.yield %dot, %b : tensor<16x64xf32>, tensor<16x64xf32>
    } loc(#loc2)
    %7 = arith.cmpi eq, %0, %c0_i32 : i32
    scf.if %7 {
      tt.store %o, %v : tensor<256x!tt.ptr<f8E4M3FN>>
    } else {
      tt.store %o, %v : tensor<128x!tt.ptr<f32>>
    }
    tt.return
  }
}
"""


def test_loops_turn_as_often_as_numbers_of_the_launch_say():
    found = tiles(TEXT, {"width": 64 * 40}, (4,))
    assert found.turns == [10.0] and found.rows == 16
    assert found.loaded == 10 * 128 * 64 * 2
    assert found.products == {"bf16": 10 * 2 * 16 * 128 * 64}
    assert found.stored == (256 + 3 * 128 * 4) / 4
    unknown = tiles(TEXT, {}, (1,))  # a bound that is loaded from memory counts once
    assert unknown.turns == [1.0]


def test_instructions_of_a_loop_count_as_often_as_it_turns():
    names = ["S2R", "LDG.E.128", "IADD3", "MUFU.EX2", "HMMA.16816", "BRA", "STG.E.64", "NOP"]
    found = expected.dynamic(names, [(1, 5)], [10.0])
    assert found == {"all": 52.0, "alu": 10.0, "xu": 10.0, "lsu": 42.0}
    assert expected.dynamic(names, [(1, 5), (6, 6)], [10.0])["all"] == 52.0


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "blocks"),
    [(32, 0, 4, 16), (168, 0, 8, 1), (90, 70, 4, 3), (255, 0, 1, 8), (16, 0, 1, 32)],
)
def test_blocks_of_a_multiprocessor(registers, shared, warps, blocks):
    code = {"registers": registers, "shared": shared, "warps": warps}
    assert expected.resident(code, expected.CHIPS["h200"]) == blocks


def test_most_rows_of_the_record_are_expected_near_what_was_measured():
    rows = read_json(page.CODE)["rows"]
    measured = {
        (row["operator"], row["model"], row["shapes"]): row["ways"]["kernel"]["us"][1]
        for row in read_json(FOLDER / "kernels.json")["rows"]
    }
    ratios = [
        expected.expect(row, "h200").us / measured[key]
        for row in rows
        if (key := (row["operator"], row["model"], row["shapes"])) in measured
    ]
    near = [ratio for ratio in ratios if 0.7 <= ratio <= 1.3]
    assert len(ratios) >= 35 and len(near) >= 0.8 * len(ratios)
    for row in rows:
        for device in expected.CHIPS:
            said = expected.expect(row, device)
            assert said.us >= said.parts["bytes"] > 0 and min(said.blocks) >= 1


def test_a_step_is_as_slow_as_its_host_or_its_device():
    import torch

    device = Device("mine", 100, 1000)
    with torch.device("meta"), Roofline(device) as spent:
        torch.empty(10**9, dtype=torch.bfloat16) + 1
    assert spent.operations == 1 and spent.seconds == 4e9 / 1e12
    assert spent.expected() == pytest.approx(4e-3 / 0.88 + 3.5e-6)
    assert spent.expected(sites=1000) == pytest.approx(0.1 + 5.4e-6)


EXPECTED_BYTES_METHODS = [
    ("taylorseer", {"every": 3, "warmup": 3, "order": 2}),
    ("taylorseer", {"every": 3, "site": "module"}),
    ("interval", {"every": 3, "site": "block", "hold": "int8"}),
    ("first-block", {"threshold": 1e9}),
    ("confidence-gated-taylor", {"threshold": 0.1, "warmup": 5}),  # a forecast of its probe, too
]


def test_a_run_holds_what_was_expected(sized):
    model, size, asked = sized
    cls = type(model).__name__
    inputs = inputs_of(cls, model.config, size, device="cpu")
    inputs |= {key: torch.ones_like(value) for key, value in inputs.items() if "mask" in key}
    turn = sorted(INPUTS).index(cls)
    for name, settings in (EXPECTED_BYTES_METHODS * 2)[turn % 5 : turn % 5 + 3]:
        if settings.get("site") == "module" and not diffcache.inspect(model).supports(Site.MODULE):
            continue
        expected = diffcache.expected_bytes(model, name, **asked, **settings)
        with diffcache.wrapped(model, name, **settings) as handle, torch.no_grad():
            with diffcache.run(model):  # the samples are all zero
                for step in range(7):
                    model(**{**inputs, "timestep": inputs["timestep"] + 9 - step})
            assert handle.last.peak_bytes == expected["model"] > 0, (name, settings)


@pytest.mark.parametrize("name", ["CogVideoXPipeline", "WanPipeline"])
@pytest.mark.parametrize("frames", [1, 8, 9])
def test_frames_left_over_are_counted_as_the_pipeline_does(name, frames):
    case = pipes()[name]
    pipe = case.build(0)
    call = {**case.call(pipe, 0, 1), "num_frames": frames}
    with noting(pipe.transformer) as seen:
        pipe(**call)
    given = {"height": call["height"], "width": call["width"], "frames": frames}
    size = size_of(pipe, pipe.transformer, given)
    cls = type(pipe.transformer).__name__
    text = pipe.transformer.config.get("max_text_seq_length", 6)
    made = inputs_of(cls, pipe.transformer.config, replace(size, text_tokens=text), compression_of(pipe))
    assert made["hidden_states"].shape[1:] == seen[0]["hidden_states"].shape[1:]


def test_prompts_of_sd3_are_those_of_clip_and_t5_one_after_the_other():
    pipe = pipes()["StableDiffusion3Pipeline"].build(0)
    assert size_of(pipe, pipe.transformer, {"height": 64, "width": 64}).text_tokens == 77 + 256
    given = {"height": 64, "width": 64, "text_tokens": 154}
    assert size_of(pipe, pipe.transformer, given).text_tokens == 154


def test_flux_dev_at_its_real_width_by_arithmetic():
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        model = FluxTransformer2DModel(guidance_embeds=True, num_layers=2, num_single_layers=3)
    size = {"height": 1024, "width": 1024, "text_tokens": 512}
    token = 4608 * 3072 * 4 * 2  # float32, two factors
    assert diffcache.expected_bytes(model, **size) == {"model": 2 * token}
    wide = diffcache.expected_bytes(model, "taylorseer", site="module", **size)
    assert wide == {"model": (2 * 2 + 3) * token}


@pytest.mark.parametrize("name", ["FluxPipeline-true-cfg", "WanPipeline"])
def test_guidance_in_two_calls_holds_the_probe_of_a_gate_once(name):
    case = pipes()[name]
    pipe = case.build(0)
    call = case.call(pipe, 0, 6)
    with noting(pipe.transformer) as calls:
        pipe(**call)
    assert len(calls) == 12
    given = {key: call.get(key) for key in ("height", "width")}
    given["frames"] = call.get("num_frames")
    given["text_tokens"] = calls[0]["encoder_hidden_states"].shape[1]
    for method, settings in [EXPECTED_BYTES_METHODS[0], *EXPECTED_BYTES_METHODS[3:], ("dbcache", {"threshold": 1e9})]:
        expected = diffcache.expected_bytes(pipe, method, branches=2, **given, **settings)
        with diffcache.wrapped(pipe, method, **settings) as handle:
            pipe(**case.call(pipe, 0, 9))
        assert handle.last.peak_bytes == expected["transformer"], (method, settings)
    # residuals of each branch, and one probe
    gate = [diffcache.expected_bytes(pipe, "first-block", branches=n, **given) for n in (1, 2)]
    reuse = diffcache.expected_bytes(pipe, "interval", **given)
    assert gate[1]["transformer"] - gate[0]["transformer"] == reuse["transformer"]


def test_a_report_before_a_run_says_that_a_gate_holds_one_probe():
    pipe = pipes()["FluxPipeline"].build(0)
    one, two = (sum(diffcache.expected_bytes(pipe, "first-block", branches=n).values()) for n in (1, 2))
    with diffcache.wrapped(pipe, "first-block"):
        words = " ".join(str(diffcache.report(pipe)).split())
    assert one < two < 2 * one
    assert f"{human(one, 'B')} expected at" in words
    assert f"doubles it, guidance in two calls holds {human(two, 'B')}" in words


def test_a_size_that_a_model_cannot_take_is_refused_and_left_out_of_its_report():
    pipe = pipes()["WanPipeline"].build(0)  # of 32 positions a side, which its defaults exceed
    with pytest.raises(ValueError, match=r"WanTransformer3DModel cannot be called at Size\(height=480"):
        diffcache.expected_bytes(pipe, "interval")
    with diffcache.wrapped(pipe, "interval"):
        assert "expected" not in str(diffcache.report(pipe))


def test_skip_layer_guidance_holds_features_of_one_more_call():
    case = pipes()["StableDiffusion3Pipeline-slg"]
    pipe = case.build(0)
    call = case.call(pipe, 0, 9)
    text = call["prompt_embeds"].shape[1]
    size = {"height": call["height"], "width": call["width"], "text_tokens": text, "batch": 2}
    size["skip_guidance_layers"] = call["skip_guidance_layers"]
    for method, settings in [*EXPECTED_BYTES_METHODS, ("dbcache", {"threshold": 1e9})]:
        expected = diffcache.expected_bytes(pipe, method, **size, **settings)
        with diffcache.wrapped(pipe, method, **settings) as handle:
            pipe(**call)
        assert handle.last.peak_bytes == expected["transformer"] > 0, (method, settings)


def test_inspect_says_what_a_method_will_hold():
    words = ["inspect", "FluxTransformer2DModel", "--method", "taylorseer:every=4,order=0"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "54 MiB in bfloat16 for each sample and guidance branch" in " ".join(done.output.split())
