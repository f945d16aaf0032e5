"""Notice changes of weights: by identity and version at every call, by content when asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from diffcache.digest import bits_of, weights_digest
from diffcache.foreign import adapters_of, count_hooks, version_of, weights_at, weights_of

Place = tuple[nn.Module, str]  # a parameter or buffer: its module and its name there
# Sums are taken over this many columns, so that numbers that change places are noticed; a prime, since rows of
# weights, which may change places as well, are as long as multiples of a power of two.
_COLUMNS = 1021


def all_of(model: nn.Module, *, few: bool = False) -> Weights:
    """Return a watch of all parameters and buffers of a model."""
    places = [(m, name) for m in model.modules() for name, _ in weights_of(m)]
    return Weights(model, places, few=few)


class Weights:
    """Watches some parameters and buffers of a model.

    A change in place raises a tensor's version and another tensor has another identity: both are cheap to see. Writes
    through `.data`, as merging an adapter does, show in neither; so once a run the contents are summed, and so are the
    settings of the modules around them (the scale of an adapter) and the modules of the model.

    Args:
        model: The model.
        places: The parameters and buffers.
        few: Whether eight numbers of each stand for its contents, as in `weights_digest`, where summing all of them
            would take as long as the call that it guards. A write through `.data` to a part of a weight is not seen
            then.
    """

    def __init__(self, model: nn.Module, places: list[Place], *, few: bool = False) -> None:
        self.model, self.few = model, few
        unique = {(id(module), name): (module, name) for module, name in places}
        self.places = list(unique.values())
        owners = {id(module) for module, _ in self.places}
        paths = [path for path, module in model.named_modules() if id(module) in owners]
        around = {path.rsplit(".", up)[0] for path in paths for up in range(3)}
        self._around = [m for p, m in model.named_modules() if p in around and m is not model]
        self._modules = list(model.modules())
        self._tensors: list[Tensor | None] = []
        self._stamps: list[Any] = []
        self._content: Any = None
        self.accept()

    def accept(self) -> None:
        """Take the weights as they are now."""
        self._content = self._contents()
        self._note()

    def trained(self) -> bool:
        """Return whether gradients are recorded for any of them now."""
        return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in self._tensors)

    def changed(self, starts: bool) -> bool:
        """Return whether they changed since they were accepted; contents are summed where a run starts."""
        tensors = self._now()
        moved = any(a is not b for a, b in zip(tensors, self._tensors, strict=True))
        moved = moved or self._stamps != [_stamp(t) for t in tensors]
        if not moved and not starts:
            return False
        if moved and self.few:  # what was written elsewhere would not be seen
            return True
        modules = list(self.model.modules())
        if len(modules) != len(self._modules) or any(a is not b for a, b in zip(modules, self._modules, strict=True)):
            return True
        if self._content != self._contents():
            return True
        self._note()  # moved to another device, for instance
        return False

    def _now(self) -> list[Tensor | None]:
        return weights_at(self.places)

    def _note(self) -> None:
        self._tensors = self._now()
        self._stamps = [_stamp(tensor) for tensor in self._tensors]

    def _contents(self) -> Any:
        """Return sums of all contents, and the settings around them; waits for the devices."""
        sums: dict[torch.device, list[Tensor]] = {}
        kinds: list[Any] = []
        for tensor in self._now():
            if tensor is None:
                kinds.append(None)
            elif tensor.is_meta:  # not here to be looked at: never equal to anything
                kinds.append(object())
            else:
                kinds.append((tensor.shape, tensor.dtype))
                if not self.few:
                    sums.setdefault(tensor.device, []).append(checksum(tensor))
        if self.few:
            kinds.append(weights_digest(tensor for tensor in self._now() if tensor is not None))
        numbers = [n for device in sums for n in torch.stack(sums[device]).tolist()]
        return kinds, numbers, [_settings(module) for module in self._around]


def checksum(tensor: Tensor) -> Tensor:
    """Return a number, int64 [], that tells contents of a shape apart; of any dtype."""
    flat = bits_of(tensor)
    if flat.numel() % 8 or flat.storage_offset() % 8:  # a copy, which nearly no weight needs
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))
    numbers = flat.view(torch.int64)
    whole = len(numbers) // _COLUMNS * _COLUMNS
    sums = torch.cat([numbers[:whole].view(-1, _COLUMNS).sum(0), numbers[whole:]])
    return (sums * torch.arange(1, 2 * len(sums), 2, device=tensor.device)).sum()


def _stamp(tensor: Tensor | None) -> Any:
    if tensor is None or tensor.is_meta:
        return None
    return tensor.data_ptr(), None if tensor.is_inference() else version_of(tensor)


def _settings(module: nn.Module) -> Any:
    """Return the plain settings of a module and how many hooks it has."""
    hooks = count_hooks(module)
    if type(module).__module__.startswith("torch.nn."):
        return module.training, hooks
    plain = {name: _plain(value) for name, value in module.__dict__.items() if name[:1] != "_"}
    return hooks, plain, _plain(adapters_of(module))


def _plain(value: Any) -> Any:
    """Return a copy of plain data; of anything else nothing."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return None
