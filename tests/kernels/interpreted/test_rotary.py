"""Properties of rotations by the kernel, and the library's rotations through it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffcache.kernels import rotary
from diffcache.kernels.gpu import rotary as gpu
from diffcache.kernels.rotary import rotate
from diffcache.kv.rotary import Rotary, Rotation
from diffcache.kv.rotary_nd import RotaryND, RotaryTable

LAYOUTS = pytest.mark.parametrize("interleaved", [False, True])
AXES = RotaryND.sections((4, 2, 2))
TABLE = torch.arange(36).view(1, 12, 3) % 7
KINDS: dict[str, tuple[Rotation, Tensor]] = {
    "half": (Rotary.default(1e4, 8), torch.arange(5)),
    "interleaved": (Rotary(torch.tensor([1.0, 0.1]), 1.3, True, 2), torch.tensor([[[9, 0, 5, 1, 2]]])),
    "axes": (AXES, torch.arange(15).view(5, 3)),
    "table": (RotaryTable.of(AXES, TABLE), torch.arange(5)[None, None]),
}  # fmt: skip


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@LAYOUTS
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_what_begins_at_an_odd_place_is_turned_as_elsewhere(
    backend: str, interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFCACHE_KERNELS", backend)
    x, angles = drawn(1, 2, 6, 16), drawn(6, 8, seed=1)
    odd = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    assert torch.equal(*(rotate(each, angles, interleaved=interleaved) for each in (odd, x)))
    one = drawn(1, 1, 1, 17)  # a head of odd size
    whole = rotate(one[..., :16].clone(), angles[:1], interleaved=interleaved)
    assert torch.equal(rotate(one, angles[:1], interleaved=interleaved)[..., :16], whole)
    assert torch.equal(rotate(x, angles[:, :0], interleaved=interleaved), x)


@LAYOUTS
def test_turning_a_query_back_is_turning_a_key_forth(interleaved: bool) -> None:
    q, k = drawn(1, 2, 6, 16, seed=1), drawn(1, 2, 6, 16, seed=2)
    angles = 20 * drawn(6, 8, seed=3)
    forth = (q * rotate(k, angles, interleaved=interleaved)).sum(-1)
    back = (rotate(q, -angles, interleaved=interleaved) * k).sum(-1)
    undone = (rotate(q, angles, back=True, interleaved=interleaved) * k).sum(-1)
    torch.testing.assert_close(back, forth, rtol=0, atol=2e-6)
    torch.testing.assert_close(undone, forth, rtol=0, atol=2e-6)


@LAYOUTS
def test_two_turns_add(interleaved: bool) -> None:
    x, one, other = drawn(2, 3, 6, 16), 3 * drawn(6, 8, seed=1), 3 * drawn(6, 8, seed=2)
    twice = rotate(rotate(x, one, interleaved=interleaved), other, interleaved=interleaved)
    once = rotate(x, one + other, interleaved=interleaved)
    torch.testing.assert_close(twice, once, rtol=0, atol=3e-6)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_outside_and_turns_by_nothing_come_out_bit_for_bit(
    interleaved: bool, dtype: torch.dtype
) -> None:
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
@pytest.mark.parametrize("shape", [(40, 4), (2, 1, 40, 4), (2, 5, 40, 4)])
def test_heads_that_share_their_angles_share_programs(
    interleaved: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
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
            torch.testing.assert_close(found, verb(x, pos), rtol=1.6e-2 if x.element_size() == 2 else 0,
                                       atol=1e-6)  # fmt: skip
    assert len(calls) == 6
    monkeypatch.setenv("DIFFCACHE_KERNELS", "triton")
    rotation.rotate(drawn(1, 2, 5, 8).double(), pos)
    rotation.rotate(drawn(1, 2, 5, 8).requires_grad_(), pos)
    assert len(calls) == 6  # plain PyTorch has float64 and gradients
