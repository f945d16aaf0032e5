"""Show scripted demonstrations of the reaching task, which the small policy imitates."""

from __future__ import annotations

import torch
from torch import Tensor

from diffcache.pipelines.small import reach


class Demonstrator:
    """Goes to the goal through the nearest opening on a side it draws anew at every obstacle.

    The odds are even where both openings are as near, and better for the nearer one.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.sides = torch.zeros(0)

    def steer(self, scenes: reach.Scenes, position: Tensor) -> Tensor:
        """Return the next moves, ahead and to the left as in `Reach.act`, `[E, 2]`."""
        left, right, _ = reach.openings(scenes, position).unbind(1)
        blocked = (left > 0) | (right > 0)
        drawn = torch.rand(len(left), generator=self.generator) < torch.sigmoid(4 * (right - left))
        sides = self.sides if len(self.sides) else torch.zeros_like(left)
        sides = torch.where(sides == 0, torch.where(drawn, 1.0, -1.0), sides)
        self.sides = torch.where(blocked, sides, 0.0)
        angle = torch.where(self.sides > 0, left + 0.03, -right - 0.03)
        angle = torch.where(blocked, angle, 0.0)
        length = (scenes.goal - position).norm(dim=1).clamp_max(reach.REACH)
        move: Tensor = length[:, None] * torch.stack((angle.cos(), angle.sin()), 1)
        return move


def demonstrate(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return windows of successful scripted demonstrations.

    Half of the demonstrations start anywhere free instead of at the bottom, and one move in
    twelve is followed by a push, so that the policy sees what it will see when it strays.

    Args:
        count: Demonstrations to attempt.
        seed: Seed of scenes, sides and pushes.

    Returns:
        Observations `[N, OBSERVED, OBSERVATION]` and actions `[N, HORIZON, 2]` in units of `REACH`;
        the first action of a window is the one that led to its last observation.
    """
    scenes = reach.draw_scenes(count, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    anywhere = 2 * torch.rand(count, 2, generator=generator) - 1
    outside = reach.gaps(anywhere, anywhere, scenes.centers, scenes.radii).amin(1) > reach.MARGIN
    scattered = outside & (torch.arange(count) % 2 == 0)
    start = torch.where(scattered[:, None], anywhere, scenes.start)
    scenes = reach.Scenes(start, scenes.goal, scenes.centers, scenes.radii)
    demonstrator = Demonstrator(generator)
    episode = reach.Reach(scenes)
    seen, moves, angles = [], [], []
    for _ in range(reach.TIME):
        seen.append(episode.observe())
        move = demonstrator.steer(scenes, episode.position)
        move = torch.where(episode.running[:, None], move, 0.0)
        angles.append(reach.heading(scenes, episode.position))
        moves.append(reach.turned(move[:, None], angles[-1])[:, 0])
        episode.act(move[:, None])
        push = 0.03 * torch.randn(count, 2, generator=generator)
        push *= (torch.rand(count, 1, generator=generator) < 1 / 12) & episode.running[:, None]
        after = episode.position + push
        safe = reach.gaps(after, after, scenes.centers, scenes.radii).amin(1, keepdim=True) > 0.01
        episode.position = torch.where(safe, after, episode.position)
    parts = (torch.stack(part, 1)[episode.succeeded] for part in (seen, moves, angles))
    return _windows(*parts)


def _windows(seen: Tensor, moves: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Cut demonstrations `[E, TIME, ...]` into windows that start while the point still moves."""
    still = moves.new_zeros(len(moves), reach.HORIZON, 2)
    alive = moves.any(2)
    moves = torch.cat((still[:, :1], moves / reach.REACH, still), 1)
    windows = moves.unfold(1, reach.HORIZON, 1)[:, : reach.TIME].transpose(2, 3)
    return seen[alive], reach.turned(windows[alive], -angles[alive])
