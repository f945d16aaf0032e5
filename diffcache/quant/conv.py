"""A convolution of codes: patches of the input as rows of one product."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from diffcache.foreign import convolve, padding_of
from diffcache.kernels.codes import int8_codes
from diffcache.quant.layer import QuantizedLayer

AT_ONCE = 2**27  # bytes of patches that are laid out together


class QuantizedConv2d(QuantizedLayer):
    """`nn.Conv2d` with weights in 8 or 4 bits and inputs in 8, `[B, C, H, W]` to `[B, O, h, w]`.

    Every stride, dilation, padding and number of groups of the dense layer.
    """

    dense: nn.Conv2d

    @property
    def in_channels(self) -> int:
        """Channels of the input."""
        return self.dense.in_channels

    @property
    def out_channels(self) -> int:
        """Channels of the output."""
        return self.dense.out_channels

    def rows_of_weight(self, weight: Tensor) -> Tensor:
        """Return the weight `[O, C, kh, kw]` as `[O, kh * kw * C]`."""
        return weight.permute(0, 2, 3, 1).flatten(1)

    def product(self, given: Tensor, step: int) -> Tensor:
        """Return the whole-number product, `[B, h, w, O]` int32, `[h, w, O]` without batch."""
        if given.dim() == 3:  # one picture without an axis for it, as the dense layer takes
            return self.product(given[None], step)[0]
        dense, zero = self.dense, self.lowered_zero(step)
        around = padding_of(dense)
        zeros = dense.padding_mode == "zeros"
        if any(around) and not zeros:
            given = functional.pad(given, around, mode=dense.padding_mode)
        codes = int8_codes(given, self.input_scale[step], self.input_zero[step])
        if any(around) and zeros:
            codes = functional.pad(codes, around, value=zero)
        patches = self._patches(codes.permute(0, 2, 3, 1).contiguous())
        item = patches.numel() // max(len(patches), 1)
        parts = patches.split(max(1, AT_ONCE // max(item, 1)))
        weight = self.weight_codes()
        return torch.cat([self._multiplied(part, zero, weight) for part in parts])

    def _patches(self, codes: Tensor) -> Tensor:
        """Return a view of the patch of every output pixel, `[B, h, w, kh, kw, C]`."""
        (kh, kw), (sh, sw) = self.dense.kernel_size, self.dense.stride
        dh, dw = self.dense.dilation
        batch, height, width, channels = codes.shape
        rows, columns = ((height - dh * (kh - 1) - 1) // sh + 1, (width - dw * (kw - 1) - 1) // sw + 1)
        item, line, pixel, one = codes.stride()
        return codes.as_strided(
            (batch, rows, columns, kh, kw, channels), (item, sh * line, sw * pixel, dh * line, dw * pixel, one)
        )

    def _multiplied(self, patches: Tensor, zero: int, codes: Tensor) -> Tensor:
        """Return the product of patches `[B, h, w, kh, kw, C]`, `[B, h, w, O]` int32."""
        groups, outs = self.dense.groups, []
        for group, part in enumerate(patches.chunk(groups, dim=-1)):
            size = codes.shape[0] // groups
            own = slice(group * size, (group + 1) * size)
            rows = part.reshape(-1, self.columns)
            outs.append(self.multiply(rows, zero, codes[own], self.weight_terms[:, own]))
        out = outs[0] if groups == 1 else torch.cat(outs, dim=1)
        return out.reshape(*patches.shape[:3], out.shape[1])

    def exact(self, given: Tensor) -> Tensor:
        """Return the dense layer's output without its bias, `[B, h, w, O]`."""
        return convolve(self.dense, given).movedim(-3, -1)

    def shaped(self, out: Tensor) -> Tensor:
        """Return a product, channels last, as `[B, O, h, w]`."""
        return out.movedim(-1, -3).contiguous()
