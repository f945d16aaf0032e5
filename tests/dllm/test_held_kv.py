"""Keys and values that partial forwards hold: written by place, met as by a softmax by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffcache.attach.extensions.partial import HeldKV

B, T, H, D = 2, 9, 2, 4


def drawn(seed: int, tokens: int, heads: int = H) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, tokens, heads, D, generator=generator, dtype=torch.float64)


def filled() -> tuple[HeldKV, Tensor, Tensor]:
    held, k, v = HeldKV(), drawn(0, T), drawn(1, T)
    held.write(range(T), k, v)
    return held, k.clone(), v.clone()


@pytest.mark.parametrize(
    "at", [range(3, 7), torch.tensor([[1, 4, 8], [0, 4, 5]]), torch.tensor([[2, 3]]).expand(B, -1)]
)
def test_rows_are_written_where_they_belong_and_others_keep_their_bits(at: Tensor | range) -> None:
    held, k, v = filled()
    index = torch.tensor(at).expand(B, -1) if isinstance(at, range) else at
    some_k, some_v = drawn(2, index.shape[1]), drawn(3, index.shape[1])
    held.write(at, some_k, some_v)
    for row in range(B):
        k[row, index[row]], v[row, index[row]] = some_k[row], some_v[row]
    assert held.k is not None
    assert held.v is not None
    assert torch.equal(held.k.transpose(1, 2), k)
    assert torch.equal(held.v.transpose(1, 2), v)


def test_a_run_may_go_on_after_what_is_there() -> None:
    held, k, _ = filled()
    more = drawn(4, 5)
    held.write(range(6, 11), more, more)
    assert held.length == 11
    assert held.k is not None
    assert torch.equal(held.k.transpose(1, 2), torch.cat([k[:, :6], more], 1))


def test_what_was_written_in_inference_mode_can_be_written_over() -> None:
    with torch.inference_mode():
        held, _, _ = filled()
    held.write(range(2), drawn(5, 2), drawn(5, 2))
    assert held.k is not None
    assert torch.equal(held.k[:, :, :2].transpose(1, 2), drawn(5, 2))


@pytest.mark.parametrize("heads", [H, 3 * H])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_that_of_a_softmax_by_hand(heads: int, count: int, masked: bool) -> None:
    held, k, v = filled()
    q, mask = drawn(6, count, heads), None
    if masked:
        mask = torch.rand(B, 1, count, T, generator=torch.Generator().manual_seed(7)) > 0.3
    wide_k, wide_v = (x.repeat_interleave(heads // H, 2) for x in (k, v))
    found = torch.einsum("bnhd,bthd->bhnt", q, wide_k) * 0.7
    weights = (found if mask is None else found.masked_fill(~mask, float("-inf"))).softmax(-1)
    expected = torch.einsum("bhnt,bthd->bnhd", weights, wide_v)
    assert torch.allclose(held.attend(q, 0.7, mask), expected, atol=1e-12)
    assert torch.allclose(held.weights(q, 0.7, mask).flatten(1, 2), weights, atol=1e-12)
