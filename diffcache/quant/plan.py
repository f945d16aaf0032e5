"""Plan of the layers to quantize: plain data, by module name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Bits = Literal["w8a8", "w4a8"]
WEIGHT_BITS: dict[Bits, int] = {"w8a8": 8, "w4a8": 4}


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """Plan of one quantized layer.

    Raises:
        ValueError: If the shapes do not go together or a scale is not above 0.
    """

    weight_scale: Tensor  # width of a code for every output channel, `[O]` float32
    weight_zero: Tensor  # code of 0 for every output channel, `[O]` int32
    input_scale: Tensor  # width of a code at every step, `[T]` float32
    input_zero: Tensor  # code of 0 at every step, `[T]` int32
    gain: Tensor | None = None  # factor of a step's bias-free output, `[T, O]` float32; None for 1
    shift: Tensor | None = None  # number that is added after it, besides the bias, `[T, O]` float32; None for 0

    def __post_init__(self) -> None:
        channels, total = self.weight_scale.shape, self.input_scale.shape
        table = torch.Size([*total, *channels])
        wanted = {"weight_scale": channels[:1], "weight_zero": channels, "input_scale": total[:1]}
        wanted |= {"input_zero": total, "gain": table, "shift": table}
        for name, shape in wanted.items():
            given = getattr(self, name)
            if given is not None and given.shape != shape:
                raise ValueError(f"{name} of shape {tuple(given.shape)}: must be {tuple(shape)}")
        if (self.gain is None) != (self.shift is None):
            raise ValueError("gain and shift: give both or none")
        if not (self.weight_scale > 0).all() or not (self.input_scale > 0).all():
            raise ValueError("weight_scale, input_scale: must be above 0")


@dataclass(frozen=True, eq=False)
class QuantPlan:
    """Quantized layers of one model, for runs of one length.

    Args:
        bits: `w8a8` (weights and activations in 8 bits) or `w4a8` (weights in 4).
        layers: Path of the module -> how it is quantized; all others stay as they are.

    Raises:
        ValueError: If `bits` is unknown, there is no layer, or layers differ in their steps.
    """

    bits: Bits
    layers: Mapping[str, LayerPlan]

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if not self.layers:
            raise ValueError("layers={}: name at least one layer to quantize")
        lengths = {len(layer.input_scale) for layer in self.layers.values()}
        if len(lengths) > 1:
            raise ValueError(f"layers: made for runs of {sorted(lengths)} steps; use one length")

    @property
    def weight_bits(self) -> int:
        """Bits of a weight."""
        return WEIGHT_BITS[self.bits]

    @property
    def total(self) -> int:
        """Steps of the runs it is made for."""
        return len(next(iter(self.layers.values())).input_scale)

    def tensors(self) -> dict[str, Tensor]:
        """Return the plan as named tensors, `<module path>/<attribute>`."""
        return {
            f"{name}/{key}": tensor
            for name, layer in self.layers.items()
            for key, tensor in vars(layer).items()
            if tensor is not None
        }

    @classmethod
    def of(cls, bits: Bits, tensors: Mapping[str, Tensor]) -> QuantPlan:
        """Return the plan that `tensors` was made from.

        Args:
            bits: `w8a8` or `w4a8`.
            tensors: Tensors by `<module path>/<attribute>`, with shapes as in `LayerPlan`.

        Raises:
            ValueError: If a name is not one of a plan, or a layer lacks a tensor.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            path, _, key = name.rpartition("/")
            if not path or key not in LayerPlan.__dataclass_fields__:
                raise ValueError(
                    f"{name!r}: not the name of a tensor of a quantized layer, which is its path, "
                    f"a slash and one of {', '.join(LayerPlan.__dataclass_fields__)}"
                )
            found.setdefault(path, {})[key] = tensor
        for path, given in found.items():
            missing = {"weight_scale", "weight_zero", "input_scale", "input_zero"} - set(given)
            if missing:
                lacking = ", ".join(sorted(missing))
                raise ValueError(f"{path}: the tables lack its {lacking}; calibrate again")
        return cls(bits, {path: LayerPlan(**given) for path, given in found.items()})


def check_bits(bits: object) -> None:
    """Raise ValueError unless `bits` names the bits of weights and activations."""
    if bits not in get_args(Bits):
        raise ValueError(f"bits={bits!r}: must be one of {', '.join(map(repr, get_args(Bits)))}")
