"""Taps on attention and feed-forward modules inside the blocks."""

from __future__ import annotations

from typing import Any

from torch import nn

from diffcache.attach.reuse.frame import FRAME, Frame
from diffcache.attach.reuse.span import OWN, BlockFeatures, estimates, store_features
from diffcache.attach.tap import Tap
from diffcache.attach.tree import Template, hollow, leaves
from diffcache.step import CURRENT


def observed(frame: Frame, name: str, out: Any) -> Any:
    """Show a module's output to the observer; return what the module returns, as it says."""
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
        if not frame.runs(self.name):
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
        if not frame.runs(self.site):
            return frame.features[self.name, 0].hollow
        out = frame.counted(self.site, self.module, args, kwargs)  # its work is that of the site
        frame.features[self.name, 0] = BlockFeatures([], [], Template(None), hollow(out))
        return out
