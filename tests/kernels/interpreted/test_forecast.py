"""Finite differences by the kernel leave memory between their tensors alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffcache.kernels.forecast import differences_twin, finite_differences


def drawn(seed: int, whole: bool) -> tuple[Tensor, Tensor]:
    """Return numbers in another order of axes, and the memory that they are in."""
    room = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    return (room if whole else room[:, :3]).t(), room


@pytest.mark.parametrize("whole", [True, False])
def test_old_differences_are_written_over_where_they_have_no_gaps(whole: bool) -> None:
    (feature, _), (first, _), (second, room) = (drawn(seed, whole) for seed in range(3))
    before, steps = room.clone(), [2.0, -4.0]
    exact = differences_twin(feature, [first, second.clone()], steps)
    _, *found = finite_differences([first, second], feature, steps)
    torch.testing.assert_close(found, exact)
    assert (found[0] is second) is whole
    assert torch.equal(room, before) is not whole
