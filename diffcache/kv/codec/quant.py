"""Uniform quantization in groups: along tokens of a channel, or along channels of a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn import functional

from diffcache.kernels.move import gather_slots
from diffcache.kernels.pack import chunk_of, unpack
from diffcache.kernels.quantize import can_quantize, can_restore, dequant_groups, quant_groups, quant_twin
from diffcache.kv.codec.base import Parts, Payload, TensorCodec, all_of, appended, checked, work_dtype
from diffcache.kv.codec.table import SlotTable
from diffcache.kv.settings import Bits, Count, FloatType, Range, Several


@dataclass(frozen=True, eq=False)
class Quantized(Parts):
    """Packed codes and the grid of every group.

    Args:
        codes: `[B, H, S, bytes]` uint8, the codes of a slot packed along its channels.
        grid: Rows `[B, H, T, 1 or 2, W]`: the width of a code and, unless the grid is symmetric,
            the value of code 0. Along tokens a row belongs to a group of tokens and W is D; along
            channels a row belongs to one slot and W is the number of groups.
        codec: The settings that made it.
        size: Channels, D.
        dtype: Dtype that was encoded, and is decoded to.
    """

    codes: Tensor
    grid: SlotTable
    codec: GroupQuant
    size: int
    dtype: torch.dtype

    def decode(self) -> Tensor:
        """Return `code * scale + low`, computed in float32 (float64 for float64)."""
        shape, wide = (*self.codes.shape[:3], self.size), work_dtype(self.dtype)
        dtype = self.dtype if self._in_one_pass(self.dtype) else wide
        out = torch.empty(shape, dtype=dtype, device=self.codes.device)
        self.decode_into(out)
        return out.to(self.dtype)

    def decode_into(self, out: Tensor) -> None:
        """Write what `decode` returns; all in place, as new memory is what costs most."""
        codec, grid = self.codec, self.grid
        if self._in_one_pass(out.dtype) and out.stride(3) == 1:
            form = int(codec.bits), max(grid.each, 1), self._columns, -codec.intervals / 2
            dequant_groups(self.codes, grid.values, out, *form, grid.of)
            return
        if out.dtype != work_dtype(self.dtype):
            out.copy_(self.decode())
            return
        codes, width = unpack(self.codes, codec.bits, self.size), codec.width(self.size)
        if codec.along == "channels" and self.size % width:
            padded = functional.pad(codes, (0, -self.size % width)).to(out.dtype)
            self.codec.restore_(padded.unflatten(3, (-1, width)), grid.lookup().unsqueeze(-1))
            out.copy_(padded[..., : self.size])
            return
        out.copy_(codes)
        if codec.along == "channels":
            codec.restore_(out.unflatten(3, (-1, width)), grid.lookup().unsqueeze(-1))
        elif grid.of is None:
            runs = (grid.values.shape[2], grid.each)
            codec.restore_(out.unflatten(2, runs), grid.values.unsqueeze(4))
        else:
            codec.restore_(out, grid.lookup())

    @property
    def _columns(self) -> int:
        """Channels that share a column of the grid."""
        return self.codec.width(self.size) if self.codec.along == "channels" else 1

    def _in_one_pass(self, dtype: torch.dtype) -> bool:
        """Return whether a kernel decodes to a dtype."""
        known = dtype in (self.dtype, work_dtype(self.dtype))
        return known and can_restore(self.codes, self.grid.values, self.codec.bits, self._columns, self.size, dtype)

    def decode_at(self, index: Tensor) -> Tensor:
        """Decode some slots, each with its grid."""
        codes = gather_slots(self.codes, index)
        grid = SlotTable(self.grid.lookup_at(index), 1)
        return replace(self, codes=codes, grid=grid).decode()


@dataclass(frozen=True)
class GroupQuant(TensorCodec):
    """Round to a uniform grid between the smallest and the largest value of a group.

    References: KIVI, arXiv 2402.02750, section 3.3 (`along="tokens"` for keys, `"channels"` for
    values, asymmetric, 2 bits, group 32); `relax` from XQuant, arXiv 2510.11236;
    `bits=1.58` has three values, as VidKV, arXiv 2503.16257, section 4.3, whose middle one is a
    threshold about 0. The codes are found with the scale and minimum as they are stored, so the
    error of an element is at most half a scale plus the rounding of these two.

    Args:
        bits: 1, 1.58 (three values, five to a byte), 2, 3, 4 or 8.
        along: Axis of a group. `tokens`: `group` consecutive slots of one channel, coded
            together. `channels`: `group` consecutive channels of one slot, so that every slot is
            coded alone; where `group` does not divide D the last group is shorter.
        group: Elements of a group; None for all channels of a slot, or all slots of one `encode`.
        symmetric: Center the grid on 0 and store no minimum: the largest magnitude sets the scale,
            and the grid has an odd number of values, so that 0 is one of them (except at 1 bit).
        levels: Values the range is divided into, None for all that the bits have. More than they
            have leaves the top of the range out: 9 at 3 bits is the grid of RotateKV's code.
        whole_zero: Move the grid, by at most half a scale, so that 0 is a whole number of scales
            from the smallest value, as in RotateKV's code; not for symmetric grids.
        relax: Share of the range that the grid is drawn in at either end, 0 to below 0.5.
        scale_dtype: Dtype that scales and minima are stored in. Groups beyond its range saturate.
    """

    bits: Bits = 2
    along: Literal["tokens", "channels"] = "channels"
    group: Count | None = 32
    symmetric: bool = False
    levels: Several | None = None
    whole_zero: bool = False
    relax: Annotated[float, Range(0, 0.5, below=True)] = 0.0
    scale_dtype: FloatType = torch.float16

    def check(self) -> None:
        """Raise ValueError unless settings go together."""
        if self.whole_zero and self.symmetric:
            raise ValueError("whole_zero=True: a symmetric grid has no smallest value to move")

    @property
    def multiple(self) -> int:
        """The group where it runs along tokens, else 1."""
        return (self.group or 1) if self.along == "tokens" else 1

    @property
    def intervals(self) -> int:
        """Widths of a code between the two ends of a group's range."""
        if self.levels is not None:
            return self.levels - 1
        values = chunk_of(self.bits)[2]
        return values - 2 if self.symmetric and values > 2 and values % 2 == 0 else values - 1

    def width(self, size: int) -> int:
        """Return the channels of a group, where D is `size`."""
        return size if self.group is None else min(self.group, size)

    def restore_(self, codes: Tensor, grid: Tensor) -> None:
        """Turn codes into their values, in place.

        Args:
            codes: Codes in the dtype of the arithmetic, which are written over.
            grid: Stored scale (and low) in axis 3; without it the shape broadcasts with `codes`.
        """
        scale, low = self.parts_of(grid, codes.dtype)
        codes.mul_(scale).add_(low)

    def parts_of(self, grid: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (scale, value of code 0) of a stored grid."""
        # Converted whole and each part put together: what lies apart is slow to go over.
        scale, *low = (part.contiguous() for part in grid.to(dtype).unbind(3))
        return scale, scale * (-self.intervals / 2) if self.symmetric else low[0]

    def encode(self, x: Tensor) -> Quantized:
        """Code a tensor `[B, H, S, D]`."""
        size, slots = checked(x, self.multiple).shape[3], x.shape[2]
        each, width = (self.group or max(slots, 1), 1) if self.along == "tokens" else (1, self.width(size))
        form = each, width, self.intervals, self.symmetric, self.scale_dtype
        if not self.whole_zero and not self.relax and can_quantize(x, self.bits, each, width):
            codes, grid = quant_groups(x, int(self.bits), *form)
        else:
            codes, grid = quant_twin(x, self.bits, *form, self.relax, self.whole_zero)
        return Quantized(codes, SlotTable(grid, each), self, size, x.dtype)

    def join(self, parts: Sequence[Payload]) -> Quantized:
        """Concatenate codes and grids."""
        return appended(all_of(Quantized, parts))
