"""Counting the floating-point operations of one block or module call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Return the operations of an attention kernel that torch's own counter leaves out."""
    return int(sdpa_flop_count(query, key, value))


_EXTRA = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}


def counted(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, float | None]:
    """Call a module and count its operations (a multiply-add is two).

    Returns:
        The module's output and the count; None for compiled modules, which are not counted.
    """
    if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
        return module(*args, **kwargs), None
    mode = FlopCounterMode(display=False, custom_mapping=_EXTRA)
    with mode:
        out = module(*args, **kwargs)
    return out, float(mode.get_total_flops())
