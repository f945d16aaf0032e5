"""Quantized layers by themselves, in models, and weights that were quantized before."""

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diffcache
from diffcache import Interval, TaylorSeer
from diffcache.attach.extensions.quantize import QuantizedLayers, WatchedLayers, watch
from diffcache.errors import AttachError, DiffcacheError
from diffcache.features.parts.quantize import WatchLayers
from diffcache.kernels.codes import int8_codes
from diffcache.kernels.linear import float_matmul
from diffcache.offline.cachequant_collect import LayerCalibration
from diffcache.pipelines.load import Loading, load
from diffcache.pipelines.shipped_models import MODELS
from diffcache.quant.conv import QuantizedConv2d
from diffcache.quant.integer import int_matmul, pack4, unpack4
from diffcache.quant.linear import QuantizedLinear
from diffcache.quant.plan import LayerPlan, QuantPlan
from diffcache.quant.scales import InputRanges, grid_of, rounded, weight_grid
from diffcache.step import CURRENT, Step

T = 3
CONVS = [
    dict(kernel_size=3, padding=1),
    dict(kernel_size=1),
    dict(kernel_size=3, stride=2, padding=1, bias=False),
    dict(kernel_size=(3, 2), padding=(2, 1), dilation=(2, 1)),
    dict(kernel_size=3, padding="same", groups=2),
    dict(kernel_size=1, groups=2, stride=2),
    dict(kernel_size=3, padding=1, padding_mode="reflect"),
]


def at(step: int, layer: nn.Module, given: Tensor) -> Tensor:
    token = CURRENT.set(SimpleNamespace(step=Step(step), repeats=False, writes=False))
    try:
        return layer(given)
    finally:
        CURRENT.reset(token)


def plan_of(dense: nn.Module, bits: int, ranges: list[tuple[float, float]]) -> LayerPlan:
    low, high = torch.tensor(ranges).unbind(1)
    return LayerPlan(*weight_grid(dense.weight, bits), *grid_of(low, high, 8))


# Of the rows in refused.txt.
DENSE = nn.Linear(4, 3)
PLAN = plan_of(DENSE, 8, [(-1, 1)] * T)
PARTS = list(vars(PLAN).values())[:4]


def fake(dense: nn.Module, plan: LayerPlan, bits: int, step: int, given: Tensor) -> Tensor:
    """The same layer in float64: weight and input rounded and back."""
    shape = (-1, *[1] * (dense.weight.dim() - 1))
    scale, zero = plan.weight_scale.view(shape), plan.weight_zero.view(shape)
    twin = copy.deepcopy(dense).double()
    twin.weight.data = rounded(dense.weight.detach(), scale, zero, bits).double()
    x = rounded(given, plan.input_scale[step], plan.input_zero[step], 8)
    return twin(x.double())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_equals_rounding_in_float(bits: int, bias: bool) -> None:
    dense = nn.Linear(7, 5, bias=bias).requires_grad_(False)
    x = torch.randn(2, 3, 7) * 2 + 0.5
    plan = plan_of(dense, bits, [(-4, 5), (-1, 1), (0, 9)])
    layer = QuantizedLinear(dense, plan, bits, "l")
    for step in range(T):
        torch.testing.assert_close(at(step, layer, x), fake(dense, plan, bits, step, x).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", CONVS, ids=str)
def test_conv_equals_rounding_in_float(bits: int, shape: dict) -> None:
    dense = nn.Conv2d(4, 6, **shape).requires_grad_(False)
    x = torch.randn(2, 4, 7, 6)
    plan = plan_of(dense, bits, [(-3, 3), (-1, 4), (0, 2)])
    layer = QuantizedConv2d(dense, plan, bits, "c")
    for step in range(T):
        found, expected = at(step, layer, x), fake(dense, plan, bits, step, x).float()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert found.is_contiguous()


def test_conv_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = nn.Conv2d(3, 4, 3, padding=1).requires_grad_(False)
    layer = QuantizedConv2d(dense, plan_of(dense, 8, [(-3, 3)] * T), 8, "c")
    x = torch.randn(5, 3, 6, 6)
    whole = at(0, layer, x)
    monkeypatch.setattr("diffcache.quant.conv.AT_ONCE", 2 * 36 * 27)
    assert torch.equal(at(0, layer, x), whole)


@pytest.mark.parametrize("shape", [(3, 5, 2), (1, 2100, 4), (40, 1024, 8), (17, 3, 1), (9, 1, 4)])
def test_both_products_are_exact(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a = torch.randint(-128, 128, (m, k), dtype=torch.int8)
    b = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    a[0], b[0] = -128, -128  # the largest sum there is
    exact = (a.double() @ b.double().t()).to(torch.int32)
    assert torch.equal(int_matmul(a, b), exact)
    assert torch.equal(float_matmul(a, b), exact)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(int_matmul(a, b), exact)
        assert torch.equal(float_matmul(a, b), exact)


@pytest.mark.parametrize("groups", [1, 3])
def test_conv_of_one_picture_and_of_none(groups: int) -> None:
    dense = nn.Conv2d(3, 6, 1, groups=groups).requires_grad_(False)
    layer = QuantizedConv2d(dense, plan_of(dense, 8, [(-3, 3)]), 8, "c")
    x = torch.randn(2, 3, 5, 4)
    assert torch.equal(at(0, layer, x[0]), at(0, layer, x[:1])[0])
    assert at(0, layer, x[:0]).shape == (0, 6, 5, 4)
    torch.testing.assert_close(at(0, layer, x), dense(x), atol=0.1, rtol=0.1)
    linear = QuantizedLinear(DENSE, plan_of(DENSE, 8, [(-1, 1)]), 8, "l")
    assert at(0, linear, torch.empty(0, 4)).shape == (0, 3)


@pytest.mark.parametrize("columns", [1, 2, 7, 8])
def test_four_bits_pack_and_unpack(columns: int) -> None:
    codes = torch.randint(-8, 8, (5, columns), dtype=torch.int8)
    packed = pack4(codes)
    assert packed.dtype == torch.uint8 and packed.shape == (5, -(-columns // 2))
    assert torch.equal(unpack4(packed, columns), codes)


def test_codes_of_bfloat16_are_those_of_its_numbers() -> None:
    x = torch.linspace(-3, 3, 1001).bfloat16()
    assert torch.equal(int8_codes(x, 6 / 255, 128), int8_codes(x.double(), 6 / 255, 128))


def test_grid_holds_zero_and_both_ends() -> None:
    low, high = torch.tensor([-1.0, 0.5, -2, 0]), torch.tensor([3.0, 2, -1, 0])
    scale, zero = grid_of(low, high, 8)
    back = rounded(torch.stack((low, high, torch.zeros(4))), scale, zero, 8)
    assert torch.equal(back[2], torch.zeros(4))
    assert ((back[:2] - torch.stack((low, high))).abs() <= scale * 1.0001).all()
    assert scale[3] == 1


@pytest.mark.parametrize("bits", [8, 4])
def test_weight_search_is_no_worse_than_any_shrunk_range(bits: int) -> None:
    weight = torch.randn(6, 50) ** 3
    weight[2] = 0

    def loss(scale: Tensor, zero: Tensor) -> Tensor:
        error = rounded(weight, scale[:, None], zero[:, None], bits) - weight
        return error.abs().pow(2.4).sum(1)

    found = loss(*weight_grid(weight, bits))
    low, high = weight.amin(1), weight.amax(1)
    tried = torch.stack([loss(*grid_of(low * k, high * k, bits)) for k in (1, 0.9, 0.7, 0.5, 0.21)])
    assert (found <= tried.amin(0) * 1.000001).all()
    assert bits == 8 or (found < tried[0]).any()


def test_input_ranges_are_those_seen_at_each_step() -> None:
    ranges = InputRanges(2)
    ranges.add(0, torch.tensor([1.0, 2]))
    ranges.add(0, torch.tensor([-1.0, 0]))
    assert not ranges.complete
    ranges.add(1, torch.tensor([[5.0]]).bfloat16())
    assert ranges.complete
    assert ranges.low_high.tolist() == [[-1, 5], [2, 5]]
    scale, zero = ranges.grid()
    torch.testing.assert_close(scale, torch.tensor([3 / 255, 5 / 255]))
    assert zero.tolist() == [85, 0]


def test_gain_and_shift_of_the_step() -> None:
    dense = nn.Linear(4, 3).requires_grad_(False)
    plain = plan_of(dense, 8, [(-3, 3)] * T)
    gain, shift = torch.rand(T, 3) + 0.5, torch.randn(T, 3)
    plan = LayerPlan(*list(vars(plain).values())[:4], gain, shift)
    x = torch.randn(5, 4)
    for step in range(T):
        bare = at(step, QuantizedLinear(dense, plain, 8, "l"), x) - dense.bias
        found = at(step, QuantizedLinear(dense, plan, 8, "l"), x)
        torch.testing.assert_close(found, gain[step] * bare + shift[step] + dense.bias)


def test_the_dense_layer_stays_whole() -> None:
    dense = nn.Linear(4, 3)
    before = copy.deepcopy(dense.state_dict())
    parent = nn.Sequential(QuantizedLinear(dense, plan_of(dense, 4, [(-1, 1)] * T), 4, "0"))
    state = parent.state_dict()
    assert list(state) == ["0.weight", "0.bias"]
    assert all(torch.equal(state[f"0.{k}"], v) for k, v in before.items())
    with pytest.raises(DiffcacheError, match="unwrap"):
        parent.load_state_dict(state)
    assert parent[0].weight is dense.weight and parent[0].bias is dense.bias
    assert type(copy.deepcopy(parent)[0]) is nn.Linear
    assert type(pickle.loads(pickle.dumps(parent))[0]) is nn.Linear


def test_scales_survive_a_cast_of_the_model() -> None:
    dense = nn.Linear(4, 3)
    layer = QuantizedLinear(dense, plan_of(dense, 8, [(-3, 3)] * T), 8, "l")
    x = torch.randn(5, 4)
    before = at(1, layer, x)
    layer.to(torch.bfloat16)
    assert torch.equal(at(1, layer, x), before)
    assert at(1, layer, x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 5, 2), (40, 1024, 8), (64, 2080, 24)])
def test_products_on_a_gpu_are_those_of_the_cpu(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a = torch.randint(-128, 128, (m, k), dtype=torch.int8)
    b = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    expected = int_matmul(a, b)
    torch.backends.cuda.matmul.allow_tf32 = True  # codes and their sums fit
    try:
        assert torch.equal(float_matmul(a.cuda(), b.cuda()).cpu(), expected)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert torch.equal(int_matmul(a.cuda(), b.cuda()).cpu(), expected)


def test_compiled_around_it_follows_the_step() -> None:
    dense = nn.Linear(4, 3).requires_grad_(False)
    layer = QuantizedLinear(dense, plan_of(dense, 8, [(-1, 1), (-3, 3), (-9, 9)]), 8, "l")
    block = nn.Sequential(nn.ReLU(), layer, nn.ReLU())
    compiled = torch.compile(block, backend="eager")
    x = torch.randn(5, 4)
    for step in (0, 1, 2, 0):
        assert torch.equal(at(step, compiled, x), at(step, block, x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])
        self.blocks[1].add_module("again", self.blocks[0][0])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Adapter(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x)


def plan_for(model: nn.Module, *names: str) -> QuantPlan:
    grids = {name: weight_grid(model.get_submodule(name).weight, 8) for name in names}
    ranges = grid_of(torch.tensor([-5.0]), torch.tensor([5.0]), 8)
    return QuantPlan("w8a8", {name: LayerPlan(*grid, *ranges) for name, grid in grids.items()})


@pytest.fixture(autouse=True)
def first_step():
    token = CURRENT.set(SimpleNamespace(step=Step(0), repeats=False, writes=False))
    with torch.no_grad():
        yield
    CURRENT.reset(token)


def snapshot(model: nn.Module) -> list[tuple[str, nn.Module, dict]]:
    return [(n, m, dict(m.__dict__)) for n, m in model.named_modules(remove_duplicate=False)]


def test_layers_come_back_at_every_path() -> None:
    model, x = Model(), torch.randn(3, 4)
    expected, before = model(x), snapshot(model)
    seen: list[str] = []
    model.first.register_forward_pre_hook(lambda *_: seen.append("pre"))
    layers = QuantizedLayers(model, plan_for(model, "first", "blocks.0.0"))
    assert model.blocks[1].again is model.blocks[0][0] is layers.layers["blocks.0.0"]
    assert type(model.blocks[1][0]) is nn.Linear
    assert 0 < float((model(x) - expected).abs().max()) < 0.1 and seen == ["pre"]
    model.first.register_forward_hook(lambda *_: seen.append("post"))
    model(x)
    assert seen == ["pre", "pre", "post"]
    layers.remove()
    for (name, module, state), (other, twin, now) in zip(snapshot(model), before, strict=True):
        assert name == other and module is twin and state.keys() == now.keys()
    model(x)
    assert seen[3:] == ["pre", "post"]  # hooks added meanwhile are kept
    assert torch.equal(model(x), expected)


def test_an_adapter_put_on_meanwhile_keeps_the_dense_layer() -> None:
    model = Model()
    dense = model.first
    layers = QuantizedLayers(model, plan_for(model, "first"))
    model.first = Adapter(model.first)
    layers.remove()
    assert model.first.base is dense


def test_a_model_cast_meanwhile_fits_together() -> None:
    model = Model()
    layers = QuantizedLayers(model, plan_for(model, "first"))
    model.double()
    layers.remove()
    assert model(torch.randn(2, 4).double()).dtype == torch.float64


def test_weights_that_are_changed_meanwhile_are_refused() -> None:
    model = Model()
    layers = QuantizedLayers(model, plan_for(model, "first", "blocks.0.0"))
    for dtype in (torch.half, torch.bfloat16, torch.double):
        model.to(dtype)
        layers.start(None)  # type: ignore[arg-type]
    layers.layers["first"].weight.data += 0.1  # as an adapter is fused
    with pytest.raises(AttachError, match="first was quantized"):
        layers.start(None)  # type: ignore[arg-type]


def test_bytes_are_reported() -> None:
    model = Model()
    layers = QuantizedLayers(model, plan_for(model, "first", "blocks.0.0"))
    assert layers.dense_bytes == 2 * 16 * 4
    assert layers.quantized_bytes == 2 * (16 + 4 * 4 * 4)  # codes, two sums, factor and shift


def test_only_layers_inside_blocks_are_watched() -> None:
    model, watcher = Model(), LayerCalibration("w8a8", (), (), False)
    watcher.enter("ranges", 1)
    before = snapshot(model)
    watched = WatchedLayers(model, ("blocks",), watcher)
    model(torch.randn(3, 4))
    assert set(watcher.ranges) == {"blocks.0.0", "blocks.1.0"}
    watched.remove()
    for (_, _, state), (_, _, now) in zip(snapshot(model), before, strict=True):
        assert all(state[key] is value or state[key] == value for key, value in now.items())


def test_modes_and_gradients_reach_the_layers_that_are_put_back() -> None:
    model = Model()
    names = [name for name, _ in model.named_parameters()]
    layers = QuantizedLayers(model, plan_for(model, "first", "blocks.0.0"))
    assert [name for name, _ in model.named_parameters()] == names
    model.eval().requires_grad_(False)
    assert not layers.layers["first"].training and not model.first.dense.training
    layers.remove()
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    layers.put()
    model.train().requires_grad_(True)
    layers.remove()
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


PACKAGES = {"torchao-int8": "torchao", "quanto-int8": "optimum.quanto"}


def opened(**loading):
    pipe, call = load(str(MODELS / "sticker-flux"), loading=Loading(**loading))
    pipe.set_progress_bar_config(disable=True)

    def draw():
        noise = torch.Generator().manual_seed(0)
        given = {**call, "num_inference_steps": 6, "output_type": "latent"}
        return pipe("a fox left of an owl on grass", generator=noise, **given).images

    return pipe, draw


@pytest.mark.parametrize("quantize", PACKAGES)
def test_quantized_weights_are_cached_and_left_as_they_were(quantize):
    pytest.importorskip(PACKAGES[quantize])
    pipe, draw = opened(quantize=quantize)
    plain = draw()
    linear = pipe.transformer.transformer_blocks[0].attn.to_q
    assert type(linear) is not torch.nn.Linear or type(linear.weight) is not torch.nn.Parameter
    with diffcache.wrapped(pipe, Interval(every=1)):
        assert torch.equal(draw(), plain)
    method = TaylorSeer(every=3, order=1, warmup=1)
    with diffcache.wrapped(pipe, method):
        cached = draw()
        assert torch.equal(draw(), cached) and not torch.equal(cached, plain)
        done = diffcache.report(pipe)
    assert torch.equal(draw(), plain)
    pipe, draw = opened()
    with diffcache.wrapped(pipe, method):
        assert not torch.equal(draw(), cached)
        assert done.steps_computed == diffcache.report(pipe).steps_computed == 2
        assert done.flops_saved == diffcache.report(pipe).flops_saved > 0


def test_plan_goes_through_tensors() -> None:
    dense = nn.Linear(4, 3)
    plain = plan_of(dense, 4, [(-1, 1)] * T)
    full = LayerPlan(*list(vars(plain).values())[:4], torch.ones(T, 3), torch.zeros(T, 3))
    plan = QuantPlan("w4a8", {"a.b": plain, "c": full})
    assert plan.total == T and plan.weight_bits == 4
    again = QuantPlan.of("w4a8", plan.tensors())
    assert again.layers.keys() == plan.layers.keys()
    for name, layer in plan.layers.items():
        for key, value in vars(layer).items():
            other = getattr(again.layers[name], key)
            assert other is value if value is None else torch.equal(other, value)


def test_compiled_parts_of_blocks_are_not_watched() -> None:
    model, watcher = Model(), LayerCalibration("w8a8", (), (), False)
    lists = (SimpleNamespace(key="blocks"),)
    denoiser: Any = SimpleNamespace(model=model, anatomy=SimpleNamespace(lists=lists, singles=()))
    model.first._compiled_call_impl = model.first._call_impl  # outside the blocks
    watch(denoiser, WatchLayers(watcher)).remove()
    layer = model.get_submodule("blocks.1.0")
    layer._compiled_call_impl = layer._call_impl
    with pytest.raises(AttachError, match="blocks.1.0 is compiled.*before you compile"):
        watch(denoiser, WatchLayers(watcher))
    assert not any(module._forward_pre_hooks for module in model.modules())
