"""Which network a script on folders uses: the published one, or the shipped stand-in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from diffcache.command import device_of
from diffcache.eval.metrics import inception, lite, lpips
from diffcache.eval.metrics.inception import MissingPackageError
from diffcache.eval.weights import MissingWeightsError

KINDS = ("auto", "real", "lite")
FEATURES = {"real": inception.DIMENSIONS, "lite": 64}
Network = TypeVar("Network")


@dataclass(frozen=True)
class Choice:
    """What the user asked for.

    Attributes:
        kind: `auto` (the real one where its weights and packages are), `real` or `lite`.
        weights: Path of the weights, which means `real`; None to look in the usual places.
        device: Where a real network runs: `auto`, or as torch names it.
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


@dataclass(frozen=True)
class SetNetwork:
    """What sees the pictures of a set.

    Attributes:
        kind: `real` or `lite`.
        entry: What a report says of it.
        call: Pictures uint8 [N, 3, H, W] -> features [N, D], class probabilities [N, C] or None.
    """

    kind: str
    entry: dict[str, Any]
    call: Callable[[Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class PairNetwork:
    """What sees pairs of pictures.

    Attributes:
        kind: `real` or `lite`.
        entry: What a report says of it.
        call: Two times uint8 [N, 3, H, W] -> distances [N].
    """

    kind: str
    entry: dict[str, Any]
    call: Callable[[Tensor, Tensor], Tensor]


def for_sets(
    choice: Choice, convention: str, with_classes: bool, warnings: list[str]
) -> SetNetwork:
    """Return Inception, or the shipped extractor.

    Args:
        choice: Which.
        convention: How Inception gets its pictures.
        with_classes: Whether class probabilities are wanted.
        warnings: Takes one where `auto` falls back to the stand-in.

    Raises:
        MissingWeightsError: If the real one is asked for and its weights are not found.
        MissingPackageError: If its packages are not.
        ValueError: If the convention has no classes, or there is no such device.
    """

    def real() -> SetNetwork:
        if with_classes and convention == "clean":
            raise ValueError("--is needs logits, which --convention clean has not: leave one out")
        network = inception.load(choice.weights, convention, str(device_of(choice.device)))

        def call(pictures: Tensor) -> tuple[Tensor, Tensor | None]:
            seen = network(pictures)
            return seen.pool, seen.probabilities() if with_classes else None

        return SetNetwork("real", network.entry(), call)

    def stand_in() -> SetNetwork:
        def call(pictures: Tensor) -> tuple[Tensor, Tensor | None]:
            classes = lite.class_probabilities(pictures) if with_classes else None
            return lite.embed(pictures), classes

        return SetNetwork("lite", lite.EXTRACTOR.entry(), call)

    return _chosen(choice.kind, (real, stand_in), ("FID", "FID-lite"), warnings)


def for_pairs(choice: Choice, warnings: list[str]) -> PairNetwork:
    """Return LPIPS, or its stand-in.

    Args:
        choice: Which.
        warnings: Takes one where `auto` falls back to the stand-in.

    Raises:
        MissingWeightsError: If the real one is asked for and its weights are not found.
        MissingPackageError: If its packages are not.
        ValueError: If there is no such device.
    """

    def real() -> PairNetwork:
        network = lpips.load(choice.weights, str(device_of(choice.device)))
        return PairNetwork("real", network.entry(), network.distances)

    def stand_in() -> PairNetwork:
        return PairNetwork("lite", lite.EXTRACTOR.entry(), lite.lpips_lite)

    return _chosen(choice.kind, (real, stand_in), ("LPIPS", "LPIPS-lite"), warnings)


def _chosen(
    kind: str,
    makers: tuple[Callable[[], Network], Callable[[], Network]],
    names: tuple[str, str],
    warnings: list[str],
) -> Network:
    """Return the real one or the stand-in."""
    real, stand_in = makers
    if kind == "lite":
        return stand_in()
    try:
        return real()
    except (MissingWeightsError, MissingPackageError) as error:
        if kind == "real":
            raise
        reason = str(error).split("; looked for")[0]
        warnings.append(
            f"{names[1]} in place of {names[0]}, the numbers do not compare (--backend lite to say "
            f"that it is meant): {reason}"
        )
    return stand_in()
