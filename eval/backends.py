"""Which network a command on folders uses: the published one, or the shipped stand-in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diffcache.command import device_of
from diffcache.eval.metrics import inception, lpips
from diffcache.eval.metrics.inception import MissingPackageError
from diffcache.eval.runs.extractors import Extractors
from diffcache.eval.weights import MissingWeightsError

KINDS = ("auto", "real", "lite")


@dataclass(frozen=True)
class Choice:
    """What the user asked for.

    Attributes:
        kind: `auto` (the real one where its weights and packages are), `real` or `lite`.
        weights: Path of the weights, which means `real`; None to look in the usual places.
        device: Where networks run: `auto`, or as torch names it.
    """

    kind: str = "auto"
    weights: str | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        for option, is_given in (("weights", self.weights), ("device", self.device != "auto")):
            if is_given and self.kind == "lite":
                raise ValueError(f"--{option} has no effect with --backend lite: leave one out")
        if self.weights and self.kind == "auto":
            object.__setattr__(self, "kind", "real")


def for_sets(choice: Choice, convention: str, warnings: list[str]) -> Extractors:
    """Return what sees the pictures of a set: Inception, or the shipped extractor alone.

    Args:
        choice: Which.
        convention: How Inception gets its pictures.
        warnings: Takes one where `auto` falls back to the stand-in.

    Raises:
        MissingWeightsError: If the real one is asked for and its weights are not found.
        MissingPackageError: If its packages are not.
        ValueError: If there is no such device.
    """

    def load() -> Any:
        return inception.load(choice.weights, convention, str(device_of(choice.device)))

    return _chosen(choice, "inception", load, warnings)


def for_pairs(choice: Choice, warnings: list[str]) -> Extractors:
    """Return what sees pairs of pictures: LPIPS, or its stand-in alone.

    Args:
        choice: Which.
        warnings: Takes one where `auto` falls back to the stand-in.

    Raises:
        MissingWeightsError: If the real one is asked for and its weights are not found.
        MissingPackageError: If its packages are not.
        ValueError: If there is no such device.
    """

    def load() -> Any:
        return lpips.load(choice.weights, str(device_of(choice.device)))

    return _chosen(choice, "lpips", load, warnings)


def _chosen(choice: Choice, name: str, load: Callable[[], Any], warnings: list[str]) -> Extractors:
    metric = {"inception": "fid", "lpips": "lpips"}[name]
    if choice.kind == "lite":
        return Extractors()
    try:
        network = load()
    except (MissingWeightsError, MissingPackageError) as error:
        if choice.kind == "real":
            raise
        reason = str(error).split("; looked for")[0]
        warnings.append(
            f"{metric.upper()}-lite in place of {metric.upper()}, the numbers do not compare "
            f"(--backend lite to say that it is meant): {reason}"
        )
        return Extractors()
    device = str(device_of(choice.device))
    return Extractors(**{name: network}, device=device, entries={metric: network.entry()})
