"""Bytes that are expected before a run, against those that a real run holds."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import diffcache
from diffcache import Site
from diffcache.attach.inputs import INPUTS, Size, inputs_of
from diffcache.cli import app
from diffcache.memory import compression_of, size_of
from diffcache.run_report import human
from tests.zoo.catalog import cases
from tests.zoo.pipes import pipes

METHODS = [
    ("taylorseer", {"every": 3, "warmup": 3, "order": 2}),
    ("taylorseer", {"every": 3, "site": "module"}),
    ("interval", {"every": 3, "site": "block", "hold": "int8"}),
    ("first-block", {"threshold": 1e9}),
    ("confidence-gated-taylor", {"threshold": 0.1, "warmup": 5}),  # a forecast of its probe, too
]


@pytest.mark.parametrize("cls", INPUTS)
def test_a_run_holds_what_was_expected(cls):
    case, known = cases()[cls], INPUTS[cls]
    model = case.build(0)
    text = model.config.get("max_text_seq_length", 6)
    frames = 1 + known.temporal if known.temporal > 1 else 1
    size = Size(8 * known.spatial, 4 * known.spatial, frames, text, batch=2)
    inputs = inputs_of(cls, model.config, size, device="cpu")
    inputs |= {key: torch.ones_like(value) for key, value in inputs.items() if "mask" in key}
    for name, settings in METHODS:
        if settings.get("site") == "module" and not diffcache.inspect(model).supports(Site.MODULE):
            continue
        expected = diffcache.expected_bytes(
            model,
            name,
            height=size.height,
            width=size.width,
            frames=size.frames,
            text_tokens=text,
            batch=2,
            **settings,
        )
        with diffcache.wrapped(model, name, **settings) as handle, torch.no_grad():
            with diffcache.run(model):  # the samples are all zero
                for step in range(7):
                    model(**{**inputs, "timestep": inputs["timestep"] + 9 - step})
            assert handle.last.peak_bytes == expected["model"] > 0, (name, settings)


@pytest.mark.parametrize("name", ["CogVideoXPipeline", "WanPipeline"])
@pytest.mark.parametrize("frames", [1, 8, 9])
def test_frames_left_over_are_counted_as_the_pipeline_does(name, frames):
    case, seen = pipes()[name], []
    pipe = case.build(0)
    call = {**case.call(pipe, 0, 1), "num_frames": frames}
    pipe.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["hidden_states"].shape), with_kwargs=True
    )
    pipe(**call)
    given = {"height": call["height"], "width": call["width"], "frames": frames}
    size = size_of(pipe, pipe.transformer, given)
    cls = type(pipe.transformer).__name__
    text = pipe.transformer.config.get("max_text_seq_length", 6)
    made = inputs_of(cls, pipe.transformer.config, replace(size, text_tokens=text), compression_of(pipe))
    assert made["hidden_states"].shape[1:] == seen[0][1:]


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


def test_a_report_before_a_run_says_what_will_be_held():
    case = pipes()["FluxPipeline"]
    pipe = case.build(0)
    with diffcache.wrapped(pipe, "interval"):
        text = str(diffcache.report(pipe))
        (expected,) = diffcache.expected_bytes(pipe, "interval").values()
    words = " ".join(text.split())
    assert f"{human(expected, 'B')} expected for each guidance branch at" in words
    assert "guidance doubles it, in one batch as in two calls" in words


TWO_CALLS = ["FluxPipeline-true-cfg", "QwenImagePipeline", "WanPipeline", "Lumina2Pipeline"]


@pytest.mark.parametrize("name", TWO_CALLS)
def test_guidance_in_two_calls_holds_the_probe_of_a_gate_once(name):
    case = pipes()[name]
    pipe = case.build(0)
    calls: list[dict[str, torch.Tensor]] = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    call = case.call(pipe, 0, 6)
    pipe(**call)
    hook.remove()
    assert len(calls) == 12
    given = {key: call.get(key) for key in ("height", "width")}
    given["frames"] = call.get("num_frames")
    given["text_tokens"] = calls[0]["encoder_hidden_states"].shape[1]
    for method, settings in [METHODS[0], *METHODS[3:], ("dbcache", {"threshold": 1e9})]:
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


def test_inspect_says_what_a_method_will_hold():
    words = ["inspect", "FluxTransformer2DModel", "--method", "taylorseer:every=4,order=0"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "54 MiB in bfloat16 for each sample and guidance branch" in " ".join(done.output.split())


def test_tokens_of_a_picture_to_edit_are_counted():
    case = pipes()["FluxKontextPipeline"]
    pipe = case.build(0)
    call, seen = case.call(pipe, 0, 6), []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    pipe(**call)
    hook.remove()
    text = seen[0]["encoder_hidden_states"].shape[1]
    size = {"height": call["height"], "width": call["width"], "text_tokens": text}
    expected = diffcache.expected_bytes(pipe, "taylorseer", every=3, **size)
    with diffcache.wrapped(pipe, "taylorseer", every=3) as handle:
        pipe(**call)
        branches = len(seen) // 6
        assert handle.last.peak_bytes == branches * expected["transformer"] > 0


def test_skip_layer_guidance_holds_features_of_one_more_call():
    case = pipes()["StableDiffusion3Pipeline-slg"]
    pipe = case.build(0)
    call = case.call(pipe, 0, 9)
    text = call["prompt_embeds"].shape[1]
    size = {"height": call["height"], "width": call["width"], "text_tokens": text, "batch": 2}
    size["skip_guidance_layers"] = call["skip_guidance_layers"]
    for method, settings in [*METHODS, ("dbcache", {"threshold": 1e9})]:
        expected = diffcache.expected_bytes(pipe, method, **size, **settings)
        with diffcache.wrapped(pipe, method, **settings) as handle:
            pipe(**call)
        assert handle.last.peak_bytes == expected["transformer"] > 0, (method, settings)
