"""Checkpoints of the training scripts: what was trained so far, written whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from diffcache.eval.workshop.small.loop import Average


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file whole or not at all.

    Args:
        path: Path of the file; its folder is made.
        tensors: Tensors of any shapes and dtypes, none sharing memory.
        metadata: Text by name, for the file's header.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    save_file({name: value.contiguous() for name, value in tensors.items()}, part, metadata)
    part.replace(path)


class Stateful(Protocol):
    """Object whose state a checkpoint holds, such as an optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a state."""


def save(
    path: Path,
    steps: tuple[int, int],
    weights: nn.Module,
    optimizer: Stateful,
    average: Average,
    *,
    weights_file: bool,
) -> None:
    """Save all that a training needs to go on.

    Args:
        path: `NAME.state`.
        steps: The next one to take, and how many the run has.
        weights: The modules that are trained.
        optimizer: Optimizer of these modules.
        average: Averaged weights of these modules.
        weights_file: Also write the averaged weights to `NAME.safetensors`.
    """
    step, total = steps
    state = {"step": step, "weights": weights.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"average": average.weights, "average_steps": average.steps}
    state |= {"total": total, "random": torch.get_rng_state()}
    part = path.with_name(path.name + ".part")
    torch.save(state, part)
    part.replace(path)
    if weights_file:
        write_tensors(path.with_suffix(".safetensors"), average.weights)


def restore(
    path: Path, weights: nn.Module, optimizer: Stateful, average: Average, total: int
) -> int:
    """Load what `save` wrote, torch's random numbers included, and return the next step.

    Args:
        path: `NAME.state`.
        weights: The modules that are trained.
        optimizer: Optimizer of these modules.
        average: Averaged weights of these modules.
        total: Steps of the run that goes on.

    Raises:
        ValueError: If the checkpoint is of a run of another length, whose learning rate was
            another one.
    """
    state = torch.load(path, weights_only=True)
    if state.get("total", total) != total:
        raise ValueError(
            f"updates={total}: {path} is of a run of {state['total']}; resume it with as many"
        )
    weights.load_state_dict(state["weights"])
    optimizer.load_state_dict(state["optimizer"])
    # Averages of masks with infinities were NaN in older files.
    average.weights = {
        name: torch.where(value.isnan(), state["weights"][name].to(value.dtype), value)
        for name, value in state["average"].items()
    }
    average.steps = state["average_steps"]
    if "random" in state:
        torch.set_rng_state(state["random"])
    return int(state["step"])
