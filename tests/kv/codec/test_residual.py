"""GEAR: the sum of its parts, and an error that falls with each of them."""

import itertools

import pytest
import torch
from torch import Tensor

from diffcache.kv.codec.base import nbytes
from diffcache.kv.codec.quant import GroupQuant
from diffcache.kv.codec.residual import Gear

SIDES = [("tokens", 16), ("channels", 16)]


def heavy(*shape: int) -> Tensor:
    """Numbers with heavy tails of both signs."""
    return torch.randn(*shape) / torch.rand(*shape).clamp(min=0.02)


def error(codec: Gear, x: Tensor) -> float:
    return float((codec.encode(x).decode() - x).norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("along", "group"), SIDES)
def test_without_both_it_is_plain_quantization(along: str, group: int, dtype: torch.dtype) -> None:
    x = heavy(2, 2, 32, 32).to(dtype)
    plain, found = GroupQuant(2, along, group), Gear(2, along, group, outliers=0, rank=0)
    assert torch.equal(found.encode(x).decode(), plain.encode(x).decode())
    assert nbytes(found.encode(x)) == nbytes(plain.encode(x))


@pytest.mark.parametrize(("along", "group"), SIDES)
def test_the_low_rank_is_nearly_the_best_of_the_error(along: str, group: int) -> None:
    x = heavy(1, 2, 32, 32).double()
    found = Gear(2, along, group, 0.1, rank=4, iterations=30).encode(x).decode()
    coded = Gear(2, along, group, 0.1, rank=0).encode(x).decode()
    lost, low = x - coded, found - coded
    values = torch.linalg.svdvals(low)
    assert (values[..., 4:] < 1e-9 * values[..., :1]).all() and (values[..., 3] > 0).all()
    inner = low.mT @ (lost - low)  # a projection onto directions over slots
    torch.testing.assert_close(inner, torch.zeros_like(inner), rtol=0, atol=1e-8)
    best = torch.linalg.svdvals(lost)[..., 4:].square().sum(-1).sqrt()
    left = (lost - low).flatten(2).norm(dim=-1)
    assert (left >= best * (1 - 1e-9)).all() and (left < 1.02 * best).all()


@pytest.mark.parametrize(("along", "group"), SIDES)
@pytest.mark.parametrize("iterations", [1, 2])
def test_error_never_grows_with_rank(along: str, group: int, iterations: int) -> None:
    x = heavy(2, 2, 32, 32)
    ranks = (0, 1, 2, 3, 5, 8, 16, 31, 32)
    found = [error(Gear(2, along, group, 0.05, rank, iterations), x) for rank in ranks]
    assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(found))
    assert found[4] < 0.95 * found[0] and found[-1] < 1e-4 * found[0]


def test_a_seed_is_repeatable_and_matters() -> None:
    x = heavy(1, 2, 32, 32)
    first, second, other = (Gear(rank=2, iterations=1, seed=s).encode(x).decode() for s in (0, 0, 1))
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_fewer_slots_than_rank() -> None:
    x = heavy(1, 2, 2, 32)
    assert error(Gear(2, "channels", 16, 0, rank=4), x) < 1e-4 * float(x.norm())


def test_bytes_by_part() -> None:
    x = heavy(1, 4, 64, 32).half()
    found = Gear(2, "channels", 16, 0.1, rank=3).encode(x)
    slots = 4 * 64
    assert nbytes(found.quantized) == slots * (8 + 2 * 4)
    assert nbytes(found.outliers) == slots * (1 + 4 * 3)
    assert nbytes(found.factors) == 2 * 3 * (slots + 4 * 32)
    assert nbytes(found) == sum(map(nbytes, (found.quantized, found.outliers, found.factors)))
