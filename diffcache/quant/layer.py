"""Base of quantized linear and convolution layers: codes of the weight, settings by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.errors import DiffcacheError
from diffcache.foreign import save_weights, share_parameters, without_dynamo
from diffcache.kernels.codes import int8_codes
from diffcache.quant.integer import HALF, int_matmul, pack4, unpack4
from diffcache.quant.plan import LayerPlan
from diffcache.step import Step, current_step, writes_to_stream


class QuantizedLayer(nn.Module, ABC):
    """A layer that multiplies int8 codes of its input with int8 codes of its weight.

    With codes `x`, `w` and zeros `zx` (of the step), `zw` (of the channel) the product
    `sum((x - zx) * (w - zw))` is worked out in whole numbers, exactly, and multiplied by
    `input_scale * weight_scale`, the channel's gain at this step, and the bias and shift are
    added (CacheQuant, arXiv 2503.01323, sections 3.1 and 3.3). The step is the one of the wrapped
    denoiser call, so the layer runs nowhere else; in a call that writes to a stream, which is no
    step and has no settings, the dense layer runs.

    The state dict is that of the dense layer, which stays referenced; nothing can be loaded.
    Scales survive `model.to(dtype)`.

    Args:
        dense: The layer it stands for.
        plan: Its scales.
        bits: Bits of a weight, 8 or 4; of 4, two are kept in a byte.
        name: Path of the layer in its model, for errors.
        now: Returns the current step, None when there is none.

    Raises:
        ValueError: If the plan is made for another number of output channels.
    """

    dense: Any
    codes: Tensor
    weight_terms: Tensor
    _floats: Tensor

    def __init__(
        self, dense: Any, plan: LayerPlan, bits: int, name: str, now: Callable[[], Step | None] = current_step
    ) -> None:
        super().__init__()
        weight: Tensor = dense.weight.detach()
        if len(plan.weight_scale) != weight.shape[0]:
            raise ValueError(
                f"{name}: the plan is made for {len(plan.weight_scale)} output channels, the layer "
                f"has {weight.shape[0]}"
            )
        self.__dict__["dense"] = dense  # no child: it has no name of its own
        # what is done to the model's parameters is done to those that are put back
        share_parameters(self, dense)
        self.name, self.bits, self._now = name, bits, now
        self.input_scale: list[float] = plan.input_scale.tolist()
        self.input_zero: list[int] = plan.input_zero.tolist()
        device = weight.device
        rows = self.rows_of_weight(weight)
        self.columns = rows.shape[1]
        scale, zero = plan.weight_scale.to(device), plan.weight_zero.to(device)
        codes = int8_codes(rows.float(), scale[:, None], zero[:, None], bits)
        self.register_buffer("codes", pack4(codes) if bits == 4 else codes, persistent=False)
        lowered = zero - 2 ** (bits - 1)
        terms = torch.stack((codes.sum(1, dtype=torch.int32), lowered.to(torch.int32)))
        self.register_buffer("weight_terms", terms, persistent=False)
        floats = self._fold(plan, scale, dense.bias)
        # as whole numbers, which no cast of the model changes
        self.register_buffer("_floats", floats.view(torch.int32), persistent=False)
        self.train(dense.training)

    def _fold(self, plan: LayerPlan, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Return factor and offset of a product, `[2, T or 1, O]` float32."""
        gain, shift = torch.ones_like(scale)[None], torch.zeros_like(scale)[None]
        if plan.gain is not None and plan.shift is not None:
            gain, shift = plan.gain.to(scale), plan.shift.to(scale)
        if bias is not None:
            shift = shift + bias.detach().float()
        return torch.stack((gain * scale, shift)).contiguous()

    @abstractmethod
    def rows_of_weight(self, weight: Tensor) -> Tensor:
        """Return a dense weight as `[O, K]`."""

    @abstractmethod
    def product(self, given: Tensor, step: int) -> Tensor:
        """Return the exact whole-number product for an input of any float dtype, `[..., O]` int32, channels last."""

    @abstractmethod
    def exact(self, given: Tensor) -> Tensor:
        """Return the dense layer's output without its bias, `[..., O]`, channels last."""

    @abstractmethod
    def shaped(self, out: Tensor) -> Tensor:
        """Return a product, channels last, in the layout of the layer's output."""

    @without_dynamo
    def forward(self, given: Tensor) -> Tensor:
        """Return the output of the quantized layer, in the dtype of its input.

        A compiled block calls it as it is: the step would be fixed in a compiled one. Raises
        DiffcacheError if there is no current step or the plan has no settings for it.
        """
        if writes_to_stream():
            dense: Tensor = self.dense.forward(given)  # whose hooks are this layer's as well
            return dense
        step = self.step()
        factor, shift = self._floats.view(torch.float32)[:, step if self._floats.shape[1] > 1 else 0]
        return self.shaped(self.scaled(given, step, factor * self.input_scale[step], shift))

    def scaled(self, given: Tensor, step: int, factor: Tensor, shift: Tensor) -> Tensor:
        """Return `product * factor + shift`, float32 `[O]` each; `[..., O]` in the input's dtype, channels last."""
        wide = torch.promote_types(given.dtype, torch.float32)
        out = self.product(given, step).to(wide)
        return out.mul_(factor).add_(shift).to(given.dtype)

    def plain(self, given: Tensor, scale: Tensor) -> Tensor:
        """Return the output without bias, gain and shift, by scales of the weight, `[..., O]` float32."""
        step = self.step()
        return self.product(given, step).float() * (scale * self.input_scale[step])

    def step(self) -> int:
        """Return the index of the current step; raise DiffcacheError if there is none, or the plan lacks it."""
        current = self._now()
        if current is None:
            raise DiffcacheError(
                f"{self.name} is quantized with settings for every step and was called outside "
                "of a wrapped denoiser call; call the pipeline, or unwrap it first"
            )
        if current.index >= len(self.input_scale):
            raise DiffcacheError(
                f"{self.name}: step {current.index} of a quantized layer calibrated for "
                f"{len(self.input_scale)} steps; run that many, or calibrate again"
            )
        return current.index

    def weight_codes(self) -> Tensor:
        """Return the codes of the weight, `[O, K]` int8."""
        return unpack4(self.codes, self.columns) if self.bits == 4 else self.codes

    def multiply(self, rows: Tensor, zero: int, codes: Tensor, terms: Tensor) -> Tensor:
        """Return `sum((x - zx) * (w - zw))` for rows of input codes, `[M, K]` int8, as `[M, O]` int32.

        `zero` is `zx`, lowered by half the range as the codes are; codes of the weight are `[O, K]`
        int8, and `terms` their sums and `zw`, `[2, O]` int32.
        """
        sums, zeros = terms
        out = int_matmul(rows, codes)
        out -= rows.sum(1, keepdim=True, dtype=torch.int32) * zeros
        out += zero * (rows.shape[1] * zeros - sums)
        return out

    def lowered_zero(self, step: int) -> int:
        """Return the code of 0 in the input at a step, as int8 codes have it."""
        return self.input_zero[step] - HALF

    @property
    def weight(self) -> Tensor:
        """The dense weight, for code that looks at its dtype or shape."""
        weight: Tensor = self.dense.weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The dense bias."""
        bias: Tensor | None = self.dense.bias
        return bias

    def quantized_bytes(self) -> int:
        """Return the bytes of codes and settings."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def train(self, mode: bool = True) -> QuantizedLayer:
        """Set the mode of the dense layer as well, which is put back as it is left."""
        self.dense.train(mode)
        super().train(mode)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        save_weights(self.dense, destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise DiffcacheError(f"{self.name} is quantized: unwrap the model before loading weights")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        dense: nn.Module = deepcopy(self.dense, memo)  # copies of a wrapped model are unwrapped
        return dense

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.dense,)

    def extra_repr(self) -> str:
        """Return the shape and the bits."""
        return f"{self.weight_terms.shape[1]}x{self.columns}, w{self.bits}a8"


def _same(dense: nn.Module) -> nn.Module:
    return dense
