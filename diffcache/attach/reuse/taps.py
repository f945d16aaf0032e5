"""Tap a model: lists of blocks, single blocks, modules inside the blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from diffcache.attach.anatomy import Anatomy
from diffcache.attach.reuse.frame import FRAME, Frame
from diffcache.attach.reuse.span import OWN, BlockFeatures, estimates, store_features
from diffcache.attach.tap import ITEMS, ServedTap, Tap, tap_children, tap_list, untap_children, untap_list
from diffcache.attach.tree import Template, hollow, leaves
from diffcache.foreign import children_of
from diffcache.step import CURRENT, Site


def _single(key: str, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run a block that is no member of a list, such as a UNet's middle, or what stands in for it."""
    items = CURRENT.get().storage.get(ITEMS, {}).get(key)
    return (module if items is None else items[0])(*args, **kwargs)


def observed(frame: Frame, name: str, out: Any) -> Any:
    """Show a module's output to the observer; return the output that it asks for."""
    observer = frame.setup.observer
    assert observer is not None
    tensors = leaves(out)
    seen = [observer.feature(frame.step, name, i, tensor) for i, tensor in enumerate(tensors)]
    if all(value is None for value in seen):
        return out
    chosen = [t if value is None else value for t, value in zip(tensors, seen, strict=True)]
    return Template(out).build(chosen)


class ModuleTap(Tap):
    """An attention or feed-forward module; its own output, before the gate, is the feature.

    A module that is called more than once a forward keeps a feature for every call.
    """

    __slots__ = ("group", "name")

    def __init__(self, module: nn.Module, name: str, group: str) -> None:
        super().__init__(module)
        self.name, self.group = name, group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the block's call of the module."""
        frame: Frame | None = CURRENT.get().storage.get(FRAME)
        if frame is None:  # a call that writes to a stream
            return self.module(*args, **kwargs)
        visit = frame.visits.get(self, 0)
        frame.visits[self] = visit + 1
        key = (self.name, visit)
        if not (frame.runs(self.name) if frame.per_site else frame.computes):
            held: BlockFeatures = frame.features[key]
            return held.template.build(estimates(frame, held))
        out = frame.counted(self.name, self.module, args, kwargs)
        setup = frame.setup
        if setup.observer is not None:
            out = observed(frame, self.name, out)
        if setup.own_sites and self.name not in setup.own_sites:
            return out  # it never decides, so nothing is kept of it
        own = [leaf.detach().clone() for leaf in leaves(out)]
        store_features(frame, key, own, [OWN] * len(own), Template(out))
        return out


class EmptyTap(Tap):
    """A module of a fused block that a skipped step leaves out.

    Its output only feeds the projection whose output is the feature; on a skipped step zeros that
    take no memory stand for it. It runs when that projection, the `site`, does.
    """

    __slots__ = ("group", "name", "site")

    def __init__(self, module: nn.Module, name: str, group: str, site: str) -> None:
        super().__init__(module)
        self.name, self.group, self.site = name, group, site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the block's call of the module."""
        frame: Frame | None = CURRENT.get().storage.get(FRAME)
        if frame is None:
            return self.module(*args, **kwargs)
        if not (frame.runs(self.site) if frame.per_site else frame.computes):
            return frame.features[self.name, 0].hollow
        out = frame.counted(self.site, self.module, args, kwargs)  # its work is that of the site
        frame.features[self.name, 0] = BlockFeatures([], [], Template(None), hollow(out))
        return out


class Taps:
    """The taps of one denoiser on its model.

    Attributes:
        blocks: List of blocks, or single block, by key -> its modules.
        module_items: List that holds attention modules -> stand-ins for its members.
    """

    def __init__(self, owner: Any, model: nn.Module, anatomy: Anatomy, site: Site) -> None:
        self.owner, self.model = owner, model
        self.blocks: dict[str, list[nn.Module]] = {}
        self.module_items: dict[str, list[Any]] = {}
        self._parents: list[nn.Module] = []
        self._lists: dict[str, nn.ModuleList] = {}
        if site.is_module:
            self._tap_modules(anatomy, site)
        else:
            self._tap_lists(anatomy)

    def _tap_lists(self, anatomy: Anatomy) -> None:
        for entry in anatomy.lists:
            blocks = self.model.get_submodule(entry.key)
            assert isinstance(blocks, nn.ModuleList)
            self.blocks[entry.key] = list(blocks)
            self._tap_list(blocks, entry.key)
        for key in anatomy.singles:
            module = self.model.get_submodule(key)
            self.blocks[key] = [module]
            self._tap_children(self.model, {key: ServedTap(module, partial(_single, key))})

    def _tap_modules(self, anatomy: Anatomy, site: Site) -> None:
        sites = anatomy.modules_at(site)
        fused = {entry.parent: entry.child for entry in sites if entry.kind == "fused"}
        for entry in sites:
            parent = self.model.get_submodule(entry.parent)
            module = parent.get_submodule(entry.child)
            name = f"{entry.parent}.{entry.child}"
            in_list = isinstance(parent, nn.ModuleList)
            group = f"{entry.list_key}.{entry.kind if in_list else entry.child}"
            if entry.kind == "empty":  # its work counts as that of the projection it feeds
                group = f"{entry.list_key}.{fused[entry.parent]}"
                fed = f"{entry.parent}.{fused[entry.parent]}"
                tap: Tap = EmptyTap(module, name, group, fed)
            else:
                tap = ModuleTap(module, name, group)
            if isinstance(parent, nn.ModuleList):
                if entry.parent not in self.module_items:
                    self.module_items[entry.parent] = list(parent)
                    self._tap_list(parent, entry.parent)
                self.module_items[entry.parent][int(entry.child)] = tap
            else:
                self._tap_children(parent, {entry.child: tap})

    def _tap_list(self, blocks: nn.ModuleList, key: str) -> None:
        self._lists[key] = blocks
        tap_list(blocks, self.owner, key)

    def _tap_children(self, parent: nn.Module, taps: dict[str, Tap]) -> None:
        if not any(parent is known for known in self._parents):
            self._parents.append(parent)
        tap_children(parent, self.owner, taps)

    def refresh(self) -> bool:
        """Look at the lists again; return whether a block was replaced since."""
        stale = False
        for key, known in self.blocks.items():
            blocks = self._lists.get(key)
            now = [self.model.get_submodule(key)] if blocks is None else [*children_of(blocks).values()]
            if len(now) != len(known) or any(a is not b for a, b in zip(now, known, strict=True)):
                self.blocks[key], stale = now, True
        return stale

    def remove(self) -> None:
        """Leave the model as it was found."""
        for blocks in self._lists.values():
            untap_list(blocks)
        for parent in self._parents:
            untap_children(parent)
        self.owner = None  # which holds this: both and the model are then freed at once
