"""Plots of records."""

import random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from diffcache.eval.report import pareto, plots
from diffcache.eval.report.palette import OKABE_ITO, styles
from tests.eval_report.made import make_record, row


@pytest.mark.parametrize("upward", [True, False])
def test_front_is_what_brute_force_finds(upward: bool) -> None:
    chance = random.Random(0)
    sign = 1 if upward else -1
    for _ in range(200):
        places = [(chance.randint(0, 6), chance.randint(0, 6)) for _ in range(chance.randint(1, 14))]
        found = pareto.front(places, upward)
        unbeaten = {
            (x, y)
            for x, y in places
            if not any(u >= x and sign * v >= sign * y and (u, v) != (x, y) for u, v in places)
        }
        assert [places[i] for i in found] == sorted(unbeaten)
    assert pareto.front([], upward) == []


def test_a_method_keeps_its_color_everywhere() -> None:
    record = make_record()
    looks = styles(record)
    record["rows"].insert(1, row("z", "method", 2, 1.0, []) | {"method": "Taylorseer(every=9)"})
    assert styles(record)["z"].color == styles(record)["taylorseer"].color == OKABE_ITO[0]
    assert styles(record)["z"].dash != styles(record)["taylorseer"].dash
    assert len({looks[n].color for n in ("taylorseer", "first-block", "interval")}) == 3
    assert looks["uncached, 3 steps"].color == looks["uncached, 4 steps"].color
    assert looks["uncached, 3 steps"].marker == "x"


def test_settings_of_a_method_are_told_apart_by_what_differs() -> None:
    rows = [{"name": f"taylor every={n}, order=1", "method": f"T(every={n})"} for n in (3, 5)]
    rows.append({"name": "gate", "method": "Gate()"})
    assert plots.settings(rows) == {r["name"]: f"every={n}" for r, n in zip(rows, (3, 5), strict=False)}


def test_every_plot_is_drawn(run: Any) -> None:
    _, folder, files = run
    names = {file.name for file in files}
    stems = [
        "pareto-fid_lite_change",
        "pareto-lpips_lite",
        "pareto-psnr_db",
        "pareto-clip_score",
        "timeline",
        "latent-error",
        "cost",
    ]
    for stem in stems:
        assert {f"{stem}.png", f"{stem}.svg"} <= names
        with Image.open(folder / "report" / f"{stem}.png") as opened:
            edge = np.asarray(opened.convert("L"))
        assert len(np.unique(edge)) > 20 and (edge != 255).mean() > 0.02
        # Nothing runs off the figure: its outermost pixels are those of the ground.
        assert min(edge[0].min(), edge[-1].min(), edge[:, 0].min(), edge[:, -1].min()) == 255


def test_missing_data_is_said_in_words() -> None:
    record = make_record()
    record["timing"] = {}
    for row_ in record["rows"]:
        row_ |= {"timeline": None, "latent_error": None, "flops": None}
        row_ |= {"held_bytes": 0, "flops_ratio": None}
    drawn, left_out = plots.draw(record)
    assert drawn == []
    assert [text.partition(":")[0] for text in left_out] == [
        "Quality against speed",
        "Decisions",
        "Error of the latents",
        "Cost",
    ]


def test_a_metric_in_which_all_rows_are_equal_is_not_plotted() -> None:
    record = make_record()
    for row_ in record["rows"]:
        row_["quality"]["clip_score"] = {"value": 1.0, "low": 1.0, "high": 1.0, "n": 64}
    drawn, left_out = plots.draw_pareto(record)
    assert "pareto-clip_score" not in {plot.stem for plot in drawn} and drawn
    assert left_out == ["Quality against speed: all rows are equal in CLIP score."]
    record["rows"][1]["quality"]["clip_score"]["low"] = 0.99
    drawn, left_out = plots.draw_pareto(record)
    assert "pareto-clip_score" in {plot.stem for plot in drawn} and not left_out
