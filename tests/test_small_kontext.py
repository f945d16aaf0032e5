"""The editing data set, the shipped FluxKontextPipeline and its training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
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
from diffcache.pipelines.small.scenes import (
    SHAPES,
    Figure,
    Scene,
    held_out,
    held_out_prompts,
    prompt,
)

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
        assert edit.reversed().reversed() == edit
        assert edit.reversed().before == after
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


# -------------------------------------------------------------------------------- the pipeline


@pytest.fixture(scope="module")
def built() -> Any:
    from diffcache.pipelines.small.kontext import build_pipeline

    return build_pipeline()


def test_the_tokenizers_know_old_words_by_their_numbers_and_new_ones_as_one(built: Any) -> None:
    from diffcache.pipelines.small.flux import build_tokenizers

    for old, new in zip(build_tokenizers(), (built.tokenizer, built.tokenizer_2), strict=True):
        texts = held_out_prompts(50)
        assert new(texts).input_ids == old(texts).input_ids
        extra = len(new("red").input_ids) - 1
        for edit in edits_of(100):
            text = instruction(edit, np.random.default_rng(0))
            ids = new(text).input_ids
            assert len(ids) == len(text.split()) + extra
            assert new.unk_token_id not in ids or old is not built.tokenizer_2
        assert len(new("Make the ring green.").input_ids) == 5 + extra


def test_what_the_old_model_knew_is_still_there(built: Any) -> None:
    from diffcache.pipelines.small.flux import load

    old = load()
    ids = old.tokenizer_2(held_out_prompts(3), padding=True, return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(built.text_encoder_2(ids)[0], old.text_encoder_2(ids)[0])
    for mine, theirs in zip(
        built.transformer.parameters(), old.transformer.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_the_text_stage_knows_what_instructions_state() -> None:
    from diffcache.eval.workshop.small.train_kontext_text import stated

    new = Figure("square", "red", "small", "left")
    edit = Edit("shape", SCENE, Scene("yellow", (new, OTHER)), 0)
    gone = Edit("remove", SCENE, Scene("yellow", (RING,)), 1)
    texts = ["turn the ring on the left into a square", "Remove the blue ring."]
    rows = stated([edit, gone], texts)
    kind, value, shape, place, color = rows[0].tolist()
    assert (KINDS[kind], SHAPES[shape], place, color) == ("shape", "ring", 3, 7)
    assert rows[1].tolist() == [4, 14, SHAPES.index("ring"), 9, 2]
    assert value == 7 + 2 + SHAPES.index("square")


def test_a_training_step_learns(built: Any) -> None:
    from torch import nn

    from diffcache.eval.workshop.small.course import build_optimizer, update
    from diffcache.eval.workshop.small.export import TRAINED
    from diffcache.eval.workshop.small.train_kontext import COURSE, Step, _batch
    from diffcache.pipelines.small.kontext import build_pipeline

    pipe = build_pipeline()
    step = Step(pipe, compiled=False)
    weights = nn.ModuleDict({name: getattr(pipe, name) for name in TRAINED})
    latents = torch.randn(2, 4, 64, 16, generator=torch.Generator().manual_seed(0))
    batch = _batch(edits_of(4), (latents[0], latents[1]), torch.arange(4), (0, 0), 0.5)
    optimizer = build_optimizer(weights, COURSE)
    losses = [update(weights, optimizer, step, batch, 3e-4) for _ in range(5)]
    assert losses[-1] < 0.9 * losses[0]


def test_a_training_is_exported(tmp_path: Path, monkeypatch: Any) -> None:
    from diffcache.eval.workshop.small import train_kontext
    from diffcache.eval.workshop.small.export_kontext import assemble, export, record
    from diffcache.eval.workshop.small.train_kontext import Plan, train

    monkeypatch.setattr(train_kontext, "COURSE", replace(train_kontext.COURSE, batch=2))
    pipe = train(tmp_path, Plan(steps=2, text_steps=2, edits=4))
    kept = assemble(tmp_path)
    weight = pipe.transformer.x_embedder.weight
    assert torch.equal(kept.transformer.x_embedder.weight, weight)
    size = export(tmp_path, tmp_path / "model")
    assert 1e6 < size < 11e6
    from diffusers import FluxKontextPipeline

    loaded = FluxKontextPipeline.from_pretrained(str(tmp_path / "model"))
    again = loaded.transformer.x_embedder.weight
    assert torch.equal(again, weight.to(torch.bfloat16).float())
    assert again.dtype == torch.float32
    done = record(tmp_path, {"seed": 0}, tmp_path / "record.json")
    assert done["steps"] == 2


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
