"""Evaluations draw, and calibrate on, what the model was taught."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from diffcache.eval.offline import inputs_of
from diffcache.eval.runs.draw import Drawer
from diffcache.eval.runs.task import Task
from diffcache.eval.workshop.shipped.kontext import instructions
from diffcache.eval.workshop.small import dit
from diffcache.pipelines.shipped_models import MODELS
from diffcache.pipelines.small.edits import draw_edits
from diffcache.pipelines.small.scenes import held_out, parse, prompt, render

SAMPLES = 256
OBJECTS = {"shapes-flux": 2, "shapes-unet": 2, "shapes-wan": 1}  # the most that was trained on


def unknown_words(model: str, texts: list[str]) -> list[str]:
    """Return the texts with a word that a tokenizer of the model does not know."""
    found = []
    for folder in sorted((MODELS / model).glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(texts).input_ids
        # CLIP's end mark serves as its unknown token: it stands once, at the end.
        least = 1 if tokenizer.unk_token_id == tokenizer.eos_token_id else 0
        found += [
            t
            for t, row in zip(texts, ids, strict=True)
            if row.count(tokenizer.unk_token_id) > least
        ]
    return found


def taught(model: str, texts: Any, held: bool) -> None:
    """Check that texts are scenes that the model's generator makes, held out or not."""
    for text in set(texts):
        scene = parse(text)
        assert 1 <= len(scene.figures) <= OBJECTS[model], text
        assert held_out(scene) is held
        assert text in {prompt(scene, phrasing) for phrasing in (0, 1)}
        assert render(scene, np.random.default_rng(0)).shape == (64, 64, 3)
    assert not unknown_words(model, sorted(set(texts)))


@pytest.mark.parametrize("model", OBJECTS)
def test_prompts_are_of_scenes_that_the_model_was_taught(model: str) -> None:
    drawer = Drawer(Task(model, samples=SAMPLES))
    taught(model, [drawer.prompts[sample] for sample in range(SAMPLES)], held=True)


@pytest.mark.parametrize("model", OBJECTS)
def test_tables_are_measured_on_other_scenes_of_them(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drawer, "pipe", None)
    taught(model, inputs_of(Task(model, samples=64)).prompts, held=False)


def test_classes_are_those_that_were_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that was never trained has a row of zeros in the table of labels."""
    pipe = dit.load()
    table = pipe.transformer.transformer_blocks[0].norm1.emb.class_embedder.embedding_table.weight
    trained = set(table.any(dim=1).nonzero().flatten().tolist())
    assert trained == {*range(len(dit.LABELS)), dit.EMPTY}
    monkeypatch.setattr(Drawer, "pipe", pipe)
    task = Task("shapes-dit", samples=SAMPLES)
    drawer = Drawer(task)
    drawn = {int(drawer.prompts[sample]) for sample in range(SAMPLES)}
    assert drawn == trained - {dit.EMPTY} and len(drawn) == 35
    assert set(inputs_of(task).prompts) == drawn


def test_edits_are_of_pictures_and_words_that_were_taught(monkeypatch: pytest.MonkeyPatch) -> None:
    edits, before, after = draw_edits(64, 0, held=True)
    assert all(held_out(edit.after) and len(edit.before.figures) <= 2 for edit in edits)
    assert before.shape == after.shape == (64, 3, 64, 64) and before.dtype == torch.uint8
    assert not unknown_words("shapes-kontext", instructions(64, 0))
    monkeypatch.setattr("diffcache.pipelines.small.kontext.load", lambda *_: torch.nn.Module())
    calls = inputs_of(Task("shapes-kontext", samples=32)).prompts
    assert not unknown_words("shapes-kontext", [text for call in calls for text in call["prompt"]])
