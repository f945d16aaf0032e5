"""What a run costs: FLOPs against closed forms, times against a clock that is set by hand."""

import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch

import diffcache
from diffcache import FirstBlock, TaylorSeer
from diffcache.errors import UnknownMethodError
from diffcache.eval.cost import energy, flops, formula, interleave, memory
from diffcache.eval.cost.inputs import INPUTS, Size, inputs_of
from diffcache.eval.methods import parse_method
from diffcache.eval.record import Setting
from diffcache.pipelines.small import flux
from diffcache.pipelines.zoo.catalog import cases
from diffcache.pipelines.zoo.pipes import pipes

CPU = Setting(torch.device("cpu"))
MIB = 1 << 20


@pytest.fixture(scope="module")
def pipe():
    return flux.load()


def call(steps=2, batch=1):
    prompts = ["a small red ring on the left, on a yellow background"] * batch
    return dict(
        flux.CALL, prompt=prompts, num_inference_steps=steps, output_type="latent",
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


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
    number = config["num_layers"] + config["num_single_layers"]
    return [2 * batch * n for n in (vectors + embed + blocks, blocks, number * attention)]


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


# FLOPs, counted ----------------------------------------------------------------------------


def test_a_real_call_counts_what_the_layers_say(pipe):
    config = pipe.transformer.config
    counted = flops.count(pipe, call(2, batch=3))
    tokens = (64 // pipe.vae_scale_factor // 2) ** 2
    expected, _, _ = flux_form(config, tokens, flux.TEXT_TOKENS, batch=3)
    assert counted.calls == (("transformer", expected),) * 2
    assert (counted.steps, counted.per_call, counted.total) == (2, expected, 2 * expected)
    assert flops.denoiser_flops(pipe, call(3, batch=3)) == expected
    assert "forward" not in vars(pipe.transformer) and "step" not in vars(pipe.scheduler)


@pytest.mark.parametrize("name", ["WanPipeline-two", "WanPipeline"])
def test_a_step_is_all_branches_of_every_denoiser(name):
    case = next((case for key, case in pipes().items() if key.startswith(name)), None)
    assert case is not None
    made = case.build(0)
    counted = flops.count(made, case.call(made, 0, 4))
    assert counted.steps == 4 and len(counted.calls) == 4 * case.branches
    assert {denoiser for denoiser, _ in counted.calls} == set(case.denoisers)
    assert counted.per_step == case.branches * counted.per_call


@pytest.mark.parametrize(
    "method",
    [
        TaylorSeer(2, warmup=1, site="stack"),
        TaylorSeer(2, warmup=1, site="attention"),
        TaylorSeer(2, warmup=1, site="module"),
        FirstBlock(1e9),
    ],
)
def test_flops_of_a_cached_run_are_those_that_ran(pipe, method):
    full = flops.denoiser_flops(pipe, call(2))
    with diffcache.wrapped(pipe, method):
        pipe(**call(2))  # learns the wiring, which runs blocks once more
        with flops.counting({"whole": pipe.transformer}) as tally:
            pipe(**call(6))
        report = diffcache.report(pipe)
    assert report.skipped
    assert flops.run_flops(report, full) == pytest.approx(tally.total, rel=1e-9)
    assert flops.evaluations(report, full) == pytest.approx(tally.total / full, rel=1e-9)
    assert flops.run_flops(report, full, calls=7) == flops.run_flops(report, full) + full


def test_flops_need_an_uncached_and_uncompiled_denoiser(pipe):
    with diffcache.wrapped(pipe, TaylorSeer()), pytest.raises(ValueError, match="under a cache"):
        flops.count(pipe, call())
    case = cases()["FluxTransformer2DModel"]
    model = case.build(0)
    inputs = case.kwargs(model, 0)
    assert flops.denoiser_flops(model, inputs) > 0
    model.transformer_blocks[0]._compiled_call_impl = model.transformer_blocks[0].forward
    counted = flops.count(model, inputs)
    assert counted.total is None and "compiled" in counted.reason
    report = SimpleNamespace(flops_saved=None, steps=[])
    assert flops.evaluations(report, 1.0) is None and flops.run_flops(report, 1.0) is None
    with pytest.raises(ValueError, match=r"full_step_flops=0.0: must be above 0"):
        flops.evaluations(report, 0.0)


def test_a_failed_count_leaves_no_trace():
    module = torch.nn.Linear(2, 3)
    with pytest.raises(RuntimeError), flops.counting({"m": module}):
        module(torch.ones(5))
    assert "forward" not in vars(module)
    module.forward = kept = module.forward  # as accelerate leaves it
    with flops.counting({"m": module}) as tally:
        module(torch.ones(7, 2))
    assert tally.calls == [("m", 2 * 7 * 2 * 3)] and vars(module)["forward"] is kept


# FLOPs, by formula -------------------------------------------------------------------------


@pytest.mark.parametrize("cls", INPUTS)
def test_the_formula_counts_as_a_real_run(cls):
    case = cases()[cls]
    model = case.build(0)
    film = INPUTS[cls].temporal > 1
    text = model.config.get("max_text_seq_length", 6)
    spatial, temporal = INPUTS[cls].spatial, INPUTS[cls].temporal
    size = Size(8 * spatial, 4 * spatial, 1 + temporal if film else 1, text, batch=2)
    real = formula.count_call(model, inputs_of(cls, model.config, size, device="cpu"))
    fields = (size.height, size.width, size.frames, size.text_tokens, size.batch)
    assert formula.formula_flops({"_class_name": cls, **case.config}, *fields) == real
    assert 0 < real.attention < real.total and real.rest > 0
    assert real.blocks + real.rest == real.total


def test_flux_dev_and_wan_by_closed_form():
    config = dict(
        _class_name="FluxTransformer2DModel", in_channels=64, num_layers=19, num_single_layers=38,
        attention_head_dim=128, num_attention_heads=24, joint_attention_dim=4096,
        pooled_projection_dim=768, guidance_embeds=True, axes_dims_rope=(16, 56, 56),
    )  # fmt: skip
    found = formula.formula_flops(config, 1024, 1024, text_tokens=512)
    total, blocks, attention = flux_form(config, 64 * 64, 512)
    assert (found.total, found.blocks, found.attention) == (total, blocks, attention)
    config = dict(
        _class_name="WanTransformer3DModel", patch_size=(1, 2, 2), num_attention_heads=12,
        attention_head_dim=128, in_channels=16, out_channels=16, text_dim=4096, freq_dim=256,
        ffn_dim=8960, num_layers=30,
    )  # fmt: skip
    found = formula.formula_flops(config, 480, 832, frames=81)
    assert found.total == wan_form(config, 21 * 30 * 52, 512)


def test_a_directory_brings_its_compression(pipe):
    found = formula.formula_flops(flux.DIRECTORY, 64, 64, text_tokens=flux.TEXT_TOKENS)
    assert found.total == flops.denoiser_flops(pipe, call())
    alone = formula.resolve(flux.DIRECTORY / "transformer")
    assert alone.cls == "FluxTransformer2DModel" and alone.compression is None


def test_inputs_of_ones_own():
    case = cases()["AllegroTransformer3DModel"]
    model = case.build(0)
    inputs = case.kwargs(model, 0)
    there = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    assert formula.count_on_meta(case.cls, case.config, there) == formula.count_call(model, inputs)


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [
        ("FluxTransformer2DModel", (1000, 1024), "height=1000: must be a multiple of 16"),
        ("FluxTransformer2DModel", (0, 1024), "height=0: must be at least 1"),
        ("FluxTransformer2DModel", (64, 64, 5), "frames=5: FluxTransformer2DModel makes pictures"),
        ("WanTransformer3DModel", (64, 64, 4), "frames=4: must be a multiple of 4, plus 1"),
        ("CogVideoXTransformer3DModel", (64, 64, 5), "text_tokens=512: this model's prompts"),
        ("NoSuchModel", (64, 64), "'NoSuchModel': the installed diffusers has no such class"),
        ("no/such/place", (64, 64), "is neither a directory"),
        ({"num_layers": 3}, (64, 64), "'_class_name' is missing"),
        ({"_class_name": "FluxTransformer2DModel", "x": 3}, (64, 64), "does not fit"),
    ],
)
def test_what_the_formula_cannot_do(model, size, message):
    with pytest.raises(ValueError, match=message):
        formula.formula_flops(model, *size)


def test_a_forward_that_needs_values_or_inputs_is_a_clear_error():
    with pytest.raises(ValueError, match="no inputs are known; known are AuraFlow"):
        inputs_of("AllegroTransformer3DModel", {}, Size(64, 64))
    case = cases()["OmniGenTransformer2DModel"]
    inputs = case.kwargs(case.build(0), 0)
    there = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    with pytest.raises(ValueError, match="OmniGenTransformer2DModel: cannot be called"):
        formula.count_on_meta(case.cls, case.config, there)


# time --------------------------------------------------------------------------------------


class Clock:
    """A clock that stands still unless it is set on."""

    def __init__(self):
        self.wall = self.cpu = 0.0

    def perf_counter(self):
        return self.wall

    def process_time(self):
        return self.cpu

    def takes(self, wall, cpu=0.0):
        self.wall += wall
        self.cpu += cpu


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(interleave, "time", clock)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5), raising=False)
    return clock


def test_contenders_take_turns_and_ratios_are_those_of_a_round(clock):
    order, slow = [], iter([9.0, 1.0, 2.0, 10.0, 4.0])  # the machine, round by round
    now = {"round": 0, "pace": 0.0}

    def contender(name, share):
        def run():
            if len(order) % 2 == 0:
                now["pace"] = next(slow)
            order.append(name)
            clock.takes(share * now["pace"], cpu=share)

        return run

    seen = []
    timings = interleave.measure(
        {"one": contender("one", 1.0), "half": contender("half", 0.5)}, rounds=4, warmup=1,
        setting=CPU, progress=lambda *given: seen.append(given),
    )  # fmt: skip
    assert order == ["one", "half", "half", "one"] * 2 + ["one", "half"]
    assert timings.seconds == {"one": [1.0, 2.0, 10.0, 4.0], "half": [0.5, 1.0, 5.0, 2.0]}
    assert timings.ratios() == {"one": [1.0] * 4, "half": [2.0] * 4}
    rows = timings.rows(samples_per_call=6)
    assert rows["one"]["seconds"] == {"median": 3.0, "q1": 1.75, "q3": 5.5, "n": 4}
    assert rows["half"]["ratio"] == {"median": 2.0, "q1": 2.0, "q3": 2.0, "n": 4}
    assert rows["half"]["cpu_seconds"]["median"] == 0.5
    assert rows["half"]["throughput"] == 6 / 1.5
    assert seen[0] == (0, 10, "one") and seen[-1] == (10, 10, "")
    assert timings.warning is None


def test_what_surrounds_a_turn_is_not_timed(clock):
    log = []

    class Within:
        def __enter__(self):
            log.append("in")
            clock.takes(100)

        def __exit__(self, *exception):
            log.append("out")
            clock.takes(100)

    def readings():
        log.append("read")
        return {"joules": None, "denoiser_seconds": 3.0}

    turn = interleave.Turn(lambda: clock.takes(4), Within, lambda: clock.takes(50), readings)
    timings = interleave.measure({"a": turn, "b": lambda: clock.takes(8)}, 3, 0, CPU)
    assert timings.seconds == {"a": [4.0] * 3, "b": [8.0] * 3} and log == ["in", "read", "out"] * 3
    assert timings.readings == {"a": {"denoiser_seconds": [3.0] * 3}, "b": {}}
    assert timings.rows()["a"]["denoiser_seconds"]["median"] == 3.0
    with pytest.raises(ValueError, match="reading='denoiser_seconds': not every contender"):
        timings.ratios("denoiser_seconds")


def test_a_busy_machine_is_told(clock, monkeypatch):
    monkeypatch.setattr(interleave, "_cores", lambda: 2)
    loads = iter([1.0, 3.5, 1.0])
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads), 0, 0), raising=False)
    timings = interleave.measure({"a": lambda: clock.takes(1)}, 2, 0, CPU)
    assert timings.load == 3.5 and "3.5 on 2 cores" in timings.warning


@pytest.mark.parametrize(
    ("contenders", "rounds", "warmup", "message"),
    [({}, 1, 0, "at least one"), ({"a": print}, 0, 0, "rounds=0"), ({"a": print}, 1, -1, "-1")],
)
def test_wrong_measurements(contenders, rounds, warmup, message):
    with pytest.raises(ValueError, match=message):
        interleave.measure(contenders, rounds, warmup, CPU)


# memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("resettable", [True, False])
def test_resident_memory_sees_what_is_gone_again(monkeypatch, resettable):
    if resettable and not memory._can_reset():
        pytest.skip("the kernel's mark cannot be reset here")
    monkeypatch.setattr(memory, "_can_reset", lambda: resettable)
    with memory._resident() as most:
        before = most()
        block = torch.ones(64 * MIB, dtype=torch.uint8)
        time.sleep(0.05)  # for the sampler
        assert most() - before > 60 * MIB
        del block
        assert 60 * MIB < most() - before < 96 * MIB


def test_memory_of_a_call_in_this_process(pipe):
    order = {
        "model": str(flux.DIRECTORY), "method": "taylorseer:every=2,order=1,warmup=1,site=module",
        "call": {"prompt": ["a small red ring"], "num_inference_steps": 3, "seed": 0},
        "device": "cpu", "dtype": "float32", "threads": 1,
    }  # fmt: skip
    found = memory.measure(order)
    config = pipe.transformer.config
    tokens = (64 // pipe.vae_scale_factor // 2) ** 2 + flux.TEXT_TOKENS
    width = config.num_attention_heads * config.attention_head_dim
    outputs = 2 * config.num_layers + config.num_single_layers
    assert found.held_bytes == 2 * outputs * tokens * width * 4  # value and first difference
    assert found.peak_bytes >= found.loaded_bytes > MIB and found.reserved_bytes is None
    assert found.call_bytes == found.peak_bytes - found.loaded_bytes


@pytest.mark.slow
def test_a_fresh_process_does_not_inherit_our_memory():
    big = torch.ones(900 * MIB, dtype=torch.uint8)
    call = {"prompt": ["a small red ring"], "num_inference_steps": 2, "seed": 0}
    found = memory.peak_bytes("shapes-flux", None, call)
    assert 0 < found.loaded_bytes <= found.peak_bytes < big.numel()
    assert found.held_bytes == 0 and 0 <= found.call_bytes < 300 * MIB


def test_memory_errors_come_before_the_process_or_name_its_failure(monkeypatch):
    with pytest.raises(FileNotFoundError, match="no pipeline at 'nowhere'"):
        memory.peak_bytes("nowhere", None, {})
    with pytest.raises(UnknownMethodError, match="teacach"):
        memory.peak_bytes("shapes-flux", "teacach", {})
    with pytest.raises(ValueError, match="dtype='int8'"):
        memory.peak_bytes("shapes-flux", None, {}, memory.Place(dtype="int8"))
    with pytest.raises(ValueError, match="must be plain data"):
        memory.peak_bytes("shapes-flux", None, {"generator": torch.Generator()})
    with pytest.raises(ValueError, match="device='cpu'"):
        memory.peak(lambda: None, "cpu")
    failed = SimpleNamespace(returncode=1, stderr="some\nTypeError: no such argument\n", stdout="")
    monkeypatch.setattr(memory.subprocess, "run", lambda *given, **named: failed)
    with pytest.raises(memory.MeasureError, match="shapes-flux failed: TypeError: no such"):
        memory.peak_bytes("shapes-flux", None, {})


# energy ------------------------------------------------------------------------------------


class FakeNvml(SimpleNamespace):
    """An NVML whose board takes 50 W, with a counter of energy or without."""

    class NVMLError(Exception):
        pass

    def __init__(self, has_energy=True, has_power=True, starts=True):
        super().__init__(energy=1000.0, open=0, has_energy=has_energy, has_power=has_power)
        self.starts = starts

    def nvmlInit(self):  # noqa: N802
        if not self.starts:
            raise self.NVMLError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    nvmlDeviceGetHandleByUUID = nvmlDeviceGetHandleByIndex  # noqa: N815

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802
        if not self.has_energy:
            raise self.NVMLError("not supported")
        return self.energy

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        if not self.has_power:
            raise self.NVMLError("not supported")
        return 50_000


def test_energy_of_the_counter(monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with energy.Joules("cuda") as used:
        nvml.energy += 2500.0  # millijoules
    assert used.joules == 2.5 and used.reason == "" and nvml.open == 0
    with used:
        nvml.energy += 500.0
    assert used.joules == 0.5


def test_energy_of_sampled_power(monkeypatch):
    nvml = FakeNvml(has_energy=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    start = time.perf_counter()
    with energy.Joules("cuda:0", interval=0.001) as used:
        time.sleep(0.02)
    elapsed = time.perf_counter() - start
    assert 50 * 0.02 <= used.joules <= 50 * elapsed and nvml.open == 0
    assert energy.integral([(0.0, 10.0), (2.0, 30.0), (3.0, 30.0)]) == 40 + 30
    assert energy.integral([(0.0, 10.0)]) == 0


@pytest.mark.parametrize(
    ("device", "nvml", "reason"),
    [
        ("cpu", FakeNvml(), "CUDA devices only, not cpu"),
        ("cuda", None, "pynvml is missing: pip install"),
        ("cuda", FakeNvml(starts=False), "driver not loaded"),
        ("cuda", FakeNvml(has_energy=False, has_power=False), "neither energy nor power"),
    ],
)
def test_no_energy_and_why(monkeypatch, device, nvml, reason):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with energy.Joules(device) as used:
        pass
    assert used.joules is None and reason in used.reason
    assert nvml is None or nvml.open == 0
    with pytest.raises(ValueError, match="interval=0"):
        energy.Joules("cuda", interval=0)


# methods by name ---------------------------------------------------------------------------


def test_methods_from_one_word():
    assert parse_method("taylorseer") == TaylorSeer()
    assert parse_method(" taylorseer : every=4, site=module") == TaylorSeer(every=4, site="module")
    assert parse_method("first-block:threshold=1e-1") == FirstBlock(threshold=0.1)
    assert parse_method("taylorseer:site='stack'") == TaylorSeer(site="stack")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("taylorseer:evry=4", "'taylorseer:evry=4': TaylorSeer has no setting 'evry'"),
        ("taylorseer:every", "'every' must be a setting and its value"),
        ("taylorseer:every=", "'every=' must be a setting and its value"),
        ("taylorseer:every=4,", "'' must be a setting"),
        ("taylorseer:every=4,every=5", "every is given twice"),
        ("taylorseer:", "settings are missing behind the colon"),
        ("taylorseer:every=0", "'taylorseer:every=0': every=0"),
        ("taylorseer:every=four", "'taylorseer:every=four': "),
        ("taylorseer:site=(1,2", "open quote or bracket"),
        (":every=4", "a name is missing"),
    ],
)
def test_methods_that_cannot_be_read(text, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_method(text)


def test_an_unknown_method_is_named():
    with pytest.raises(UnknownMethodError, match="'taylorser:every=4': .*did you mean"):
        parse_method("taylorser:every=4")
