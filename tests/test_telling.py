"""Telling power: factors of a gate that follows ratios, and what the page says of a record."""

from __future__ import annotations

from typing import Any

import pytest

from diffcache.eval.record import FOLDER, ROOT
from diffcache.eval.workshop.bench.telling import FACTORS, STEPS, computed, magcache
from diffcache.eval.workshop.shipped.telling_page import FEWER, FORECAST, RECORD, REUSE, page
from diffcache.files import read_json


@pytest.mark.parametrize("factor", FACTORS)
def test_the_gate_computes_as_few_steps_as_the_others(factor: int):
    ratios = [1 + 0.2 / step for step in range(1, STEPS)]
    method = magcache(ratios, factor)
    steps = computed(method)
    assert steps[0] == 0 and 2 <= len(steps) <= -(-STEPS // factor)
    assert len(steps) >= -(-STEPS // factor) - 2  # no coarser than it has to be


def row(method: str, factor: int, right: float, decibels: float) -> dict[str, Any]:
    ends = {"low": right - 0.1, "high": right + 0.1}
    close = {"value": decibels, "low": decibels - 1, "high": decibels + 1}
    return {
        "method": method,
        "factor": factor,
        "steps": STEPS // factor,
        "psnr_db": close,
        "whole_right": {"value": right, **ends},
    }


def test_the_page_says_which_pairs_stand_against_the_published_order():
    rows = [row("uncached", 1, 0.7, 60.0)]
    rows += [row(FORECAST, 4, 0.6, 24.0), row(REUSE, 4, 0.4, 20.0), row(FEWER, 4, 0.5, 22.0)]
    for one, change in zip(rows[1:], (-0.1, -0.3, -0.2), strict=True):
        one["whole_right_change"] = {"value": change, "low": change - 0.15, "high": change + 0.15}
    rows += [row(FORECAST, 6, 0.5, 20.0), row(REUSE, 6, 0.2, 15.0), row(FEWER, 6, 0.4, 18.0)]
    ratios = [1.2 - 0.01 * step for step in range(STEPS - 1)]
    path = {"ratio": ratios, "cosine": ratios, "change": ratios, "first_to_last": [0.5]}
    text = page(
        {
            "rows": rows,
            "residuals": path,
            "shapes": {"samples": 64},
            "commit": "abc",
            "seconds": 9.0,
            "command": "again",
        }
    )
    assert "beyond the interval, by: reuse at 4 times, fewer steps at 4 times." in text
    assert "Reversed: reuse and fewer steps at 4 times." in text
    assert "| reuse | 20.0 (19.0 to 21.0) | 15.0 (14.0 to 16.0) |" in text
    assert "Uncached, 70% (60% to 80%) are right." in text
    assert "with FLUX.1-dev over the first ten steps" in text and "cosine of 0.50" in text


def test_the_page_is_that_of_its_record():
    text = (ROOT / "docs" / "telling_power.md").read_text(encoding="utf-8")
    assert text == page(read_json(FOLDER / RECORD))
