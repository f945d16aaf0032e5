"""The own film dimensions in closed form, and films that cannot be measured."""

import numpy as np
import pytest
import torch

from diffcache.eval.vbench import own


def test_flickering_in_closed_form() -> None:
    levels = torch.tensor([0, 255, 0, 255, 0], dtype=torch.uint8)
    film = levels[:, None, None, None].repeat(1, 3, 20, 20)
    assert own.measure(film, 8, ["temporal_flickering"])["temporal_flickering"] == 0
    ramp = (torch.arange(5, dtype=torch.uint8) * 51)[:, None, None, None].repeat(1, 3, 20, 20)
    value = own.measure(ramp, 8, ["temporal_flickering"])["temporal_flickering"]
    assert value == pytest.approx(1 - 51 / 255)


@pytest.mark.parametrize("sigma", [1.0, 5.0, 10.0])
def test_noise_is_found_in_a_flat_and_in_a_sloping_picture(sigma: float) -> None:
    noise = np.random.default_rng(0).normal(0, sigma, (256, 256))
    slope = np.linspace(60, 190, 256)[None].repeat(256, 0)
    for picture in (np.full((256, 256), 128.0), slope):
        found = own.noise_sigma(np.round(picture + noise).astype(np.uint8))
        # Rounding adds a variance of 1 / 12.
        assert found == pytest.approx(np.sqrt(sigma**2 + 1 / 12), rel=0.03)
    assert own.noise_sigma(np.full((32, 32), 7, dtype=np.uint8)) == 0


def test_sharpness_of_one_point_in_closed_form() -> None:
    picture = np.zeros((20, 30), dtype=np.uint8)
    assert own.sharpness(picture) == 0
    picture[7, 9] = 50
    assert own.sharpness(picture) == pytest.approx(20 * 50**2 / 600)


def test_blocks_are_found_in_every_size_and_nothing_is_found_in_a_ramp() -> None:
    ramp = np.arange(64, dtype=np.uint8)[None].repeat(64, 0)
    assert own.blockiness(ramp) == pytest.approx(1)
    assert own.blockiness(np.zeros((64, 64), dtype=np.uint8)) == 1
    rng = np.random.default_rng(0)
    for side in own.BLOCK_SIDES:
        small = rng.integers(-6, 7, (64 // side, 64 // side))
        blocks = np.kron(small, np.ones((side, side), dtype=np.int64))
        assert own.blockiness((ramp + 64 + blocks).astype(np.uint8)) > 2


def test_consistency_in_closed_form() -> None:
    east, north, west = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])
    slant = torch.tensor([1.0, 1.0])
    half = 0.5**0.5
    assert own.consistency(torch.stack([east, 5 * east])) == pytest.approx(1)
    assert own.consistency(torch.stack([east, west])) == 0  # not -1
    # (0 + 0) / 2, then (1 + 0) / 2
    assert own.consistency(torch.stack([east, north, north])) == pytest.approx(0.25)
    # (s + s) / 2, then (s + 0) / 2
    assert own.consistency(torch.stack([east, slant, north])) == pytest.approx(0.75 * half)


def test_the_subject_is_what_moves_or_else_the_middle() -> None:
    greys = np.full((4, 40, 60), 100, dtype=np.uint8)
    middle = np.zeros((40, 60), dtype=bool)
    middle[10:30, 15:45] = True
    assert np.array_equal(own.subject(greys), middle)
    greys[2, 10:14, 20:26] = 200
    moved = np.zeros((40, 60), dtype=bool)
    moved[8:16, 18:28] = True
    assert np.array_equal(own.subject(greys), moved)
    noisy = np.random.default_rng(0).integers(0, 256, (4, 40, 60), dtype=np.uint8)
    assert np.array_equal(own.subject(noisy), middle)


def test_the_subject_is_painted_over_with_the_colour_of_the_rest() -> None:
    film = torch.full((4, 3, 40, 60), 90, dtype=torch.uint8)
    film[2, 0, 10:14, 20:26] = 250
    assert torch.equal(own.background(film), torch.full_like(film, 90))
    assert film[2, 0, 12, 22] == 250


@pytest.mark.parametrize(
    ("film", "fps", "keys", "message"),
    [
        (torch.zeros(5, 3, 32, 32), 8, None, "uint8"),
        (torch.zeros(5, 1, 32, 32, dtype=torch.uint8), 8, None, r"\[5, 1, 32, 32\]"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), 8, None, "needs 3 frames .* has 2 of 32"),
        (torch.zeros(5, 3, 16, 32, dtype=torch.uint8), 8, None, "17 px a side .* 5 of 16 x 32"),
        (torch.zeros(5, 3, 32, 32, dtype=torch.uint8), 0, None, "positive .* not 0"),
        (torch.zeros(5, 3, 32, 32, dtype=torch.uint8), 8, ["imaging_quality"], "unknown own"),
        (torch.zeros(5, 3, 32, 32, dtype=torch.uint8), 8, [], r"\(none given\)"),
    ],
)
def test_what_cannot_be_measured_is_an_error(
    film: torch.Tensor, fps: float, keys: list[str] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        own.measure(film, fps, keys)
