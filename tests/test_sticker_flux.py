"""The sticker pipeline is what was trained, and its judge tells a right picture from a wrong one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from diffcache.eval.workshop.bench.judge import KINDS, draw
from diffcache.eval.workshop.small import sticker_autoencoder, sticker_judge
from diffcache.eval.workshop.small.sticker_autoencoder import build_autoencoder, start_from_patches
from diffcache.eval.workshop.small.sticker_judge import Reading, correlation, faults, fit, likeness
from diffcache.eval.workshop.small.stickers import Sticker, render, sample_scene

FOX = Sticker("fox", 20, 24, 24, 8, False, 1.0)
OWL = Sticker("owl", 46, 46, 28, -5, True, 0.9)


def test_an_encoder_starts_as_principal_components_of_patches():
    rng = np.random.default_rng(0)
    drawn = np.stack([render(sample_scene(rng)) for _ in range(64)])
    pictures = sticker_autoencoder.to_unit(torch.from_numpy(drawn))
    model = build_autoencoder()
    start_from_patches(model, pictures)
    with torch.no_grad():
        latents = model.encode(pictures).latent_dist.mean
    rows = latents.permute(0, 2, 3, 1).flatten(0, 2)
    patches = nn.functional.unfold(pictures, 4, stride=4).transpose(1, 2).flatten(0, 1)
    mixed = torch.cat([rows, torch.ones(len(rows), 1)], 1)
    left = patches - mixed @ torch.linalg.lstsq(mixed, patches).solution
    values = torch.linalg.eigvalsh(torch.cov(patches.T)).flip(0)
    # The least error that any 12 linear components leave, up to what the constants cost.
    assert left.square().sum(1).mean() == pytest.approx(float(values[12:].sum()), rel=0.03)
    covariance = torch.cov(rows.T)
    off = covariance - covariance.diag().diag()
    assert off.abs().max() < 0.05 * covariance.diag().max()


def picture(*objects: Sticker, ground: str = "grass") -> np.ndarray:
    scene = replace(sample_scene(np.random.default_rng(5)), stickers=objects, ground=ground)
    return render(scene)


def test_an_object_is_found_again_near_where_it_is_looked_for():
    car = Sticker("car", 44, 42, 32, -5, True, 0.9)
    shown = picture(FOX, car)
    guess = replace(car, x=car.x + 2, y=car.y - 2, tilt=4, size=30, mirrored=False)
    found, value = fit(guess, shown)
    assert value > 0.97 > correlation(guess, shown)
    assert found.mirrored and abs(found.x - car.x) < 1 and abs(found.y - car.y) < 1


def accepts(sticker: Sticker, shown: np.ndarray) -> bool:
    return likeness(fit(sticker, shown)[0], shown) >= sticker_judge.LEAST_LIKENESS


def test_a_blurred_and_moved_object_is_like_its_drawing_and_a_broken_one_is_not():
    shown = picture(FOX, OWL)
    soft = np.stack([np.roll(shown, step, (0, 1)) for step in ((0, 0), (1, 0), (0, 1), (1, 1))])
    assert accepts(FOX, shown) and accepts(FOX, soft.mean(0).round().astype(np.uint8))
    ground = picture(OWL)
    parts, half, quarter, shuffled = (shown.copy() for _ in range(4))
    parts[24:40, 8:32] = np.roll(parts[24:40, 8:32], 8, axis=1)  # the lower half slides away
    half[24:] = ground[24:]
    quarter[24:, :20] = ground[24:, :20]
    shuffled[12:36, 8:32] = shown[12:36, 8:32, [1, 2, 0]]  # other colors
    assert not any(accepts(FOX, each) for each in (parts, half, quarter, shuffled))
    assert not accepts(replace(OWL, name="penguin"), shown)


def test_a_fragment_is_no_small_object():
    shown, ground = picture(replace(FOX, size=40, x=32, y=32)), picture()
    shown[:, 32:] = ground[:, 32:]
    assert not accepts(replace(FOX, size=18, x=26, y=32), shown)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bench_of_the_judge_draws_what_it_says(kind: str):
    draws = [draw(kind, np.random.default_rng([3, 0])) for _ in range(2)]
    assert draws[0][0] == draws[1][0] and np.array_equal(draws[0][1], draws[1][1])
    assert draws[0][1].shape == (64, 64, 3) and draws[0][1].dtype == np.uint8
    whole = draw("whole", np.random.default_rng([3, 0]))
    same = float((draws[0][1] == whole[1]).mean())
    assert (same == 1) == (kind == "whole")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("a fox left of an owl on grass", []),
        ("an owl below a fox", []),
        ("a fox right of an owl", ["not right of"]),
        ("a fox on wood", ["also a owl", "on grass, not wood"]),
        ("a fox and a car", ["no car", "also a owl"]),
    ],
)
def test_all_that_a_sentence_says_has_to_be_there(text: str, wrong: list[str]):
    assert faults(text, Reading((FOX, OWL), (), "grass")) == wrong


def test_a_broken_object_counts_as_a_fault():
    assert faults("a fox", Reading((FOX,), ("owl",), "sky")) == ["a broken owl"]
    assert faults("a fox", Reading((), ("fox",), "sky")) == ["no fox", "a broken fox"]
