"""Edits change one thing of a scene, and the sticker pipeline for them is what was trained."""

from dataclasses import replace

import numpy as np
import pytest

from diffcache.eval.workshop.small.sticker_edits import KINDS, changed, draw_edits, edit_words, judge, sample_edit
from diffcache.eval.workshop.small.stickers import SIDE, held_out, render


def test_all_but_one_thing_stays_as_it_is():
    edits = draw_edits(120, 4)
    assert {edit.kind for edit in edits} == set(KINDS)
    for edit in edits:
        before, after = edit.before, edit.after
        kept = [sticker for sticker in after.stickers if sticker in before.stickers]
        left = max(len(before.stickers), len(after.stickers)) - len(kept)
        assert after.seed == before.seed
        assert left == (0 if edit.kind == "ground" else 1)
        assert (after.ground != before.ground) == (edit.kind == "ground")
        assert set(edit.text.split()) <= set(edit_words())


@pytest.mark.parametrize("held", [False, True])
def test_results_of_held_out_edits_are_left_out_of_training(held: bool):
    for edit in draw_edits(30, 5, held=held):
        names = tuple(sticker.name for sticker in edit.after.stickers)
        assert held_out(names, edit.after.ground) == held
        assert held or not held_out(tuple(sticker.name for sticker in edit.before.stickers), edit.before.ground)


def test_instructions_say_what_was_changed():
    rng = np.random.default_rng(3)
    for _ in range(60):
        edit = sample_edit(rng)
        kind, (gone, new) = edit.kind, changed(edit)
        if kind == "replace":
            assert gone.name in edit.text.split() and new.name in edit.text.split()
            assert replace(new, name=gone.name) == gone
        elif kind == "remove":
            assert edit.text == f"remove the {gone.name}" and new is None
        elif kind == "add":
            assert edit.text.startswith("add a") and edit.text.endswith(new.name)
        elif kind == "move":
            across, down = new.x - gone.x, new.y - gone.y
            side = ("right" if across > 0 else "left") if across else "bottom"
            side = "top" if down < 0 else side
            assert edit.text == f"move the {new.name} to the {side}"
            assert abs(across) + abs(down) >= 10 and across * down == 0
        elif kind == "size":
            assert edit.text.split()[-1] == ("larger" if new.size > gone.size else "smaller")


def test_the_judge_takes_the_wanted_picture_and_no_other():
    edits = draw_edits(24, 7, held=True)
    wanted = judge(np.stack([render(edit.after) for edit in edits]), edits)
    assert wanted["whole_right"].float().mean() > 0.9
    assert wanted["target_right"].float().mean() > 0.95
    assert wanted["untouched_psnr_db"].min() > 40
    same = judge(np.stack([render(edit.before) for edit in edits]), edits)
    assert not (same["whole_right"] | same["target_right"]).any()


def test_an_added_object_may_stand_anywhere_but_all_else_stays():
    edit = next(e for e in draw_edits(50, 9) if e.kind == "add")
    old, new = edit.after.stickers
    corner = [(x, y) for x in (16, 48) for y in (16, 48)]
    x, y = max(corner, key=lambda at: abs(at[0] - old.x) + abs(at[1] - old.y))
    other = replace(edit.after, stickers=(old, replace(new, x=x, y=y)))
    moved = replace(edit.after, stickers=(replace(old, x=SIDE - old.x), new))
    verdict = judge(render(other)[None], [edit])
    assert verdict["whole_right"] and verdict["untouched_psnr_db"] > 25
    assert not judge(render(moved)[None], [edit])["whole_right"]
