"""What `predict` says before a run, against runs: operations, steps and bytes of every model."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

import diffcache
from diffcache import Combine, Listed, Table
from diffcache.attach.inputs import INPUTS, Size, inputs_of
from diffcache.cli import app
from diffcache.eval.cost import flops
from diffcache.eval.cost.predict import kinds_of
from diffcache.eval.cost.roofline import Device
from diffcache.eval.options import AS_SAVED
from diffcache.pipelines.load import load
from tests.zoo.catalog import cases

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
    seen = []
    (model,) = {id(m): m for m in flops.denoisers(pipe).values()}.values()
    hook = model.register_forward_pre_hook(lambda m, a, k: seen.append(k), with_kwargs=True)
    torch.manual_seed(0)
    with diffcache.wrapped(pipe, method), torch.no_grad():
        pipe(**call)
        report = diffcache.report(pipe)
    hook.remove()
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
    size = said.size
    return dict(
        height=size.height,
        width=size.width,
        frames=size.frames,
        text_tokens=size.text_tokens,
        steps=said.steps,
        guidance=said.calls * size.batch == 2,
    )


@pytest.mark.parametrize("cls", INPUTS)
def test_every_class_is_counted_as_a_real_run(cls):
    """Blocks that are alike run once, and the count is that of all of them."""
    case, known = cases()[cls], INPUTS[cls]
    model = case.build(0)
    text = model.config.get("max_text_seq_length", 6)
    frames = 1 + known.temporal * (known.temporal > 1)
    size = Size(8 * known.spatial, 4 * known.spatial, frames, text, batch=2)
    asked = {key: getattr(size, key) for key in ("height", "width", "frames", "text_tokens", "batch")}
    said = diffcache.predict(model, "first-block", steps=7, guidance=False, **asked)
    with torch.no_grad(), flops.counting({"": model}) as real:
        model(**inputs_of(cls, model.config, size, device="cpu"))
    assert said.uncached.flops == said.most.flops == 7 * real.total
    assert (said.most.steps, said.least.steps, said.is_exact) == (7, 1, False)
    assert {"model": said.held_bytes} == diffcache.expected_bytes(model, "first-block", **asked)


# what is asked for, and what is refused --------------------------------------------------------

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


@pytest.mark.parametrize(
    ("target", "settings", "why"),
    [
        ("WanPipeline", {"preset": "fast"}, "stands for several models; say which: published='wan"),
        ("StableDiffusion3Pipeline", {}, "stands for no known model; name the directory"),
        ("FluxPipeline", {"published": "wan2.1-14b"}, "published='wan2.1-14b': stands for no known"),
        ("FluxTransformer2DModel", {"published": "flux.1-dev"}, "is no class of pipelines"),
        ("FluxPipeline", {"device": "h999"}, "must be one of h100, h200"),
        ("Fluks", {}, "Fluks"),
    ],
)
def test_what_is_not_known_is_refused(target, settings, why):
    with pytest.raises((ValueError, FileNotFoundError), match=why):
        diffcache.predict(target, settings.pop("method", None), **settings)


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
