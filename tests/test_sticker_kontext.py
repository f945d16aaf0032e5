"""Edits change one thing of a scene, and the sticker pipeline for them is what was trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from diffcache.eval.workshop.small.sticker_autoencoder import build_autoencoder
from diffcache.eval.workshop.small.sticker_edits import (
    KINDS,
    changed,
    draw_edits,
    edit_words,
    judge,
    sample_edit,
)
from diffcache.eval.workshop.small.sticker_kontext import CALL, Kontext
from diffcache.eval.workshop.small.sticker_text import Encoder, learn_words
from diffcache.eval.workshop.small.stickers import SIDE, held_out, render
from diffcache.eval.workshop.small.trainer import Draws, Settings, seeded, start_from
from diffcache.pipelines.shipped_models import MODELS


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
        assert held or not held_out(
            tuple(sticker.name for sticker in edit.before.stickers), edit.before.ground
        )


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


def test_a_picture_and_its_edit_are_equal_where_nothing_changed():
    edit = next(e for e in draw_edits(50, 6) if e.kind == "remove")
    gone, _ = changed(edit)
    same = (render(edit.before) == render(edit.after)).all(-1)
    assert 0.5 < same.mean() < 1
    rows, columns = np.nonzero(~same)
    reach = 0.75 * gone.size + 4  # a tilted square, and its shadow
    assert np.abs(columns - gone.x).max() < reach and np.abs(rows - gone.y).max() < reach


def test_the_judge_takes_the_wanted_picture_and_no_other():
    edits = draw_edits(48, 7, held=True)
    wanted = judge(np.stack([render(edit.after) for edit in edits]), edits)
    assert np.mean([verdict.whole_right for verdict in wanted]) > 0.9
    assert np.mean([verdict.target_right for verdict in wanted]) > 0.95
    assert min(verdict.untouched_psnr_db for verdict in wanted) > 40
    same = judge(np.stack([render(edit.before) for edit in edits]), edits)
    assert not any(verdict.whole_right or verdict.target_right for verdict in same)


def test_an_added_object_may_stand_anywhere_but_all_else_stays():
    edit = next(e for e in draw_edits(50, 9) if e.kind == "add")
    old, new = edit.after.stickers
    corner = [(x, y) for x in (16, 48) for y in (16, 48)]
    x, y = max(corner, key=lambda at: abs(at[0] - old.x) + abs(at[1] - old.y))
    other = replace(edit.after, stickers=(old, replace(new, x=x, y=y)))
    moved = replace(edit.after, stickers=(replace(old, x=SIDE - old.x), new))
    (verdict,) = judge(render(other)[None], [edit])
    assert verdict.whole_right and verdict.untouched_psnr_db > 25
    (verdict,) = judge(render(moved)[None], [edit])
    assert not verdict.whole_right


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Kontext:
    """A training on 16 edits, with an autoencoder of random weights."""
    folder = tmp_path_factory.mktemp("kontext")
    torch.manual_seed(0)
    torch.save({"average": build_autoencoder().state_dict()}, folder / "sticker-autoencoder.state")
    return Kontext(Settings(steps=2, batch=4, examples=16), folder)


def test_the_pipeline_draws_what_training_showed(job: Kontext):
    models = job.build()
    start_from(models, MODELS / "sticker-kontext")  # whose gates are open
    edits = job.held_edits[:2]
    texts = [edit.text for edit in edits]
    shown = job.sample(models, texts, steps=3, guidance=2.0, references=job.held_references[:2])
    pipe = job.pipeline(models)
    pipe.set_progress_bar_config(disable=True)
    before = torch.from_numpy(np.stack([render(edit.before) for edit in edits])) / 255
    noise = torch.randn(2, 64, 48, generator=seeded(0))
    call = CALL | {"negative_prompt": ["", ""], "num_inference_steps": 3, "output_type": "np"}
    found = pipe(before.permute(0, 3, 1, 2), texts, latents=noise, **call)
    drawn = torch.from_numpy(found.images)
    assert drawn.std() > 0.02
    assert (drawn * 255 - shown).abs().max() <= 1.5  # references are kept in float16
    other = job.sample(models, texts, steps=3, references=job.held_references[2:4])
    assert (other.float() - shown.float()).abs().max() > 5


def test_the_loss_is_the_same_for_the_same_seed_and_trains_every_part(job: Kontext):
    models = job.build()
    with torch.no_grad():
        for weight in models["transformer"].parameters():
            if not weight.any():
                nn.init.normal_(weight, std=0.05)
    drawn = Draws(job)[0]
    losses = [job.loss(models, drawn, seeded(3)) for _ in range(2)]
    assert torch.equal(*losses)
    losses[0].backward()
    still = [n for n, w in models.named_parameters() if w.grad is None or not w.grad.any()]
    assert still == []
    changed = drawn | {"references": drawn["references"].flip(0)}
    assert not torch.equal(job.loss(models, changed, seeded(3)), losses[0])


def test_known_words_keep_their_vectors_in_a_larger_vocabulary(job: Kontext):
    old, new = Encoder(), job.encoder
    first, second = old.build()
    models = nn.ModuleDict({"text_encoder": first, "text_encoder_2": second}).eval()
    before = old.encode(models, old.ids(["a fox on grass"]))
    learn_words(dict(models.items()), old, new)
    after = new.encode(models, new.ids(["a fox on grass"]))
    for one, other in zip(before, after, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    ids = new.ids(["replace the fox with an owl"])[1][0]
    unknown = new.t5.convert_tokens_to_ids("<unk>")
    assert unknown not in ids and int((ids != 0).sum()) == 7
