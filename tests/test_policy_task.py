"""The task of the small policy: scenes, demonstrations, rollouts, training."""

from __future__ import annotations

import math

import pytest
import torch

from diffcache.eval.workshop.small import train_reach
from diffcache.eval.workshop.small.trainer import Settings, train
from diffcache.pipelines.policy import DiffusionPolicyPipeline, rollout
from diffcache.pipelines.small import demonstrations, reach

# The task ------------------------------------------------------------------------------------


def scene(start, goal, center=(9.0, 9.0), radius=0.2):
    centers = torch.tensor([[center, (9.0, -9.0), (-9.0, 9.0)]])
    radii = torch.tensor([[radius, 0.1, 0.1]])
    return reach.Scenes(torch.tensor([start]), torch.tensor([goal]), centers, radii)


def test_an_episode_by_hand():
    """Straight ahead reaches a free goal; long moves are shortened; a touch ends the episode."""
    free = reach.Reach(scene((0.0, 0.0), (0.4, 0.0)))
    free.act(torch.tensor([[[5.0, 0.0], [0.1, 0.0], [0.1, 0.0]]]))
    assert free.position[0].tolist() == pytest.approx([0.3, 0.0]) and free.running.all()
    free.act(torch.tensor([[[0.06, 0.0], [0.1, 0.1]]]))
    assert free.succeeded.all() and not free.running.any()
    assert free.position[0].tolist() == pytest.approx([0.36, 0.0])  # nothing moves afterwards

    hit = reach.Reach(scene((0.0, 0.0), (0.0, 1.0), (0.0, 0.25), 0.2))
    hit.act(torch.tensor([[[0.1, 0.0]] * 10]))
    assert hit.touched.all() and not hit.succeeded.any()
    late = reach.Reach(scene((0.0, 0.0), (1.0, 0.0)))
    late.act(torch.full((1, reach.TIME, 2), math.nan))  # what is no move is none
    assert not late.running.any() and not late.succeeded.any() and not late.touched.any()
    assert late.position.tolist() == [[0, 0]]


def test_what_is_seen_does_not_depend_on_where_north_is():
    """Turning and shifting the world changes no observation; moves follow the goal."""
    scenes = reach.draw_scenes(20, 3)
    angle, shift = torch.full((20,), 2.5), torch.tensor([0.3, -0.7])

    def moved(points):
        return reach.turned(points, angle) + shift

    other = reach.Scenes(
        moved(scenes.start[:, None])[:, 0], moved(scenes.goal[:, None])[:, 0],
        moved(scenes.centers), scenes.radii,
    )  # fmt: skip
    torch.testing.assert_close(
        reach.Reach(other).observe(), reach.Reach(scenes).observe(), atol=1e-4, rtol=1e-4
    )
    moves = torch.randn(20, 3, 2) * 0.05
    here, there = reach.Reach(scenes), reach.Reach(other)
    here.act(moves)
    there.act(moves)
    torch.testing.assert_close(moved(here.position[:, None])[:, 0], there.position)


def test_gaps_are_distances_to_segments():
    """Against the nearest of many points on each segment."""
    scenes = reach.draw_scenes(50, 0)
    share = torch.linspace(0, 1, 2001)[:, None, None]
    points = scenes.start * (1 - share) + scenes.goal * share
    far = (points[:, :, None] - scenes.centers).norm(dim=3).amin(0) - scenes.radii
    made = reach.gaps(scenes.start, scenes.goal, scenes.centers, scenes.radii)
    torch.testing.assert_close(made, far, atol=1e-3, rtol=0)
    assert (made.amin(1) < -0.05).all()  # the straight way is blocked


def test_openings_are_the_nearest_free_directions():
    """Just outside of them the way past every nearer obstacle is free, just inside it is not."""
    scenes = reach.draw_scenes(300, 2)
    found = reach.openings(scenes, scenes.start)
    goal = (scenes.goal - scenes.start).norm(dim=1)
    ahead = reach.heading(scenes, scenes.start)
    far = (scenes.centers - scenes.start[:, None]).norm(dim=2)
    counts = far - scenes.radii < goal[:, None]
    wide = scenes.radii + reach.MARGIN
    free = []
    for side, nudge in ((0, 2e-4), (1, 2e-4), (0, -2e-4), (1, -2e-4)):
        angle = ahead + (1 - 2 * side) * (found[:, side] + nudge)
        end = scenes.start + 3 * torch.stack((angle.cos(), angle.sin()), 1)
        gaps = reach.gaps(scenes.start, end, scenes.centers, wide)
        free.append((torch.where(counts, gaps, 1.0) > 0).all(1))
    assert free[0].all() and free[1].all()
    assert not free[2].any() and not free[3].any()  # the straight way is blocked in every scene
    assert reach.openings(scene((0.0, 0.0), (1.0, 0.0)), torch.zeros(1, 2))[0, :2].tolist() == [
        0,
        0,
    ]


def test_demonstrations_succeed_on_both_sides():
    """The script reaches every goal; where the way is blocked in the middle it goes both ways."""
    scenes = reach.draw_scenes(200, 1)
    demonstrator = demonstrations.Demonstrator(torch.Generator().manual_seed(0))
    episode = reach.Reach(scenes)
    while episode.running.any():
        episode.act(demonstrator.steer(scenes, episode.position)[:, None])
    assert episode.succeeded.float().mean() > 0.98

    middle = scene((0.0, -0.9), (0.0, 0.9), (0.0, 0.0), 0.25)
    many = reach.Scenes(*(getattr(middle, f).expand(400, *getattr(middle, f).shape[1:])
                          for f in ("start", "goal", "centers", "radii")))  # fmt: skip
    demonstrator = demonstrations.Demonstrator(torch.Generator().manual_seed(0))
    left = (demonstrator.steer(many, many.start)[:, 1] > 0).float().mean()
    assert 0.4 < left < 0.6
    assert (demonstrator.sides.abs() == 1).all()


def test_windows_are_what_was_done():
    """Executing a window's actions from its second one on repeats the demonstration."""
    seen, moves = demonstrations.demonstrate(30, 5)
    assert seen.shape[1:] == (reach.OBSERVED, reach.OBSERVATION)
    assert moves.shape[1:] == (reach.HORIZON, 2) and len(seen) == len(moves) > 200
    assert moves.norm(dim=2).max() < 1.001 and torch.isfinite(seen).all()
    first = demonstrations.demonstrate(30, 5)
    assert torch.equal(first[0], seen) and torch.equal(first[1], moves)
    # the distance to the goal falls by what the move is ahead, while nothing is in the way
    clear = (moves[:-1, 1, 1].abs() < 1e-3) & (seen[1:, 0, 0] == seen[:-1, 1, 0])
    fallen = (seen[:-1, 1, 0] - seen[1:, 1, 0])[clear]
    expected = moves[:-1, 1, 0][clear] * reach.REACH
    assert clear.sum() > 100
    assert ((fallen - expected).abs() < 1e-3).float().mean() > 0.85  # the others were pushed


def test_a_rollout_does_not_depend_on_its_neighbors():
    """Half of the episodes alone end as they do among others."""
    pipe = reach.build()
    pipe.set_progress_bar_config(disable=True)
    pipe.transformer.eval()
    scenes = reach.draw_scenes(4, 0)
    whole, part = reach.Reach(scenes), reach.Reach(scenes.take(torch.tensor([0, 1])))
    assert rollout(pipe, whole, num_inference_steps=2) >= 1
    rollout(pipe, part, num_inference_steps=2)
    torch.testing.assert_close(whole.position[:2], part.position)


def test_training_lowers_the_loss_and_ships_a_pipeline(tmp_path):
    settings = Settings(steps=30, batch=128, examples=640, rate=1.5e-3, average=0.9, warmup=1)
    job = train_reach.Reach(settings, tmp_path)
    job.measure = lambda models: {}  # its rollouts take longer than all the rest
    run = train(job, "reach", precision="float32")
    drawn = {"chosen": torch.arange(640)}
    losses = [
        float(job.loss(models, drawn, torch.Generator().manual_seed(1)).detach())
        for models in (job.build(), run.average)
    ]
    assert losses[1] < 0.8 * losses[0]
    job.export(run.average.eval(), tmp_path / "model")
    loaded = DiffusionPolicyPipeline.from_pretrained(str(tmp_path / "model"))
    for one, other in zip(
        loaded.transformer.parameters(), run.average["transformer"].parameters(), strict=True
    ):
        assert torch.equal(one, other.bfloat16().float())


def test_examples_that_there_are_not_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(train_reach, "WINDOWS", 100)
    with pytest.raises(ValueError, match="examples=300, but there are"):
        train_reach.Reach(Settings(steps=1, batch=1, examples=300), tmp_path)


def test_building_is_deterministic():
    weights = []
    for _ in range(2):
        torch.manual_seed(4)
        weights.append(reach.build().transformer.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
