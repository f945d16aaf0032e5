"""Properties of single codecs: loops and closed forms, error bounds, honest bytes."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv.codec.base import Exact, nbytes
from diffcache.kv.codec.fourier import FourierSigns, real_fourier
from diffcache.kv.codec.lowrank import LowRank, StaticLowRank, steady_product
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.codec.rotate import ChannelPermute, Hadamard, hadamard, rotatekv
from diffcache.kv.codec.scaled import balancer
from diffcache.kv.codec.sparse import BitmapSparse, Outliers


def groups_of(x: Tensor, along: str, group: int) -> Iterator[tuple[int, int, slice, slice]]:
    """Yield (b, h, slots, channels) slices of every group, by definition."""
    b, h, s, d = x.shape
    tokens, channels = (group, 1) if along == "tokens" else (1, group)
    for i, j, t, c in itertools.product(range(b), range(h), range(0, s, tokens), range(0, d, channels)):
        yield i, j, slice(t, t + tokens), slice(c, c + channels)


def reference(x: Tensor, bits: float, along: str, group: int) -> tuple[Tensor, Tensor]:
    """Min-max rounding in Python floats; returns what is decoded and half a scale of each element."""
    top = {1.58: 2}.get(bits, 2 ** int(bits) - 1)
    out, half = torch.empty_like(x), torch.empty_like(x)
    for place in groups_of(x, along, group):
        values = x[place].flatten().tolist()
        low = float(torch.tensor(min(values)).half())
        scale = float(torch.tensor((max(values) - min(values)) / top).half())
        codes = [min(max(round((v - low) / scale), 0), top) if scale else 0 for v in values]
        out[place] = torch.tensor([low + code * scale for code in codes]).reshape(x[place].shape)
        half[place] = scale / 2
    return out, half


@pytest.mark.parametrize("bits", [1, 1.58, 2, 3, 4, 8])
@pytest.mark.parametrize(("along", "group"), [("tokens", 4), ("channels", 4), ("channels", 7)])
def test_equals_a_loop_and_keeps_the_bound(bits: float, along: str, group: int) -> None:
    x = torch.randn(2, 2, 8, 12)
    wanted, half = reference(x, bits, along, group)
    found = GroupQuant(bits, along, group).encode(x).decode()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    error = (found - x).abs()
    slack = x.abs().max() * 2**-11 * 2  # of the stored minimum and scale
    assert (error <= half + slack).all()


@pytest.mark.parametrize("bits", [1, 1.58, 2, 3, 4, 8])
def test_symmetric_grid_by_hand(bits: float) -> None:
    x = torch.randn(1, 2, 3, 16)
    payload = GroupQuant(bits, "channels", None, symmetric=True).encode(x)
    found, largest = payload.decode(), x.abs().amax(-1, keepdim=True)
    values = {1: 2, 1.58: 3}.get(bits, 2 ** int(bits) - 1)
    steps = torch.linspace(-1, 1, values)
    ideal = (largest * steps).unsqueeze(3)  # [1, 2, 3, 1, values]
    nearest = (x.unsqueeze(-1) - ideal).abs().min(-1).values
    torch.testing.assert_close((found - x).abs(), nearest, rtol=0, atol=2e-3 * float(largest.max()))
    assert payload.grid.values.shape[3] == 1
    if values % 2:
        assert (GroupQuant(bits, symmetric=True).encode(torch.zeros(1, 1, 2, 8)).decode() == 0).all()


def test_relaxed_grid_draws_both_ends_in() -> None:
    x = torch.tensor([0.0, 1, 2, 4])[None, None, None]
    found = GroupQuant(1, "channels", None, relax=0.25).encode(x).decode()
    assert found.flatten().tolist() == [1, 1, 1, 3]


def test_ranges_beyond_half_precision_saturate() -> None:
    x = torch.tensor([-1e6, 0, 1e6, 5])[None, None, None]
    assert GroupQuant(2, "channels", None).encode(x).decode().isfinite().all()
    wide = GroupQuant(8, "channels", None, scale_dtype=torch.float32).encode(x).decode()
    assert ((wide - x).abs() <= 1e6 / 255 + 1).all()


def side_by_side(x: Tensor) -> Tensor:
    return torch.stack([torch.cat(list(row), -1) for row in x])


@pytest.mark.parametrize(("joint", "rank", "slots"), [(False, 3, 40), (False, 8, 3), (True, 15, 40), (True, 24, 3)])
def test_error_is_the_tail_of_the_spectrum(joint: bool, rank: int, slots: int) -> None:
    x = torch.randn(2, 3, slots, 8, dtype=torch.float64)
    error = LowRank(rank, joint=joint).encode(x).decode() - x
    tail = torch.linalg.svdvals(side_by_side(x) if joint else x)[..., rank:].square().sum(-1).sqrt()
    close = 1e-6 if rank >= slots else 1e-10
    torch.testing.assert_close(error.flatten(1 if joint else 2).norm(dim=-1), tail, rtol=1e-10, atol=close)


@pytest.mark.parametrize(
    ("codec", "shape", "wanted"),
    [
        *(
            (GroupQuant(2, along, 32), (2, 4, 128, 64), 0.1875 * 2 * 2 * 4 * 128 * 64)
            for along in ("tokens", "channels")
        ),
        (GroupQuant(2, "channels", 32, symmetric=True), (2, 4, 128, 64), 0.15625 * 2 * 2 * 4 * 128 * 64),
        (LowRank(5), (1, 4, 128, 16), 2 * 5 * (4 * 128 + 4 * 16)),
        (LowRank(5, joint=True), (1, 4, 128, 16), 2 * 5 * (128 + 64)),
        (BitmapSparse(0.7), (1, 4, 100, 64), 400 * (8 + 2 * (64 - 44))),
        (BitmapSparse(0.5, GroupQuant(2, "channels", 32)), (1, 4, 100, 64), 400 * (8 + 32 // 4 + 4)),
        (Outliers(0.1), (2, 4, 50, 64), 2 * 4 * 50 * (1 + 6 * 3)),
        (FourierSigns(32), (1, 4, 128, 64), 4 * 4 * (31 * 8 + 2 * 2 * 64)),
    ],
    ids=str,
)
def test_bytes_are_the_closed_forms(codec: Any, shape: tuple[int, ...], wanted: float) -> None:
    x = torch.randn(shape).half()
    assert nbytes(codec.encode(x)) == wanted
    if isinstance(codec, GroupQuant):
        assert nbytes(codec.join([codec.encode(x)] * 3)) == 3 * wanted


def test_given_basis_by_definition() -> None:
    down, up = torch.randn(24, 7), torch.randn(7, 24)
    x = torch.randn(2, 3, 5, 8)
    found = side_by_side(StaticLowRank(down, up).encode(x).decode())
    torch.testing.assert_close(found, side_by_side(x) @ down @ up, rtol=1e-4, atol=1e-4)
    head = StaticLowRank(down[:8], up[:, :8]).encode(x).decode()
    torch.testing.assert_close(head, x @ down[:8] @ up[:, :8], rtol=1e-4, atol=1e-4)


def test_a_row_does_not_depend_on_its_company() -> None:
    left, right = torch.randn(300, 33), torch.randn(33, 70)
    whole = steady_product(left, right, torch.float32)
    for some in (slice(0, 1), slice(17, 20), slice(5, 250)):
        assert torch.equal(steady_product(left[some], right, torch.float32), whole[some])


def pruned(x: Tensor, count: int) -> Tensor:
    """Zero the `count` smallest magnitudes of each token, the later channel first among equals."""
    out = x.clone()
    for row in out.reshape(-1, x.shape[-1]):
        order = sorted(range(len(row)), key=lambda c: (abs(float(row[c])), -c))
        row[order[:count]] = 0
    return out


@pytest.mark.parametrize("sparsity", [0, 0.3, 0.58, 0.95])
@pytest.mark.parametrize("size", [8, 33, 50])
def test_bitmap_equals_a_loop(sparsity: float, size: int) -> None:
    x = torch.randn(2, 2, 5, size)
    count = math.floor(round(size * sparsity, 6))
    assert torch.equal(BitmapSparse(sparsity).encode(x).decode(), pruned(x, count))
    official = BitmapSparse(sparsity, mode="official").encode(x).decode()
    assert torch.equal(official, pruned(x, max(count - 1, 0)))


def test_exactly_as_many_are_pruned_among_equals() -> None:
    x = torch.tensor([1.0, -1, 1, 1, -1, 1, 1, 1, 1, 1])[None, None, None]
    found = BitmapSparse(0.7).encode(x).decode()
    assert found.flatten().tolist() == [1, -1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert (BitmapSparse(0.7).encode(torch.zeros_like(x)).decode() == 0).all()


def extremes(vector: Tensor, half: int) -> Tensor:
    order = sorted(range(len(vector)), key=lambda i: float(vector[i]))
    out = torch.zeros_like(vector)
    for place in (order[:half] + order[-half:]) if half else []:
        out[place] = vector[place]
    return out


@pytest.mark.parametrize(("share", "length", "half"), [(0.02, 32, 1), (0.1, 40, 2), (0, 32, 0), (1, 8, 4), (1, 7, 3)])
def test_outliers_equal_a_loop(share: float, length: int, half: int) -> None:
    x = torch.randn(2, 2, 6, length)
    found = Outliers(share).encode(x).decode()
    wanted = torch.stack([extremes(v, half) for v in x.reshape(-1, length)]).reshape(x.shape)
    assert torch.equal(found, wanted)
    turned = Outliers(share, "tokens").encode(x.mT.contiguous()).decode()
    assert torch.equal(turned, wanted.mT)


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


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("size", [64, 48])
def test_logits_are_unchanged_without_quantization(heads: int, size: int) -> None:
    k, q = outliers(2, 4, 32, size), torch.randn(2, 4, 6, size)
    for codec in (Hadamard(Exact(), heads), ChannelPermute(Exact()), ChannelPermute(Hadamard(Exact(), heads))):
        found = q @ codec.encode(k).decode().mT
        torch.testing.assert_close(found, q @ k.mT, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_rotatekv_rounds_to_the_nearest_of_its_grid(bits: int) -> None:
    x, order = torch.randn(1, 2, 64, 32), torch.arange(32)
    rotated = hadamard(x, 32)
    span = rotated.amax(-1, keepdim=True) - rotated.amin(-1, keepdim=True)
    found = rotatekv(bits, 32, 1, order).encode(x).decode()
    worst = ((hadamard(found, 32) - rotated).abs() / (span / (2**bits - 1))).max()
    assert float(worst) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("length", [2, 7, 32])
def test_basis_is_orthonormal_and_the_transform(length: int) -> None:
    basis = real_fourier(length)
    torch.testing.assert_close(basis @ basis.mT, torch.eye(length, dtype=torch.float64))
    signal = torch.randn(length, dtype=torch.float64)
    wanted = torch.fft.rfft(signal, norm="ortho")
    found = basis @ signal
    torch.testing.assert_close(found[0], wanted[0].real)
    for frequency in range(1, (length + 1) // 2):
        pair = found[2 * frequency - 1], found[2 * frequency]
        torch.testing.assert_close(pair[0], wanted[frequency].real * 2**0.5)
        torch.testing.assert_close(pair[1], -wanted[frequency].imag * 2**0.5)
    if length % 2 == 0:
        torch.testing.assert_close(found[-1], wanted[-1].real)


def test_signs_equal_a_loop() -> None:
    x, group, basis = torch.randn(2, 2, 12, 5), 4, real_fourier(4).float()
    found = FourierSigns(group).encode(x).decode()
    for b, h, start, c in itertools.product(range(2), range(2), range(0, 12, group), range(5)):
        signal = x[b, h, start : start + group, c]
        rest = basis[1:] @ signal
        coded = rest.abs().mean() * torch.where(rest >= 0, 1.0, -1.0)
        wanted = signal.mean() + coded @ basis[1:]
        torch.testing.assert_close(found[b, h, start : start + group, c], wanted, rtol=1e-3, atol=2e-3)


def test_balancer_by_definition() -> None:
    q, k = torch.randn(2, 3, 2, 5, 4), torch.randn(2, 3, 7, 4)
    found = balancer(q, k)
    for b, h, c in itertools.product(range(2), range(3), range(4)):
        wanted = (q[b, h, :, :, c].abs().max() / k[b, h, :, c].abs().max()).sqrt()
        torch.testing.assert_close(found[b, h, c], wanted)
    k[..., 0] = 0
    assert (balancer(q, k)[..., 0] == 1).all()
