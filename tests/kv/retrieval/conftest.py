"""A count of the slots that queries read."""

from typing import Any

import pytest
from torch import Tensor

from diffcache.kv.layer import KVLayer
from diffcache.kv.retrieval.select import Selecting


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[KVLayer, Tensor]:
    """Slots that the last queries read in each layer, int64 [B, H]."""
    own, found = Selecting.views, {}

    def views(self: Selecting, query: Any, layer: KVLayer, others: list[KVLayer]) -> Any:
        chosen = own(self, query, layer, others)
        slots = [view.slots for view in chosen]
        found[layer] = sum(each.valid.expand(each.k.shape[:3]).sum(-1) for each in slots)
        return chosen

    monkeypatch.setattr(Selecting, "views", views)
    return found
