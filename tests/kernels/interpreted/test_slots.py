"""Kernels of slots: moved, rotated, coded and restored."""

from collections import Counter
from itertools import cycle

import pytest
import torch
from torch import Tensor

import diffcache
from diffcache.dllm import DKVCache, Schedule
from diffcache.kernels import move, quantize, rotary
from diffcache.kernels.attention import FORWARD
from diffcache.kernels.gpu import rotary as gpu
from diffcache.kernels.rotary import rotate
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.layer import KVLayer
from diffcache.kv.rotary import Rotary, Rotation
from diffcache.kv.rotary_nd import RotaryND, RotaryTable
from diffcache.kv.slots import SlotIndex, Slots
from diffcache.pipelines.diffusion_lm import DiffusionLM
from tests.dllm.toys import bidirectional, prompts
from tests.kernels.quantized import CODECS, DTYPES, by_twin, tensor


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count launches by operator."""
    found: Counter[str] = Counter()
    for operator in (move.SCATTER, move.GATHER, FORWARD):
        launch = operator.launch

        def counted(*args, launch=launch, name=operator.name):
            found[name] += 1
            return launch(*args)

        monkeypatch.setattr(operator, "launch", counted)
    return found


def test_slots_that_are_not_there_are_left_out_and_come_out_as_zeros() -> None:
    room = torch.full((1, 2, 12, 8), torch.nan)
    k, v = room[:, :, 2:8], room.clone()[:, :, 2:8]
    index = torch.tensor([[-1, 6, 2, 2**40]])
    ones = torch.ones(1, 2, 4, 8)
    move.kv_scatter(k, v, ones, ones, index)
    assert torch.equal(room.isnan().sum((0, 1, 3)), torch.tensor([16] * 4 + [0] + [16] * 7))
    for found in move.kv_gather(k, v, index[:, None]):
        assert torch.equal(found.sum(-1), torch.tensor([0.0, 0, 8, 0]).expand(1, 2, 4))


@pytest.mark.parametrize("index", [torch.zeros(2, 3, dtype=torch.long), torch.arange(2)])
def test_shapes_that_do_not_fit_are_refused(index: Tensor, launches: Counter[str]) -> None:
    k, v, fresh = torch.zeros(1, 2, 6, 8), torch.zeros(1, 2, 6, 8), torch.ones(1, 2, 3, 8)
    with pytest.raises((IndexError, RuntimeError)):
        move.kv_scatter(k, v, fresh, fresh, index)
    assert not launches


@pytest.mark.parametrize("wrong", ["channels", "slots", "heads"])
def test_values_that_do_not_fit_are_refused(wrong: str, launches: Counter[str]) -> None:
    heads, slots, size = 2 - (wrong == "heads"), 6 - (wrong == "slots"), 8 - (wrong == "channels")
    k, v, fresh = (torch.zeros(1, 2, 6, 8), torch.zeros(1, heads, slots, size), torch.ones(1, 2, 1, 8))
    with pytest.raises((IndexError, RuntimeError)):
        move.kv_scatter(k, v, fresh, fresh, torch.tensor([5]))
    if wrong == "slots":
        with pytest.raises((IndexError, RuntimeError)):
            move.kv_gather(k, v, torch.tensor([[[5]]]))
    assert not launches


@pytest.mark.parametrize(
    ("index", "settled", "dtype"),
    [
        (torch.tensor([4, 8, 6]), 0, torch.bfloat16),
        (torch.tensor([[4, 8, 6], [3, 7, 5]]), 3, torch.float32),
        (torch.tensor([[5, 4, 3]]).expand(2, -1), 3, torch.bfloat16),
    ],
)
def test_a_layer_is_overwritten_in_one_launch(
    index: Tensor, settled: int, dtype: torch.dtype, launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for kernels, checked in (("torch", False), ("triton", False), ("triton", True)):
        monkeypatch.setenv("DIFFCACHE_KERNELS", kernels)
        layer = KVLayer()
        if settled:
            first = drawn(2, 3, settled, 8, seed=1).to(dtype)
            layer.write(first, first)
            layer.settle_tail()
        k, v = (drawn(2, 3, 10, 8, seed=seed).to(dtype) for seed in (2, 3))
        layer.write(k, v, meta={"ver": torch.zeros(2, 1, 10, dtype=torch.int32)})
        fork = layer.fork()
        new = drawn(2, 3, 3, 8, seed=4).to(dtype)
        layer.overwrite(SlotIndex.of(index, 10, settled) if checked else index, new, -new, ver=7)
        assert torch.equal(fork.tail.read().k, k)
        slots = layer.read()
        found.append([slots.k, slots.v, slots.meta["ver"], layer.tail.clean])
    assert launches == {"kv_scatter": 2}
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.equal(one, two) if isinstance(one, Tensor) else one == two


def test_slots_are_gathered_in_one_launch(launches: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pos = torch.arange(9, dtype=torch.int32).expand(2, 1, -1)
    slots = Slots(drawn(2, 3, 9, 8), drawn(2, 3, 9, 4, seed=1), {"pos": pos})
    index = torch.randint(9, (2, 3, 5), generator=torch.Generator().manual_seed(0))
    keep = index % 2 == 0
    found = slots.gather(index, keep)
    monkeypatch.setenv("DIFFCACHE_KERNELS", "torch")
    wanted = slots.gather(index, keep)
    assert launches == {"kv_gather": 1}
    assert torch.equal(found.k, wanted.k) and torch.equal(found.v, wanted.v)
    assert torch.equal(found.pos, wanted.pos)


def test_a_decoding_that_writes_rows_is_that_of_plain_pytorch(launches: Counter[str], monkeypatch) -> None:
    found = []
    for backend in ("triton", "torch"):
        monkeypatch.setenv("DIFFCACHE_KERNELS", backend)
        model = bidirectional(torch.float32, num_hidden_layers=2)
        with diffcache.wrapped(model, DKVCache(every=4)):
            found.append(DiffusionLM(model).generate(prompts(6, 4), Schedule(6, 3)).ids)
    assert torch.equal(*found)
    assert launches["kv_scatter"] and launches["attn_forward"]  # under the mask of padding


LAYOUTS = pytest.mark.parametrize("interleaved", [False, True])
AXES = RotaryND.sections((4, 2, 2))
TABLE = torch.arange(36).view(1, 12, 3) % 7
KINDS: dict[str, tuple[Rotation, Tensor]] = {
    "half": (Rotary.default(1e4, 8), torch.arange(5)),
    "interleaved": (Rotary(torch.tensor([1.0, 0.1]), 1.3, True, 2), torch.tensor([[[9, 0, 5, 1, 2]]])),
    "axes": (AXES, torch.arange(15).view(5, 3)),
    "table": (RotaryTable.of(AXES, TABLE), torch.arange(5)[None, None]),
}


@LAYOUTS
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_what_begins_at_an_odd_place_is_turned_as_elsewhere(backend: str, interleaved: bool, monkeypatch) -> None:
    monkeypatch.setenv("DIFFCACHE_KERNELS", backend)
    x, angles = drawn(1, 2, 6, 16), drawn(6, 8, seed=1)
    odd = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    assert torch.equal(*(rotate(each, angles, interleaved=interleaved) for each in (odd, x)))
    one = drawn(1, 1, 1, 17)  # a head of odd size
    whole = rotate(one[..., :16].clone(), angles[:1], interleaved=interleaved)
    assert torch.equal(rotate(one, angles[:1], interleaved=interleaved)[..., :16], whole)
    assert torch.equal(rotate(x, angles[:, :0], interleaved=interleaved), x)


@pytest.mark.parametrize(("interleaved", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_channels_outside_and_turns_by_nothing_come_out_bit_for_bit(interleaved: bool, dtype: torch.dtype) -> None:
    x = drawn(2, 3, 5, 30).to(dtype)
    x[..., 0], x[..., -1] = torch.inf, torch.nan
    found = rotate(x, drawn(5, 6), start=7, interleaved=interleaved)
    outside = [*range(7), *range(19, 30)]
    assert torch.equal(found[..., outside].nan_to_num(9), x[..., outside].nan_to_num(9))
    assert not torch.equal(found[..., 7:19], x[..., 7:19])
    still = rotate(x[..., 1:-1], torch.zeros(5, 14), interleaved=interleaved)
    assert torch.equal(still, x[..., 1:-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cosines_and_sines_are_exact_at_positions_up_to_a_million(dtype: torch.dtype) -> None:
    near = torch.arange(-40, 41) * (torch.pi / 4)  # every eighth of a turn
    far = torch.tensor([1e6, -1e6, 999_983.5, 2.0**20, 1e8, 131_072 * 0.7])
    angles = torch.cat([near, far, 1e6 * drawn(400)]).to(dtype)
    ones = torch.tensor([1.0, 0.0]).expand(1, 1, len(angles), 2)
    found = rotate(ones, angles[:, None])[0, 0].double()
    exact = torch.stack([angles.double().cos(), angles.double().sin()], -1)
    assert float((found - exact).abs().max()) < 1e-7


@LAYOUTS
@pytest.mark.parametrize("shape", [(40, 4), (2, 5, 40, 4)])
def test_heads_that_share_their_angles_share_programs(interleaved: bool, shape: tuple[int, ...], monkeypatch) -> None:
    x, angles = drawn(2, 5, 40, 11), drawn(*shape, seed=1)
    alone = rotate(x, angles, start=2, interleaved=interleaved)
    for enough in (1, 3, 5):  # five heads, three or two of them in a program
        monkeypatch.setattr(gpu, "ENOUGH", enough)
        assert torch.equal(rotate(x, angles, start=2, interleaved=interleaved), alone)


@pytest.mark.parametrize("name", KINDS)
def test_the_library_rotates_by_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rotation, pos = KINDS[name]
    calls = []
    launch = rotary.ROTATE.launch
    monkeypatch.setattr(rotary.ROTATE, "launch", lambda *a: calls.append(1) or launch(*a))
    for verb in (rotation.rotate, rotation.unrotate, rotation.shift):
        for dtype in (torch.float32, torch.bfloat16):
            x = drawn(1, 2, 5, 8).to(dtype)
            monkeypatch.setenv("DIFFCACHE_KERNELS", "triton")
            found = verb(x, pos)
            monkeypatch.setenv("DIFFCACHE_KERNELS", "torch")
            rtol = 1.6e-2 if x.element_size() == 2 else 0
            torch.testing.assert_close(found, verb(x, pos), rtol=rtol, atol=1e-6)
    assert len(calls) == 6
    monkeypatch.setenv("DIFFCACHE_KERNELS", "triton")
    rotation.rotate(drawn(1, 2, 5, 8).double(), pos)
    rotation.rotate(drawn(1, 2, 5, 8).requires_grad_(), pos)
    assert len(calls) == 6  # plain PyTorch has float64 and gradients


@pytest.mark.parametrize(("codec", "dtype"), list(zip(CODECS, cycle(DTYPES), strict=False)), ids=str)
def test_codes_and_grids_are_those_of_plain_pytorch(codec: GroupQuant, dtype: torch.dtype, monkeypatch) -> None:
    x = tensor(dtype)
    codes, grid = by_twin(codec, x)
    made = codec.encode(x)
    assert torch.equal(codes, made.codes)
    assert torch.equal(grid, made.grid.values)
    index = torch.randint(64, (2, 2, 40), generator=torch.Generator().manual_seed(2))
    parts = (made, made.take(index))
    found = [(held.decode(), torch.full(held.decode().shape, 7.0)) for held in parts]
    for held, (_, room) in zip(parts, found, strict=True):
        held.decode_into(room)
    monkeypatch.setenv("DIFFCACHE_KERNELS", "torch")
    for held, (one, room) in zip(parts, found, strict=True):
        assert torch.equal(held.decode(), one)
        wide = torch.empty_like(room)
        held.decode_into(wide)
        assert torch.equal(wide, room)


def test_kernels_run_where_they_can_and_are_not_asked_elsewhere() -> None:
    x = tensor(torch.float32)
    assert quantize.can_quantize(x, 2, 32, 1)
    assert quantize.can_quantize(x, 4, 1, 40)
    assert not quantize.can_quantize(x, 3, 32, 1)  # numbers that share three bytes
    assert not quantize.can_quantize(x, 2, 1, 6)  # a byte of two groups
    assert not quantize.can_quantize(x.double(), 2, 32, 1)
    made = GroupQuant(2, "channels", 6).encode(x)
    assert made.decode().isfinite().all()


def test_a_group_with_a_number_that_is_none_comes_back_as_none() -> None:
    x = tensor(torch.float32)
    x[0, 0, 3, 4] = float("nan")
    for codec in (CODECS[0], CODECS[3]):
        assert codec.encode(x).decode().isnan()[0, 0, 3, 4]
        assert codec.encode(x).decode().isfinite()[0, 1].all()
