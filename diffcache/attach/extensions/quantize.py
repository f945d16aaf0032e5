"""Swapping the layers of a model for quantized ones, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.call import Call, in_call
from diffcache.attach.denoiser import Denoiser
from diffcache.attach.extension import Extension
from diffcache.attach.run import Timeline
from diffcache.attach.tree import unshared
from diffcache.errors import AttachError
from diffcache.features.parts.quantize import LayerWatcher, Quantize, WatchLayers
from diffcache.foreign import children_of, is_compiled, share_hooks
from diffcache.quant.conv import QuantizedConv2d
from diffcache.quant.layer import QuantizedLayer
from diffcache.quant.linear import QuantizedLinear
from diffcache.quant.plan import QuantPlan
from diffcache.step import CURRENT, current_step

SAMPLE = 64  # numbers by which a weight is known again
KINDS: dict[type, type[QuantizedLayer]] = {nn.Linear: QuantizedLinear, nn.Conv2d: QuantizedConv2d}


def install(denoiser: Denoiser, ability: Quantize) -> QuantizedLayers:
    """Quantize the layers of a plan; raise AttachError if the model lacks one, or it is of another kind or size."""
    return QuantizedLayers(denoiser.model, ability.plan)


def watch(denoiser: Denoiser, ability: WatchLayers) -> WatchedLayers:
    """Show the layers inside the blocks to a watcher; raise AttachError if some are compiled, or none is left."""
    anatomy = denoiser.anatomy
    inside = (*(entry.key for entry in anatomy.lists), *anatomy.singles)
    for name, module in denoiser.model.named_modules():
        if is_compiled(module) and _is_in(name, inside):
            raise AttachError(
                f"{name} is compiled, so what its layers are given cannot be seen; calibrate before you compile"
            )
    return WatchedLayers(denoiser.model, inside, ability.watcher)


class QuantizedLayers(Extension):
    """The quantized layers of one model.

    The dense layers stay referenced, since detaching puts the very same modules back, so that
    memory for them is only given back with the model: what is saved is what a step has to read.

    Args:
        model: The denoiser.
        plan: Layers to quantize, with their scales.

    Raises:
        AttachError: If the model lacks a layer of the plan or it is of another kind or size.
    """

    def __init__(self, model: nn.Module, plan: QuantPlan) -> None:
        self.model = model
        self.layers = {name: _quantized(model, name, plan) for name in plan.layers}
        self._samples = {name: _sample(layer.weight) for name, layer in self.layers.items()}
        self.put()

    def start(self, timeline: Timeline) -> None:
        """Start a run; raise AttachError if weights were written to, which the codes do not show."""
        for name, layer in self.layers.items():
            if not layer.weight.is_meta and _differ(self._samples[name], _sample(layer.weight)):
                raise AttachError(
                    f"{name} was quantized, and its weights were changed since, as by fusing an adapter: unwrap the "
                    "model, and calibrate with these weights"
                )

    @property
    def dense_bytes(self) -> int:
        """Bytes of the weights that are not read while the layers are quantized."""
        return sum(layer.weight.nbytes for layer in self.layers.values())

    @property
    def quantized_bytes(self) -> int:
        """Bytes of the codes and settings that are read instead."""
        return sum(layer.quantized_bytes() for layer in self.layers.values())

    def put(self) -> None:
        """Put the quantized layers in, one for a layer with two paths."""
        stand_in: dict[nn.Module, nn.Module] = {q.dense: q for q in self.layers.values()}
        _replace(self.model, stand_in)

    def remove(self) -> None:
        """Put the dense layers back."""
        _replace(self.model, {layer: layer.dense for layer in self.layers.values()})


class WatchedLayers(Extension):
    """The layers inside the blocks of one model, watched.

    Args:
        model: The denoiser.
        inside: Paths of the lists of blocks, and of blocks of their own.
        watcher: Watcher of the layers.
    """

    def __init__(self, model: nn.Module, inside: tuple[str, ...], watcher: LayerWatcher) -> None:
        self.model, self.watcher = model, watcher
        self._plan: QuantPlan | None = None
        self._swapped: QuantizedLayers | None = None
        self._hooks: list[Any] = []
        self.dense = {
            name: module
            for name, module in model.named_modules()
            if type(module) in KINDS and _is_in(name, inside) and not watcher.excludes(name)
        }
        if not self.dense:
            raise AttachError(
                f"{type(model).__name__} has no linear or convolution layer inside its blocks that "
                "is not exempt; exempt fewer"
            )
        for name, module in self.dense.items():
            _check_dense(name, module)
            watcher.layer(name, module.weight.detach(), _bias(module))
        self._hook(self.dense)

    def open(self, call: Call) -> Call:
        """Quantize the layers anew if the watcher changed its plan; note the modules called."""
        plan = self.watcher.plan()
        if plan is not self._plan:
            self.remove()
            self._plan = plan
            if plan is not None:
                self._swapped = QuantizedLayers(self.model, plan)
            self._hook(self.dense if self._swapped is None else self._swapped.layers)
        if self._swapped is not None and self.watcher.wants_dense and not call.writes:
            call.storage[self] = unshared((call.args, call.kwargs))
        return call

    def close(self, call: Call, out: Any) -> None:
        """Run the call once more with dense layers, if the watcher wants to see their features."""
        given = call.storage.pop(self, None)
        if given is None or self._swapped is None:
            return
        self._swapped.remove()
        self.watcher.dense_again(True)
        try:
            with in_call(call):
                self.model.forward(*given[0], **given[1])
        finally:
            self.watcher.dense_again(False)
            self._swapped.put()

    def _hook(self, layers: Mapping[str, nn.Module]) -> None:
        for name, layer in layers.items():
            self._hooks.append(layer.register_forward_pre_hook(self._watcher_of(name)))

    def _watcher_of(self, name: str) -> Any:
        def see(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            call: Call | None = CURRENT.get()
            if call is None or call.repeats or call.writes:
                return
            step, given = call.step, args[0].detach()
            if self._plan is None:
                self.watcher.given(name, step.index, given)
            elif isinstance(layer, QuantizedLayer) and self.watcher.compares(name):
                scale = self._plan.layers[name].weight_scale.to(given.device)
                with torch.no_grad():
                    exact, rounded = layer.exact(given), layer.plain(given, scale)
                self.watcher.compare(name, step.index, exact, rounded)

        return see

    def remove(self) -> None:
        """Put the dense layers back and stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._swapped is not None:
            self._swapped.remove()
        self._swapped = self._plan = None


def _is_in(name: str, parts: tuple[str, ...]) -> bool:
    """Return whether a module is one of these parts of the model, or inside one."""
    return any(f"{name}.".startswith(f"{part}.") for part in parts)


def _quantized(model: nn.Module, name: str, plan: QuantPlan) -> QuantizedLayer:
    """Return the quantized layer that stands for the one at a path."""
    try:
        dense = model.get_submodule(name)
    except AttributeError:
        raise AttachError(
            f"{type(model).__name__} has no layer {name!r}, which the tables quantize: they were "
            "made for another model; calibrate on this one"
        ) from None
    kind = KINDS.get(type(dense))
    if kind is None:
        raise AttachError(
            f"{type(model).__name__}: {name} is a {type(dense).__name__}, not a linear or "
            "convolution layer; take adapters off before quantizing"
        )
    _check_dense(name, dense)
    try:
        layer = kind(dense, plan.layers[name], plan.weight_bits, name, current_step)
    except ValueError as error:
        raise AttachError(f"{type(model).__name__}: {error}; calibrate on this model") from error
    share_hooks(layer, dense)  # those added or removed later count as well
    return layer


def _check_dense(name: str, module: nn.Module) -> None:
    weight: Any = module.weight
    if weight.device.type == "meta" or not weight.dtype.is_floating_point:
        raise AttachError(
            f"{name} has its weight on {weight.device} in {weight.dtype}: quantize before the "
            "model is offloaded or quantized by something else"
        )


def _sample(weight: Tensor) -> Tensor:
    """Return some numbers of a weight, float32 on the host."""
    return weight.detach().flatten()[:: max(weight.numel() // SAMPLE, 1)].clone().float().cpu()


def _differ(before: Tensor, now: Tensor) -> bool:
    """Return whether numbers of a weight are others, by more than a cast to half precision makes of them."""
    far = (now - before).abs() > before.abs() / 64 + before.abs().mean() / 512
    return bool(far.any())


def _bias(module: nn.Module) -> Tensor | None:
    bias: Any = module.bias
    return None if bias is None else bias.detach()


def _replace(model: nn.Module, by: Mapping[Any, nn.Module]) -> None:
    """Replace modules wherever a part of the model has them, adapters added since included."""
    for parent in list(model.modules()):
        children = children_of(parent)
        for name, child in children.items():
            if child is not None and child in by:
                children[name] = by[child]
