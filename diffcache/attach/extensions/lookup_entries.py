"""Entries of look-up tables, by condition: bounded in number, exact or rounded."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from diffcache.attach.extensions.lookup_layers import Given, reconstruct, rounded_copy
from diffcache.attach.tree import Template, leaves
from diffcache.digest import bits_of
from diffcache.features.temporal_table import Rounded, TemporalTable, disturbance, keeps_table, rounded, step_of


@dataclass(frozen=True)
class SiteEntry:
    """Output of a module for one condition."""

    template: Template  # structure of the output, without its tensors
    rows: tuple[Tensor | Rounded, ...]  # its tensors; rows of a batch that are alike are kept once
    # row of each tensor at every place of the batch, int64; None where all rows are kept
    places: tuple[Tensor | None, ...]
    layer: bool = False  # whether the rounded layer stands for it instead
    # disturbance by the rounded layer and by the rounded table, where measured
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
class Write:
    """An entry that a run wrote."""

    entries: ConditionEntries  # entries of its condition
    name: str  # module
    kept: SiteEntry  # the entry
    harm: float | None = None  # disturbance by the rounded layer, where a layer may stand for the module
    given: Given | None = None  # arguments of the module, where its layer is to be reconstructed


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

    def __init__(self, ability: TemporalTable) -> None:
        self.ability = ability
        self.conditions: OrderedDict[Any, ConditionEntries] = OrderedDict()
        self._layers: dict[str, tuple[nn.Module, nn.Module]] = {}  # and what they are made of
        self._fitted: set[str] = set()  # those that were reconstructed

    def entries_of(self, key: Any, run: int) -> ConditionEntries | None:
        """Return the entries of a condition, None where no more are kept; those that `run` used make no room."""
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
            disturbance(leaves(kept.value()), leaves(table.value())) for kept, table in zip(exact, tables, strict=True)
        ]
        by_layer, by_table = (
            torch.tensor([value or 0.0 for value in values], dtype=torch.float64) for values in (harms, errors)
        )
        chosen = torch.full(by_table.shape, self.ability.keep == "table")
        if self.ability.keep == "closer":
            chosen = keeps_table(by_layer, by_table, self.ability.by)
        for line, kept, harm, error, stays in zip(written, tables, harms, errors, chosen.tolist(), strict=True):
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
        return [disturbance(leaves(line.kept.value()), leaves(out)) for line, out in zip(written, outs, strict=True)]

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
            tensor.nbytes for layer, _ in self._layers.values() for tensor in (*layer.parameters(), *layer.buffers())
        )
        return layers + sum(kept.nbytes for entries in self.conditions.values() for kept in entries.values())


def _round(kept: SiteEntry, site: list[SiteEntry], ability: TemporalTable, bits: int) -> SiteEntry:
    """Return an entry in whole numbers, with its own scale or that of its site."""
    rows = []
    for place, tensor in enumerate(kept.rows):
        shared = [other.rows[place] for other in site] if ability.scale == "site" else [tensor]
        values = [value for value in shared if isinstance(value, Tensor)]
        assert isinstance(tensor, Tensor)
        rows.append(rounded(tensor, bits, step_of(values, bits)))
    return replace(kept, rows=tuple(rows))
