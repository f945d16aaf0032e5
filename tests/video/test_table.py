"""The table of causal video: its rows, its page, and what it says of films that are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from diffcache.eval.record import Setting
from diffcache.eval.workshop.bench import causal as bench
from diffcache.eval.workshop.parts import Parts
from diffcache.eval.workshop.video import page, rollouts
from diffcache.eval.workshop.video.rollouts import Rollouts, summary
from diffcache.eval.workshop.video.rows import CHANGES, ROWS, Change, Row
from diffcache.pipelines.small import causal
from diffcache.video import Keep, Window

SETTING = Setting(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def shapes() -> causal.ShapesCausal:
    return causal.load()


def test_films_of_all_policies_begin_alike_and_have_the_same_noise(shapes: Any) -> None:
    found = Rollouts(shapes, 2)
    truth = found.groups[0]
    with shapes.video() as video:
        films = [found.film(video, Window(6, sinks), 0, 10) for sinks in (0, 0, 3)]
    assert torch.equal(films[0], films[1]) and films[0].shape == (2, 3, 10, 24, 24)
    assert torch.equal(films[0][:, :, :3], truth.film())
    assert torch.equal(films[0][:, :, :9], films[2][:, :, :9])  # nothing has gone yet


def test_a_film_that_shows_the_new_prompt_late_is_told_so(
    shapes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Rollouts(shapes, 3)

    def change(video: Any, row: Any, group: int) -> Any:
        truth = found.groups[group].lasting(72)
        shapes = truth.shapes.clone()
        shapes[:, 24:] = (shapes[:, 24:] + 1) % 4
        stated = replace(truth, shapes=shapes)
        shown = replace(truth, shapes=torch.where(torch.arange(72) < 33, truth.shapes, shapes))
        return shown.film(), stated

    monkeypatch.setattr(found, "change", change)
    told = found.changes([Change("late", Window(), Keep())], Parts(None, {}), None)[0]
    assert told["chunks"] == 3 and told["shown"]["value"] == 1
    assert told["identity"]["value"] == pytest.approx(39 / 48)  # 9 of 48 frames show the old one


def test_the_last_quarter_is_that_of_the_film() -> None:
    values = torch.arange(8.0).repeat(3, 1)  # [samples, slices]
    told = summary([{"size": values[:1]}, {"size": values[1:]}])
    assert told["slices"]["size"] == list(range(8)) and told["late"]["size"]["value"] == 6.5


def test_names_of_rows_are_their_own() -> None:
    for rows in (ROWS, CHANGES):
        assert len({row.name for row in rows}) == len(rows)
    assert ROWS[0].role == "stock"


def test_the_benchmark_measures_every_part(shapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "load", lambda dtype: shapes)
    monkeypatch.setattr(bench, "CHANGES", CHANGES[:1])
    monkeypatch.setattr(rollouts, "AFTER", 6)
    rows = [ROWS[0], Row("window 3", Window(3, 0))]
    body = bench.measure(SETTING, rounds=9, samples=2, frames=12, rows=rows)
    full, window = (row["chunk"] for row in body["rows"])
    assert full["bytes"][0] < full["bytes"][1] < full["bytes"][2]
    assert len(set(window["bytes"])) == 1  # full from the third chunk on
    assert [row["chunks"] for row in body["anew"]] == [8]
    assert body["stream_batch"]["largest_difference"] < 1e-5
    with pytest.raises(ValueError, match="rounds=2, samples=2: must be at least 3 and 2"):
        bench.measure(SETTING, rounds=2, samples=2)


def test_the_page_is_that_of_the_docstrings_and_records() -> None:
    assert page.main(["--check"]) == 0
