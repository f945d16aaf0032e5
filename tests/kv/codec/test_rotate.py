"""Hadamard rotation and reordering: orthogonal, exact without quantization, good against outliers."""

import pytest
import torch
from torch import Tensor

from diffcache.kv.codec.base import Exact
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.codec.rotate import ChannelPermute, Hadamard, energy_order, hadamard, rotatekv


def sylvester(size: int) -> Tensor:
    """The matrix by its definition."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.kron(torch.tensor([[1.0, 1], [1, -1]]), matrix)
    return matrix / size**0.5


def outliers(*shape: int) -> Tensor:
    """Keys of which three channels are thirty times as large."""
    x = torch.randn(*shape)
    x[..., [3, 17, 18]] *= 30
    return x


@pytest.mark.parametrize(("size", "block"), [(1, 1), (2, 2), (64, 64), (96, 32), (24, 4)])
def test_equals_the_matrix(size: int, block: int) -> None:
    x = torch.randn(3, 5, size)
    wanted = torch.block_diag(*[sylvester(block)] * (size // block))
    torch.testing.assert_close(hadamard(x, block), x @ wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard(hadamard(x, block), block), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("size", [64, 48])
def test_logits_are_unchanged_without_quantization(heads: int, size: int) -> None:
    k, q = outliers(2, 4, 32, size), torch.randn(2, 4, 6, size)
    for codec in (Hadamard(Exact(), heads), ChannelPermute(Exact()), ChannelPermute(Hadamard(Exact(), heads))):
        found = q @ codec.encode(k).decode().mT
        torch.testing.assert_close(found, q @ k.mT, rtol=1e-5, atol=2e-4)


def test_grouped_heads_share_an_outlier() -> None:
    x = torch.randn(1, 4, 64, 16)
    x[:, 1] *= 20  # one loud head
    quant = GroupQuant(4, "channels", None)
    found = Hadamard(Exact(), heads=4).encode(x)
    inner = found.inner.inner.values  # type: ignore[attr-defined]
    assert inner.shape == (1, 1, 64, 64)
    assert (Hadamard(quant, 4).encode(x).decode() - x).isfinite().all()


def test_energy_order_sorts_channels() -> None:
    x = torch.tensor([[1.0, 3, 0, 2], [-1, 0, 0, -2]])[None, None]
    assert energy_order(x).tolist() == [[[1, 3, 0, 2]]]
    assert energy_order(torch.zeros(1, 1, 2, 3)).tolist() == [[[0, 1, 2]]]


def test_a_given_order_is_used_and_stored_once() -> None:
    order = torch.tensor([2, 0, 3, 1])
    codec = ChannelPermute(Exact(), order)
    x = torch.randn(1, 2, 5, 4)
    payload = codec.encode(x)
    assert torch.equal(payload.inner.decode(), x[..., order])
    joined = codec.join([payload, codec.encode(torch.randn(1, 2, 9, 4))])
    assert joined.order.values.shape[2] == 1 and joined.order.of is None


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_rotatekv_rounds_to_the_nearest_of_its_grid(bits: int) -> None:
    x, order = torch.randn(1, 2, 64, 32), torch.arange(32)
    rotated = hadamard(x, 32)
    span = rotated.amax(-1, keepdim=True) - rotated.amin(-1, keepdim=True)
    found = rotatekv(bits, 32, 1, order).encode(x).decode()
    worst = ((hadamard(found, 32) - rotated).abs() / (span / (2**bits - 1))).max()
    assert float(worst) == pytest.approx(0.5, abs=0.02)
