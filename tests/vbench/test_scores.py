"""VBench's scores: arithmetic on published numbers, and the files of results."""

import json
from pathlib import Path
from typing import Any

import pytest

from diffcache.eval.vbench import scores, suite
from diffcache.eval.vbench.command import app

# Percent, as published: total, quality, semantic, then the 16 raw scores in the order of
# suite.DIMENSIONS. Table 8 of Show-o2 (arXiv 2506.15564), which takes them from VBench's
# leaderboard; T2V-Turbo-v2 from table 11 of its paper (arXiv 2410.05677), which has them in another
# order.
PUBLISHED = {
    "ModelScope": "75.75 78.05 66.54 89.87 95.29 98.28 95.79 66.39 52.06 58.57 82.25 38.98 92.40 81.72 33.68 39.26 23.39 25.37 25.67",
    "Show-1": "78.93 80.42 72.98 95.53 98.02 99.12 98.24 44.44 57.35 58.66 93.07 45.47 95.60 86.35 53.50 47.03 23.06 25.28 27.46",
    "Gen-2": "80.58 82.47 73.03 97.61 97.61 99.56 99.58 18.89 66.96 67.42 90.92 55.47 89.20 89.49 66.91 48.91 19.34 24.12 26.17",
    "VideoCrafter-2.0": "80.44 82.20 73.42 96.85 98.22 98.41 97.73 42.50 63.13 67.22 92.55 40.66 95.00 92.92 35.86 55.29 25.13 25.84 28.23",
    "CogVideoX": "81.61 82.75 77.04 96.23 96.52 98.66 96.92 70.97 61.98 62.90 85.23 62.11 99.40 82.81 66.35 53.20 24.91 25.38 27.59",
    "Kling": "81.85 83.39 75.68 98.33 97.60 99.30 99.40 46.94 61.21 65.62 87.24 68.05 93.40 89.90 73.03 50.86 19.62 24.17 26.42",
    "Gen-3": "82.32 84.11 75.17 97.10 96.62 98.61 99.23 60.14 63.34 66.82 87.81 53.64 96.40 80.90 65.09 54.57 24.31 24.71 26.69",
    "Show-o2": "81.34 82.10 78.31 97.28 96.78 97.68 98.25 40.83 65.15 67.06 94.81 76.01 95.20 80.89 62.61 57.67 23.29 25.27 27.00",
    "T2V-Turbo-v2": "82.93 84.08 78.33 97.03 98.32 97.54 97.00 61.39 66.73 70.92 96.42 64.76 94.40 94.85 48.08 56.41 24.29 26.85 28.76",
}


def published(model: str) -> tuple[list[float], dict[str, float]]:
    numbers = [float(text) / 100 for text in PUBLISHED[model].split()]
    return numbers[:3], dict(zip(suite.DIMENSIONS, numbers[3:], strict=True))


def write(folder: Path, name: str, value: float) -> None:
    """Write a result as VBench does."""
    films = [{"video_path": "a-0.mp4", "video_results": 0.25}]
    (folder / f"{name}_eval_results.json").write_text(json.dumps({name: [value, films]}, indent=4))


@pytest.mark.parametrize("model", PUBLISHED)
def test_scores_are_those_published(model: str) -> None:
    (total, quality, semantic), raw = published(model)
    found = scores.summarize(raw)
    # Raw scores are rounded to 0.01 points, so a mean of them is off by less than that.
    assert found.quality == pytest.approx(quality, abs=1e-4)
    assert found.semantic == pytest.approx(semantic, abs=1e-4)
    assert found.total == pytest.approx(total, abs=1e-4)
    assert found.missing == ()


def test_the_best_and_worst_raw_scores_count_one_and_nothing() -> None:
    best = {name: d.high for name, d in suite.DIMENSIONS.items()}
    worst = {name: d.low for name, d in suite.DIMENSIONS.items()}
    assert scores.summarize(best).total == pytest.approx(1)
    assert scores.summarize(worst).total == pytest.approx(0)
    halved = {**best, "dynamic_degree": 0.0}
    assert scores.summarize(halved).quality == pytest.approx(6 / 6.5)


def test_no_score_is_made_from_a_part() -> None:
    _, raw = published("Kling")
    del raw["scene"], raw["color"]
    found = scores.summarize(raw)
    assert (found.semantic, found.total) == (None, None)
    assert found.quality == scores.summarize(published("Kling")[1]).quality
    assert found.missing == ("color", "scene")
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["total"] is None
    assert "| **total score** |  | n/a |" in found.markdown()


def test_results_are_read_in_both_forms(tmp_path: Path) -> None:
    _, raw = published("Gen-3")
    folder, flat = tmp_path / "results", tmp_path / "flat"
    folder.mkdir()
    flat.mkdir()
    for name, value in raw.items():
        write(folder, name, value)
        # Beside every result stands what VBench was given, which is no result.
        (folder / f"{name}_full_info.json").write_text('[{"prompt_en": "a"}]')
    named = {name.replace("_", " "): value for name, value in raw.items()}
    (flat / "all_results.json").write_text(json.dumps(named))
    assert scores.read_results(folder) == scores.read_results(flat) == raw
    assert scores.read_results(folder / "scene_eval_results.json") == {"scene": raw["scene"]}


def test_results_that_disagree_are_an_error(tmp_path: Path) -> None:
    for place, value in (("a", 0.5), ("b", 0.25)):
        (tmp_path / place).mkdir()
        write(tmp_path / place, "scene", value)
        (tmp_path / place / "scene_eval_results.json").rename(
            tmp_path / f"{place}_eval_results.json"
        )
    with pytest.raises(ValueError, match=r"a_eval.*b_eval.*disagree on scene: 0.5 and 0.25"):
        scores.read_results(tmp_path)


def test_the_command_scores_results(tmp_path: Path, run: Any) -> None:
    (total, _, _), raw = published("Gen-2")
    for name, value in raw.items():
        write(tmp_path, name, value)
    done = run(app, ["score", str(tmp_path), "--json", "-"])
    assert json.loads(done.stdout)["total"] == pytest.approx(total, abs=1e-4)
    (tmp_path / "scene_eval_results.json").unlink()
    target = tmp_path / "out" / "scores.json"
    done = run(app, ["score", str(tmp_path), "--json", str(target)])
    assert "no total score, missing: scene" in done.stdout
    assert json.loads(target.read_text())["total"] is None
