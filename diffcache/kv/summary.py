"""What a retriever knows of a layer, as far as the layer has to know of it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class LayerSummary(ABC):
    """Summary of the slots of a layer; never written to, so that forks share it."""

    @abstractmethod
    def rows(self, index: Tensor) -> LayerSummary:
        """Keep batch rows, int64 [m]."""

    @abstractmethod
    def shortened(self, width: int) -> LayerSummary | None:
        """Forget all slots but the first `width`; None if all has to be built anew."""
