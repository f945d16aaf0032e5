"""Films of bouncing shapes, and what the metrics of causal video say of planted defects."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from diffcache.eval.workshop.video.shapes import by_slice, judge, see, shows, switch_latency
from diffcache.pipelines.small import causal_scenes
from diffcache.pipelines.small.causal_scenes import COLORS, HELD_OUT, SHAPES, Clips, draw
from diffcache.psnr import CAP


def clips_of(count: int = 12, frames: int = 36, **settings: float) -> Clips:
    return draw(count, frames, torch.Generator().manual_seed(HELD_OUT), **settings)


def sliced(films: Tensor, truth: Clips) -> dict[str, Tensor]:
    return by_slice(judge(films, truth), 12)


# the films ---------------------------------------------------------------------------------------


def test_a_shape_bounces_without_loss() -> None:
    """The closed form agrees with a ball that is moved frame by frame."""
    clips = clips_of(frames=200)
    low, high = torch.tensor(causal_scenes.ROOM).unbind(1)
    low, high = low + clips.radius[:, None], high - clips.radius[:, None]
    place, speed = clips.start.clone(), clips.velocity.clone()
    for center in clips.centers().unbind(1):
        assert torch.allclose(center, place, atol=1e-3)
        place = place + speed
        for wall in (low, high):
            out = (place < wall) if wall is low else (place > wall)
            place, speed = (
                torch.where(out, 2 * wall - place, place),
                torch.where(out, -speed, speed),
            )


def test_a_prompt_states_shape_and_color_and_changes_at_a_chunk() -> None:
    clips = clips_of(64, 24, switched=0.5)
    for row, shapes, colors in zip(clips.prompts, clips.shapes, clips.colors, strict=True):
        for text, shape, color in zip(row, shapes.tolist(), colors.tolist(), strict=True):
            assert causal_scenes.parse(text) == (shape, color)
        changes = [frame for frame in range(1, 24) if row[frame] != row[frame - 1]]
        assert len(changes) <= 1 and all(frame % 3 == 0 for frame in changes)
    assert 16 <= sum(len(set(row)) == 2 for row in clips.prompts) <= 48
    assert {len(set(row)) for row in clips_of(64, 24).prompts} == {1}
    for text in ("a ring", "a red blue ring", "a red dog", ""):
        with pytest.raises(ValueError, match="must name one of square"):
            causal_scenes.parse(text)


def test_films_are_repeatable_and_history_is_not_in_the_prompt() -> None:
    one, again = clips_of(frames=4).film(), clips_of(frames=4).film()
    assert torch.equal(one, again) and one.shape == (12, 3, 4, 24, 24)
    assert one.abs().max() <= 1 and 0.3 < one.std() < 0.6
    longer = clips_of(frames=4).lasting(9)
    assert torch.equal(longer.film()[:, :, :4], one) and longer.shapes.shape == (12, 9)
    clips = clips_of(400, 1)
    for spread in (clips.offset, clips.wall[:, 12, 12]):
        assert len(spread.unique()) > 300
    assert clips.radius.unique().tolist() == [3, 4]
    assert len(clips.velocity.unique(dim=0)) == 8 and clips.velocity.abs().max() == 1
    assert torch.equal(clips_of(50, 60).centers() % 1, torch.zeros(50, 60, 2))  # whole pixels
    assert {tuple(mark) for mark in clips.mark.flatten(1).tolist()} == {
        tuple(bool(number >> bit & 1) for bit in range(4)) for number in range(16)
    }


# the metrics -------------------------------------------------------------------------------------


def test_a_perfect_film_scores_perfectly() -> None:
    truth = clips_of(16, 36, switched=0.5)
    found = sliced(truth.film(), truth)
    assert (found["identity"] == 1).all() and (found["mark"] == 1).all()
    assert (found["wall_db"] == CAP).all() and (found["static"] == 0).all()
    assert found["hue_error"].max() < 0.01
    assert found["size"] == pytest.approx(1)
    # Seams of a switch are measured apart: a triangle's center of area is not that of a square.
    still = sliced(clips_of(16).film(), clips_of(16))
    assert (still["speed"] - 1).abs().max() < 0.1 and (still["jump"] - 1).abs().median() < 0.05


def test_planted_defects_are_measured_as_planted() -> None:
    truth = clips_of()
    film = truth.film()
    turned = replace(truth, offset=truth.offset + 17)
    assert sliced(turned.film(), truth)["hue_error"] == pytest.approx(17, abs=0.01)
    grown = replace(truth, radius=1.1 * truth.radius, start=truth.start.clamp(6, 17))
    kept = replace(truth, start=truth.start.clamp(6, 17))
    assert sliced(grown.film(), kept)["size"] == pytest.approx(1.21, abs=0.1)
    noise = 0.02 * torch.randn(film.shape, generator=torch.Generator().manual_seed(0))
    noise[:, :, 0] = 0
    grain = noise.mean(1, keepdim=True).expand_as(noise) * 3**0.5  # gray, of the same deviation
    decibels = sliced(film + grain, truth)["wall_db"][:, 1:]
    assert decibels == pytest.approx(40.0, abs=0.4)  # 0.02 of -1..1 is 0.01 of 0..1
    flipped = replace(truth, mark=truth.mark ^ torch.tensor([[True, False], [False, False]]))
    dark = flipped.mark[:, 0, 0]
    walls = truth.wall.clone()
    walls[:, 1:3, 8:10] = torch.where(dark, 0.95, 0.35)[:, None, None]
    assert (sliced(replace(truth, wall=walls).film(), truth)["mark"] == 0.75).all()


def test_planted_motion_is_measured_as_planted() -> None:
    truth = clips_of()
    film = truth.film()
    slow = sliced(replace(truth, velocity=0.5 * truth.velocity).film(), truth)
    assert slow["speed"].mean() == pytest.approx(0.5, abs=0.02)
    frozen = film.clone()
    frozen[:, :, 13:] = film[:, :, 12:13]
    found = sliced(frozen, truth)
    assert (found["static"] == torch.tensor([0.0, 1.0, 1.0])).all()
    assert (found["speed"][:, 2] == 0).all()
    # A film that stands still for two frames and catches up where a chunk begins.
    seams = film[:, :, torch.arange(36) // 3 * 3]
    assert (by_slice(judge(seams, truth), 36)["jump"] > 10).all()


def test_identity_and_switches_are_read_from_the_frames() -> None:
    truth = clips_of(len(SHAPES) * len(COLORS), 6)
    every = torch.arange(len(truth.shapes))
    shapes, colors = (x[:, None].expand(-1, 6) for x in (every % 4, every // 4))
    film = replace(truth, shapes=shapes, colors=colors).film()
    for shape in range(len(SHAPES)):
        for color in range(len(COLORS)):
            right = shows(film, torch.full_like(shapes, shape), torch.full_like(colors, color))
            assert torch.equal(right.all(1), (every % 4 == shape) & (every // 4 == color))
    empty = truth.wall[:, None, None].expand(-1, 3, 6, -1, -1) * 2 - 1
    assert not shows(empty, shapes, colors).any() and (see(empty).area == 0).all()
    both = torch.cat([film[:2], film[1:2].expand(2, -1, -1, -1, -1)], 2)
    assert switch_latency(both, torch.tensor([1, 1]), torch.tensor([0, 0])).tolist() == [2.0, 0.0]
    assert switch_latency(both, torch.tensor([3, 3]), torch.tensor([0, 0])).tolist() == [
        torch.inf,
        torch.inf,
    ]
