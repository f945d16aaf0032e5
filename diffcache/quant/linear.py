"""A linear layer of codes."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from diffcache.kernels.codes import int8_codes
from diffcache.kernels.linear import linear_of_codes, takes_codes
from diffcache.quant.layer import QuantizedLayer


class QuantizedLinear(QuantizedLayer):
    """`nn.Linear` with weights in 8 or 4 bits and inputs in 8, `[..., K]` to `[..., O]`."""

    dense: nn.Linear

    @property
    def in_features(self) -> int:
        """Numbers a row has."""
        return self.dense.in_features

    @property
    def out_features(self) -> int:
        """Numbers a row of the output has."""
        return self.dense.out_features

    def rows_of_weight(self, weight: Tensor) -> Tensor:
        """Return the weight itself."""
        return weight

    def scaled(self, given: Tensor, step: int, factor: Tensor, shift: Tensor) -> Tensor:
        """Return `product * factor + shift`, `[..., O]`; a kernel scales before it writes."""
        needed = factor, shift, self.codes, self.weight_terms, given
        if not takes_codes(*needed, dtype=given.dtype):
            return super().scaled(given, step, factor, shift)
        out = linear_of_codes(
            self.input_codes(given, step),
            self.weight_codes(),
            self.weight_terms,
            self.lowered_zero(step),
            factor,
            shift,
            given.dtype,
        )
        return out.reshape(*given.shape[:-1], out.shape[1])

    def input_codes(self, given: Tensor, step: int) -> Tensor:
        """Return the codes of the input as rows, `[M, K]` int8."""
        codes = int8_codes(given, self.input_scale[step], self.input_zero[step])
        return codes.reshape(-1, self.columns)

    def product(self, given: Tensor, step: int) -> Tensor:
        """Return the whole-number product, `[..., O]` int32."""
        out = self.multiply(
            self.input_codes(given, step), self.lowered_zero(step), self.weight_codes(), self.weight_terms
        )
        return out.reshape(*given.shape[:-1], out.shape[1])

    def exact(self, given: Tensor) -> Tensor:
        """Return the dense layer's output without its bias, `[..., O]`."""
        return functional.linear(given, self.dense.weight)

    def shaped(self, out: Tensor) -> Tensor:
        """Return the product as it is."""
        return out
