"""The shipped sticker pipelines: plain, small, and evaluated on what they were taught."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from diffcache.eval.offline import inputs_of
from diffcache.eval.runs.draw import Drawer
from diffcache.eval.runs.task import Task
from diffcache.eval.samples.prompts import calibration_prompts, load_prompts
from diffcache.eval.workshop.small import sticker_dit, sticker_flux, sticker_kontext, sticker_wan
from diffcache.eval.workshop.small.stickers import parse
from tests.internals import noting

CLASSES: dict[str, tuple[Any, type]] = {
    "sticker-flux": (sticker_flux, diffusers.FluxPipeline),
    "sticker-dit": (sticker_dit, diffusers.DiTPipeline),
    "sticker-kontext": (sticker_kontext, diffusers.FluxKontextPipeline),
    "sticker-wan": (sticker_wan, diffusers.WanPipeline),
}
LISTS = {"sticker-flux": "stickers", "sticker-wan": "sticker-films"}


@pytest.fixture(scope="module")
def flux() -> Any:
    return sticker_flux.load()


@pytest.mark.parametrize("name", CLASSES)
def test_a_pipeline_is_plain_small_and_of_one_dtype(name: str) -> None:
    module, kind = CLASSES[name]
    files = [path for path in module.DIRECTORY.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 12_600_000
    assert {"README.md", "model_index.json"} <= {path.name for path in files}
    pipe = module.load(torch.bfloat16)
    assert type(pipe) is kind
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    assert {weight.dtype for part in parts for weight in part.parameters()} == {torch.bfloat16}


def unknown_words(model: str, texts: Any) -> list[str]:
    """Return the texts with a word that a tokenizer of the model does not know."""
    found = []
    for folder in sorted((CLASSES[model][0].DIRECTORY).glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        # CLIP's end mark serves as its unknown token: it stands once, at the end.
        least = 1 if tokenizer.unk_token_id == tokenizer.eos_token_id else 0
        ids = tokenizer(list(texts)).input_ids
        rows = zip(texts, ids, strict=True)
        found += [text for text, row in rows if row.count(tokenizer.unk_token_id) > least]
    return found


@pytest.mark.parametrize(("model", "name"), LISTS.items())
def test_evaluations_draw_and_calibrate_on_what_was_taught(
    model: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = Drawer(Task(model, samples=256)).prompts
    assert drawn.source == name and drawn.texts == load_prompts(name).texts
    monkeypatch.setattr(Drawer, "pipe", None)
    used = inputs_of(Task(model, samples=32)).prompts
    assert set(used) <= set(calibration_prompts(name).texts)
    for texts in (drawn.texts, used):
        most = 1 if model == "sticker-wan" else 2
        assert all(1 <= len(parse(text)[0]) <= most for text in texts)
        assert not unknown_words(model, texts)


def test_classes_are_those_that_were_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = sticker_dit.load()
    assert pipe.get_label_ids(list(sticker_dit.CLASSES)) == list(range(12))
    monkeypatch.setattr(Drawer, "pipe", pipe)
    task = Task("sticker-dit", samples=96)
    drawer = Drawer(task)
    assert {int(drawer.prompts[number]) for number in range(96)} == set(range(12))
    assert set(inputs_of(task).prompts) == set(range(12))
    with noting(pipe.transformer) as seen:
        for scale in (1.0, 3.0):
            pipe([4], guidance_scale=scale, num_inference_steps=1)
    assert [given["class_labels"].tolist() for given in seen] == [[4], [4, sticker_dit.EMPTY]]
