"""Rewards of samples for their prompts: PickScore of pictures, or functions of the user's.

Weights are looked for as `diffcache.eval.metrics.weight_files` says and never downloaded. PickScore (Kirstain et al.,
arXiv 2305.01569) is a CLIP model of transformers. ImageReward, HPSv2, GenEval and DPG-Bench need packages that pin
other versions of transformers: run those where they are installed, on the samples of a run.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from diffcache.errors import DiffcacheError
from diffcache.eval.metrics import weight_files
from diffcache.eval.metrics.clip import ClipScore, classes
from diffcache.eval.metrics.pixels import check_pictures
from diffcache.pipelines.load import named_function

OWN = "reward_"  # begins the keys of the user's functions
NAMES = {"pickscore": "pick_score"}  # name on the command line -> key of the metric


class RewardError(DiffcacheError, RuntimeError):
    """A reward could not be computed."""


class Reward(Protocol):
    """Scores pictures, or films, for their prompts."""

    def __call__(self, samples: Tensor, prompts: Sequence[str], /) -> Tensor:
        """Return one score a sample, float [N]; more is better.

        Args:
            samples: Pictures uint8 [N, 3, H, W], or films uint8 [N, F, 3, H, W].
            prompts: N texts.
        """


@dataclass
class PickScore:
    """`exp(logit scale) cos(image features, text features)` of PickScore's CLIP model.

    Args:
        device: Device of the model, as torch names it.

    Raises:
        MissingWeightsError: If there is no such folder.
        MissingPackageError: If transformers cannot import its CLIP.
    """

    device: str = "cpu"  # device of the model, as torch names it
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder = weight_files.find("pickscore")
        classes()

    @cached_property
    def _scorer(self) -> ClipScore:
        return ClipScore(self.folder, self.device)

    def __call__(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the score of each picture for its own prompt, float64 [N].

        Args:
            pictures: uint8 [N, 3, H, W].
            prompts: N texts.
        """
        scale: Tensor = self._scorer.model.logit_scale.double().exp().cpu()
        return scale * self._scorer.cosines(pictures, prompts)

    def entry(self) -> dict[str, Any]:
        """Return the back end's entry in a record."""
        name = self.folder.name
        return {"backend": "real", "extractor": name, "sha256": weight_files.sha256(self.folder)}


@dataclass
class Own:
    """A function of the user's.

    Args:
        named: `module:function`; the module must be importable.

    Raises:
        ValueError: If it is not of that form, or names nothing that can be called.
    """

    named: str  # `module:function`; the module must be importable

    def __post_init__(self) -> None:
        self.function = named_function("reward", self.named)

    def __call__(self, samples: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the rewards that the function gives, float64 [N].

        Args:
            samples: Pictures uint8 [N, 3, H, W], or films uint8 [N, F, 3, H, W].
            prompts: N texts.
        """
        return torch.as_tensor(self.function(samples, prompts)).detach().double().cpu()

    def entry(self) -> dict[str, Any]:
        """Return the back end's entry in a record, with the title of the metric and a SHA-256 of the code's files."""
        module, _, title = self.named.partition(":")
        names = {module, getattr(self.function, "__module__", None)}
        files = sorted({getattr(sys.modules.get(str(name)), "__file__", None) or "" for name in names} - {""})
        code = "".join(weight_files.sha256(Path(file)) for file in files)
        found = {"backend": "user", "extractor": self.named, "title": title}
        return found | ({"sha256": hashlib.sha256(code.encode()).hexdigest()} if code else {})


def load(names: str, device: str = "cpu") -> dict[str, PickScore | Own]:
    """Return rewards by the key of their metric; requirements are checked, models load when asked.

    Args:
        names: Keys of `NAMES` and `module:function`, with commas between them; "" for none.
        device: Device of published rewards, as torch names it.

    Raises:
        ValueError: If a name is none, or is given twice.
        MissingError: If weights or a package are missing.
    """
    found: dict[str, PickScore | Own] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        module, _, function = name.partition(":")
        if name not in NAMES and not (module and function):
            raise ValueError(f"reward {name}: must be {', '.join(NAMES)} or module:function")
        key = NAMES.get(name) or OWN + function
        if key in found:
            raise ValueError(f"reward {names}: two of them are {key}; give one at a time")
        found[key] = PickScore(device) if name in NAMES else Own(name)
    return found


def score(reward: Reward, samples: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return the checked reward of each sample, float64 [N].

    Args:
        reward: Reward that scores the samples.
        samples: Pictures uint8 [N, 3, H, W], or films uint8 [N, F, 3, H, W].
        prompts: N texts.

    Raises:
        ValueError: If there are not as many prompts as samples.
        RewardError: If it did not return one finite number a sample.
    """
    is_film = samples.ndim == 5
    check_pictures(samples.flatten(0, 1) if is_film else samples)
    kind = "film" if is_film else "picture"
    if len(prompts) != len(samples):
        raise ValueError(f"{len(samples)} {kind}s need as many prompts, not {len(prompts)}")
    found = reward(samples, prompts)
    if found.shape != (len(samples),):
        raise RewardError(f"the reward returned {list(found.shape)}, not [{len(samples)}]")
    if not bool(found.isfinite().all()):
        raise RewardError(f"the reward of {kind} {int((~found.isfinite()).nonzero()[0])} is not a finite number")
    return found
