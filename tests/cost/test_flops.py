"""FLOPs by counting and by prediction, against closed forms and real runs; counting changes no bit."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, library, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import diffcache
from diffcache import AttachError, CacheWarning, Combine, Every
from diffcache.attach.flop_counter import _refuses_modes, counted
from diffcache.eval.cost import flops
from diffcache.features.base import Probe
from diffcache.features.parts.when import Gate
from tests import shipped as flux
from tests.zoo.catalog import cases
from tests.zoo.pipes import pipes

ALWAYS = float("inf")
MODULES = Combine(Every(3), site="module")
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # which torch leaves out


def call(steps=2, batch=1):
    asked = {"prompt": ["a fox left of an owl on grass"] * batch, "num_inference_steps": steps}
    return flux.CALL | asked | {"output_type": "latent", "generator": torch.Generator().manual_seed(0)}


def flux_form(config, image, text, batch=1):
    """FLOPs of FluxTransformer2DModel from its layers: 2 for each multiply-add of each matrix."""
    D = config["num_attention_heads"] * config["attention_head_dim"]
    S, C = image + text, config["in_channels"]
    times = 2 if config["guidance_embeds"] else 1
    vectors = times * (256 * D + D * D) + config["pooled_projection_dim"] * D + D * D + 2 * D * D
    embed = image * C * D + text * config["joint_attention_dim"] * D + image * D * C
    attention = 2 * S * S * D
    double = 2 * 6 * D * D + S * (4 + 8) * D * D + attention
    single = 3 * D * D + S * (3 + 4 + 5) * D * D + attention
    blocks = config["num_layers"] * double + config["num_single_layers"] * single
    return 2 * batch * (vectors + embed + blocks)


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def test_a_real_call_counts_what_the_layers_say(pipe):
    config = pipe.transformer.config
    counted = flops.count(pipe, call(2, batch=3))
    tokens = (64 // pipe.vae_scale_factor // 2) ** 2
    expected = flux_form(config, tokens, flux.CALL["max_sequence_length"], batch=3)
    assert counted.calls == [("transformer", expected)] * 2
    assert (counted.steps, counted.per_step, counted.total) == (2, expected, 2 * expected)
    assert flops.count(pipe, call(3, batch=3)).per_step == expected
    assert "forward" not in vars(pipe.transformer) and "step" not in vars(pipe.scheduler)


def gated(probe: Probe) -> Combine:
    """Blocks that always run at both ends, and a gate that skips all it may after its look."""
    return Combine(Gate(ALWAYS, of=probe), lead=1, tail=1)


@contextmanager
def torch_counts(models: list[nn.Module]) -> Iterator[list[float]]:
    """Collect what torch's own counter says of every call of the models."""
    counts: list[float] = []

    def counting(forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            mode = FlopCounterMode(display=False, custom_mapping={_ATTENTION: _attention})
            with mode:
                out = forward(*args, **kwargs)
            counts.append(mode.get_total_flops())
            return out

        return call

    for model in models:
        model.forward = counting(model.forward)
    try:
        yield counts
    finally:
        for model in models:
            del model.forward


# Pipelines that a gate's look, or the site `stack` of the gate, does not serve -> what says so.
BLIND = {
    "DDIMPipeline": "down_blocks.0 has no attention module",
    "StableCascadeDecoderPipeline": "calls none of the attentions that were found",
    "StableDiffusionXLPipeline": "down_blocks.0 has no attention module",
}
NO_STACK = {"WanAnimatePipeline": "changes the output by .* use site='block' or site='model'"}
# Those that make other calls than one step shows, or whose scheduler cannot take one step.
TWO = {"SkyReelsV2DiffusionForcingPipeline", "WanAnimatePipeline", "PixArtAlphaPipeline", "MochiPipeline"}


def counted_run(case: Any, pipe: Any, models: list[nn.Module], steps: int = 2) -> list[float]:
    """Return what torch's own counter says of the calls of a run."""
    with torch_counts(models) as counts:
        case.run(pipe, 0, steps)
    return counts


def gate_that_serves(case: Any, pipe: Any) -> Combine:
    """Return a gate that the pipeline can have; others are refused, with the reason."""
    reason = BLIND.get(case.name) or NO_STACK.get(case.name)
    if reason:
        with pytest.raises(AttachError, match=reason), diffcache.wrapped(pipe, gated("modulated")):
            case.run(pipe, 0, 2)
    if case.name in NO_STACK:
        return replace(gated("modulated"), site="block")
    return gated("residual" if case.name in BLIND else "modulated")


@pytest.mark.parametrize(
    "name", [name for name in pipes() if "-" not in name]
)  # variants make other numbers of the same calls
def test_flops_saved_are_those_that_the_calls_lack(name):
    case = pipes()[name]
    pipe = case.build(0)
    models = [getattr(pipe, part) for part in case.denoisers]
    is_flex = any(map(_refuses_modes, models))  # which torch's counter cannot run, nor ours
    kinds = 2 if name in TWO else 1  # steps that show every kind of call
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        full = [] if is_flex else counted_run(case, pipe, models, kinds) * (2 // kinds)
        more = [] if is_flex or list(pipes()).index(name) % 3 else [MODULES]  # a third of them: modules are alike
        for method in (gate_that_serves(case, pipe), *more):
            with diffcache.wrapped(pipe, method):
                case.run(pipe, 0, kinds)  # learns the wiring, which runs the denoiser once more
                if is_flex:
                    assert diffcache.report(pipe).flops_saved is None
                    continue
                cached = counted_run(case, pipe, models)
                report = diffcache.report(pipe)
            assert len(report.calls) == len(full) == len(cached)
            assert report.skipped and report.flops_saved > 0, method
            assert report.flops_saved == pytest.approx(sum(full) - sum(cached), rel=0.01), method


def test_flops_need_an_uncompiled_denoiser():
    case = cases()["FluxTransformer2DModel"]
    model = case.build(0)
    inputs = case.kwargs(model, 0)
    assert flops.count(model, inputs).per_step > 0
    model.transformer_blocks[0]._compiled_call_impl = model.transformer_blocks[0].forward
    counted = flops.count(model, inputs)
    assert counted.total is None


def test_a_failed_count_leaves_no_trace():
    module = torch.nn.Linear(2, 3)
    with pytest.raises(RuntimeError), flops.counting({"m": module}):
        module(torch.ones(5))
    assert "forward" not in vars(module)
    module.forward = kept = module.forward  # as accelerate leaves it
    with flops.counting({"m": module}) as tally:
        module(torch.ones(7, 2))
    assert tally.calls == [("m", 2 * 7 * 2 * 3)] and vars(module)["forward"] is kept


def wan_form(config, tokens, text):
    D = config["num_attention_heads"] * config["attention_head_dim"]
    patch = config["patch_size"][0] * config["patch_size"][1] * config["patch_size"][2]
    C = config["in_channels"] * patch
    vectors = config["freq_dim"] * D + D * D + D * 6 * D
    prompt = text * (config["text_dim"] * D + D * D)
    own = tokens * 4 * D * D + 2 * tokens * tokens * D
    cross = (2 * tokens + 2 * text) * D * D + 2 * tokens * text * D
    block = own + cross + tokens * 2 * D * config["ffn_dim"]
    return 2 * (vectors + prompt + 2 * tokens * C * D + config["num_layers"] * block)


def test_predictions_of_flux_dev_and_wan_follow_the_closed_form():
    """At their real widths, with few layers: that of Flux has 19 and 38, that of Wan 30."""
    heads = dict(attention_head_dim=128, num_attention_heads=24, axes_dims_rope=(16, 56, 56), guidance_embeds=True)
    sizes = dict(in_channels=64, num_layers=2, num_single_layers=3, joint_attention_dim=4096)
    flux_config = dict(_class_name="FluxTransformer2DModel", pooled_projection_dim=768, **heads, **sizes)
    asked = {"steps": 1, "guidance": False, "text_tokens": 512}
    found = diffcache.predict(flux_config, "interval", height=1024, width=1024, **asked)
    assert found.uncached.flops == flux_form(flux_config, 64 * 64, 512)
    heads = dict(num_attention_heads=12, attention_head_dim=128, patch_size=(1, 2, 2), num_layers=3)
    sizes = dict(in_channels=16, out_channels=16, text_dim=4096, freq_dim=256, ffn_dim=8960)
    wan_config = dict(_class_name="WanTransformer3DModel", **heads, **sizes)
    found = diffcache.predict(wan_config, "interval", height=480, width=832, frames=81, **asked)
    assert found.uncached.flops == wan_form(wan_config, 21 * 30 * 52, 512)


MODES = [torch.inference_mode, torch.no_grad]


@pytest.fixture
def halved() -> Iterator[library.Library]:
    """An operation whose kernel on a CPU rounds otherwise than its body of other operations."""
    made = library.Library("diffcache_test_bits", "DEF")
    made.define("halve(Tensor x, Tensor[] more) -> Tensor")
    made.impl("halve", lambda x, more: x * 0.5 + 1e-3, "CompositeImplicitAutograd")
    made.impl("halve", lambda x, more: x * 0.5, "CPU")
    yield made
    made._destroy()


class Halve(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.diffcache_test_bits.halve(x, [x])


@pytest.mark.parametrize("mode", MODES)
def test_a_kernel_of_the_device_runs_in_the_place_of_a_body(halved, mode):
    x = torch.arange(4.0)
    with mode():
        out, total = counted(Halve(), (x,), {})
    assert torch.equal(out, x * 0.5) and total == 0


def test_a_body_runs_on_a_device_without_a_kernel(halved):
    halved.define("double(Tensor x) -> Tensor")
    halved.impl("double", lambda x: x @ x, "CompositeImplicitAutograd")
    halved.impl("double", lambda x: x * 2, "CUDA")
    x = torch.eye(3)
    with torch.inference_mode():
        out, total = counted(Halve(), (x,), {}, call=torch.ops.diffcache_test_bits.double)
    assert torch.equal(out, x) and total == 2 * 3**3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "module",
    [
        nn.Upsample(scale_factor=1.7, mode="bilinear"),  # export has bodies in Python for these
        nn.Upsample(scale_factor=1.7, mode="bicubic"),
        nn.BatchNorm2d(4).eval(),
        nn.RMSNorm(15),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 3, 3),
    ],
    ids=lambda module: f"{type(module).__name__}-{getattr(module, 'mode', '')}".strip("-"),
)
def test_modules_return_the_bits_that_they_return_uncounted(module, mode):
    x = torch.randn(2, 4, 15, 15, generator=torch.Generator().manual_seed(0))
    with mode():
        expected = module(x)
        assert torch.equal(counted(module, (x,), {})[0], expected)


class Attention(nn.Module):
    """Two layers, one of them without a bias, and attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out(functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("mode", [*MODES, torch.enable_grad])
def test_counts_are_the_same_in_every_mode(mode):
    module, x = Attention(), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    with mode():
        out, total = counted(module, (x,), {})
        assert torch.equal(out, module(x))
    layers, attention = 2 * 10 * 8 * (24 + 6), 2 * (2 * 2) * 5 * 5 * (4 + 4)
    assert total == layers + attention
