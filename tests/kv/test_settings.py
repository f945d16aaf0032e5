"""Settings of recipes that go together or not; single ones are in `tests/settings.txt`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from diffcache import kv
from diffcache.kv.codec.remat import Projections
from tests.kv import examples

TABLES: dict[str, Any] = {
    **examples.TABLES,
    "compresskv": {},
    "scalekv": {"scales": ((1, 1), (2, 2))},
    "rematerialised": {"projections": (Projections(torch.eye(8), torch.eye(8), 1),)},
    "xquant_latent": {"bases": examples.BASES},
}


@pytest.mark.parametrize(
    ("make", "always"),
    [
        (lambda n: kv.quest(n, page=16), "16 slots .*page=16"),
        (lambda n: kv.mpcache_select(n, small=16), "16 slots .*small=16"),
        (lambda n: kv.double_sparsity(examples.CHANNELS, n, recent=64, sinks=4), "68 slots .*sinks=4, recent=64"),
        (lambda n: kv.tidal_decode(n, recent=64), "64 slots .*sinks=0, recent=64"),
        (lambda n: kv.sentence_kv(n), "64 slots .*sinks=32, recent=32"),
        (lambda n: kv.probe_query(n), "68 slots .*sinks=4, recent=64"),
        (lambda n: kv.a2ats(n), "68 slots .*sinks=4, recent=64"),
        (lambda n: kv.shadowkv(n, outliers=4), "64 slots .*8 . outliers=32, last tokens=32"),
    ],
)
def test_budgets_that_leave_nothing_to_choose_are_refused(make: Any, always: str) -> None:
    count = int(always.split()[0])
    with pytest.raises(ValueError, match=f"budget={count}: must be above the {always}"):
        make(count)
    make(count + 1)
    make(0.01)


def test_numbers_of_numpy_are_numbers() -> None:
    assert kv.snapkv(np.int64(64)) == kv.snapkv(64)
    assert kv.snapkv(np.float64(0.5), window=np.int32(8)) == kv.snapkv(0.5, window=8)
