"""The table of causal video: its rows, its page, and what it says of films that are known."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from diffcache.eval.record import Setting
from diffcache.eval.workshop.bench import causal as bench
from diffcache.eval.workshop.small.sticker_films import render_film
from diffcache.eval.workshop.small.sticker_wan import draw_films
from diffcache.eval.workshop.video import page
from diffcache.eval.workshop.video.rollouts import EVERY, Rollouts, held_sentences, judged
from diffcache.eval.workshop.video.rows import ROWS, Row
from diffcache.pipelines.causal_video import CausalVideo
from diffcache.video import FullHistory, VideoPolicy, Window

SETTING = Setting(torch.device("cpu"), torch.float32)
FILMS: dict[Any, torch.Tensor] = {}


class Once(Rollouts):
    """Makes each film once."""

    def films(self, video: CausalVideo, policy: VideoPolicy, chunks: int) -> torch.Tensor:
        if (policy, chunks) not in FILMS:
            FILMS[policy, chunks] = super().films(video, policy, chunks)
        return FILMS[policy, chunks]


@pytest.fixture(scope="module")
def rollouts() -> Rollouts:
    return Once(held_sentences(2), SETTING)


@pytest.fixture
def video(rollouts: Rollouts) -> Iterator[CausalVideo]:
    with rollouts.video() as video:
        yield video


def test_films_of_all_policies_have_the_same_noise(rollouts: Rollouts, video: CausalVideo) -> None:
    window, full = Window(3, 0), FullHistory()
    again, *films = (rollouts.films(video, *each) for each in ((window, 1), (window, 3), (full, 3)))
    assert torch.equal(films[0][:, : again.shape[1]], again) and films[0].shape[0::2] == (2, 64, 3)
    same = [torch.equal(films[0][:, :count], films[1][:, :count]) for count in (11, None)]
    assert same == [True, False]  # nothing has gone before the third chunk


def test_true_films_are_right_and_those_of_another_object_are_not() -> None:
    truth = draw_films(4, 5, held=True)
    films = torch.from_numpy(np.stack([render_film(film, 4 * EVERY)[0] for film in truth]))
    said = [film.caption_at(0) for film in truth]
    found = judged(films, said)
    assert found["right"]["value"] > 0.8 and found["right"]["n"] == 4
    assert found["drift"]["value"] < 10
    assert found["motion"]["value"] > 1 and found["static"]["value"] < 0.1
    still = judged(films[:, :1].expand(-1, 4 * EVERY, -1, -1, -1), said)
    assert (still["motion"]["value"], still["static"]["value"]) == (0, 1)
    assert judged(films, ["a cupcake" for _ in said])["right"]["value"] < 0.3  # which none of them shows
    dark = films.clone()
    dark[:, 3 * EVERY :] //= 4
    late = judged(dark, said)
    assert late["late"]["value"] < found["late"]["value"]
    assert late["drift"]["value"] > found["drift"]["value"] + 20


def test_names_of_rows_are_their_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) and ROWS[0].role == "stock"


def test_the_benchmark_measures_every_part(rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "Rollouts", lambda samples, setting: rollouts)
    monkeypatch.setattr(bench, "DEPTHS", (2, 8))
    rows = [ROWS[0], Row("window 3", Window(3, 0))]
    body: dict[str, Any] = bench.measure(SETTING, rounds=3, samples=2, length=3, rows=rows)
    full, window = (row["chunk"] for row in body["rows"])
    assert full["bytes"][0] < full["bytes"][1] < full["bytes"][2]
    assert window["bytes"][0] < window["bytes"][1] == window["bytes"][2]  # full from the second chunk on
    assert [row["chunks"] for row in body["anew"]] == [2]
    assert body["stream_batch"]["largest_difference"] < 1e-4
    record = {"dtype": "float32", "threads": 1, "device": "cpu", "command": "x", **body}
    text = page.measured(record)
    assert "| full history | " in text and "every 12th frame" in " ".join(text.split())
    assert "| window 3 | " in text and "| 2 | " in text


def test_the_page_is_that_of_the_docstrings_and_records() -> None:
    assert page.main(["--check"]) == 0
