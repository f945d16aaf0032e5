"""What a retriever knows of a layer, as far as the layer has to know of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from diffcache.kv.layer import KVLayer


class LayerSummary(ABC):
    """Summary of the slots of a layer; never written to, so that forks share it."""

    @abstractmethod
    def rows(self, index: Tensor) -> LayerSummary:
        """Keep batch rows, int64 [m]."""

    @abstractmethod
    def shortened(self, width: int) -> LayerSummary | None:
        """Forget all slots but the first `width`; None if it cannot, as queries said more."""


def known_before(layer: KVLayer, count: int) -> LayerSummary | None:
    """Return what a retriever knew of a layer before the last tokens.

    Raises:
        ValueError: If it knows more of them than it can forget.
    """
    if layer.summary is None or not count:
        return layer.summary
    if layer.marked is not None and layer.seen - count >= layer.marked[0]:
        return layer.marked[1]
    found = layer.summary.shortened(layer.held - count)
    if found is None:
        raise ValueError(
            f"count={count}: queries choose by what is known of these tokens, which cannot be "
            "forgotten; announce it (cache.activate_past_recording()) before they are read and "
            "take back no more than the last forward wrote, or go on from a fork of before"
        )
    return found
