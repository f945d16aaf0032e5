"""Entries of look-up tables, by condition: bounded in number, exact or rounded."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.tree import Template, leaves
from diffcache.digest import bits_of
from diffcache.features.temporal_table import (
    Rounded,
    TimeTables,
    disturbance,
    keeps_table,
    rounded,
    step_of,
)


@dataclass(frozen=True)
class SiteEntry:
    """Output of a module for one condition.

    Attributes:
        template: Structure of the output, without its tensors.
        rows: Its tensors; rows of a batch that are alike are kept once.
        places: Row of each tensor at every place of the batch, int64; None where all rows are kept.
        layer: Whether the rounded layer stands for it instead.
        harm: Disturbance by the rounded layer and by the rounded table, where measured.
    """

    template: Template
    rows: tuple[Tensor | Rounded, ...]
    places: tuple[Tensor | None, ...]
    layer: bool = False
    harm: tuple[float, float] | None = None

    @classmethod
    def of(cls, out: Any) -> SiteEntry:
        """Return copies of a module's latest output."""
        rows, places = zip(*(alike(tensor.detach()) for tensor in leaves(out)), strict=True)
        return cls(Template(out), rows, places)

    def value(self) -> Any:
        """Return the module's output, in fresh tensors."""
        made = []
        for rows, places in zip(self.rows, self.places, strict=True):
            held = rows.value() if isinstance(rows, Rounded) else rows
            made.append(held.clone() if places is None else held[places])
        return self.template.build(made)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(rows.nbytes for rows in self.rows)


def alike(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the different rows of a batch and the row at every place; a copy either way."""
    if tensor.dim() < 2 or len(tensor) < 2:
        return tensor.clone(), None
    bits = bits_of(tensor).unflatten(0, (len(tensor), -1))  # in which -0.0 is not 0.0
    places: list[int] = []
    first: list[int] = []
    for row in range(len(bits)):
        same = next((n for n, f in enumerate(first) if torch.equal(bits[f], bits[row])), None)
        if same is None:
            same = len(first)
            first.append(row)
        places.append(same)
    if len(first) == len(bits):
        return tensor.clone(), None
    return tensor[first], torch.tensor(places, device=tensor.device)


class ConditionEntries(dict[str, SiteEntry]):
    """The entries of one condition, by the module's path."""

    used = 0  # number of the run that used it last


@dataclass(frozen=True)
class Given:
    """A module's call, to be repeated after its run.

    Attributes:
        args: Arguments by position, whose tensors are copies: later code may change the others.
        kwargs: Arguments by name, likewise.
        cast: Device type, dtype and state of automatic casts in the run.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cast: tuple[str, torch.dtype, bool]

    @classmethod
    def of(cls, args: Any, kwargs: Any, device: str) -> Given:
        """Return a call as it is made now."""
        cast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        with torch.inference_mode(False):  # copies that may be used in any mode
            copies = [tensor.detach().clone() for tensor in leaves((args, kwargs))]
        copied_args, copied_kwargs = Template((args, kwargs)).build(copies)
        return cls(copied_args, copied_kwargs, cast)

    def repeat(self, module: nn.Module) -> Any:
        """Return what a module answers to the call, under the casts of the run."""
        with torch.autocast(*self.cast):
            return module(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Write:
    """An entry that a run wrote.

    Attributes:
        entries: Entries of its condition.
        name: Module.
        kept: The entry.
        harm: Disturbance by the rounded layer, where a layer may stand for the module.
        given: Arguments of the module, where its layer is to be reconstructed.
    """

    entries: ConditionEntries
    name: str
    kept: SiteEntry
    harm: float | None = None
    given: Given | None = None


@dataclass
class RunWrites:
    """Entries that one run wrote."""

    lines: list[Write] = field(default_factory=list)

    def write(self, line: Write) -> None:
        """Write one entry."""
        line.entries[line.name] = line.kept
        self.lines.append(line)


class LookupTable:
    """All entries of a denoiser, by condition.

    Args:
        ability: Settings of the tables: conditions that are kept, and rounding.
    """

    def __init__(self, ability: TimeTables) -> None:
        self.ability = ability
        self.conditions: OrderedDict[Any, ConditionEntries] = OrderedDict()
        self._layers: dict[str, tuple[nn.Module, nn.Module]] = {}  # and what they are made of
        self._fitted: set[str] = set()  # those that were reconstructed

    def entries_of(self, key: Any, run: int) -> ConditionEntries | None:
        """Return the entries of a condition, None where no more are kept.

        Args:
            key: The condition.
            run: Number of the run; conditions that it used are not given up for new ones.
        """
        entries = self.conditions.get(key)
        if entries is None:
            if len(self.conditions) >= self.ability.entries:
                oldest = next(iter(self.conditions))
                if self.conditions[oldest].used >= run:
                    return None
                del self.conditions[oldest]
            entries = self.conditions[key] = ConditionEntries()
        self.conditions.move_to_end(key)
        entries.used = run
        return entries

    def close(self, writes: RunWrites) -> None:
        """Round the entries of a run, and choose between tables and layers."""
        bits = self.ability.bits
        lines, writes.lines = writes.lines, []
        if bits is None:
            return
        sites: dict[str, list[Write]] = {}
        for line in lines:
            if line.entries.get(line.name) is line.kept:  # no other thread wrote it since
                sites.setdefault(line.name, []).append(line)
        for name, written in sites.items():
            self._close(name, written, bits)

    @torch.inference_mode(False)  # a run may close in another mode than it was made in
    @torch.no_grad()
    def _close(self, name: str, written: list[Write], bits: int) -> None:
        exact = [line.kept for line in written]
        tables = [_round(kept, exact, self.ability, bits) for kept in exact]
        harms = [line.harm for line in written]
        if self.ability.reconstruct:
            harms = self._reconstructed(name, written)
        errors = [
            disturbance(leaves(kept.value()), leaves(table.value()))
            for kept, table in zip(exact, tables, strict=True)
        ]
        by_layer, by_table = (
            torch.tensor([value or 0.0 for value in values], dtype=torch.float64)
            for values in (harms, errors)
        )
        chosen = torch.full(by_table.shape, self.ability.keep == "table")
        if self.ability.keep == "closer":
            chosen = keeps_table(by_layer, by_table, self.ability.by)
        for line, kept, harm, error, stays in zip(
            written, tables, harms, errors, chosen.tolist(), strict=True
        ):
            found = None if harm is None else (harm, error)
            rows = kept.rows if stays else ()
            places = kept.places if stays else ()
            made = replace(kept, rows=rows, places=places, layer=not stays, harm=found)
            line.entries[name] = made

    def _reconstructed(self, name: str, written: list[Write]) -> list[float | None]:
        """Round a layer for the calls of its first run; return its disturbance of each entry."""
        layer, source = self._layers[name]
        calls = [line.given for line in written if line.given is not None]
        if name not in self._fitted:
            # Once: what was chosen for earlier conditions rests on these weights.
            reconstruct(layer, source, calls)
            self._fitted.add(name)
        outs = (call.repeat(layer) for call in calls)
        return [
            disturbance(leaves(line.kept.value()), leaves(out))
            for line, out in zip(written, outs, strict=True)
        ]

    def layer(self, name: str, module: nn.Module) -> nn.Module:
        """Return a copy of a module whose linear layers have rounded weights."""
        if name not in self._layers:
            assert self.ability.bits is not None
            bits, activations = self.ability.bits, self.ability.activations
            with torch.inference_mode(False):
                self._layers[name] = rounded_copy(module, bits, activations), module
        return self._layers[name][0]

    def clear(self) -> None:
        """Forget everything."""
        self.conditions.clear()
        self._layers.clear()
        self._fitted.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all entries and rounded layers."""
        layers = sum(
            tensor.nbytes
            for layer, _ in self._layers.values()
            for tensor in (*layer.parameters(), *layer.buffers())
        )
        return layers + sum(
            kept.nbytes for entries in self.conditions.values() for kept in entries.values()
        )


def _round(kept: SiteEntry, site: list[SiteEntry], ability: TimeTables, bits: int) -> SiteEntry:
    """Return an entry in whole numbers, with its own scale or that of its site."""
    rows = []
    for place, tensor in enumerate(kept.rows):
        shared = [other.rows[place] for other in site] if ability.scale == "site" else [tensor]
        values = [value for value in shared if isinstance(value, Tensor)]
        assert isinstance(tensor, Tensor)
        rows.append(rounded(tensor, bits, step_of(values, bits)))
    return replace(kept, rows=tuple(rows))


class RoundedLinear(nn.Module):
    """A linear layer with whole numbers for weights and a scale for every output.

    Args:
        layer: Layer to round, to the nearest; it is not held.
        bits: Bits of a weight.
        activations: Bits of an input, with one scale a call; None leaves inputs as they are.
    """

    def __init__(self, layer: nn.Linear, bits: int, activations: int | None = None) -> None:
        super().__init__()
        found = rounded(layer.weight, bits, step_of([layer.weight], bits, dim=1))
        self.register_buffer("codes", found.codes)
        self.register_buffer("step", found.step)
        self.dtype, self.bias = found.dtype, layer.bias
        self.bits, self.activations = bits, activations

    def given(self, value: Tensor) -> Tensor:
        """Return an input as the layer multiplies it."""
        if self.activations is None:
            return value
        return rounded(value, self.activations, step_of([value], self.activations)).value()

    def forward(self, value: Tensor) -> Tensor:
        """Return the layer's output; the weights are made anew at every call."""
        codes, step = self.get_buffer("codes"), self.get_buffer("step")
        weight = Rounded(codes, step, self.dtype).value()
        return nn.functional.linear(self.given(value), weight, self.bias)

    def fit(self, weight: Tensor, given: Tensor) -> None:
        """Round a weight anew, so that outputs for given inputs change little.

        Columns are rounded one after the other. What rounding one changes in the outputs, those
        that are still to be rounded take up as well as they can (GPTQ, arXiv 2210.17323, without
        its blocks and its order; scales stay those of the weight).

        Args:
            weight: float [O, K], the weight before rounding.
            given: float [N, K], inputs.
        """
        exact = torch.float32 if weight.device.type == "mps" else torch.float64
        step = self.get_buffer("step").to(exact)
        left, seen = (weight.detach() / step).to(exact), given.to(exact)
        moments = seen.T @ seen
        # Inputs of fewer steps than columns leave directions free. A little of the identity
        # decides there, for small changes.
        damping = 1e-4 * moments.diagonal().mean().clamp(min=1e-12)
        moments.diagonal().add_(damping)
        inverse = torch.linalg.inv(moments)
        upper = torch.linalg.cholesky((inverse + inverse.T) / 2, upper=True)
        most = 2 ** (self.bits - 1) - 1
        codes = torch.empty_like(left)
        for column in range(left.shape[1]):
            codes[:, column] = left[:, column].round().clamp(-most, most)
            missed = (left[:, column] - codes[:, column]) / upper[column, column]
            left[:, column + 1 :] -= torch.outer(missed, upper[column, column + 1 :])
        self.register_buffer("codes", codes.to(self.get_buffer("codes").dtype))


def rounded_copy(module: nn.Module, bits: int, activations: int | None = None) -> nn.Module:
    """Return a copy of a module in which every `nn.Linear` is a `RoundedLinear`."""
    if type(module) is nn.Linear:
        return RoundedLinear(copy.deepcopy(module), bits, activations)
    made = copy.deepcopy(module)
    for parent in list(made.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, RoundedLinear(child, bits, activations))
    return made


def reconstruct(layer: nn.Module, source: nn.Module, calls: list[Given]) -> None:
    """Round the linear layers of a module anew for some calls of it.

    They are taken in the order in which they are called, so that each is given what the ones
    before it return with rounded weights.

    Args:
        layer: What `rounded_copy` made of the module.
        source: The module.
        calls: Arguments of the calls.
    """
    linears = {name: m for name, m in layer.named_modules() if isinstance(m, RoundedLinear)}
    for name in _inputs(layer, linears, calls):
        linear = linears[name]
        given = _inputs(layer, {name: linear}, calls)[name]
        linear.fit(source.get_submodule(name).get_parameter("weight"), torch.cat(given))


def _inputs(
    layer: nn.Module, linears: dict[str, RoundedLinear], calls: list[Given]
) -> dict[str, list[Tensor]]:
    """Return inputs of linear layers in some calls of a module, float [N, K], in their order."""
    found: dict[str, list[Tensor]] = {}

    def keep(linear: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(linear, RoundedLinear)
        name = next(name for name, one in linears.items() if one is linear)
        value = linear.given(args[0])
        found.setdefault(name, []).append(value.reshape(-1, value.shape[-1]))

    hooks = [linear.register_forward_pre_hook(keep) for linear in linears.values()]
    try:
        for call in calls:
            call.repeat(layer)
    finally:
        for hook in hooks:
            hook.remove()
    return found
