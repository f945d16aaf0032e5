"""Optical flow and the dimensions of motion, on films that pan by whole pixels."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from diffcache.eval.clips import write_clip
from diffcache.eval.vbench import flow, own, summary

FRAMES = 13


def texture(height: int, width: int, seed: int, blur: float = 3.0) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal((height, width, 3)).astype(np.float32)
    smooth = cv2.GaussianBlur(noise, (0, 0), blur)
    return 120 + 40 * smooth / smooth.std()


def pan(step: int, seed: int = 4, side: int = 64) -> torch.Tensor:
    """A camera that moves to the right by whole pixels."""
    wide = np.clip(texture(side, side + step * FRAMES, seed), 0, 255).round().astype(np.uint8)
    film = np.stack([wide[:, step * time : step * time + side] for time in range(FRAMES)])
    return torch.from_numpy(film).permute(0, 3, 1, 2).contiguous()


@pytest.mark.parametrize(
    ("side", "step"), [(32, 0), (32, 1), (32, 3), (64, 0), (64, 1), (64, 3), (96, 5)]
)
def test_flow_finds_a_known_shift(side: int, step: int) -> None:
    film = pan(step, side=side).permute(0, 2, 3, 1).contiguous().numpy()
    found = flow.flow(flow.grey(film[0]), flow.grey(film[1]))
    inner = found[8:-8, 8:-8]
    assert np.hypot(inner[..., 0] + step, inner[..., 1]).mean() < 0.1
    assert flow.strongest(inner) == pytest.approx(step, abs=0.2)


def test_the_picture_half_way_is_the_one_between() -> None:
    film = pan(2).permute(0, 2, 3, 1).contiguous().numpy()
    guess = flow.midpoint(film[0], film[2])[:, 8:-8]
    assert np.abs(guess - film[1][:, 8:-8]).mean() < 1
    average = (film[0].astype(np.float32) + film[2]) / 2
    assert np.abs(average[:, 8:-8] - film[1][:, 8:-8]).mean() > 4


def test_sampling_with_a_whole_shift_moves_pixels() -> None:
    picture = np.arange(20, dtype=np.float32).reshape(4, 5)
    shift = np.zeros((4, 5, 2), dtype=np.float32)
    shift[..., 0] = 1
    expected = np.concatenate([picture[:, 1:], picture[:, -1:]], axis=1)
    assert np.array_equal(flow.sample(picture, shift), expected)


def test_flow_is_consistent_where_it_returns_and_stays_inside() -> None:
    there = np.zeros((6, 8, 2), dtype=np.float32)
    there[..., 0] = 2
    assert flow.consistent(there, -there)[:, :6].all()
    assert not flow.consistent(there, -there)[:, 6:].any()
    assert not flow.consistent(there, there).any()


@pytest.mark.parametrize(("gap", "agrees"), [(0.82, True), (0.86, False)])
def test_consistency_is_lost_where_the_paper_says(gap: float, agrees: bool) -> None:
    """|there + back|^2 < 0.01 (|there|^2 + |back|^2) + 0.5: at 3 and 3 px, a gap of 0.84 px."""
    there, back = np.zeros((2, 16, 16, 2), np.float32)
    there[..., 0], back[..., 0], back[..., 1] = 3, -3, gap
    limit = (0.01 * (9 + 9 + gap**2) + 0.5) ** 0.5
    assert (gap < limit) is agrees and flow.consistent(there, back)[:, :12].all() == agrees
    assert flow.consistent(there, back)[:, :12].any() == agrees


@pytest.mark.parametrize(
    ("film", "fps", "dynamic"),
    [
        (pan(1), 8, False),  # 1 px a frame, below the threshold of 6 * 64 / 256 = 1.5 px
        (pan(2), 8, True),
        (pan(1), 16, True),  # two frames apart: 2 px
        (pan(1), 11.9, False),
        # Thirteen frames need round(4 * 13 / 16) = 3 pairs that move.
        (torch.cat([pan(3)[:3], pan(3)[2:3].repeat(10, 1, 1, 1)]), 8, False),
        (torch.cat([pan(3)[:4], pan(3)[3:4].repeat(9, 1, 1, 1)]), 8, True),
        (pan(2)[:3], 240, True),
    ],
)
def test_dynamic_degree_follows_vbench_s_rule(
    film: torch.Tensor, fps: float, dynamic: bool
) -> None:
    keys = ["lite_dynamic_degree", "lite_dynamic_motion"]
    found = own.measure(film, fps, keys)
    assert found["lite_dynamic_degree"] == dynamic
    assert list(found) == keys


def test_motion_is_measured_relative_to_the_shorter_side() -> None:
    for side, step in ((64, 1), (128, 2)):
        found = own.measure(pan(step, side=side), 8, ["lite_dynamic_motion"])
        assert found["lite_dynamic_motion"] == pytest.approx(4, rel=0.15)


def test_small_films_carry_a_warning_where_flow_is_used(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mkv", pan(1, side=48), 8)
    (warning,) = summary.measure_films([path], ["lite_warp_error"])["warnings"]
    assert "48 x 48: with fewer than 64 px" in warning
    assert summary.measure_films([path], ["lite_sharpness"])["warnings"] == []
    with pytest.raises(ValueError, match="no film to measure"):
        summary.measure_films([])
