"""A method that `diffcache.tune` chose for a model, with the front it saw, in one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from diffcache.errors import UncalibratedError
from diffcache.features.base import OWN, Ability, FeatureMethod
from diffcache.features.combine import Combine
from diffcache.features.plain import from_plain
from diffcache.features.tables import Tables


@dataclass(frozen=True)
class Tuned(FeatureMethod):
    """Run the method that `diffcache.tune` chose for this model.

    Args:
        tables: What `tune` returned or wrote.

    Raises:
        UncalibratedError: If there are none.
        TablesError: If the file cannot be read.

    Example:
        >>> pipe = diffcache.wrap(pipe, "tuned", tables="fast.safetensors")  # doctest: +SKIP
    """

    name: ClassVar[str] = "tuned"
    source: ClassVar[str] = "diffcache"
    bibtex: ClassVar[str] = OWN

    tables: Tables | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", Tables.of(self.tables, self.name))
        if self.tables is not None and self.method.bibtex:
            object.__setattr__(self, "source", self.method.source)
            object.__setattr__(self, "bibtex", self.method.bibtex)

    @property
    def _measured(self) -> Tables:
        if not isinstance(self.tables, Tables):
            raise UncalibratedError(
                "Tuned has nothing to run: method = diffcache.tune(pipe, prompts=[...], "
                "speedup=3), or give Tuned(tables='file.safetensors')",
                self.name,
            )
        return self.tables

    @property
    def method(self) -> FeatureMethod:
        """The method that was chosen."""
        return _made(self._measured)

    @property
    def total(self) -> int:
        """Number of steps of the runs it was tuned for."""
        return self._measured.steps

    @property
    def front(self) -> list[dict[str, Any]]:
        """What was seen: of no two trials is one better and cheaper; the cheapest first.

        Each has `method` (its repr), `cost` (floating-point operations of the denoiser as a share
        of the uncached run's), `psnr_db` on the prompts that were searched on, and
        `validation_psnr_db` where it was validated, else None.
        """
        front: list[dict[str, Any]] = json.loads(json.dumps(self._measured.header["front"]))
        return front

    def parts(self) -> Combine:
        """Return the parts of the method that was chosen."""
        return self.method.parts()

    def abilities(self) -> tuple[Ability, ...]:
        """Return those of the method that was chosen."""
        return self.method.abilities()

    def check_model(self, facts: Mapping[str, Any]) -> None:
        """Raise TablesError unless it was tuned on this model and scheduler."""
        self._measured.check(facts)


@lru_cache(maxsize=32)
def _made(tables: Tables) -> FeatureMethod:
    tensors = {name: tables[name] for name in tables.names()}
    method: FeatureMethod = from_plain(tables.header["choice"], tensors)
    return method
