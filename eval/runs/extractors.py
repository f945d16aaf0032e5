"""Networks that read samples: the shipped extractor always, real networks where their weights are.

An extractor turns samples into columns, one number or vector a sample. A key that ends in `_lite`
comes from the shipped one; the same key without the ending from a real one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor

from diffcache.command import device_of
from diffcache.eval.metrics import clip, i3d, inception, lite, lpips, reward
from diffcache.eval.metrics.inception import MissingPackageError
from diffcache.eval.metrics.weight_files import MissingWeightsError

Columns = dict[str, Tensor]
_ALONE = threading.Lock()  # a function of the user's is called by one thread at a time
_REAL_SETS = ("fid", "kid", "is", "precision", "recall", "density", "coverage")


@dataclass(frozen=True)
class Extractors:
    """The networks that are at hand."""

    inception: inception.Inception | None = None  # features of pictures, for FID and the like
    lpips: lpips.LPIPS | None = None  # distances of pairs
    clip: clip.ClipScore | None = None  # scores of pictures for prompts
    i3d: i3d.I3D | None = None  # features of films, for FVD
    # Scores of pictures for prompts, by the key of their metric
    rewards: Mapping[str, reward.Reward] = field(default_factory=dict)
    reward_name: str = ""  # names of those
    device: str = "cpu"  # device of the pictures; `cpu` or an accelerator with float64
    # Entries of a record on the real networks, by metric
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)  # real metrics that are left out, and why

    def placed(self, pictures: Tensor) -> Tensor:
        """Return pictures on the device where they are seen."""
        return pictures.to(self.device)

    def describe(self, key: str) -> dict[str, Any]:
        """Return the back end of a metric, for the record."""
        if "_lite" in key:
            return lite.ENTRY
        base = key.removesuffix("_change").removesuffix("_to_uncached")
        return self.entries.get(base, {"backend": "exact"})

    @property
    def identity(self) -> list[Any]:
        """Facts that the values of samples depend on."""
        kind = self.device.partition(":")[0]
        return [lite.ENTRY, self.entries, self.reward_name, kind]

    def of_pictures(self, pictures: Tensor, prompts: Sequence[str]) -> Columns:
        """Return the columns of pictures by themselves.

        Pictures are uint8 [N, 3, H, W], with a prompt for each. Columns are `features_lite` [N, D],
        `probabilities_lite` [N, C], and of the real networks `features`, `probabilities`, `clip_score`, and every
        reward under its key.
        """
        there = self.placed(pictures)
        features, probabilities = lite.embed_and_classify(there)
        found: Columns = {"features_lite": features, "probabilities_lite": probabilities}
        if self.inception is not None:
            seen = self.inception(there)
            found["features"] = seen.pool
            if seen.logits is not None:
                found["probabilities"] = seen.probabilities()
        if self.clip is not None:
            found["clip_score"] = self.clip(pictures, prompts)
        for key, scorer in self.rewards.items():
            found[key] = _rewarded(scorer, pictures, prompts)
        return found

    def of_real(self, samples: Tensor | Sequence[Tensor]) -> Columns:
        """Return the columns of `of_pictures` or `of_films` that need no prompt: the features.

        Pictures are uint8 [N, 3, H, W]; a sequence is of films.
        """
        if not isinstance(samples, Tensor):
            return self._features_of_films(samples)
        there = self.placed(samples)
        found: Columns = {"features_lite": lite.embed(there)}
        if self.inception is not None:
            found["features"] = self.inception(there).pool
        return found

    def of_films(self, films: Sequence[Tensor], prompts: Sequence[str]) -> Columns:
        """Return the columns of films by themselves.

        Each film is uint8 [F, 3, H, W], with a prompt for each. Columns are `features_lite` [N, D], with I3D
        `features` [N, 400], and every reward under its key.
        """
        found = self._features_of_films(films)
        for key, scorer in self.rewards.items():
            each = [_rewarded(scorer, film[None], [said]) for film, said in zip(films, prompts, strict=True)]
            found[key] = torch.cat(each)
        return found

    def _features_of_films(self, films: Sequence[Tensor]) -> Columns:
        found: Columns = {"features_lite": lite.clip_features([self.placed(film) for film in films])}
        if self.i3d is not None:
            found["features"] = self.i3d.features(films)
        return found

    def of_pairs(self, theirs: Tensor, mine: Tensor) -> Columns:
        """Return `lpips_lite` [N] and, with AlexNet, `lpips` [N] of pairs uint8 [N, 3, H, W]."""
        found: Columns = {"lpips_lite": lite.lpips_lite(theirs, mine)}
        if self.lpips is not None:
            found["lpips"] = self.lpips.distances(theirs, mine)
        return found


def _rewarded(scorer: reward.Reward, samples: Tensor, prompts: Sequence[str]) -> Tensor:
    with _ALONE:
        return reward.score(scorer, samples, prompts)


def at_hand(
    device: str, films: bool, reward_name: str = "", convention: str = "torch-fidelity", in_words: bool = True
) -> Extractors:
    """Return the networks whose weights are found here; a wrong weight file is an error.

    `reward_name` are names of rewards, for `reward.load`; `convention` is `torch-fidelity` or `clean`, the way of
    preparing pictures for Inception; CLIP reads prompts that are `in_words`, no class numbers.

    Raises:
        WrongWeightsError: If a weight file is another one than it should be.
        MissingError: If a reward lacks its weights or its package.
        ValueError: If `reward_name` names nothing that can be called.
    """
    loaders: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
        "lpips": (lambda: lpips.load(device=device), ("lpips",))
    }
    if films:
        loaders["i3d"] = (lambda: i3d.I3D(device=device), ("fvd", "kvd"))
    else:
        load_inception = partial(inception.load, convention=convention, device=device)
        loaders["inception"] = (load_inception, _REAL_SETS)
        if in_words:
            loaders["clip"] = (lambda: clip.ClipScore(device=device), ("clip_score",))
    networks, entries, lacking = dict[str, Any](), dict[str, Any](), dict[str, str]()
    for name, (load, metrics) in loaders.items():
        try:
            networks[name] = load()
            entries |= dict.fromkeys(metrics, networks[name].entry())
        except (MissingWeightsError, MissingPackageError) as error:
            lacking |= dict.fromkeys(metrics, str(error).split("; looked for")[0])
    networks["rewards"] = reward.load(reward_name, device)
    entries |= {key: one.entry() for key, one in networks["rewards"].items()}
    return Extractors(**networks, reward_name=reward_name, device=device, entries=entries, lacking=lacking)


# The options of both commands, with one meaning.
Backend = Annotated[
    Literal["auto", "real", "lite"],
    typer.Option(help="real: published weights; lite: shipped ones; auto: real if they are here."),
]
Weights = Annotated[str, typer.Option(metavar="PATH", help="Weights of the network; means --backend real.")]
Recursive = Annotated[bool, typer.Option("--recursive", help="Look into folders inside, too.")]


@dataclass(frozen=True)
class Choice:
    """Choice of the user: the back end and where its weights are."""

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
