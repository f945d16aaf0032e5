"""Choice of a command's network on folders: the published one, or the shipped stand-in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from diffcache.command import device_of
from diffcache.eval.metrics import inception, lpips
from diffcache.eval.metrics.inception import MissingPackageError
from diffcache.eval.metrics.weights import MissingWeightsError
from diffcache.eval.runs.extractors import Extractors

# The options of both commands, with one meaning.
Backend = Annotated[
    Literal["auto", "real", "lite"],
    typer.Option(help="real: published weights; lite: shipped ones; auto: real if they are here."),
]
Weights = Annotated[str, typer.Option(metavar="PATH", help="Weights of the network; means --backend real.")]
Recursive = Annotated[bool, typer.Option("--recursive", help="Look into folders inside, too.")]


@dataclass(frozen=True)
class Choice:
    """Choice of the user."""

    kind: str = "auto"  # `auto` (the real one where its weights and packages are), `real` or `lite`
    weights: str = ""  # path of the weights, which means `real`; empty to look in the usual places
    device: str = "auto"  # device of the networks: `auto`, or as torch names it

    def __post_init__(self) -> None:
        for option, is_given in (("weights", self.weights), ("device", self.device != "auto")):
            if is_given and self.kind == "lite":
                raise ValueError(f"--{option} has no effect with --backend lite: leave one out")
        if self.weights and self.kind == "auto":
            object.__setattr__(self, "kind", "real")

    def load(self, name: Literal["inception", "lpips"], warnings: list[str], **settings: Any) -> Extractors:
        """Return the network that reads pictures: the real one, or the shipped extractor alone.

        `inception` reads the pictures of a set, `lpips` pairs of pictures; `warnings` takes one where `auto`
        falls back to the stand-in.

        Raises:
            MissingWeightsError: If the real one is asked for and its weights are not found.
            MissingPackageError: If its packages are not.
            ValueError: If there is no such device.
        """
        if self.kind == "lite":
            return Extractors()
        load: Any = {"inception": inception.load, "lpips": lpips.load}[name]
        metric = {"inception": "fid", "lpips": "lpips"}[name]
        try:
            device = str(device_of(self.device))
            network = load(self.weights or None, device=device, **settings)
        except (MissingWeightsError, MissingPackageError) as error:
            if self.kind == "real":
                raise
            reason = str(error).split("; looked for")[0]
            warnings.append(
                f"{metric.upper()}-lite in place of {metric.upper()}, the numbers do not compare "
                f"(--backend lite to say that it is meant): {reason}"
            )
            return Extractors()
        return Extractors(**{name: network}, device=device, entries={metric: network.entry()})
