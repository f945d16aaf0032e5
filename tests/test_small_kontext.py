"""The editing data set and the shipped FluxKontextPipeline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from diffcache.pipelines.small.edits import (
    KINDS,
    Edit,
    draw_edits,
    instruction,
    judge,
    render_pair,
    sample_edit,
    subjects,
    target_shown,
    untouched_psnr,
)
from diffcache.pipelines.small.scenes import Figure, Scene, held_out, prompt

RING = Figure("ring", "red", "small", "left")
OTHER = Figure("ring", "blue", "large", "top right")
SCENE = Scene("yellow", (RING, OTHER))


def edits_of(count: int, held: bool = False) -> list[Edit]:
    rng = np.random.default_rng(5)
    return [sample_edit(rng, held=held) for _ in range(count)]


# ----------------------------------------------------------------------------------- the edits


def test_an_edit_changes_one_thing() -> None:
    seen = set()
    for edit in edits_of(300):
        seen.add(edit.kind)
        before, after = edit.before, edit.after
        assert (before.background != after.background) == (edit.kind == "background")
        assert all(figure.color != after.background for figure in after.figures)
        if edit.kind == "remove":
            assert before.figures == (*after.figures, before.figures[edit.index])
            continue
        changed = [
            (i, name)
            for i, (a, b) in enumerate(zip(before.figures, after.figures, strict=True))
            for name in ("shape", "color", "size", "position")
            if getattr(a, name) != getattr(b, name)
        ]
        assert changed == ([] if edit.kind == "background" else [(edit.index, edit.kind)])
    assert seen == set(KINDS)


def test_training_edits_hold_nothing_that_is_held_out() -> None:
    assert not any(held_out(s) for edit in edits_of(200) for s in (edit.before, edit.after))
    assert all(held_out(edit.after) for edit in edits_of(20, held=True))


def test_subjects_mean_one_figure() -> None:
    assert subjects(SCENE, RING) == ["the red ring", "the small ring", "the ring on the left"]
    alone = Scene("yellow", (RING,))
    assert subjects(alone, RING)[0] == "the ring"
    twin = Scene("yellow", (RING, Figure("ring", "red", "small", "right")))
    assert subjects(twin, RING) == ["the ring on the left"]


def test_instructions_read_as_english() -> None:
    def ask(kind: str, *figures: Figure, background: str = "yellow") -> str:
        index = -1 if kind == "background" else 0
        return instruction(Edit(kind, SCENE, Scene(background, figures), index))

    green = Figure("ring", "green", "small", "left")
    assert ask("color", green, OTHER) == "make the red ring green"
    assert ask("size", Figure("ring", "red", "large", "left"), OTHER) == "make the red ring large"
    square = Figure("square", "red", "small", "left")
    assert ask("shape", square, OTHER) == "turn the red ring into a square"
    assert ask("background", RING, OTHER, background="black") == "make the background black"
    gone = Edit("remove", SCENE, Scene("yellow", (RING,)), 1)
    assert instruction(gone) == "remove the blue ring"
    rng = np.random.default_rng(0)
    assert len({instruction(gone, rng) for _ in range(40)}) == 3


def test_pixels_that_are_not_touched_are_the_same_to_the_bit() -> None:
    for number, edit in enumerate(edits_of(40)):
        before, after = render_pair(edit, number)
        changed = (before != after).any(-1)
        assert changed.any()
        if edit.kind == "background":
            continue
        figure = edit.before.figures[edit.index]
        rows, columns = np.nonzero(changed)
        from diffcache.pipelines.small.scenes import POSITIONS

        x, y = POSITIONS[figure.position]
        assert max(abs(rows + 0.5 - y).max(), abs(columns + 0.5 - x).max()) < 16


def test_the_classifier_sees_every_edit_in_the_drawn_pictures() -> None:
    edits, before, after = draw_edits(60, 3, held=True)
    right = judge(after, edits, before, after)
    wrong = judge(before, edits, before, after)
    assert right["target_right"].all() and right["whole_right"].all()
    assert (right["untouched_psnr_db"] == 100).all()
    assert not wrong["target_right"].any() and not wrong["whole_right"].any()
    assert sum(edit.kind == "remove" for edit in edits) > 0
    assert target_shown(edits[0].after, edits[0])
    assert not target_shown(edits[0].before, edits[0])


def test_untouched_psnr_is_that_of_the_untouched_pixels() -> None:
    before = torch.full((1, 3, 8, 8), 100, dtype=torch.uint8)
    after, made = before.clone(), before.clone()
    after[..., :4], made[..., :4] = 200, 7  # what is touched may be anything
    made[..., 4:] += 10
    assert float(untouched_psnr(made, before, after)) == pytest.approx(20 * np.log10(255 / 10))


# ----------------------------------------------------------------------------- what is shipped


@pytest.fixture(scope="module")
def shipped() -> Any:
    from diffusers import FluxKontextPipeline

    from diffcache.pipelines.small.kontext import DIRECTORY

    loaded = FluxKontextPipeline.from_pretrained(str(DIRECTORY))
    loaded.set_progress_bar_config(disable=True)
    return loaded


def test_the_shipped_files_are_small_and_complete(shipped: Any) -> None:
    from diffcache.pipelines.small.kontext import DIRECTORY

    files = [path for path in DIRECTORY.rglob("*") if path.is_file()]
    assert all(path.stat().st_size < 10_000_000 for path in files)
    assert {"README.md", "grid.png", "model_index.json"} <= {path.name for path in files}
    assert {p.dtype for p in shipped.transformer.parameters()} == {torch.float32}


def test_the_shipped_pipeline_edits_what_it_is_asked_to(shipped: Any) -> None:
    from diffcache.eval.workshop.shipped.draw import edit_pictures
    from diffcache.eval.workshop.shipped.kontext import instructions

    edits, before, after = draw_edits(16, 0, held=True)
    made = edit_pictures(shipped, before, instructions(16, 0), steps=8, seed=0)
    found = judge(made, edits, before, after)
    assert found["target_right"].float().mean() >= TARGET_LEAST
    assert found["untouched_psnr_db"].median() >= PSNR_LEAST


def test_words_without_a_reference_are_drawn_by_the_same_call(shipped: Any) -> None:
    from diffcache.pipelines.small.kontext import CALL

    text = prompt(Scene("blue", (RING,)))
    image = shipped(prompt=text, num_inference_steps=1, output_type="latent", **CALL).images
    assert image.shape == (1, 64, 16)


TARGET_LEAST, PSNR_LEAST = 0.5, 17.0  # well below what is measured
