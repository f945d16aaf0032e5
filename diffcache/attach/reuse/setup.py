"""Hold the setup of feature reuse on one denoiser, and its state of a run and of a branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn

from diffcache.attach.anatomy import Anatomy
from diffcache.attach.reuse.layout import Layout
from diffcache.features.base import Instead, Method
from diffcache.features.collect import Observer
from diffcache.features.combine import Combine
from diffcache.features.parts.hold import Hold
from diffcache.step import Site

KINDS = 32  # kinds of calls that are remembered; a run rarely has more than a few
V = TypeVar("V")


class Latest(dict[Any, V], Generic[V]):
    """A dictionary that forgets the entry that was not asked for the longest.

    Args:
        size: Entries that are kept.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def recall(self, key: Any) -> V | None:
        """Return an entry, which is the newest from now on; None if there is none."""
        value = self.pop(key, None)
        if value is not None:
            self[key] = value
        return value

    def __setitem__(self, key: Any, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self.size:
            del self[next(iter(self))]


class Probing(Protocol):
    """Shows a probe that is no lead block's output."""

    def look(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the probe of the call at hand."""

    def remove(self) -> None:
        """Leave the model as it was found."""


@dataclass(eq=False)
class Decision:
    """Decision whether the steps of a run, or of one branch of it, are computed."""

    parts: Combine  # schedule and stand-in of the run
    state: Any = None  # state of the schedule
    index: int = -1  # step that was decided last
    computes: bool = True  # whether it is computed
    last_computed: int = -1  # last step that was computed by decision

    @property
    def hold(self) -> Hold | None:
        """The form in which features are held, None where they are left as they are."""
        return self.parts.instead if isinstance(self.parts.instead, Hold) else None


@dataclass(eq=False)
class BranchState:
    """State of feature reuse in one guidance branch."""

    decision: Decision  # decision of the run, or of the branch by itself
    layout: Layout | None = None  # layout that is handed out for such calls, None until it is learned
    anchor: int | None = None  # last step that was computed, None before the first
    features: dict[Any, Any] = field(default_factory=dict)  # features by place
    # step and tensors of its last output, where other branches are taken against it
    output: tuple[int, Sequence[Tensor]] = (-1, ())


@dataclass(eq=False)
class Setup:
    """Feature reuse on one denoiser."""

    model: nn.Module  # the denoiser
    anatomy: Anatomy  # its anatomy
    parts: Combine  # schedule, stand-in and site, which is never `deep`
    site: Site  # the site as the user said it
    observer: Observer | None  # observer of features and outputs in calibration, None elsewhere
    method: Method  # the method as the user wrote it, for advice in errors
    peek: Probing | None = None  # reader of the schedule's probe, None where lead blocks show it or there is none
    # list of blocks, or single block, by key -> its modules
    blocks: dict[str, list[nn.Module]] = field(default_factory=dict)
    # list that holds attention modules -> stand-ins for its members
    module_items: dict[str, list[Any]] = field(default_factory=dict)
    # look of a call -> what is handed out for it
    layouts: Latest[Layout] = field(default_factory=lambda: Latest(KINDS))
    # look of a call -> operations of module sites
    costs: Latest[dict[str, float | None]] = field(default_factory=lambda: Latest(KINDS))

    def __post_init__(self) -> None:
        self.instead: Instead = self.parts.instead
        by_kind = self.parts.when.by_kind
        self.kinds = kinds_of(self.model, self.anatomy, self.site) if by_kind else {}
        self.own_sites = frozenset(self.parts.when.sites or self.kinds)
        self.probe, self.waits = self.parts.when.probe, self.parts.when.waits
        self.is_module = self.site.is_module


def kinds_of(model: nn.Module, anatomy: Anatomy, site: Site) -> dict[str, str]:
    """Return the kinds of attention modules by path: `cross`, `temporal` or `self`."""
    found = {}
    for entry in anatomy.modules_at(site):
        path = f"{entry.parent}.{entry.child}"
        crosses = getattr(model.get_submodule(path), "is_cross_attention", False)
        plain = "temporal" if "temporal" in entry.list_key else "self"
        found[path] = "cross" if crosses else plain
    return found


def can_set(method: Method, name: str) -> bool:
    """Return whether a method has a setting of that name."""
    return name in getattr(type(method), "__dataclass_fields__", {})


def use_sites(method: Method, sites: list[Site]) -> str:
    """Return the advice to cache at other sites, or to take a method that lets them be set."""
    names = " or ".join(f"site={site.value!r}" for site in sites)
    return f"use {names}" if can_set(method, "site") else f"use a method with {names}, such as TaylorSeer"
