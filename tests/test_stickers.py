"""Scenes of stickers: what is said is true, what is held out stays out, what is drawn is there."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from diffcache.eval.workshop.small import stickers
from diffcache.eval.workshop.small.stickers import (
    GROUNDS,
    OBJECTS,
    RELATIONS,
    Sticker,
    caption,
    held_out,
    layer,
    parse,
    render,
    sample_scene,
)

RNG = np.random.default_rng(0)
SEEN = [sample_scene(RNG) for _ in range(300)]
HELD = [sample_scene(RNG, held=True) for _ in range(100)]


@pytest.mark.parametrize(("scenes", "held"), [(SEEN, False), (HELD, True)])
def test_no_combination_is_both_trained_on_and_held_out(scenes, held):
    for scene in scenes:
        names = tuple(sticker.name for sticker in scene.stickers)
        assert held_out(names, scene.ground) == held
        assert held_out(names[::-1], scene.ground) == held


def test_most_objects_are_held_out_somewhere_and_all_are_seen_elsewhere():
    apart = [(name, ground) for name in OBJECTS for ground in GROUNDS if held_out((name,), ground)]
    assert 0 < len(apart) < len(OBJECTS) * len(GROUNDS) / 4
    pairs = {held: set[str]() for held in (False, True)}
    for pair in combinations(OBJECTS, 2):
        pairs[held_out(pair, "")].update(pair)
    assert pairs[False] == set(OBJECTS) and len(pairs[True]) >= 0.8 * len(OBJECTS)


def test_a_sentence_is_read_back_as_what_it_was_written_from():
    for scene in SEEN + HELD:
        names, relation, ground = parse(caption(scene))
        assert names == tuple(sticker.name for sticker in scene.stickers)
        assert relation == scene.relation
        assert ground == (scene.ground if scene.says_ground else "")
        assert set(caption(scene).split()) <= set(stickers.words())


def test_a_relation_that_is_said_is_seen():
    side = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
    said = [scene for scene in SEEN if scene.relation]
    assert {scene.relation for scene in said} == set(RELATIONS)
    for scene in said:
        one, other = scene.stickers
        across, down = side[scene.relation]
        assert across * (one.x - other.x) + down * (one.y - other.y) >= 6


def test_an_object_is_drawn_where_it_is_said_to_be_and_is_not_cut_off():
    for scene in SEEN[:40]:
        for sticker in scene.stickers:
            upright = Sticker(sticker.name, 32, 32, sticker.size, 0, False, 1)
            whole = layer(upright)[1].sum()
            cover = layer(sticker)[1]
            assert cover.sum() == pytest.approx(whole, rel=0.08)
            rows, columns = np.nonzero(cover > 0.5)
            reach = 0.75 * sticker.size
            assert abs(rows - sticker.y).max() < reach and abs(columns - sticker.x).max() < reach


def test_mirroring_turns_left_and_right_round():
    car = Sticker("car", 32, 32, 40, 0, False, 1)
    plain, mirrored = layer(car)[1], layer(replace(car, mirrored=True))[1]
    assert np.abs(plain[:, ::-1] - mirrored).mean() < 0.01 < np.abs(plain - mirrored).mean()


def test_a_scene_is_the_same_picture_each_time_and_its_ground_depends_on_the_seed():
    scene = SEEN[0]
    picture = render(scene)
    assert picture.dtype == np.uint8 and picture.shape == (64, 64, 3)
    assert np.array_equal(picture, render(scene))
    for ground in GROUNDS:
        one, other = (stickers.ground(ground, seed) for seed in (1, 2))
        assert one.min() >= 0 and one.max() < 300 and np.abs(one - other).mean() > 2
