"""The quality of the shipped models: what counts as right, records, cards."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from diffcache.eval import record as records
from diffcache.eval.runs.task import directory_sha256
from diffcache.eval.workshop.again import again_of
from diffcache.eval.workshop.shipped import cards, quality
from diffcache.eval.workshop.small.stickers import caption, draw_scenes, render
from diffcache.pipelines.shipped_models import MODELS
from diffcache.pipelines.small.recall import HELD_OUT, Task

SCENES = draw_scenes(8, 3, held=True, single=0.5)


def test_a_picture_is_right_only_where_everything_is(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [caption(scene) for scene in SCENES]
    pictures = np.stack([render(scene) for scene in SCENES])
    monkeypatch.setattr(quality, "held_out_captions", lambda count, seed: texts)
    for shift, least, most in ((0, 0.8, 1), (1, 0, 0.2)):
        drawn = np.roll(pictures, shift, 0)
        monkeypatch.setattr(quality, "draw_stickers", lambda *asked, drawn=drawn, **to: drawn)
        found = quality._of_stickers(None, 28, len(SCENES), 0, range(len(SCENES)))
        assert least <= found["whole_right"].float().mean() <= most
        parts = torch.cat([found["right_of_one_object"], found["right_of_two"]])
        assert sorted(parts.tolist()) == sorted(found["whole_right"].tolist())


def test_answers_are_right_where_both_values_are() -> None:
    model, task = quality.QUALITIES["recall-llama"].load(), Task(65, 8, 2)
    found = quality.of_recall(model, task, 5, 3, range(5))
    assert all(column.shape == (5, 2) for column in found.values())
    assert torch.equal(found["whole_right"], found["first_right"] & found["second_right"])
    assert quality.TASKS[0].context == 513  # that of the tables of caches
    assert found["first_right"].float().mean() > 0.9
    some = quality.of_recall(model, task, 5, 3, [1, 4])  # the same contexts
    assert all(torch.equal(some[key], column[[1, 4]]) for key, column in found.items())
    assert HELD_OUT + 3 > 1 << 39


def test_a_record_says_how_it_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(quality.QUALITIES["sticker-dit"], steps=(2,))
    monkeypatch.setattr(quality, "QUALITIES", {"sticker-dit": model})
    record = quality.measure("sticker-dit", 3, 7)
    records.check(record)
    assert record["command"].endswith("quality sticker-dit --samples 3 --seed 7")
    assert record["seed"] == 7 and record["commit"]
    (row,) = record["rows"]
    (made,) = again_of("sticker-dit-quality")(record, [row], 0.6, 1)
    assert made.holds and torch.equal(made.now, made.kept) and len(made.now) == 2
    assert not replace(made, kept=~made.kept).holds
    assert row["name"] == "2 steps" and row["quality"]["whole_right"]["n"] == 3


@pytest.mark.parametrize("name", quality.QUALITIES)
def test_the_committed_record_is_of_the_shipped_weights(name: str) -> None:
    record = json.loads(quality.file_of(name).read_text(encoding="utf-8"))
    assert record["shapes"]["model_sha256"] == directory_sha256(MODELS / name)
    least = 64 if name in ("sticker-causal", "sticker-wan") else 128  # films take minutes
    assert all(row["quality"]["whole_right"]["n"] >= least for row in record["rows"])


def test_cards_are_those_of_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert cards.main(["--check"]) == 0, "python -m diffcache.eval.workshop.shipped.cards --write"
    assert cards.main([]) == 2 and "give --write or --check" in capsys.readouterr().err
