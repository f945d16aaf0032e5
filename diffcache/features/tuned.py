"""A method that `diffcache.tune` chose for a model, with the front it saw, in one file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal

from torch import Tensor

from diffcache.errors import DiffcacheError, TablesError, UncalibratedError
from diffcache.features.base import Ability, is_number
from diffcache.features.combine import Combine, FeatureMethod
from diffcache.features.schema import header_fault, shown
from diffcache.features.serialize import from_plain, to_plain
from diffcache.features.tables import Tables

Measure = Literal["psnr", "lpips", "right"]
# Measure -> what its certificate says of a new prompt, of a score that is higher for the better.
_SAYS: Mapping[str, Callable[[float], str]] = {
    "psnr": lambda bar: f"is at least {bar:g} dB from the uncached output",
    "lpips": lambda bar: f"is at most {-bar:g} LPIPS from the uncached output",
    "right": lambda bar: "is judged right wherever the uncached output is",
}


@dataclass(frozen=True)
class Guarantee:
    """Certificate of how close a new prompt of the same kind stays to its uncached output.

    Attributes:
        bar: Score that a sample has to reach: its PSNR to the uncached output in dB, its LPIPS
            distance times -1, or 1 for a sample that is right or whose uncached output is wrong.
        confidence: Least probability with which a new prompt reaches it.
        samples: Number of prompts that it was checked on, which no search saw.
        strayed: How many of these did not reach it, at the chosen setting or a dearer one.
        settings: Number of settings that were checked.
        measure: Kind of the score.
    """

    bar: float
    confidence: float
    samples: int
    strayed: int
    settings: int
    measure: Measure = "psnr"

    def __str__(self) -> str:
        return (
            f"a new prompt {_SAYS[self.measure](self.bar)} with probability "
            f"{self.confidence:.0%} or more: {self.strayed} of {self.samples} prompts that no "
            f"search saw strayed, at this or a dearer of {self.settings} settings. It holds for "
            "prompts drawn as these were, with the same steps, size, guidance and scheduler"
        )


@dataclass(frozen=True)
class Tuned(FeatureMethod):
    """Run the method that `diffcache.tune` chose for this model.

    Args:
        tables: Tables of the choice that `tune` made, or their file.

    Raises:
        UncalibratedError: If there are none.
        TablesError: If the file cannot be read, or holds anything but a choice that `tune` made.
    """

    tables: Tables | str | None = None

    def check(self) -> None:
        """Read `tables` if it is a file, and check the choice in it."""
        object.__setattr__(self, "tables", Tables.of(self.tables, self.name))
        if self.tables is not None and self.method.bibtex:  # which checks the choice
            object.__setattr__(self, "bibtex", self.method.bibtex)
        if self.tables is not None and self.guarantee is not None:
            object.__setattr__(self, "note", f"certified  {self.guarantee}.")

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
        """Best trials: of no two is one better and cheaper; the cheapest first.

        Each has `method` (its repr), `cost` (floating-point operations of the denoiser as a share
        of the uncached run's), `psnr_db` on the prompts that were searched on, and where it was
        validated, else None, `validation_psnr_db` on the others with the ends of its 95 %
        bootstrap interval over samples, `validation_low_db` and `validation_high_db`.
        """
        front: list[dict[str, Any]] = json.loads(json.dumps(self._measured.header["front"]))
        return front

    @property
    def validation(self) -> dict[str, Any]:
        """Outcome of the chosen method on the prompts that were not searched on.

        `cost`, `psnr_db`, `low_db`, `high_db` and `seconds` as in a trial of the search, and the
        number of `samples`.
        """
        return dict(self._measured.header["validation"])

    @property
    def guarantee(self) -> Guarantee | None:
        """Certificate for new prompts, if `tune` was given a confidence, else None."""
        found = self._measured.header.get("guarantee")
        return None if found is None else Guarantee(**found)

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
    """Return the method that tables hold; raise TablesError if they hold none, or anything else."""
    tensors = {name: tables[name] for name in tables.names()}
    fault = (
        header_fault(tables.header)
        or _front_fault(tables.header.get("front"))
        or _guarantee_fault(tables.header.get("guarantee"))
    )
    if fault:
        raise TablesError(f"tables={tables!r}: {fault}; tune again")
    try:
        method = from_plain(tables.header.get("choice"), tensors)
        if not isinstance(method, FeatureMethod):
            raise TablesError(f"its choice is {shown(method)}; must be a method")
        used: dict[str, Tensor] = {}
        to_plain(method, used)
        extra = sorted(set(tensors) - set(used))
        if extra:
            raise TablesError(f"it has {shown(extra[0])}, which is no table of its choice")
        if method.parts().when.total not in (tables.steps, None):
            raise TablesError(f"its choice is not for the {tables.steps} steps of its header")
        method.abilities()  # raises where a table is missing
    except (DiffcacheError, ValueError, RecursionError) as error:
        raise TablesError(f"tables={tables!r}: {error}; tune again") from error
    return method


def _front_fault(front: Any) -> str:
    """Describe the fault of a header's trials, empty if there is none."""
    needed = ("cost", "psnr_db")
    interval = ("validation_low_db", "validation_high_db")  # files of earlier versions have none
    for trial in front if isinstance(front, list) else [front]:
        known = isinstance(trial, dict) and {"method", *needed} <= set(trial)
        if (
            not known
            or not isinstance(trial["method"], str)
            or not all(
                is_number(value) or value is None
                for value in map(trial.get, (*needed, "validation_psnr_db", *interval))
            )
        ):
            return f"its header has {shown(trial)} in front; must be trials with their numbers"
    return ""


def _guarantee_fault(found: Any) -> str:
    """Describe the fault of a header's guarantee, empty if there is none."""
    names = {one.name for one in fields(Guarantee)}
    if found is None:
        return ""
    numbers = dict(found) if isinstance(found, dict) else {}
    known = numbers.pop("measure", None) in [*_SAYS]
    if known and set(found) == names and all(map(is_number, numbers.values())):
        counts = (found["strayed"], found["samples"])
        if 0 <= counts[0] < counts[1] and 0 < found["confidence"] < 1:
            return ""
    return f"its header has guarantee={shown(found)}; must be {', '.join(sorted(names))} in range"
