"""Reuse each module's output at the steps that a trained router says (HarmoniCa)."""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from diffcache.errors import TablesError
from diffcache.features.base import Change
from diffcache.features.collect import Calibrated
from diffcache.features.combine import Combine
from diffcache.features.parts.instead import Reuse
from diffcache.features.parts.when import Table
from diffcache.features.schema import Entry, Schema
from diffcache.features.tables import Tables
from diffcache.ranges import Count, NotNegative
from diffcache.step import Site

DIT_SITES = ("transformer_blocks.{}.attn1", "transformer_blocks.{}.ff")


@dataclass(frozen=True)
class HarmoniCa(Calibrated):
    """Compute a module only where its trained score is above a threshold, else reuse its output.

    Reference: HarmoniCa, arXiv 2410.01723, section 4: a table of logits, one for every step and
    site (attention and feed-forward of each block, before the gate), is trained once on the
    model's own trajectories and knows nothing of prompt or sample.
    A site is computed at a step if `sigmoid(logit) > threshold`, and at the first step always.
    The paper routes two sites a block of DiT and three of PixArt; here every site of the model's
    anatomy has its column. A router belongs to its number of steps; other runs are refused.
    `diffcache.calibrate` trains one with the settings from `epochs` on, whose defaults are the
    official recipe for DiT-XL/2 at 10 steps (with `batch_size=32`).

    Args:
        threshold: Scores above it are computed; dimensionless; 0 turns the cache off, and from 1
            on only the first step is computed. In training, scores above it renew what is kept.
        tables: A trained router: `logits` `[T, sites]`, row 0 the first executed step, and in the
            header the names of the `sites` in their order. Tables or a file.
        epochs: Training: batches that are drawn; each takes one AdamW step a sampling step.
        rate: Training: learning rate of AdamW, without weight decay.
        beta: Training: weight of the penalty on the sum of a step's scores.
        beta_sites: Number of sites `beta` was chosen for (56 in DiT-XL/2): the penalty becomes
            `beta * beta_sites / sites`. None takes `beta` as it is.
        proxy: Training: which image error weighs a step's loss. `paper`: that of the router at
            this step alone, a squared norm, so that `beta` is larger by the values of a sample;
            `official`: what switching it on adds, steps before it being on, a mean square.
            `typical` (ours): as `paper`, with geometric means over the samples of a batch.
        refresh: Training: iterations (epochs times steps) between measurements of that error.
        relative: Training: weigh the squared error of a step by the image error it causes per
            unit, both measured together, not by the image error itself, so that the losses add up
            to an estimate of the image error and `beta` is how much of it one evaluation may cost
            (not in the paper, where steps whose outputs differ little count little twice).

    Raises:
        TablesError: If `tables` is no router.

    Examples:
        >>> method = HarmoniCa(tables="harmonica-20.safetensors")  # doctest: +SKIP
    """

    schema: ClassVar[Schema] = Schema(
        {
            "logits": Entry(("steps", "sites"), low=-1e4, high=1e4),
            "curve": Entry(("epochs", 5), optional=True),  # of the training
        },
        header={"sites": "names"},
    )
    trainer: ClassVar[str] = "diffcache.offline.harmonica.training:train"

    threshold: Change = 0.1
    tables: Tables | str | None = None
    epochs: Count = 2000
    rate: NotNegative = 0.01
    beta: NotNegative = 7e-8
    beta_sites: Count | None = None
    proxy: Literal["paper", "official", "typical"] = "official"
    refresh: Count = 500
    relative: bool = False

    def parts(self) -> Combine:
        """Return the router's steps of every site, reused; raise UncalibratedError if there is no router."""
        tables = self.measured()
        computed = self.computed()
        steps = {
            site: computed[:, column].nonzero().flatten().tolist()
            for column, site in enumerate(tables.header["sites"])
        }
        return Combine(Table(steps, total=tables.steps), Reuse(), Site.MODULE)

    def computed(self) -> Tensor:
        """Return which site is computed at which step, bool `[T, sites]`, as the router says, which it needs."""
        logits = self.measured()["logits"]
        computed = (torch.sigmoid(logits) > self.threshold) | (self.threshold == 0)
        computed[0] = True
        return computed

    @property
    def compute_ratio(self) -> float:
        """Part of the sites' evaluations that is computed, above 0 to 1; sites count alike."""
        return float(self.computed().double().mean())

    def check_model(self, facts: Mapping[str, Any]) -> None:
        """Raise TablesError unless the router was trained on this model and scheduler.

        An official checkpoint says nothing of its model; only the class is compared.
        """
        if not isinstance(self.tables, Tables) or not self.tables.header.get("official"):
            super().check_model(facts)
        elif facts.get("model") != self.tables.header.get("model"):
            raise TablesError(
                f"tables={self.tables!r}: an official router of {self.tables.header.get('model')}, "
                f"this model is {facts.get('model')!r}"
            )

    @classmethod
    def load_official(
        cls,
        path: str | Path,
        threshold: float = 0.1,
        sites: Sequence[str] = DIT_SITES,
        model: str = "DiTTransformer2DModel",
    ) -> HarmoniCa:
        """Return the method of a checkpoint written by the official training script.

        Only tensors, plain data and the `argparse.Namespace` of the script's arguments are read;
        no other class or function in the file is ever called.

        Args:
            path: A file of `{"routers": ..., "opt": ..., "args": ...}`; router T - 1 is that of the
                first executed step.
            threshold: Scores above it are computed.
            sites: Names of a block's sites in the router's order, with `{}` for its number.
            model: Class of the denoiser it belongs to.

        Raises:
            TablesError: If the file is missing, holds anything else, or is no router.
        """
        probs, arguments = _read_official(Path(path))
        steps, width = probs.shape
        if not sites or width % len(sites):
            raise TablesError(
                f"{str(path)!r}: {width} scores a step do not share out to blocks of "
                f"{len(sites)} sites ({', '.join(sites)}); give the block's sites in their order"
            )
        planned = arguments.get("num_sampling_steps", steps)
        if planned != steps:
            raise TablesError(f"{str(path)!r}: {steps} routers, but its arguments say {planned} sampling steps")
        names = [site.format(block) for block in range(width // len(sites)) for site in sites]
        header = {"method": cls.name, "steps": steps, "sites": names, "model": model}
        header["official"] = True
        return cls(threshold, Tables(header, {"logits": probs.flip(0)}))


def _read_official(path: Path) -> tuple[Tensor, dict[str, Any]]:
    """Return the logits `[T, sites]` of an official checkpoint in file order, and its arguments."""
    if not path.is_file():
        raise TablesError(f"{str(path)!r}: no such file")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            held = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise TablesError(
            f"{str(path)!r}: not an official router, which holds tensors, plain data and an "
            f"argparse.Namespace and nothing else ({reason})"
        ) from error
    routers = held.get("routers") if isinstance(held, dict) else None
    if not isinstance(routers, dict):
        raise TablesError(f"{str(path)!r}: has no `routers`; it is no official router checkpoint")
    wanted = [f"{number}.prob" for number in range(len(routers))]
    rows = [routers.get(key) for key in wanted]
    if not rows or not all(isinstance(row, Tensor) and row.ndim == 1 for row in rows):
        odd = [key for key in routers if not re.fullmatch(r"\d+\.prob", str(key))]
        raise TablesError(
            f"{str(path)!r}: its `routers` must be '0.prob' to 'T-1.prob', one score a site; "
            f"found {odd or list(routers)}"
        )
    if len({len(row) for row in rows if isinstance(row, Tensor)}) > 1:
        raise TablesError(f"{str(path)!r}: its routers have different numbers of sites")
    arguments = held.get("args")
    plain = vars(arguments) if isinstance(arguments, argparse.Namespace) else {}
    return torch.stack([row.float() for row in rows if isinstance(row, Tensor)]), plain
