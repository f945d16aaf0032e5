"""Find modules that see the timestep and the condition alone, by following one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.flop_counter import _refuses_modes
from diffcache.attach.tree import leaves
from diffcache.foreign import (
    DispatchMode,
    current_dispatch_mode,
    is_compiled_in_place,
    packet_of,
    schema_of,
    storage_of,
    weights_of,
)
from diffcache.weights import Place

Label = str | int  # an argument by its path, or a weight by its number
LARGEST = 2**22  # numbers in an output that is more than one row for each sample
OTHER: frozenset[Label] = frozenset({"*"})  # the sample, randomness, or nobody knows
NOTHING: frozenset[Label] = frozenset()


@dataclass(frozen=True)
class TimeSite:
    """A module whose output depends on conditions and weights alone."""

    path: str  # path of the module in the model
    arguments: frozenset[str]  # paths of the arguments that its output depends on
    weights: tuple[Place, ...]  # the parameters and buffers that its output depends on, its own and others


class _Origins(DispatchMode):
    """Follows from which arguments and weights every tensor of a forward was made.

    Origins belong to storages, so that views and writes in place are followed. What is read out of
    a tensor as a Python number may be anywhere afterwards: from then on it is in every origin.
    """

    def __init__(self) -> None:
        super().__init__()
        self.origins: dict[int, frozenset[Label]] = {}
        self.escaped: frozenset[Label] = NOTHING
        self.writes: dict[int, int] = {}

    def of(self, tensors: list[Tensor]) -> frozenset[Label]:
        """Return the origins of some tensors."""
        found = self.escaped
        for tensor in tensors:
            found = _joined(found, self.origins.get(storage_of(tensor), OTHER))
        return found

    def mark(self, tensor: Tensor, label: Label) -> None:
        """Say that a tensor is an argument or a weight."""
        key = storage_of(tensor)
        self.origins[key] = _joined(self.origins.get(key, NOTHING), frozenset({label}))

    def written(self, tensors: list[Tensor]) -> int:
        """Return how often some tensors were written to in place."""
        return sum(self.writes.get(storage_of(tensor), 0) for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = leaves([args, kwargs])
        before = {storage_of(tensor) for tensor in given}
        out = func(*args, **kwargs)
        packet, made = packet_of(func), leaves(out)
        # a tensor made of Python numbers: they are constants, plain arguments, or escaped
        fresh = packet in (torch.ops.aten.lift_fresh, torch.ops.aten.lift_fresh_copy)
        origin = self.escaped if fresh else self.of(given)
        if torch.Tag.nondeterministic_seeded in func.tags:
            origin = OTHER
        if given and not made:
            self.escaped = _joined(self.escaped, origin)
        elif torch.Tag.dynamic_output_shape in func.tags:  # its shape tells of masks and indices
            telling = [tensor for tensor in given if not tensor.is_floating_point()] or given
            self.escaped = _joined(self.escaped, self.of(telling))
        for tensor in made:
            key = storage_of(tensor)
            old = NOTHING if fresh or key not in before else self.origins.get(key, OTHER)
            self.origins[key] = _joined(old, origin)
        for tensor in _mutated(func, args, kwargs):
            key = storage_of(tensor)
            self.writes[key] = self.writes.get(key, 0) + 1
            self.origins[key] = _joined(self.origins.get(key, OTHER), origin)
        return out


def _joined(one: frozenset[Label], two: frozenset[Label]) -> frozenset[Label]:
    return OTHER if one is OTHER or two is OTHER else one | two


def _mutated(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    if not schema_of(func).is_mutable:
        return []
    found: list[Tensor] = []
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += leaves(value)
    return found


@dataclass
class _Seen:
    """Notes on one module in the followed forward."""

    calls: int = 0
    writes: int = 0
    fits: bool = True
    origin: frozenset[Label] = NOTHING


def time_sites(
    model: nn.Module, call: Callable[[], Any], conditions: dict[str, Tensor], samples: Sequence[Tensor] = ()
) -> list[TimeSite]:
    """Return the outermost modules that see conditions alone, and no axis of tokens.

    What they return is one row for each sample, or little and made from conditions that are.
    Modules without weights, modules that are called more than once, members of a sequence of
    modules, and modules that write to what they are given are left out, and so is what is inside
    compiled modules.

    `call` runs the forward once, with nothing tapped; RuntimeError says that it cannot be followed.
    `conditions` are all arguments but the sample by path; other tensors, which the model holds
    beside its parameters and buffers, count as unknown. No condition is to share the memory of
    `samples`.
    """
    if not _compiled(model) and _refuses_modes(model):
        raise RuntimeError("it attends with flex attention, which compiles itself")
    origins = _Origins()
    for path, tensor in conditions.items():
        origins.mark(tensor, path)
    places: list[Place] = []
    for module in model.modules():
        for name, weight in weights_of(module):
            if weight is not None:
                origins.mark(weight, len(places))
                places.append((module, name))
    for tensor in samples:
        origins.origins[storage_of(tensor)] = OTHER
    seen: dict[nn.Module, _Seen] = {}
    rows = frozenset(path for path, tensor in conditions.items() if tensor.dim() <= 2)
    with _watched(model, origins, seen, rows), _eager(model), torch.no_grad(), origins:
        call()
    found: list[TimeSite] = []
    for path, module in _candidates(model):
        known = seen.get(module)
        inside = any(_below(path, site.path) for site in found)
        if known is not None and known.fits and known.calls == 1 and not inside:
            arguments = frozenset(label for label in known.origin if isinstance(label, str))
            numbers = sorted(label for label in known.origin if isinstance(label, int))
            found.append(TimeSite(path, arguments, tuple(places[n] for n in numbers)))
    return found


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with weights that can be tapped, outer ones first."""
    modules = dict(model.named_modules())
    compiled = _compiled(model)
    for path, module in modules.items():
        if not path or any(path == top or _below(path, top) for top in compiled):
            continue
        in_sequence = isinstance(modules[path.rpartition(".")[0]], nn.Sequential)  # calls by place
        if not in_sequence and any(True for _ in module.parameters()):
            yield path, module


def _compiled(model: nn.Module) -> list[str]:
    """Return the paths of compiled modules."""
    return [p for p, module in model.named_modules() if is_compiled_in_place(module)]


def _below(path: str, top: str) -> bool:
    return path.startswith(top + ".")


@contextmanager
def _watched(
    model: nn.Module, origins: _Origins, seen: dict[nn.Module, _Seen], rows: frozenset[str]
) -> Iterator[None]:
    """Note the origins of every module's inputs and outputs in `seen`; `rows` are arguments of a row a sample."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if current_dispatch_mode() is not origins:
            return  # another thread's call
        known, given = seen.setdefault(module, _Seen()), leaves([args, kwargs])
        known.calls += 1
        known.writes = origins.written(given)
        known.fits = known.fits and bool(given) and _fits(given, origins.of(given), rows)

    def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        known = seen.get(module)
        if current_dispatch_mode() is not origins or not known:
            return
        made = leaves(out)
        known.origin = origins.of(made)
        stays = known.writes == origins.written(leaves([args, kwargs]))
        known.fits = known.fits and stays and bool(made) and _fits(made, known.origin, rows)

    hooks = []
    for module in model.modules():
        if module is not model:
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _fits(tensors: list[Tensor], origin: frozenset[Label], rows: frozenset[str]) -> bool:
    """Return whether tensors come of conditions alone and have no axis of tokens."""
    arguments = {label for label in origin if isinstance(label, str)}
    if origin is OTHER or not arguments:
        return False
    if all(tensor.dim() <= 2 for tensor in tensors):
        return True
    return arguments <= rows and all(tensor.numel() <= LARGEST for tensor in tensors)


@contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Run compiled parts as they are written, so that their operations are seen."""
    if not _compiled(model):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
