"""Counting the floating-point operations of one block or module call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from diffcache.foreign import (
    CPU_ATTENTION,
    INT_MM,
    DispatchMode,
    call_body,
    has_kernel,
    is_compiled,
    is_made_of_others,
    packet_of,
    uses_flex_attention,
)
from diffcache.kernels.dispatch import register_flops

# Products of matrices -> which argument's last axis is summed over. torch's own formulas walk
# through all arguments as trees, which takes as long as the products of a small model.
_PRODUCTS = {
    torch.ops.aten.mm: 0,
    torch.ops.aten.bmm: 0,
    INT_MM: 0,
    torch.ops.aten.addmm: 1,
    torch.ops.aten.baddbmm: 1,
    torch.ops.aten.linear: 0,
}
# Products of matrices in libraries of quantized weights; the first argument's last axis is summed.
_INT8_PRODUCTS = ("linear_matmul", "scaled_mm", "mixed_scaled_mm")
_QUANTIZED_PRODUCTS = {"quanto::qbytes_mm", "bitsandbytes::gemv_4bit"}
_QUANTIZED_PRODUCTS |= {f"bitsandbytes::int8_{name}" for name in _INT8_PRODUCTS}
_UNCOUNTED: set[Any] = set()  # operations that are not made of others and have no count


class _Counter(DispatchMode):
    """Adds up the operations of every kernel; torch's own mode also tracks modules, by hooks."""

    def __init__(self) -> None:
        # not at the top: where triton is installed, torch's counter imports all of it
        from torch.utils.flop_counter import flop_registry, sdpa_flop_count

        super().__init__()
        register_flops()
        self.registry, self.attention, self.total = flop_registry, sdpa_flop_count, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _UNCOUNTED:  # most of them: the shortest way
            return func(*args, **kwargs)
        packet = packet_of(func)
        if packet is CPU_ATTENTION and packet not in self.registry:  # torch before 2.15 leaves it out
            self.total += self.attention(*[tensor.shape for tensor in args[:3]])
        elif packet in _PRODUCTS:
            out = func(*args, **kwargs)
            self.total += 2 * out.numel() * args[_PRODUCTS[packet]].shape[-1]
            return out
        elif packet not in self.registry:
            if func.name().partition(".")[0] in _QUANTIZED_PRODUCTS:
                out = func(*args, **kwargs)
                product = out[0] if isinstance(out, tuple) else out
                self.total += 2 * product.numel() * args[0].shape[-1]
                return out
            if not is_made_of_others(func):
                _UNCOUNTED.add(func)
            elif not _has_own_kernel(func, args, kwargs):
                with self:  # under inference mode, operations made of others arrive whole
                    return call_body(func, args, kwargs)
        out = func(*args, **kwargs)
        if packet in self.registry:
            self.total += self.registry[packet](*args, **kwargs, out_val=out)
        return out


def counted(
    module: nn.Module, args: Any, kwargs: Any, call: Callable[..., Any] | None = None
) -> tuple[Any, float | None]:
    """Call a module, or a part of it by `call`, and count its operations (a multiply-add is two).

    The count is None for compiled modules and for those whose kernels run under no dispatch mode (flex attention).
    """
    call = module if call is None else call
    if _refuses_modes(module):
        return call(*args, **kwargs), None
    with _Counter() as counter:
        return call(*args, **kwargs), float(counter.total)


def _has_own_kernel(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation that is made of others has a kernel where its tensors are.

    Such a kernel may round otherwise than what it stands for, as that of RMSNorm on CUDA devices.
    """
    given = [*args, *kwargs.values()]
    given += [item for several in given if isinstance(several, (list, tuple)) for item in several]
    devices = {item.device.type for item in given if isinstance(item, torch.Tensor)}
    return any(has_kernel(func, device) for device in devices)


def _refuses_modes(module: nn.Module) -> bool:
    """Return whether a part is compiled or attends with flex attention, which compiles itself."""
    return any(is_compiled(part) or uses_flex_attention(part) for part in module.modules())
