"""Train the small policy that reaches a goal round obstacles.

The policy imitates scripted demonstrations: it learns to tell the actions from noisy chunks of
them at the timesteps its scheduler uses (arXiv 2303.04137, section II).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from diffcache.eval.workshop.small.job import Job, Settings
from diffcache.pipelines.policy import DiffusionPolicyPipeline, rollout
from diffcache.pipelines.small import reach
from diffcache.pipelines.small.demonstrations import demonstrate

WINDOWS = 16  # of a demonstration, and on average some more
EPISODES = 64


class ReachTraining(Job):
    """Imitate demonstrations; an example is a window of one."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings, folder)
        self.seen, self.moves = demonstrate(-(-settings.examples // WINDOWS), settings.seed)
        if len(self.seen) < settings.examples:
            raise ValueError(f"examples={settings.examples}, but there are {len(self.seen)}")
        self.pipe = reach.build()

    def build(self) -> nn.ModuleDict:
        """Build the network."""
        return nn.ModuleDict({"transformer": reach.build().transformer})

    def loss(self, models: nn.ModuleDict, drawn: Mapping[str, Any], generator: torch.Generator) -> Tensor:
        """Return the mean square error of the actions, in units of `reach.REACH`."""
        chosen = drawn["chosen"]
        seen, moves = self.seen[chosen], self.moves[chosen]
        scheduler = self.pipe.scheduler
        noise = torch.randn(moves.shape, generator=generator)
        times = torch.randint(scheduler.config.num_train_timesteps, (len(moves),), generator=generator)
        noisy = scheduler.add_noise(moves, noise, times)
        return functional.mse_loss(models["transformer"](noisy, times, seen), moves)

    @torch.no_grad()
    def measure(self, models: nn.ModuleDict) -> dict[str, float]:
        """Measure the share of held-out episodes that succeed, with all steps."""
        environment = reach.Reach(reach.draw_scenes(EPISODES, reach.HELD_OUT))
        steps = self.pipe.scheduler.config.num_train_timesteps
        rollout(self.pipeline(models), environment, num_inference_steps=steps, seed=0)
        return {"succeeded": float(environment.succeeded.float().mean())}

    def pipeline(self, models: nn.ModuleDict) -> DiffusionPolicyPipeline:
        """Put the weights into the pipeline."""
        self.pipe.transformer.load_state_dict(models["transformer"].state_dict())
        self.pipe.transformer.eval()
        self.pipe.set_progress_bar_config(disable=True)
        return self.pipe
