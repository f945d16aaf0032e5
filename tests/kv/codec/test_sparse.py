"""Sparse codecs: Mustafar's bitmap and GEAR's outliers, against loops."""

import math

import pytest
import torch
from torch import Tensor

from diffcache.kv.codec.base import nbytes
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.codec.sparse import BitmapSparse, Outliers


def pruned(x: Tensor, count: int) -> Tensor:
    """Zero the `count` smallest magnitudes of each token, the later channel first among equals."""
    out = x.clone()
    for row in out.reshape(-1, x.shape[-1]):
        order = sorted(range(len(row)), key=lambda c: (abs(float(row[c])), -c))
        row[order[:count]] = 0
    return out


@pytest.mark.parametrize("sparsity", [0, 0.3, 0.5, 0.58, 0.7, 0.95])
@pytest.mark.parametrize("size", [8, 10, 33, 50, 64])
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


def test_bitmap_bytes() -> None:
    x = torch.randn(1, 4, 100, 64).half()
    kept = 64 - 44
    assert nbytes(BitmapSparse(0.7).encode(x)) == 400 * (8 + 2 * kept)
    both = BitmapSparse(0.5, GroupQuant(2, "channels", 32)).encode(x)
    assert nbytes(both) == 400 * (8 + 32 // 4 + 4)


def test_quantized_values_stay_in_their_places() -> None:
    x = torch.randn(1, 2, 8, 32)
    exact = BitmapSparse(0.5).encode(x).decode()
    coded = BitmapSparse(0.5, GroupQuant(8, "channels", None)).encode(x).decode()
    assert ((coded - exact).abs() <= x.abs().max() / 100).all()
    assert torch.equal(coded == 0, exact == 0)


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


def test_outlier_bytes() -> None:
    x = torch.randn(2, 4, 50, 64).half()
    assert nbytes(Outliers(0.1).encode(x)) == 2 * 4 * 50 * (1 + 6 * 3)


def test_a_slot_may_hold_every_outlier_or_none() -> None:
    x = torch.randn(1, 2, 40, 8) * 0.01
    x[:, :, 7], x[:, :, 9] = 5, -5
    payload = Outliers(0.05, "tokens").encode(x)
    assert payload.counts[0, 0].tolist() == [8 if s in (7, 9) else 0 for s in range(40)]
    kept = payload.take(torch.tensor([[[9, 0, 9], [1, 2, 3]]]))
    assert kept.values.numel() == 16 and kept.counts.tolist() == [[[8, 0, 8], [0, 0, 0]]]
