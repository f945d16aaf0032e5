"""The time that a device takes for the operations of a call, from their shapes alone.

The least time is that at the peaks of the device. What is to be expected counts with the shares of
these peaks that code reaches, with a constant for each operation, and with the host, which begins
one operation after another: expected, not measured.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from diffcache.attach.reuse.modulated_probe import PEEKING
from diffcache.attach.tree import Template, leaves
from diffcache.foreign import DispatchMode, packet_of, schema_of, storage_of

ASSUMPTIONS = (
    "each operation takes as long as the slower of its arithmetic and its reads and writes, at the "
    "peaks of the device; nothing but attention is fused; no launches, no time of the host, no "
    "text encoder, no autoencoder: a real run takes longer"
)

# Microseconds of an operation on the device beyond its bytes and products: fitted to the launches
# in assets/bench/kernels.json that move memory, by the median.
START = 3.5
# Microseconds of the host for an operation with its views and the Python around it, and for a
# module that a cache stands in for: fitted to the skipped steps of FLUX.1-dev on an H200
# (docs/kernels.md), 0.50 ms with the site `stack` and 27.1 ms with `module`.
HOST, SITE = 5.4, 100.0
# Shares of the peaks that a copy and dense products reach: those of an H200, `limits` in
# assets/bench/kernels.json. Other devices are taken to be like it.
COPIED, MULTIPLIED = 0.88, 0.79


@dataclass(frozen=True)
class Device:
    """A device and its peaks.

    Attributes:
        title: Name of the device.
        tflops: Dense bfloat16 products with sums in float32, 10^12 operations a second.
        gbps: Bandwidth of its memory, 10^9 bytes a second.
        source: Sheet of the vendor that says so.
    """

    title: str
    tflops: float
    gbps: float
    source: str = ""

    def __str__(self) -> str:
        return f"{self.title} ({self.tflops:g} TFLOPS, {self.gbps:g} GB/s)"


_EMPTY = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided}
# Sheets that print the rate "with sparsity" alone are halved here.
DEVICES: dict[str, Device] = {
    name: Device(title, tflops, gbps, source)
    for name, title, tflops, gbps, source in (
        ("h100", "H100 SXM 80GB", 989.4, 3350, "NVIDIA H100 data sheet: 1,979 sparse, 3.35 TB/s"),
        ("h200", "H200 SXM 141GB", 989.4, 4800, "NVIDIA H200 data sheet: 1,979 sparse, 4.8 TB/s"),
        ("a100", "A100 SXM 80GB", 312, 2039, "NVIDIA A100 data sheet: 312, 2,039 GB/s"),
        ("l40s", "L40S", 362.05, 864, "NVIDIA L40S data sheet: 362.05, 864 GB/s"),
        ("4090", "GeForce RTX 4090", 165.2, 1008, "NVIDIA Ada GPU architecture, appendix A"),
        ("5090", "GeForce RTX 5090", 209.5, 1792, "NVIDIA RTX Blackwell architecture, appendix A"),
        ("mi300x", "Instinct MI300X", 1307.4, 5300, "AMD MI300X data sheet: 1,307.4, 5.3 TB/s"),
    )
}


class Roofline:
    """Add up operations and the least seconds of the code inside; a context manager.

    Args:
        device: The device.

    Attributes:
        flops: Operations; a multiply-add is two.
        seconds: Least seconds on the device.
        busy: Expected seconds of the device, which is never idle.
        operations: Operations that are launched.
    """

    def __init__(self, device: Device) -> None:
        self.flops, self.seconds, self.busy, self.operations = 0.0, 0.0, 0.0, 0
        self.quiet = False  # inside attention, whose parts are one kernel
        self._device = device
        self._stack = ExitStack()

    def __enter__(self) -> Roofline:
        self._stack.enter_context(_Attention(self))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def add(self, flops: float, tensors: Iterable[Tensor]) -> None:
        """Add an operation that reads and writes some tensors."""
        moved = sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors)
        peaks = self._device.tflops * 1e12, self._device.gbps * 1e9
        multiplied, copied = flops / peaks[0], moved / peaks[1]
        self.flops += flops
        self.seconds += max(multiplied, copied)
        self.busy += max(multiplied / MULTIPLIED, copied / COPIED) + START * 1e-6
        self.operations += 1

    def add_all(self, other: Roofline) -> None:
        """Add what another roofline counted."""
        self.flops += other.flops
        self.seconds += other.seconds
        self.busy += other.busy
        self.operations += other.operations

    def expected(self, sites: int = 0) -> float:
        """Return the expected seconds: of the device or of the host, whichever is slower.

        `sites` is the number of modules that a cache stands in for.
        """
        return max(self.busy, (self.operations * HOST + sites * SITE) * 1e-6)


class _Operations(DispatchMode):
    """Tells a roofline of every operation but views."""

    def __init__(self, roofline: Roofline) -> None:
        super().__init__()
        self.roofline = roofline

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.roofline.quiet or packet_of(func) in _EMPTY:
            return out
        given, made = leaves([args, kwargs]), leaves(out)
        known = {storage_of(tensor) for tensor in given}
        is_view = not schema_of(func).is_mutable and all(storage_of(t) in known for t in made)
        if made and not is_view:
            count = flop_registry.get(packet_of(func))
            flops = 0.0 if count is None else float(count(*args, **kwargs, out_val=out))
            self.roofline.add(flops, [*given, *made] if given else made)
        return out


class _Attention(TorchFunctionMode):
    """Tells a roofline of attention as one operation, which `meta` tensors take apart."""

    def __init__(self, roofline: Roofline) -> None:
        super().__init__()
        self.roofline = roofline

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention or self.roofline.quiet:
            return func(*args, **kwargs)
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        shapes = [given[name].shape for name in ("query", "key", "value")]
        self.roofline.quiet = True
        try:
            out = func(*args, **kwargs)
        finally:
            self.roofline.quiet = False
        self.roofline.add(float(sdpa_flop_count(*shapes)), [*leaves([args, kwargs]), out])
        return out


class Repeats:
    """Lets modules that are alike run once, where tensors have no values; a context manager.

    Of modules of one class, with parameters of the same shapes, the first call with inputs of some
    shapes is run and later ones return tensors of the shapes that it returned.

    Args:
        modules: The modules, none inside another.
        device: Device of the roofline.

    Attributes:
        roofline: Roofline that is told what a stood-in call costs; None for none.
    """

    def __init__(self, modules: Iterable[nn.Module], device: Device) -> None:
        self.roofline: Roofline | None = None
        self._modules, self._device = list(modules), device
        self._known: dict[Any, tuple[Roofline, Any, list[Any]]] = {}

    def __enter__(self) -> Repeats:
        for module in self._modules:
            module.forward = self._stand_in(module)
        return self

    def __exit__(self, *_: Any) -> None:
        for module in self._modules:
            del module.forward

    @contextmanager
    def counted(self) -> Iterator[Roofline]:
        """Yield a roofline of the code inside."""
        with Roofline(self._device) as self.roofline:
            yield self.roofline
        self.roofline = None

    def _stand_in(self, module: nn.Module) -> Any:
        forward = module.forward
        shapes = tuple((name, value.shape) for name, value in module.state_dict().items())

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if PEEKING.get():  # which ends inside of the forward
                return forward(*args, **kwargs)
            given = leaves([args, kwargs])
            looks = tuple((tensor.shape, tensor.dtype) for tensor in given)
            key = type(module), shapes, looks, tuple(kwargs)
            if key in self._known:
                cost, template, sources = self._known[key]
                if self.roofline is not None:
                    self.roofline.add_all(cost)
                made = [given[s] if isinstance(s, int) else torch.empty_like(s) for s in sources]
                return template.build(made)
            with Roofline(self._device) as cost:
                out = forward(*args, **kwargs)
            places = {id(tensor): place for place, tensor in enumerate(given)}
            sources = [places.get(id(tensor), tensor) for tensor in leaves(out)]
            self._known[key] = cost, Template(out), sources
            return out

        return call
