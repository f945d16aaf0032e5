"""CacheQuant: its schedule, corrections and quantized layers, calibrated and attached to models."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache.attach.fingerprint import facts_of
from diffcache.attach.handle import Handle
from diffcache.errors import AttachError, TablesError
from diffcache.features.cachequant import CacheQuant, Corrected
from diffcache.features.collect import Observer, RunInfo
from diffcache.features.tables import Tables
from diffcache.offline.cachequant_collect import CacheQuantCollector, LayerCalibration, segment_bounds
from diffcache.offline.tracing import Traced
from diffcache.step import Step
from tests.internals import state_of

SITE = "up_blocks.0"

pytestmark = pytest.mark.usefixtures("no_gradients")


def info(total: int, number: int = 0) -> RunInfo:
    return RunInfo(number, 0, torch.arange(total), None, total)


def collected(runs: list[list[Tensor]], **settings: Any) -> CacheQuantCollector:
    """A collector that saw one feature in some runs."""
    collector = CacheQuant(**settings).collector()
    for run in runs:
        collector.begin(info(len(run)))
        for index, value in enumerate(run):
            collector.feature(Step(index), SITE, 0, value)
        collector.end()
    return collector


def tables_of(collector: CacheQuantCollector, total: int, **more: Any) -> Tables:
    header = {"method": "cachequant", "steps": total, **collector.settings(), **more}
    return Tables(header, collector.tables())


def walk(total: int, shape: tuple[int, ...] = (2, 5, 3)) -> list[Tensor]:
    jumps = torch.rand(total, *[1] * len(shape), dtype=torch.float64) ** 3
    return list((torch.randn(total, *shape, dtype=torch.float64) * jumps).cumsum(0))


# the schedule


def brute_force(values: list[Tensor], count: int, shortest: int, longest: int) -> tuple[float, Any]:
    total, best = len(values), (math.inf, None)
    for inner in itertools.combinations(range(1, total), count - 1):
        edges = [0, *inner, total]
        lengths = [b - a for a, b in itertools.pairwise(edges)]
        if all(shortest <= length <= longest for length in lengths):
            cost = sum(
                float((values[t] - values[a]).abs().sum()) for a, b in itertools.pairwise(edges) for t in range(a, b)
            )
            best = min(best, (cost, edges[:-1]))
    return best


@pytest.mark.parametrize(
    ("total", "every"), [(12, 3), (10, 2), (14, 4), (13, 3), (7, 4), (5, 4), (9, 5), (3, 5), (6, 1)]
)
def test_schedule_equals_brute_force(total: int, every: int, agrees: Any) -> None:
    values = walk(total)
    count, shortest, longest = math.ceil(total / every), math.ceil(every / 2), 2 * every
    if count * shortest > total:
        shortest, longest = 1, total
    _, expected = brute_force(values, count, shortest, longest)
    if every == 1:
        expected = list(range(total))
    steps = collected([values], every=every).starts(), expected
    agrees("cachequant", "all schedules, with the paper's costs", steps=steps)


def test_bounds_of_segments() -> None:
    assert segment_bounds(50, 5) == (10, 3, 10)
    assert segment_bounds(2, 5) == (1, 1, 2)  # ceil(5 / 2) steps do not fit: any length
    for total in range(1, 40):
        for every in range(1, 12):
            count, shortest, longest = segment_bounds(total, every)
            assert count * shortest <= total <= count * longest
    assert collected([walk(10)], every=4, schedule="uniform").starts() == [0, 4, 8]


# the correction of reused features


@pytest.mark.parametrize("shape", [(2, 6, 4), (2, 4, 3, 5)], ids=["tokens", "pictures"])
def test_affine_features_are_met_exactly(shape: tuple[int, ...]) -> None:
    total, base = 10, torch.randn(shape, dtype=torch.float64)
    channels = (4,) if len(shape) == 3 else (4, 1, 1)
    a = torch.rand(total, *channels, dtype=torch.float64) + 0.5
    b = torch.randn(total, *channels).double()
    features = [a[t] * base + b[t] for t in range(total)]
    collector = collected([features], every=4)
    method = Corrected(tables_of(collector, total))
    assert method.tables[f"cache/{SITE}/0/a"].shape == (total, 4)
    state, starts = method.init_at(SITE, 0), collector.starts()
    for t in range(total):
        if t in starts:
            method.record(state, Step(t), features[t])
        error = float((method.estimate(state, Step(t)) - features[t]).abs().max())
        assert error < 1e-12 and (t not in starts or error == 0)
        if t in starts:
            assert method.estimate(state, Step(t)) is features[t]


def test_a_feature_of_another_step_is_reused_as_it_is() -> None:
    run = walk(9)
    collector = collected([run], every=3, schedule="uniform")
    method = Corrected(tables_of(collector, 9))
    state = method.init()
    method.record(state, Step(4), run[4])  # forced: the schedule says 3
    assert method.estimate(state, Step(5)) is run[4]
    method.record(state, Step(6), run[6])
    assert method.estimate(state, Step(7)) is not run[6]
    assert method.held(state) == [run[6]]


def test_joint_maps_lead_to_what_dense_layers_would_make() -> None:
    collector = CacheQuant(every=2, bits="w8a8", schedule="uniform", corrected=()).collector()
    assert collector.passes == 2 and len(collector.abilities()) == 1
    watched = collector.layers
    watched.layer("l", torch.randn(3, 4), None)
    collector.begin(info(4, 0))
    for t in range(4):
        watched.given("l", t, torch.randn(2, 4))
        collector.feature(Step(t), SITE, 0, torch.full((2, 5, 3), torch.nan))  # not looked at
    collector.end()
    collector.begin(info(4, 1))
    assert watched.plan() is not None and watched.wants_dense
    quantized, dense = walk(4), []
    for t in range(4):
        dense.append((t + 0.5) * quantized[t - t % 2] - t)
        collector.feature(Step(t), SITE, 0, quantized[t])
        watched.dense_again(True)
        collector.feature(Step(t), SITE, 0, dense[t])
        watched.dense_again(False)
    collector.end()
    expected = sum((dense[t] - quantized[0]).abs().sum() for t in range(2))
    torch.testing.assert_close(collector.pairs.distances[0, :2].sum(), expected)
    method = Corrected(tables_of(collector, 4))
    state = method.init()
    for t in (0, 2):
        method.record(state, Step(t), quantized[t])
        error = (method.estimate(state, Step(t + 1)) - dense[t + 1]).abs().max()
        assert float(error) < 1e-12


def unet() -> nn.Module:
    torch.manual_seed(1)
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=2,
        out_channels=2,
        layers_per_block=1,
        norm_num_groups=4,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    ).eval()


def dit() -> nn.Module:
    torch.manual_seed(1)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=2,
        out_channels=2,
        num_layers=3,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=1000,
    ).eval()
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def call(model: nn.Module, x: Tensor, t: int) -> Tensor:
    extra = {"class_labels": torch.tensor([1])} if isinstance(model, DIT) else {}
    return model(x, timestep=torch.tensor([t]), **extra).sample


DIT = diffusers.DiTTransformer2DModel
MODELS = {"unet": unet, "dit": dit}
STEPS = 4


def sample(model: nn.Module, seed: int = 0, steps: int = STEPS) -> Tensor:
    """A sampling loop that is as simple as can be; all outputs."""
    x = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(seed))
    outs = []
    for step in range(steps):
        out = call(model, x, 999 - step * (999 // steps))
        outs.append(out)
        x = x - 0.1 * out
    return torch.stack(outs)


def calibrated(model: nn.Module, method: CacheQuant, steps: int = STEPS) -> CacheQuant:
    collector = method.collector()
    traced = Traced(collector.site(), collector.abilities())
    with Handle(model, {"model": model}, traced, observer=collector) as handle:
        for number in range(collector.passes):
            for seed in range(2):
                handle.reset()
                collector.begin(info(steps, number))
                sample(model, seed, steps)
                collector.end()
    return dataclasses.replace(method, tables=tables_of(collector, steps, **facts_of(model, None)))


@functools.cache
def quantized_unet() -> tuple[nn.Module, CacheQuant]:
    model = unet()
    return model, calibrated(model, CacheQuant(every=1, bits="w8a8", corrected=()))


def attached(model: nn.Module, method: CacheQuant) -> Handle:
    return Handle(model, {"model": model}, method)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("name", "bits"), [("unet", "w4a8"), ("dit", "w8a8")])
def test_joint_from_end_to_end(name: str, bits: Any) -> None:
    model = MODELS[name]()
    expected, before = sample(model), dict(model.named_modules())
    hooked = []
    lists = "mid_block.resnets.0.conv1" if name == "unet" else "transformer_blocks.1.attn1.to_q"
    layer = model.get_submodule(lists)
    hook = layer.register_forward_hook(lambda *_: hooked.append(1))
    state, traces = {key: value.clone() for key, value in model.state_dict().items()}, state_of(model)

    method = calibrated(model, CacheQuant(every=2, bits=bits, exempt="*to_v"))
    quantized = {n.split("/")[1] for n in method.tables.names() if n.startswith("quant/")}
    kinds = (nn.Linear, nn.Conv2d)
    inside = ("down_blocks.", "mid_block.", "up_blocks.", "transformer_blocks.")
    assert quantized == {
        n for n, m in before.items() if type(m) in kinds and n.startswith(inside) and not n.endswith("to_v")
    }
    hooked.clear()
    with attached(model, method) as handle:
        out = sample(model)
        assert len(hooked) > 0
        extension = handle.denoisers[0].extensions[1]
        assert extension.quantized_bytes < extension.dense_bytes
        assert type(model.get_submodule(lists)).__name__.startswith("Quantized")
        assert model.state_dict().keys() == state.keys()
        swapped = [call.index for call in handle.last.calls if call.computed]
    assert swapped == method.tables["starts"].tolist()
    assert 0 < relative(out, expected) < 0.4
    assert all(module is before[key] for key, module in model.named_modules()) and state_of(model) == traces
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(sample(model), expected)
    hook.remove()


def test_calibrate_goes_on_where_it_was_interrupted(tmp_path: Any) -> None:
    vae = diffusers.AutoencoderKL(latent_channels=2, block_out_channels=(4,), norm_num_groups=2)
    pipe, out = diffusers.DiTPipeline(dit(), vae.eval(), diffusers.DDIMScheduler()), tmp_path / "t.safetensors"
    pipe.set_progress_bar_config(disable=True)
    prompts = [{"class_labels": [n]} for n in (0, 1)]
    method = CacheQuant(every=2, bits="w8a8", corrected=("*conv1", "*.ff.*"))
    calibrate = functools.partial(diffcache.calibrate, pipe, method, prompts, steps=STEPS, output_type="np")

    def stop(done: int, total: int, word: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(out=out, progress=stop)
    seen: list[tuple[int, int]] = []
    found = calibrate(out=out, progress=lambda done, total, word: seen.append((done, total)))
    assert seen == [(3, 6), (4, 6), (5, 6), (6, 6)]
    whole = calibrate()
    assert set(found.tables.names()) == set(whole.tables.names())
    for table in whole.tables.names():
        assert torch.equal(found.tables[table], whole.tables[table]), table
    again = CacheQuant(every=2, bits="w8a8", corrected=("*conv1", "*.ff.*"), tables=str(out))
    with diffcache.wrapped(pipe, again) as handle:
        call = {**prompts[0], "num_inference_steps": STEPS, "output_type": "np"}
        pictures = [pipe(**call, generator=torch.Generator().manual_seed(0))[0] for _ in "ab"]
        assert (pictures[0] == pictures[1]).all()
        computed = [call.index for call in handle.last.calls if call.computed]
        assert computed == again.tables["starts"].tolist()


class Seen(Observer):
    """Notes what a collector is shown, and whose features they are."""

    def __init__(self, collector: CacheQuantCollector) -> None:
        self.collector = collector
        self.first: dict[str, Tensor] = {}

    def feature(self, step: Step, site: str, index: int, value: Tensor) -> None:
        layers = self.collector.layers
        if step.index == 0:
            self.first[layers.stage + " again" * layers.dense] = value.clone()
        self.collector.feature(step, site, index, value)


@pytest.mark.parametrize("name", MODELS)
def test_quantized_calls_are_made_again_with_dense_layers(name: str) -> None:
    model = MODELS[name]()
    collector = CacheQuant(every=2, bits="w4a8").collector()
    seen = Seen(collector)
    traced = Traced(collector.site(), collector.abilities())
    with Handle(model, {"model": model}, traced, observer=seen) as handle:
        for number in range(collector.passes):
            handle.reset()
            collector.begin(info(STEPS, number))
            sample(model)
            collector.end()
    assert list(seen.first) == ["ranges", "errors", "done", "done again"]
    assert torch.equal(seen.first["done again"], seen.first["ranges"])  # of the same noise
    assert not torch.equal(seen.first["done"], seen.first["ranges"])


def test_a_plan_for_another_model_is_refused() -> None:
    model, method = quantized_unet()
    header = {**method.tables.header, "config": facts_of(dit(), None)["config"]}
    names = method.tables.names()

    def renamed(old: str, new: str) -> CacheQuant:
        tensors = {n.replace(old, new): method.tables[n] for n in names}
        return dataclasses.replace(method, tables=Tables(method.tables.header, tensors))

    with pytest.raises(AttachError, match=r"no layer 'up_blocks\.7\.resnets\.0\.conv1'"):
        attached(model, renamed("up_blocks.0.resnets.0.conv1", "up_blocks.7.resnets.0.conv1"))
    with pytest.raises(AttachError, match=r"norm1 is a GroupNorm, not a linear"):
        attached(model, renamed("up_blocks.0.resnets.0.conv1", "up_blocks.0.resnets.0.norm1"))
    tables = Tables(header, {n: method.tables[n] for n in names})
    with pytest.raises(TablesError, match="measured on .* with config="):
        attached(model, dataclasses.replace(method, tables=tables))
    assert type(model.get_submodule("up_blocks.0.resnets.0.conv1")) is nn.Conv2d


def layers(official: bool = False) -> LayerCalibration:
    made = LayerCalibration("w8a8", (), ("*",), official)
    made.layer("l", torch.randn(3, 4), torch.tensor([1.0, 2, 3]))
    made.enter("ranges", 2)
    for step in range(2):
        made.given("l", step, torch.randn(8, 4) * (step + 1))
    made.enter("errors", 2)
    return made


def test_official_layers_count_the_bias_twice() -> None:
    ours, theirs, bias = layers(), layers(official=True), torch.tensor([1.0, 2, 3])
    seen = []
    for step in range(2):
        x = torch.randn(8, 3)
        y = 0.7 * x + 0.2 + 0.01 * torch.randn(8, 3)
        seen.append((x, y))
        ours.compare("l", step, y, x)
        theirs.compare("l", step, y, x)
    for made in (ours, theirs):
        made.enter("done", 2)
    mine, found = ours.plan().layers["l"], theirs.plan().layers["l"]
    for step, (x, y) in enumerate(seen):
        a = ((x - x.mean(0)) * (y - y.mean(0))).mean(0) / x.var(0)
        torch.testing.assert_close(found.gain[step], a)
        torch.testing.assert_close(found.shift[step], (y + bias).mean(0) - a * (x + bias).mean(0))
        torch.testing.assert_close(mine.gain[step], a * 8 / 7)
        torch.testing.assert_close(mine.shift[step], y.mean(0) - mine.gain[step] * x.mean(0))


def test_schedule_adds_runs_features_and_branches() -> None:
    total, first, second = 9, walk(9), walk(9)
    joined = [torch.cat(pair) for pair in zip(first, second, strict=True)]
    whole = collected([joined], every=3).starts()
    assert collected([first, second], every=3).starts() == whole
    apart = CacheQuant(every=3).collector()
    apart.begin(info(total))
    for index, (a, b) in enumerate(zip(first, second, strict=True)):
        apart.feature(Step(index), SITE, 0, a)
        apart.feature(Step(index, branch=1), SITE, 0, b)
    apart.end()
    assert apart.starts() == whole


def test_maps_of_named_layers_only() -> None:
    _, plain = quantized_unet()
    mapped = calibrated(dit(), CacheQuant(every=1, bits="w4a8", corrected="*.ff.*"))
    names = [n for n in mapped.tables.names() if n.endswith("/gain")]
    assert len(names) == 6 and all(".ff." in n for n in names)
    assert not any(n.endswith("/gain") for n in plain.tables.names())
    assert mapped.tables["starts"].tolist() == list(range(STEPS))
    assert mapped.collector().passes == 3 and plain.collector().passes == 2
