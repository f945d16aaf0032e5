"""Inputs of interrupted work are alike where they hold the same."""

from __future__ import annotations

import pytest
import torch

from diffcache.digest import bits_of, content
from diffcache.features.tables import Tables


@pytest.mark.parametrize(
    "view",
    [torch.tensor(3.0).expand(1), torch.tensor([[1, 2], [3, 4]]).t(), torch.arange(8)[::3],
     torch.zeros(0)],
    ids=["repeated", "transposed", "strided", "empty"],
)  # fmt: skip
def test_a_view_counts_as_what_it_shows(view: torch.Tensor) -> None:
    plain = torch.tensor(view.tolist(), dtype=view.dtype)
    assert content(view) == content(plain) != content(plain.new_ones(9))
    assert torch.equal(bits_of(view), bits_of(plain))
    assert Tables({}, {"a": view}).digest == Tables({}, {"a": plain}).digest
