"""The table of methods on the editing pipeline: rows, resuming, fitted ratios."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diffcache.attach.flops import counted
from diffcache.features.regione import RegionE
from diffcache.pipelines.small import measure_regions, method_rows
from diffcache.pipelines.small.measure_kontext import edit_pictures

NAMES = ("interval:every=3", "regione:threshold=0.88")
STEPS = 8


@pytest.fixture(scope="module")
def small() -> measure_regions.Measurement:
    return measure_regions.Measurement(samples=2, steps=STEPS, fitted=2, rounds=2)


@pytest.fixture(scope="module")
def report(small: measure_regions.Measurement, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, measured one after the other as by two commands."""
    folder = tmp_path_factory.mktemp("regions")
    path = folder / "shapes-kontext-methods.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_regions, "TIMED", 1)
        for name in NAMES:
            measure_regions.run(small, path, folder / "kept.safetensors", [name])
    return path


def test_rows_hold_what_was_measured(report: Path) -> None:
    found = json.loads(report.read_text())
    plain, whole, region = found["rows"]
    assert [row["name"] for row in found["rows"]] == ["uncached", *NAMES]
    assert (found["samples"], found["steps"], found["quality"]["key"]) == (2, 8, "target_right")
    check_rows(found)
    assert plain["flops_ratio"] == 1 and plain["computed_steps"] == STEPS
    assert whole["computed_steps"] == 3 and whole["tokens_computed"] == 3 / STEPS
    assert (whole["pictures_a_run"], region["pictures_a_run"]) == (16, 1)
    assert 0 < region["tokens_computed"] < 1 and region["tokens_computed"] * STEPS < STEPS
    for row in (whole, region):
        assert row["flops_ratio"] > 1 and row["held_bytes"] > 0
        assert row["fidelity"]["psnr_db"]["n"] == 2 and row["fidelity"]["psnr_db"]["value"] < 100
        assert row["seconds_ratio"]["n"] == 2 and row["seconds_ratio"]["median"] > 0
        assert "Tables" not in row["method"]


def test_the_flops_ratio_is_of_the_whole_denoiser(
    small: measure_regions.Measurement, report: Path
) -> None:
    """Skipped steps save the blocks; what is outside of them runs at every step."""
    pipe, (_, before, _, texts) = small.plain, small.data
    given: list[Any] = []
    model = pipe.transformer
    parts = [*model.transformer_blocks, *model.single_transformer_blocks]
    hooks = [
        part.register_forward_pre_hook(lambda m, a, k: given.append((m, a, k)), with_kwargs=True)
        for part in parts
    ]
    edit_pictures(pipe, before[:1], texts[:1], steps=1, seed=0)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        blocks = sum(counted(part, args, kwargs)[1] or 0 for part, args, kwargs in given)
    assert len(given) == len(parts) and 0 < blocks < small.once
    row = json.loads(report.read_text())["rows"][1]
    expected = STEPS * small.once / (STEPS * small.once - (STEPS - 3) * blocks)
    assert row["flops_ratio"] == pytest.approx(expected, abs=1e-3)


def test_rows_and_uncached_pictures_are_kept(
    small: measure_regions.Measurement, report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run draws nothing; a file of other pictures is not taken."""

    def draw(self: object, batch: int, title: str) -> Any:
        raise AssertionError(f"{title} is drawn again")

    monkeypatch.setattr(measure_regions.Measurement, "draw", draw)
    kept, before = report.with_name("kept.safetensors"), report.read_text()
    measure_regions.run(small, report, kept, NAMES)
    assert report.read_text() == before
    assert small.uncached(kept).shape == (2, 3, 64, 64)
    with pytest.raises(AssertionError, match="uncached is drawn again"):
        measure_regions.Measurement(samples=2, steps=STEPS + 1).uncached(kept)


def test_ratios_are_fitted_to_the_steps_of_the_run(small: measure_regions.Measurement) -> None:
    method = measure_regions.fit(small.plain, RegionE(threshold=0.9), steps=STEPS, samples=2)
    assert method.steps == STEPS and method.threshold == 0.9
    assert method.tables["gamma"].shape == (STEPS - 1,)  # type: ignore[index, union-attr]


def test_unknown_rows_are_refused(small: measure_regions.Measurement, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only='nothing': must be one of interval:every=3, "):
        measure_regions.run(small, tmp_path / "none.json", tmp_path / "kept", ["nothing"])


def test_the_shipped_figures_can_be_made_again() -> None:
    """From the outcomes of the edits that the report keeps."""
    if not measure_regions.REPORT.exists():
        pytest.skip(f"{measure_regions.REPORT.name} is not measured yet")
    found = json.loads(measure_regions.REPORT.read_text(encoding="utf-8"))
    assert found["samples"] >= 256
    check_rows(found)


def check_rows(found: dict[str, Any]) -> None:
    """Compare shares, intervals and changes with the outcomes that the rows keep."""
    base = method_rows.flags_of(found["rows"][0]["outcomes"])
    for row in found["rows"]:
        right = method_rows.flags_of(row["outcomes"])
        assert len(right) == found["samples"]
        quality = row["quality"]
        assert quality["target_right"] == pytest.approx(method_rows.interval(right), abs=1e-4)
        if row["method"] is not None:
            again = method_rows.change(right, base)
            assert quality["target_right_change"] == pytest.approx(again, abs=1e-4)
