"""Quantized layers as abilities, and watchers of layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from torch import Tensor

from diffcache.features.base import Ability
from diffcache.quant.plan import QuantPlan


@dataclass(frozen=True, eq=False)
class Quantize(Ability):
    """Run the layers of a plan in whole numbers.

    Args:
        plan: Layers to quantize, with their scales.
    """

    plan: QuantPlan


class LayerWatcher(ABC):
    """Watch inputs and outputs of the linear and convolution layers inside the blocks.

    Layers outside the blocks (the first and the last of the model, and the embeddings) are never
    quantized, and so never watched.
    """

    @abstractmethod
    def excludes(self, layer: str) -> bool:
        """Return whether a layer, by its path, is left alone."""

    @abstractmethod
    def layer(self, layer: str, weight: Tensor, bias: Tensor | None) -> None:
        """Take note of a layer before it runs.

        Args:
            layer: Its path in the model.
            weight: `[O, ...]`, not to be written to.
            bias: `[O]`, if it has one.
        """

    @abstractmethod
    def plan(self) -> QuantPlan | None:
        """Return how layers are to be quantized now, None for not at all; asked at every call."""

    def given(self, layer: str, step: int, value: Tensor) -> None:  # noqa: B027
        """Note the input of a dense layer, `[...]`, while there is no plan."""

    def compare(self, layer: str, step: int, exact: Tensor, rounded: Tensor) -> None:  # noqa: B027
        """Compare the dense and the quantized output of a layer of the plan for one input.

        Args:
            layer: Its path in the model.
            step: Index of the step.
            exact: Output of the dense layer without its bias, `[..., O]`.
            rounded: Output of the quantized layer without bias, gain and shift, `[..., O]`.
        """

    def compares(self, layer: str) -> bool:
        """Return whether `compare` is to be called for a layer now, which costs a dense run."""
        return False

    @property
    def wants_dense(self) -> bool:
        """Return whether every quantized call is to be made again with dense layers."""
        return False

    def dense_again(self, begins: bool) -> None:  # noqa: B027
        """Note that a call that was made with quantized layers is made again, or is over.

        The features seen in between are those of dense layers, given the same inputs.
        """


@dataclass(frozen=True, eq=False)
class WatchLayers(Ability):
    """Show layers to a watcher, and quantize them as it says.

    Args:
        watcher: Watcher of the layers.
    """

    watcher: LayerWatcher = field(repr=False)
