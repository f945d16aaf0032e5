"""Calibrate methods: the observers that gather their tables."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from diffcache.errors import AttachError, TablesError, UncalibratedError
from diffcache.features.base import Ability
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.schema import Schema, shown
from diffcache.features.tables import Tables
from diffcache.presets.published import check_published, fitting
from diffcache.step import Site, Step

C = TypeVar("C", bound="Calibrated")


@dataclass(frozen=True)
class RunInfo:
    """Facts about a traced run when it starts."""

    number: int  # number of the pass over the prompts, from 0
    prompt: int  # position of the run's prompts in the list of batches, from 0
    timesteps: Tensor  # float [T], as the scheduler has them
    sigmas: Tensor | None  # float [T + 1], or None where the scheduler has none
    total: int  # number of steps T

    def check_length(self, before: int) -> None:
        """Raise ValueError unless the runs before had as many steps, which are 0 where there was none."""
        if before not in (0, self.total):
            raise ValueError(
                f"a run of {self.total} steps after one of {before}: calibrate with prompts of one num_inference_steps"
            )


class Observer:
    """Observe a wrapped denoiser's computations; methods do nothing unless they are overridden."""

    def times(self, scheduler: Any) -> None:
        """See a scheduler whose times were just set: a run starts."""

    def feature(self, step: Step, site: str, index: int, value: Tensor) -> Tensor | None:
        """See a fresh feature; it is not to be written to.

        Args:
            step: The step, with its guidance branch.
            site: Path of the module or of the block that closes the skipped span.
            index: Index of the tensor among those that are kept there, from 0.
            value: The feature.

        Returns:
            At module sites: what the module returns instead (gradients flow), None if its output
            stays.
        """
        return None

    def output(self, step: Step, given: Tensor, value: Tensor) -> Tensor | None:
        """See the denoiser's output.

        Args:
            step: The step, with its guidance branch.
            given: The sample the denoiser was given.
            value: Its output.

        Returns:
            Output that the denoiser returns instead, None if its own stays.
        """
        return None

    def probe(self, step: Step, value: Tensor) -> None:
        """Note the probe of a gate."""

    def guided(self, step: Step, sample: Tensor, output: Tensor) -> None:
        """See the guided output with which the scheduler is about to step."""


class Collector(Observer, ABC):
    """Gather the data of a method's tables, over runs in which everything is computed.

    Attributes:
        passes: Number of passes over the prompts.
        wants_attention: Whether `attention` is to be called, which costs a little.
        one_shape: Whether it compares steps whose outputs have to be of one shape.
    """

    passes: int = 1
    wants_attention: ClassVar[bool] = False
    one_shape: ClassVar[bool] = True

    @abstractmethod
    def site(self) -> Combine:
        """Return where features are seen; of its schedule only the probe counts."""

    def abilities(self) -> tuple[Ability, ...]:
        """Return abilities that it needs beside features; such a collector has its passes alone."""
        return ()

    def begin(self, run: RunInfo) -> None:
        """Note that a run starts."""

    def attention(self, step: Step, site: str, query: Tensor, key: Tensor) -> None:
        """See the queries and keys, `[B, H, N, D]`, of the attention module `site`."""

    def end(self) -> None:
        """Note that a run ended."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return all sums so far, from which `load` goes on."""

    @abstractmethod
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the sums that `state` returned."""

    @abstractmethod
    def tables(self) -> dict[str, Tensor]:
        """Return the tables, after the last pass."""

    def settings(self) -> dict[str, Any]:
        """Return plain data that belongs with the tables."""
        return {}


class Calibrated(FeatureMethod):
    """A method with tables measured on the model it runs on.

    A subclass is a frozen dataclass with a field `tables: Tables | str | None = None`.

    Attributes:
        schema: Requirements on its tables; others are refused when they are given to it.
        collected_by: `module:class` of its collector, which is given the method; empty if tables are
            trained.
        trainer: `module:function` that makes the tables by training instead of collecting,
            called as `function(pipe, method, plan)`; empty for most.
        numbers: Field of `publishes` that stands in for tables; empty for most.
    """

    schema: ClassVar[Schema]
    collected_by: ClassVar[str] = ""
    trainer: ClassVar[str] = ""
    numbers: ClassVar[str] = ""

    tables: Tables | str | None
    model: str
    site: Site | str

    @classmethod
    def published(cls: type[C], name: str, /, **settings: Any) -> C:
        """Return the method with the settings that its authors published for a model.

        Args:
            name: Name of a model in `publishes`, such as `flux.1-dev`.
            **settings: Settings in the place of published ones, such as `threshold=0.1`;
                `model=""` lets them be used on any model.

        Raises:
            ValueError: If there are none for that model.
        """
        if name not in cls.publishes:
            raise ValueError(f"model={name!r}: published are {', '.join(cls.publishes) or 'none'}")
        make: Any = cls
        made: C = make(**{**cls.publishes[name], "model": name, **settings})
        return made

    @classmethod
    def published_for(cls, facts: Mapping[str, Any]) -> str:
        """Return the name of the model that settings were published for, empty if there is none.

        Args:
            facts: Facts about a model, as in `check_model`.

        Raises:
            AttachError: If the model may be one of several.
        """
        first = [name for name in cls.publishes if not name.endswith("-ret")]
        found = fitting(first, facts)
        if len(found) > 1:
            names = " or ".join(f"model={name!r}" for name in found)
            raise AttachError(
                f"{cls.name}: nothing tells which of the published settings are this {facts['model']}'s; say {names}"
            )
        return found[0] if found else ""

    @property
    def total(self) -> int | None:
        """Length in steps of the runs the tables were measured in; other runs are refused."""
        return self.tables.steps if isinstance(self.tables, Tables) else None

    def collector(self) -> Collector:
        """Return a new, empty collector for this method's settings; raise UncalibratedError if tables are trained."""
        if not self.collected_by:
            cls = type(self).__name__
            raise UncalibratedError(
                f"the tables of {cls} are trained, which no collector does: use "
                f"diffcache.calibrate(pipe, {cls}(), prompts=[...])"
            )
        module, function = self.collected_by.split(":")
        made: Collector = getattr(importlib.import_module(module), function)(self)
        return made

    def check(self) -> None:
        """Read `tables` if it is a file, and check it.

        Raises TablesError if it cannot be read, belongs to another method, was measured at another
        site, or does not hold what `schema` says.
        """
        tables = Tables.of(self.tables, self.name)
        if tables is not None:
            tables.fit(self.schema)
        if "site" in self.schema.header:
            site = Site.of(self.site)
            object.__setattr__(self, "site", site)
            if tables is not None and tables.header["site"] != site.value:
                at = shown(tables.header["site"])
                raise TablesError(f"tables={tables!r}: measured at site {at}, not {self.site!r}")
        object.__setattr__(self, "tables", tables)

    def measured(self) -> Tables:
        """Return the tables; raise UncalibratedError if there are none."""
        if not isinstance(self.tables, Tables):
            cls = type(self).__name__
            raise UncalibratedError(
                f"{cls} has no tables for this model: method = diffcache.calibrate(pipe, "
                f"{cls}(...), prompts=[...]), or give {cls}(..., tables='file.safetensors')"
                + (f"; {cls}.published(NAME) is for {', '.join(self.publishes)}" if self.publishes else ""),
                self.name,
            )
        return self.tables

    def check_model(self, facts: Mapping[str, Any]) -> None:
        """Raise TablesError unless the tables were measured on this model, or AttachError unless published for it."""
        if isinstance(self.tables, Tables):
            self.tables.check(facts)
        elif self.publishes:
            check_published(self.numbers, self.model, self.publishes, facts)
