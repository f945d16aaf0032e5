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
class Entry:
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
    def of(cls, out: Any) -> Entry:
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


class ConditionEntries(dict[str, Entry]):
    """The entries of one condition, by the module's path."""

    used = 0  # number of the run that used it last


@dataclass
class RunWrites:
    """Entries that one run wrote: condition, module, entry, disturbance by the rounded layer."""

    lines: list[tuple[ConditionEntries, str, Entry, float | None]] = field(default_factory=list)

    def write(self, entries: ConditionEntries, name: str, kept: Entry, harm: float | None) -> None:
        """Write one entry."""
        entries[name] = kept
        self.lines.append((entries, name, kept, harm))


class LookupTable:
    """All entries of a denoiser, by condition.

    Args:
        ability: Settings of the tables: conditions that are kept, and rounding.
    """

    def __init__(self, ability: TimeTables) -> None:
        self.ability = ability
        self.conditions: OrderedDict[Any, ConditionEntries] = OrderedDict()
        self._layers: dict[str, nn.Module] = {}

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
        sites: dict[str, list[tuple[ConditionEntries, float | None]]] = {}
        for entries, name, kept, harm in lines:
            if entries.get(name) is kept:  # no other thread wrote it since
                sites.setdefault(name, []).append((entries, harm))
        for name, written in sites.items():
            self._close(name, written, bits)

    def _close(
        self, name: str, written: list[tuple[ConditionEntries, float | None]], bits: int
    ) -> None:
        exact = [entries[name] for entries, _ in written]
        tables = [_round(kept, exact, self.ability, bits) for kept in exact]
        layer = torch.tensor([harm or 0.0 for _, harm in written], dtype=torch.float64)
        table = torch.tensor(
            [disturbance(leaves(e.value()), leaves(t.value())) for e, t in zip(exact, tables)],  # noqa: B905
            dtype=torch.float64,
        )
        chosen = torch.full(table.shape, self.ability.keep == "table")
        if self.ability.keep == "closer":
            chosen = keeps_table(layer, table, self.ability.by)
        for (entries, harm), kept, error, stays in zip(
            written, tables, table.tolist(), chosen.tolist(), strict=True
        ):
            found = None if harm is None else (harm, error)
            rows = kept.rows if stays else ()
            places = kept.places if stays else ()
            entries[name] = replace(kept, rows=rows, places=places, layer=not stays, harm=found)

    def layer(self, name: str, module: nn.Module) -> nn.Module:
        """Return a copy of a module whose linear layers have rounded weights."""
        if name not in self._layers:
            assert self.ability.bits is not None
            self._layers[name] = rounded_copy(module, self.ability.bits)
        return self._layers[name]

    def clear(self) -> None:
        """Forget everything."""
        self.conditions.clear()
        self._layers.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all entries and rounded layers."""
        layers = sum(
            tensor.nbytes
            for layer in self._layers.values()
            for tensor in (*layer.parameters(), *layer.buffers())
        )
        return layers + sum(
            kept.nbytes for entries in self.conditions.values() for kept in entries.values()
        )


def _round(kept: Entry, site: list[Entry], ability: TimeTables, bits: int) -> Entry:
    """Return an entry in whole numbers, with its own scale or that of its site."""
    rows = []
    for place, tensor in enumerate(kept.rows):
        shared = [other.rows[place] for other in site] if ability.scale == "site" else [tensor]
        values = [value for value in shared if isinstance(value, Tensor)]
        assert isinstance(tensor, Tensor)
        rows.append(rounded(tensor, bits, step_of(values, bits)))
    return replace(kept, rows=tuple(rows))


class RoundedLinear(nn.Module):
    """A linear layer with whole numbers for weights and a scale for every output."""

    def __init__(self, layer: nn.Linear, bits: int) -> None:
        super().__init__()
        found = rounded(layer.weight, bits, step_of([layer.weight], bits, dim=1))
        self.register_buffer("codes", found.codes)
        self.register_buffer("step", found.step)
        self.dtype, self.bias = found.dtype, layer.bias

    def forward(self, value: Tensor) -> Tensor:
        """Return the layer's output; the weights are made anew at every call."""
        codes, step = self.get_buffer("codes"), self.get_buffer("step")
        weight = Rounded(codes, step, self.dtype).value()
        return nn.functional.linear(value, weight, self.bias)


def rounded_copy(module: nn.Module, bits: int) -> nn.Module:
    """Return a copy of a module in which every `nn.Linear` is a `RoundedLinear`."""
    if type(module) is nn.Linear:
        return RoundedLinear(copy.deepcopy(module), bits)
    made = copy.deepcopy(module)
    for parent in list(made.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, RoundedLinear(child, bits))
    return made
