"""What `predict` says before a run, against runs: operations, steps and bytes of every model."""

from pathlib import Path

import pytest
import torch

import diffcache
from diffcache.attach.inputs import INPUTS, Size, inputs_of
from diffcache.eval.cost import flops, formula
from diffcache.eval.options import AS_SAVED
from diffcache.pipelines.load import load
from tests.zoo.catalog import cases

TABLES = Path(__file__).parents[2] / "assets" / "tables"
STEPS = 6
MAGNITUDES = (1.0, 1.02, 1.01, 1.01, 1.02, 1.0)
METHODS = [
    "taylorseer:every=3,warmup=1",
    "taylorseer:every=2,warmup=2,order=2,site=module",
    f"magcache:ratios={MAGNITUDES},retention=0.1",
]
SHIPPED = [
    f"{kind}-{name}"
    for kind in ("shapes", "sticker")
    for name in ("flux", "dit", "unet", "wan", "kontext")
]


def shipped(name):
    """A shipped pipeline, its call of a few steps, and what `predict` is told of it."""
    from PIL import Image

    pipe, defaults = load(name, "float32", "cpu", AS_SAVED)
    call = {**defaults, "num_inference_steps": STEPS, "output_type": "latent"}
    if "dit" in name:
        call |= {"class_labels": [1]}
        del call["output_type"]
    else:
        call |= {"prompt": "a small red ring"}
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
    whole = flops.count(pipe, call).total
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
    """What a prediction is asked for to be that of the same calls."""
    size, batch = said.size, said.size.batch
    return dict(
        height=size.height, width=size.width, frames=size.frames, text_tokens=size.text_tokens,
        steps=said.steps, batch=batch // 2 if said.calls == 1 and batch > 1 else batch,
    )  # fmt: skip


@pytest.mark.parametrize("cls", INPUTS)
def test_every_class_is_counted_as_a_real_run(cls):
    """Blocks that are alike run once, and the count is that of all of them."""
    case, known = cases()[cls], INPUTS[cls]
    model = case.build(0)
    text = model.config.get("max_text_seq_length", 6)
    frames = 1 + known.temporal * (known.temporal > 1)
    size = Size(8 * known.spatial, 4 * known.spatial, frames, text, batch=2)
    asked = {
        key: getattr(size, key) for key in ("height", "width", "frames", "text_tokens", "batch")
    }
    said = diffcache.predict(model, "first-block", steps=7, guidance=False, **asked)
    real = formula.count_call(model, inputs_of(cls, model.config, size, device="cpu"))
    assert said.uncached.flops == said.most.flops == 7 * real.total
    assert (said.most.steps, said.least.steps, said.is_exact) == (7, 1, False)
    assert {"model": said.held_bytes} == diffcache.expected_bytes(model, "first-block", **asked)
