"""Jobs of the trainer: settings, modules, loss and measures of a small model to train."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file
from torch import Tensor, nn

from diffcache.eval.workshop.small.shipping import save_pipeline

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Value = TypeVar("Value")
SETTINGS = Path(__file__).parent / "settings"
JOBS = {  # name -> class, and the shipped model it is for
    "sticker-autoencoder": ("sticker_autoencoder:Autoencoder", "sticker-flux"),
    "sticker-text": ("sticker_text:Text", "sticker-flux"),
    "sticker-judge": ("sticker_judge:JudgeJob", "sticker-judge"),
    "sticker-features": ("sticker_features:Features", "sticker-features"),
    "sticker-flux": ("sticker_flux:Flux", "sticker-flux"),
    "sticker-dit": ("sticker_dit:Dit", "sticker-dit"),
    "sticker-kontext": ("sticker_kontext:Kontext", "sticker-kontext"),
    "sticker-video-autoencoder": ("sticker_video_autoencoder:VideoAutoencoder", "sticker-causal"),
    "sticker-video-decoder": ("sticker_video_autoencoder:VideoDecoder", "sticker-causal"),
    "sticker-causal": ("sticker_causal:Causal", "sticker-causal"),
    "sticker-wan": ("sticker_wan:Wan", "sticker-wan"),
    "reach-policy": ("train_reach:ReachTraining", "reach-policy"),
    "recall-llama": ("train_recall:Recall", "recall-llama"),
    "chain-llada": ("chain:Chain", "chain-llada"),
    "chain-llada-probe": ("chain:Chain", "chain-llada-probe"),
    "chain-llada-walk": ("chain:Chain", "chain-llada-walk"),
    "chain-block": ("chain:Chain", "chain-block"),
    "chain-guide": ("chain:Chain", "chain-guide"),
    "chain-guide-probe": ("chain:Chain", "chain-guide-probe"),
}


@dataclass(frozen=True)
class Settings:
    """Settings of a training, read from the file of its model in `settings`.

    Attributes:
        steps: Length of the run in steps.
        batch: Examples in a step.
        examples: Number of different examples.
        seed: Seed of weights, examples, order and noise.
        rate: Highest learning rate of AdamW.
        muon: Highest learning rate of Muon, which trains the matrices and kernels of `muon_in`;
            0 trains them with AdamW.
        muon_in: Regular expression found in the names of the parameters that Muon trains.
        factors: Factors of the learning rate by module; 1 where it says nothing.
        average: Decay of the averaged weights a step.
        warmup: Steps over which the learning rate rises.
        cooldown: Last share of the run, over which the learning rate falls to a fiftieth.
        save_every: Steps between two checkpoints.
        measure_every: Steps between two measurements on held-out examples.
        start: Name of a shipped model whose weights a run without a checkpoint starts from; blocks
            that it has not keep their own. None if it is empty.
        model: Name of the shipped model that the training is for, which names the file.
    """

    steps: int
    batch: int
    examples: int
    seed: int = 0
    rate: float = 1e-3
    muon: float = 0.0
    muon_in: str = "blocks"
    factors: Mapping[str, float] = field(default_factory=dict)
    average: float = 0.999
    warmup: int = 100
    cooldown: float = 0.3
    save_every: int = 250
    measure_every: int = 1000
    start: str = ""
    model: str = ""


class Job(ABC):
    """A model to train: its modules, its loss, and measures on held-out examples.

    Args:
        settings: Settings of the training.
        folder: Folder of the run, where examples are kept.

    Attributes:
        on_gpu: Whether `draw` puts all that the loss needs into tensors, so that it may be on a GPU.
        held: Held-out examples, as `draw` returns them where `measure` is this one.
        together: Held-out examples that are measured at once.
        call: Arguments that every call of the pipeline needs.
    """

    on_gpu = False
    together = 64
    call: Mapping[str, Any] | None = None
    held: Any

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.compiled = False  # whether the loss may compile its costly part
        self.step = 0  # number of the step that a loss is of
        self._compiled: dict[nn.Module, Any] = {}

    def compile(self, model: nn.Module) -> Any:
        """Return a model compiled, once, if the run's precision says so; else as it is."""
        if not self.compiled or not model.training:
            return model
        if model not in self._compiled:
            self._compiled[model] = torch.compile(model)
        return self._compiled[model]

    @abstractmethod
    def build(self) -> nn.ModuleDict:
        """Build the modules, untrained."""

    def draw(self, chosen: Tensor, generator: torch.Generator) -> dict[str, Any]:
        """Draw what the loss of a step needs: tensors on the CPU, and choices that it follows.

        Args:
            chosen: Numbers of the examples, int64 [B].
            generator: Source of the drawing's randomness, on the CPU.
        """
        del generator
        return {"chosen": chosen}

    @abstractmethod
    def loss(self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator) -> Tensor:
        """Return the loss of examples, a 0-d tensor.

        Args:
            models: Modules as `build` makes them.
            drawn: Examples as `draw` returned them, their tensors on the device of the models.
            generator: Source of the loss's randomness, on the device of the models.
        """

    @torch.no_grad()
    def measure(self, models: nn.ModuleDict) -> dict[str, float]:
        """Measure averaged weights on held-out examples, by name: their loss, with the same noise each time."""
        generator, losses = seeded(5), []
        for part in zip(*(column.split(self.together) for column in self.held.values()), strict=True):
            drawn = {name: value.to(generator.device) for name, value in zip(self.held, part, strict=True)}
            losses.append(float(self.loss(models, drawn, generator)))
        return {"held_loss": sum(losses) / len(losses)}

    def pipeline(self, models: nn.ModuleDict) -> DiffusionPipeline | None:
        """Put the pipeline that is shipped together; None where there is none, or another training ships it."""
        del models
        return None

    def export(self, models: nn.ModuleDict, directory: Path) -> None:
        """Write averaged weights as they are shipped, of a pipeline in bfloat16.

        Args:
            models: Averaged modules.
            directory: Directory of the shipped model.
        """
        if pipe := self.pipeline(models):
            save_pipeline(pipe, directory, self.call)


def spread(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """Yield a function's results in order; processes on all cores compute those of many items."""
    if len(items) < 1000:
        yield from map(function, items)
        return
    with ProcessPoolExecutor() as pool:
        yield from pool.map(function, items, chunksize=32)


def draw_each(sample: Callable[..., Value], count: int, seed: int, *salt: int, **how: Any) -> list[Value]:
    """Return what a function draws, each from a seed of its own: `seed`, its number, `salt`."""
    return list(spread(partial(_numbered, sample, seed, salt, how), range(count)))


def _numbered(
    sample: Callable[..., Value], seed: int, salt: tuple[int, ...], how: Mapping[str, Any], number: int
) -> Value:
    return sample(np.random.default_rng([seed, number, *salt]), **how)


def seeded(seed: int) -> torch.Generator:
    """Return a source of randomness on the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def read_settings(name: str) -> Settings:
    """Read the settings of a training from the file of its model.

    Args:
        name: One of `JOBS`.

    Raises:
        ValueError: If there is no such training, or the file names a setting that there is not.
    """
    if name not in JOBS:
        raise ValueError(f"unknown training {name!r}; use one of {', '.join(JOBS)}")
    path = SETTINGS / f"{JOBS[name][1]}.toml"
    values = tomllib.loads(path.read_text(encoding="utf-8"))[name]
    known = [one.name for one in fields(Settings)]
    if unknown := [key for key in values if key not in known]:
        raise ValueError(f"{path}: no setting {unknown[0]!r}; use {', '.join(known)}")
    return Settings(**values, model=JOBS[name][1])


def start_from(models: nn.ModuleDict, directory: Path) -> None:
    """Load the weights of a shipped model into modules by their names; new ones keep theirs.

    Args:
        models: Modules of a training.
        directory: Directory of the shipped model, with a folder for each module.

    Raises:
        ValueError: If a module has no file there, or has another shape or fewer weights.
    """
    for name, model in models.items():
        files = sorted((directory / name).glob("*.safetensors"))
        if len(files) != 1:
            raise ValueError(f"start={directory.name!r}: it ships no weights of {name}")
        try:
            found = model.load_state_dict(load_file(files[0]), strict=False)
        except RuntimeError as error:
            raise ValueError(f"start={directory.name!r}: {name} has other shapes") from error
        if found.unexpected_keys:
            raise ValueError(f"start={directory.name!r}: {name} has no {found.unexpected_keys[0]}")


def load_job(name: str, folder: Path, changes: Iterable[str] = ()) -> Job:
    """Build a training from its settings.

    Args:
        name: One of `JOBS`.
        folder: Folder of the run, with the checkpoints of the trainings that it builds on.
        changes: Settings for this run alone, such as "batch=64".

    Raises:
        ValueError: If a change names no number among the settings, or gives none.
    """
    settings = read_settings(name)
    for change in changes:
        key, _, value = change.partition("=")
        kind = type(getattr(settings, key, None))
        if kind not in (int, float):
            raise ValueError(f"--set {change}: {key!r} is no number among the settings")
        settings = replace(settings, **{key: kind(value)})
    module, _, member = JOBS[name][0].partition(":")
    made: Job = getattr(import_module(f"diffcache.eval.workshop.small.{module}"), member)(settings, folder)
    return made
