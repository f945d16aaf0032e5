"""Low rank: the best there is (Eckart-Young), exact at full rank, and given bases."""

import pytest
import torch
from torch import Tensor

from diffcache.kv.codec.base import nbytes
from diffcache.kv.codec.heads import JoinHeads
from diffcache.kv.codec.lowrank import LowRank, StaticLowRank, steady_product
from diffcache.kv.codec.quant import GroupQuant


def side_by_side(x: Tensor) -> Tensor:
    return torch.stack([torch.cat(list(row), -1) for row in x])


@pytest.mark.parametrize("rank", [1, 3, 8, 15])
def test_error_is_the_tail_of_the_spectrum(rank: int) -> None:
    x = torch.randn(2, 3, 40, 16, dtype=torch.float64)
    error = LowRank(rank).encode(x).decode() - x
    tail = torch.linalg.svdvals(x)[..., rank:]
    wanted = tail.square().sum(-1).sqrt()
    torch.testing.assert_close(error.flatten(2).norm(dim=-1), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rank", [1, 6, 20])
def test_joint_error_is_the_tail_of_all_heads(rank: int) -> None:
    x = torch.randn(2, 3, 40, 8, dtype=torch.float64)
    error = LowRank(rank, joint=True).encode(x).decode() - x
    tail = torch.linalg.svdvals(side_by_side(x))[..., rank:]
    wanted = tail.square().sum(-1).sqrt()
    torch.testing.assert_close(error.flatten(1).norm(dim=-1), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("slots", [3, 16, 50])
@pytest.mark.parametrize("joint", [False, True])
def test_full_rank_is_exact(slots: int, joint: bool) -> None:
    x = torch.randn(2, 3, slots, 8, dtype=torch.float64)
    rank = min(slots, 24 if joint else 8)
    found = LowRank(rank, joint=joint).encode(x).decode()
    torch.testing.assert_close(found, x, rtol=1e-6, atol=1e-6 if slots == 3 else 1e-11)


def test_coordinates_come_by_falling_energy() -> None:
    x = torch.randn(1, 2, 50, 8, dtype=torch.float64)
    left = LowRank(5).encode(x).left.decode()  # type: ignore[attr-defined]
    torch.testing.assert_close(left.norm(dim=2), torch.linalg.svdvals(x)[..., :5])


def test_bytes_are_coordinates_and_basis() -> None:
    x = torch.randn(1, 4, 128, 16).half()
    assert nbytes(LowRank(5).encode(x)) == 2 * 5 * (4 * 128 + 4 * 16)
    assert nbytes(LowRank(5, joint=True).encode(x)) == 2 * 5 * (128 + 64)


def test_quantized_coordinates() -> None:
    x = torch.randn(1, 2, 64, 4) @ torch.randn(1, 2, 4, 32)
    plain = LowRank(4).encode(x)
    coded = LowRank(4, GroupQuant(8, "tokens", 32)).encode(x)
    assert nbytes(coded.left) < nbytes(plain.left) / 2  # type: ignore[attr-defined]
    assert (coded.decode() - x).norm() < 0.02 * x.norm()


def test_given_basis_by_definition() -> None:
    down, up = torch.randn(24, 7), torch.randn(7, 24)
    x = torch.randn(2, 3, 5, 8)
    found = side_by_side(StaticLowRank(down, up).encode(x).decode())
    torch.testing.assert_close(found, side_by_side(x) @ down @ up, rtol=1e-4, atol=1e-4)
    head = StaticLowRank(down[:8], up[:, :8]).encode(x).decode()
    torch.testing.assert_close(head, x @ down[:8] @ up[:, :8], rtol=1e-4, atol=1e-4)


def test_a_given_basis_is_shared_by_payloads() -> None:
    down, up = torch.randn(16, 4), torch.randn(4, 16)
    codec = StaticLowRank(down, up)
    parts = [codec.encode(torch.randn(1, 2, 6, 8)) for _ in range(3)]
    assert nbytes(parts) == 3 * 6 * 4 * 4 + up.nbytes


def test_heads_that_keep_other_slots_share_what_they_can() -> None:
    x = torch.randn(1, 2, 8, 4)
    payload = JoinHeads(GroupQuant(8, "channels", None)).encode(x)
    both = payload.take(torch.tensor([[[0, 1, 2], [0, 1, 2]]]))
    assert both.at is None and both.shape == (1, 1, 3)
    apart = payload.take(torch.tensor([[[0, 1, 2], [1, 2, 5]]]))
    assert apart.at is not None and apart.shape == (1, 1, 4)  # 0, 1, 2 and 5
    again = apart.take(torch.tensor([[[1, 2], [0, 1]]]))  # 1 and 2 for both
    assert again.at is None and again.shape == (1, 1, 2)
    assert torch.equal(again.decode(), payload.decode()[:, :, 1:3])


def test_a_row_does_not_depend_on_its_company() -> None:
    left, right = torch.randn(300, 33), torch.randn(33, 70)
    whole = steady_product(left, right, torch.float32)
    for some in (slice(0, 1), slice(17, 20), slice(5, 250)):
        assert torch.equal(steady_product(left[some], right, torch.float32), whole[some])
