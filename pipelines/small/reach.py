"""A simulated task for policies: move a point to a goal, round obstacles, in the plane.

Kinematic and vectorised: hundreds of episodes run at once. Between start and goal lie three round
obstacles; the straight way is blocked, and both ways round are shown in the demonstrations, so
that the mean of what was shown leads into the obstacle.

    pipe = load()
    episodes = Reach(draw_scenes(256, seed=7))
    rollout(pipe, episodes)
    print(episodes.succeeded.float().mean())
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from diffcache.pipelines.policy import DiffusionPolicyPipeline, scheduler
from diffcache.pipelines.policy_transformer import TransformerForDiffusion
from diffcache.pipelines.shipped_models import MODELS, present

DIRECTORY = MODELS / "reach-policy"
OBSTACLES = 3
REACH = 0.1  # longest move in one time step; the arena is about 2 wide
NEAR = 0.05  # distance at which the goal is reached
TIME = 40  # time steps of an episode
HORIZON = 8
ACTION_STEPS = 4
OBSERVED = 2
OBSERVATION = 6
MARGIN = 0.08  # how far demonstrations stay away from obstacles
HELD_OUT = 1_000_000  # seeds from here on are never trained on


@dataclass(frozen=True)
class Scenes:
    """Places of start, goal and obstacles, for E episodes.

    Attributes:
        start: `[E, 2]`.
        goal: `[E, 2]`.
        centers: `[E, OBSTACLES, 2]`.
        radii: `[E, OBSTACLES]`.
    """

    start: Tensor
    goal: Tensor
    centers: Tensor
    radii: Tensor

    def __len__(self) -> int:
        """Return the number of episodes."""
        return len(self.start)

    def take(self, chosen: Tensor) -> Scenes:
        """Return some of the episodes, by index or mask."""
        return Scenes(*(getattr(self, field.name)[chosen] for field in fields(self)))


def draw_scenes(count: int, seed: int) -> Scenes:
    """Draw scenes in which an obstacle blocks the straight way and every gap is passable.

    `count` is the number of episodes; a `seed` for tests is `HELD_OUT` or above.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator)

    drawn: list[Scenes] = []
    while sum(map(len, drawn)) < count:
        tries = 4 * count + 64
        start = torch.stack((uniform(-0.8, 0.8, tries), uniform(-1.0, -0.8, tries)), 1)
        goal = torch.stack((uniform(-0.8, 0.8, tries), uniform(0.8, 1.0, tries)), 1)
        radii = uniform(0.15, 0.28, tries, OBSTACLES)
        centers = torch.stack((uniform(-0.8, 0.8, tries, OBSTACLES), uniform(-0.45, 0.45, tries, OBSTACLES)), 2)
        between = torch.cdist(centers, centers) - radii[:, :, None] - radii[:, None, :]
        between += 9 * torch.eye(OBSTACLES)
        blocked = gaps(start, goal, centers, radii).amin(1) < -0.05
        scenes = Scenes(start, goal, centers, radii)
        drawn.append(scenes.take(blocked & (between.amin((1, 2)) > 2.5 * MARGIN)))
    parts = zip(*((s.start, s.goal, s.centers, s.radii) for s in drawn), strict=True)
    return Scenes(*(torch.cat(part)[:count] for part in parts))


def gaps(begin: Tensor, end: Tensor, centers: Tensor, radii: Tensor) -> Tensor:
    """Return how far the segments from `begin` to `end` stay from obstacles, `[E, OBSTACLES]`.

    Negative where a segment passes through one. Points are `[E, 2]`.
    """
    way, to = (end - begin)[:, None], centers - begin[:, None]
    share = ((to * way).sum(2) / way.square().sum(2).clamp_min(1e-12)).clamp(0, 1)
    away: Tensor = (to - share[..., None] * way).norm(dim=2) - radii
    return away


def shortened(move: Tensor) -> Tensor:
    """Return moves `[E, 2]`, those longer than `REACH` shortened to it."""
    made: Tensor = move * (REACH / move.norm(dim=1, keepdim=True).clamp_min(REACH))
    return made


class Reach:
    """Episodes of the task, side by side.

    An episode succeeds when the point comes within `NEAR` of the goal before `TIME` runs out and before it touches an
    obstacle; moves longer than `REACH` are shortened to it. If `numbers` are given, only these episodes run; the
    others keep their place, and with it their noise.
    """

    def __init__(self, scenes: Scenes, numbers: Sequence[int] | None = None) -> None:
        self.scenes = scenes
        self.chosen = torch.full((len(scenes),), numbers is None)
        self.chosen[list(numbers or ())] = True
        self.position = scenes.start.clone()
        self.past = scenes.start.clone()
        self.touched = torch.zeros(len(scenes), dtype=torch.bool)
        self.succeeded = torch.zeros(len(scenes), dtype=torch.bool)
        self.time = 0
        self.path = [self.position.clone()]

    @property
    def running(self) -> Tensor:
        """Mask of the episodes that are not over, bool `[E]`."""
        return self.chosen & ~(self.touched | self.succeeded) & (self.time < TIME)

    def observe(self) -> Tensor:
        """Return the readings at the last two positions, `[E, OBSERVED, OBSERVATION]` float32."""
        return torch.stack([observation(self.scenes, p) for p in (self.past, self.position)], 1)

    def act(self, actions: Tensor) -> None:
        """Make moves one after the other, `[E, n, 2]`; episodes that are over stay as they are.

        A move goes ahead and to the left as seen from the point, looking at the goal, before the first move.
        """
        scenes = self.scenes
        for move in turned(actions, heading(scenes, self.position)).unbind(1):
            running = self.running
            able = running[:, None] & move.isfinite().all(1, True)
            move = torch.where(able, shortened(move), 0.0)
            after = self.position + move
            hit = gaps(self.position, after, scenes.centers, scenes.radii).amin(1) < 0
            self.touched |= running & hit
            self.succeeded |= running & ~hit & ((after - scenes.goal).norm(dim=1) < NEAR)
            self.past, self.position = self.position, after
            self.path.append(after.clone())
            self.time += 1


def heading(scenes: Scenes, position: Tensor) -> Tensor:
    """Return the direction of the goal from `position [E, 2]`, in radians, `[E]`."""
    way = scenes.goal - position
    return torch.atan2(way[:, 1], way[:, 0])


def turned(moves: Tensor, angle: Tensor) -> Tensor:
    """Return moves `[..., n, 2]` turned to the left by `angle [...]`, in radians."""
    cos, sin = angle.cos()[..., None], angle.sin()[..., None]
    x, y = moves.unbind(-1)
    return torch.stack((cos * x - sin * y, sin * x + cos * y), -1)


def openings(scenes: Scenes, position: Tensor) -> Tensor:
    """Return the nearest free directions on both sides of the goal, from `position [E, 2]`.

    A direction is taken where an obstacle that is nearer than the goal comes closer to it than `MARGIN`.

    Returns:
        `[E, 3]`: how far to the left of the goal, how far to its right, both in radians and 0 where the way is free,
        and the distance to the nearest obstacle's edge.
    """
    to = scenes.centers - position[:, None]
    far = to.norm(dim=2)
    bearing = torch.atan2(to[..., 1], to[..., 0]) - heading(scenes, position)[:, None]
    bearing = torch.remainder(bearing + torch.pi, 2 * torch.pi) - torch.pi
    half = torch.asin(((scenes.radii + MARGIN) / far.clamp_min(1e-6)).clamp_max(1))
    nearer = far - scenes.radii < (scenes.goal - position).norm(dim=1, keepdim=True)
    left, right = torch.zeros(len(far), 1), torch.zeros(len(far), 1)
    for _ in range(OBSTACLES):  # a direction past one obstacle may lead into another
        taken = nearer & (bearing - half < left) & (bearing + half > -right)
        left = torch.where(taken, bearing + half, left).amax(1, keepdim=True).maximum(left)
        right = torch.where(taken, half - bearing, right).amax(1, keepdim=True).maximum(right)
    return torch.cat((left, right, (far - scenes.radii).amin(1, keepdim=True)), 1)


def observation(scenes: Scenes, position: Tensor) -> Tensor:
    """Return the readings of a range sensor that looks at the goal from `position [E, 2]`.

    Returns:
        `[E, OBSERVATION]`: the distance to the goal and to the nearest obstacle, and cosine and
        sine of the two directions of `openings`.
    """
    found = openings(scenes, position)
    goal = (scenes.goal - position).norm(dim=1, keepdim=True)
    return torch.cat((goal, found[:, 2:], found[:, :2].cos(), found[:, :2].sin()), 1)


def build() -> DiffusionPolicyPipeline:
    """Build the untrained policy: four decoder layers of width 64.

    Unlike the published ones it predicts actions instead of noise, and its matrices start from
    Xavier's distribution; whether it needs either was not measured.
    """
    model = TransformerForDiffusion(
        input_dim=2,
        output_dim=2,
        horizon=HORIZON,
        n_obs_steps=OBSERVED,
        cond_dim=OBSERVATION,
        n_layer=4,
        n_head=4,
        n_emb=64,
        p_drop_emb=0.0,
        p_drop_attn=0.0,
        causal_attn=True,
    )
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "pos_emb" not in name:
            nn.init.xavier_uniform_(parameter)
    solver = scheduler(prediction_type="sample")
    return DiffusionPolicyPipeline(model, solver, ACTION_STEPS, action=[[1 / REACH], [0.0]])


def load(directory: str | Path = DIRECTORY) -> DiffusionPolicyPipeline:
    """Load the shipped policy in float32, with its progress bar off."""
    pipe: DiffusionPolicyPipeline = DiffusionPolicyPipeline.from_pretrained(present(directory))
    pipe.set_progress_bar_config(disable=True)
    return pipe
